"""Shapes and the small interfaces that the floors above share."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Batch: TypeAlias = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
"""Model inputs: one tensor, several positional ones, or named ones; the first axis of each counts samples."""

Model: TypeAlias = Any
"""A trained model: a torch.nn.Module or a torch.export.ExportedProgram."""

ArrayLike: TypeAlias = Any
"""What `fit` and `score` take: a NumPy array, a tensor, or nested lists of numbers, samples first."""

Scores: TypeAlias = NDArray[np.float64]
"""One number a sample; bigger is stranger."""


@runtime_checkable
class Kernel(Protocol):
    """A similarity k(x, x′) between inputs, such as the neural tangent kernel of Eq. 4."""

    def __call__(self, x1: Any, x2: Any, /) -> Float[Tensor, "n1 n2"]:
        """k(x1_i, x2_j) for every pair."""
        ...

    def diag(self, x: Any, /) -> Float[Tensor, " n"]:
        """k(x_i, x_i), without the other pairs."""
        ...


@runtime_checkable
class FeatureKernel(Kernel, Protocol):
    """A kernel of finitely many features: k(x, x′) = φ(x)ᵀφ(x′)."""

    def features(self, x: Any, /) -> Float[Tensor, "n d"]:
        """φ(x_i), row by row."""
        ...


@runtime_checkable
class Indexable(Protocol):
    """Samples by index: a tensor, or something that reads or encodes them when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@runtime_checkable
class Resumable(Protocol):
    """Work in so many steps, which can be kept after any of them and gone on with: a training, a chain of samples."""

    @property
    def steps(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: dict[str, Tensor], /) -> None: ...
