"""Sources of contexts: the train set, augmentations of it, other data, or a mixture (Section 3.3)."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onefold.core.batches import concatenate, map_batch
from onefold.errors import InputError
from onefold.nn.augment import UNIFORMS, Chain, augment
from onefold.types import Indexable


@runtime_checkable
class Contexts(Protocol):
    """Source of contexts for the minibatches of a training."""

    def __call__(
        self, x: Any, index: Int[Tensor, " n"], integers: Int[Tensor, " n"], uniforms: Float[Tensor, "n 14"]
    ) -> Any:
        """Return N contexts for N train samples, as a function of the random numbers of the step.

        Args:
            x: Minibatch of N train samples.
            index: Their numbers in the train set.
            integers: Random integers from [0, 2⁶²), one for each sample.
            uniforms: Uniform random numbers from [0, 1), 14 for each sample.

        Returns:
            Minibatch of N contexts.
        """
        ...


@dataclass(frozen=True)
class TrainContexts:
    """The train samples as contexts: c_i = x_i."""

    def __call__(self, x: Any, index: Tensor, integers: Tensor, uniforms: Tensor) -> Any:
        del index, integers, uniforms
        return x


@dataclass(frozen=True)
class AugmentedContexts:
    """Augmented train samples, each with its own random numbers.

    Args:
        chain: Probabilities and ranges of the augmentations.
        low: Smallest value of a pixel; results are clipped.
        high: Largest value of a pixel.
    """

    chain: Chain
    low: float
    high: float

    def __call__(self, x: Tensor, index: Tensor, integers: Tensor, uniforms: Tensor) -> Tensor:
        del index, integers
        if x.ndim == 3:  # grey images without an axis of channels
            return augment(x[:, None], uniforms, self.chain, self.low, self.high)[:, 0]
        return augment(x, uniforms, self.chain, self.low, self.high)


@dataclass(frozen=True, eq=False)
class CopiedContexts:
    """Train samples, or with probability `share` their copies, which were made before the training.

    Args:
        copies: One copy of each train sample, such as the encoding of an augmented image, in the order of the samples.
        share: Share of copies, from 0 to 1.
    """

    copies: Indexable
    share: float

    def __call__(self, x: Tensor, index: Tensor, integers: Tensor, uniforms: Tensor) -> Tensor:
        del integers
        chosen = (uniforms[:, 0] < self.share).reshape(-1, *[1] * (x.ndim - 1))
        return torch.where(chosen, self.copies[index], x)


@dataclass(frozen=True, eq=False)
class ExtraContexts:
    """Unlabelled data as contexts, for example from the target domain.

    Args:
        data: Samples by index; every context is drawn at random.
    """

    data: Indexable

    def __call__(self, x: Any, index: Tensor, integers: Tensor, uniforms: Tensor) -> Any:
        del x, index, uniforms
        return self.data[integers % len(self.data)]


@dataclass(frozen=True)
class Mixture:
    """Contexts from several sources, each with a fixed share of every minibatch.

    Minibatches are random, so any sample may get a context from any source.

    Args:
        sources: Sources of contexts.
        shares: Positive shares, one for each source; they need not add up to 1.

    Raises:
        InputError: If the numbers of sources and shares differ, or a share is not positive.
    """

    sources: tuple[Contexts, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.shares) or not self.sources or min(self.shares) <= 0:
            raise InputError("shares: a mixture of contexts needs one positive share for each source")

    def __call__(self, x: Any, index: Tensor, integers: Tensor, uniforms: Tensor) -> Any:
        total, count = sum(self.shares), len(integers)
        edges = [round(count * sum(self.shares[:i]) / total) for i in range(len(self.shares) + 1)]
        parts = zip(self.sources, map(slice, edges, edges[1:]), strict=True)
        return concatenate(
            [
                source(map_batch(lambda t, rows=rows: t[rows], x), index[rows], integers[rows], uniforms[rows])
                for source, rows in parts
            ]
        )


__all__ = ["UNIFORMS", "AugmentedContexts", "Contexts", "CopiedContexts", "ExtraContexts", "Mixture", "TrainContexts"]
