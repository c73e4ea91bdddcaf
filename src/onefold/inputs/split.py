"""Subsets of sources: random splits, selected samples, and passes with progress."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from onefold.core.batches import batch_length, map_batch
from onefold.errors import InputError
from onefold.inputs.source import IndexedSource, Source, check_index, split_range
from onefold.types import Batch

Tracker: TypeAlias = Callable[[Iterator[Batch]], Iterator[Batch]]
"""Yields the batches of a pass unchanged and may display its progress."""


class Subset:
    """Samples of an indexed source at these indices; all samples without an index."""

    def __init__(self, source: IndexedSource, index: NDArray[np.int64] | None, tracker: Tracker = iter) -> None:
        self.source, self.index, self.tracker = source, index, tracker

    def __len__(self) -> int:
        return len(self.source) if self.index is None else len(self.index)

    def batches(self, size: int) -> Iterator[Batch]:
        if self.index is None:
            return self.tracker(self.source.batches(size))
        return self.tracker(self.take(part) for part in split_range(len(self), size))

    def take(self, index: NDArray[np.int64]) -> Batch:
        check_index(index, len(self))
        return self.source.take(index if self.index is None else self.index[index])


class RandomStreamSubset:
    """Random subset of a sequential source: samples whose random number lies in [low, high)."""

    def __init__(self, source: Source, low: float, high: float, seed: int) -> None:
        self.source, self.low, self.high, self.seed = source, low, high, seed

    def batches(self, size: int) -> Iterator[Batch]:
        generator = np.random.default_rng(self.seed)
        for batch in self.source.batches(size):
            drawn = generator.random(batch_length(batch))
            chosen = np.flatnonzero((drawn >= self.low) & (drawn < self.high))
            if len(chosen):
                yield map_batch(lambda t, chosen=chosen: t[chosen], batch)


class StreamSubset:
    """Samples of a sequential source at these sorted positions; all samples without an index."""

    def __init__(self, source: Source, index: NDArray[np.int64] | None, tracker: Tracker = iter) -> None:
        self.source, self.index, self.tracker = source, index, tracker

    def batches(self, size: int) -> Iterator[Batch]:
        batches = self.source.batches(size)
        return self.tracker(batches if self.index is None else _select_rows(batches, self.index))


def _select_rows(batches: Iterator[Batch], index: NDArray[np.int64]) -> Iterator[Batch]:
    start = 0
    for batch in batches:
        end = start + batch_length(batch)
        first, last = np.searchsorted(index, [start, end])
        if first < last:
            yield map_batch(lambda t, rows=index[first:last] - start: t[rows], batch)
        start = end


def select(source: Source, index: NDArray[np.int64]) -> Source:
    """Return the samples at these sorted positions as a source."""
    return Subset(source, index) if isinstance(source, IndexedSource) else StreamSubset(source, index)


def track(source: Source, tracker: Tracker) -> Source:
    """Return the same source with every pass through `tracker`."""
    return Subset(source, None, tracker) if isinstance(source, IndexedSource) else StreamSubset(source, None, tracker)


def split(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Split a source at random into most samples and a `share` of them; the same seed gives the same split."""
    if not 0 < share < 1:
        raise InputError(f"share: {share} is not supported. Use a number between 0 and 1.")
    if not isinstance(source, IndexedSource):
        return RandomStreamSubset(source, share, 1.0, seed), RandomStreamSubset(source, 0.0, share, seed)
    order = np.random.default_rng(seed).permutation(len(source))
    cut = round(share * len(source))
    return Subset(source, np.sort(order[cut:])), Subset(source, np.sort(order[:cut]))
