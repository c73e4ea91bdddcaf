"""Type aliases and protocols that several packages share."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Batch: TypeAlias = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
"""Model inputs: one tensor, several positional tensors, or tensors by name; the first axis of each counts samples."""

Model: TypeAlias = Any
"""A trained model: a torch.nn.Module or a torch.export.ExportedProgram."""

ArrayLike: TypeAlias = Any
"""Input of `fit` and `score`: a NumPy array, a tensor, or nested lists of numbers, samples first."""

Scores: TypeAlias = NDArray[np.float64]
"""One number per sample; bigger is more uncertain."""


@runtime_checkable
class Kernel(Protocol):
    """A similarity k(x, x′) between inputs, such as the neural tangent kernel of Eq. 4."""

    def __call__(self, x1: Any, x2: Any, /) -> Float[Tensor, "n1 n2"]:
        """Return k(x1_i, x2_j) for every pair.

        Args:
            x1: N1 inputs.
            x2: N2 inputs.

        Returns:
            Kernel matrix [N1, N2].
        """
        ...

    def diag(self, x: Any, /) -> Float[Tensor, " n"]:
        """Return k(x_i, x_i) without computing the other pairs.

        Args:
            x: N inputs.

        Returns:
            Diagonal of the kernel matrix, [N].
        """
        ...


@runtime_checkable
class FeatureKernel(Kernel, Protocol):
    """A kernel of finitely many features: k(x, x′) = φ(x)ᵀφ(x′)."""

    def features(self, x: Any, /) -> Float[Tensor, "n d"]:
        """Return φ(x_i), one row per input.

        Args:
            x: N inputs.

        Returns:
            Features [N, D].
        """
        ...


@runtime_checkable
class Indexable(Protocol):
    """Samples by index: a tensor, or an object that reads or encodes samples on access."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Return the samples at these indices."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Work in a fixed number of steps that can be saved and resumed after each: a training or a Markov chain."""

    @property
    def steps(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: dict[str, Tensor], /) -> None: ...
