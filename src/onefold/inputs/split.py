"""Two parts of one source, chosen at random but always alike for the same seed."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from onefold.core.batches import batch_length, map_batch
from onefold.errors import InputError
from onefold.inputs.source import Indexed, Source, check_index, spans
from onefold.types import Batch

Watch: TypeAlias = Callable[[Iterator[Batch]], Iterator[Batch]]
"""Hands on the batches of a pass as they come, and may show how far it is."""


class Subset:
    """Some samples of a source that can be read by index, or with no index all of them."""

    def __init__(self, source: Indexed, index: NDArray[np.int64] | None, watch: Watch = iter) -> None:
        self.source, self.index, self.watch = source, index, watch

    def __len__(self) -> int:
        return len(self.source) if self.index is None else len(self.index)

    def batches(self, size: int) -> Iterator[Batch]:
        if self.index is None:
            return self.watch(self.source.batches(size))
        return self.watch(self.take(part) for part in spans(len(self), size))

    def take(self, index: NDArray[np.int64]) -> Batch:
        check_index(index, len(self))
        return self.source.take(index if self.index is None else self.index[index])


class Sifted:
    """Some samples of a source that can only be read in order: those whose random number lies in [low, high)."""

    def __init__(self, source: Source, low: float, high: float, seed: int) -> None:
        self.source, self.low, self.high, self.seed = source, low, high, seed

    def batches(self, size: int) -> Iterator[Batch]:
        generator = np.random.default_rng(self.seed)
        for batch in self.source.batches(size):
            drawn = generator.random(batch_length(batch))
            chosen = np.flatnonzero((drawn >= self.low) & (drawn < self.high))
            if len(chosen):
                yield map_batch(lambda t, chosen=chosen: t[chosen], batch)


class Picked:
    """Given samples, by sorted position, of a source that can only be read in order, or with no index all of them."""

    def __init__(self, source: Source, index: NDArray[np.int64] | None, watch: Watch = iter) -> None:
        self.source, self.index, self.watch = source, index, watch

    def batches(self, size: int) -> Iterator[Batch]:
        batches = self.source.batches(size)
        return self.watch(batches if self.index is None else _picked(batches, self.index))


def _picked(batches: Iterator[Batch], index: NDArray[np.int64]) -> Iterator[Batch]:
    start = 0
    for batch in batches:
        end = start + batch_length(batch)
        first, last = np.searchsorted(index, [start, end])
        if first < last:
            yield map_batch(lambda t, rows=index[first:last] - start: t[rows], batch)
        start = end


def picked(source: Source, index: NDArray[np.int64]) -> Source:
    """The samples at these sorted positions."""
    return Subset(source, index) if isinstance(source, Indexed) else Picked(source, index)


def watched(source: Source, watch: Watch) -> Source:
    """The same samples, every pass over them watched."""
    return Subset(source, None, watch) if isinstance(source, Indexed) else Picked(source, None, watch)


def split(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Most of the samples, and about a `share` of them that the first part does not have."""
    if not 0 < share < 1:
        raise InputError(f"the share to set apart must be between 0 and 1, not {share}")
    if not isinstance(source, Indexed):
        return Sifted(source, share, 1.0, seed), Sifted(source, 0.0, share, seed)
    order = np.random.default_rng(seed).permutation(len(source))
    cut = round(share * len(source))
    return Subset(source, np.sort(order[cut:])), Subset(source, np.sort(order[:cut]))
