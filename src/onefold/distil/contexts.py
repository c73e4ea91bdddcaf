"""Where contexts come from: the train set, augmentations of it, other data, or a mixture (Section 3.3)."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from onefold.core.batches import joined, map_batch
from onefold.errors import InputError
from onefold.nn.augment import UNIFORMS, Chain, augment
from onefold.types import Indexable


@runtime_checkable
class Contexts(Protocol):
    """A minibatch of contexts from a minibatch of train samples and the step's random numbers."""

    def __call__(self, x: Any, integers: Int[Tensor, " n"], uniforms: Float[Tensor, "n 14"]) -> Any: ...


@dataclass(frozen=True)
class TrainContexts:
    """The train samples themselves: c_i = x_i."""

    def __call__(self, x: Any, integers: Tensor, uniforms: Tensor) -> Any:
        del integers, uniforms
        return x


@dataclass(frozen=True)
class AugmentedContexts:
    """The train samples through the paper's chain of augmentations, each sample with its own draw."""

    chain: Chain
    low: float
    high: float

    def __call__(self, x: Tensor, integers: Tensor, uniforms: Tensor) -> Tensor:
        del integers
        if x.ndim == 3:  # grey images without an axis for it
            return augment(x[:, None], uniforms, self.chain, self.low, self.high)[:, 0]
        return augment(x, uniforms, self.chain, self.low, self.high)


@dataclass(frozen=True, eq=False)
class ExtraContexts:
    """Unlabelled data, for example from the target domain."""

    data: Indexable

    def __call__(self, x: Any, integers: Tensor, uniforms: Tensor) -> Any:
        del x, uniforms
        return self.data[integers % len(self.data)]


@dataclass(frozen=True)
class Mixture:
    """Fixed shares of every minibatch from several sources; minibatches are random, so any sample may get any."""

    sources: tuple[Contexts, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.shares) or not self.sources or min(self.shares) <= 0:
            raise InputError("a mixture of contexts needs one positive share for each source")

    def __call__(self, x: Any, integers: Tensor, uniforms: Tensor) -> Any:
        total, count = sum(self.shares), len(integers)
        edges = [round(count * sum(self.shares[:i]) / total) for i in range(len(self.shares) + 1)]
        parts = zip(self.sources, edges, edges[1:], strict=False)
        return joined(
            [source(map_batch(lambda t, a=a, b=b: t[a:b], x), integers[a:b], uniforms[a:b]) for source, a, b in parts]
        )


__all__ = ["UNIFORMS", "AugmentedContexts", "Contexts", "ExtraContexts", "Mixture", "TrainContexts"]
