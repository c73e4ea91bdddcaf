"""Protocols of data sources: raw samples in order, or also by index."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from onefold.errors import InputError
from onefold.types import Batch


@runtime_checkable
class Source(Protocol):
    """Raw, unscaled samples that can be iterated repeatedly."""

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all samples in order, about `size` at a time."""
        ...


@runtime_checkable
class IndexedSource(Source, Protocol):
    """Source with access to samples by index."""

    def __len__(self) -> int: ...

    def take(self, index: NDArray[np.int64]) -> Batch:
        """Return the samples at these indices in this order; indices may repeat."""
        ...


def split_range(length: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices 0 … length − 1 in ranges of at most `size`."""
    check_batch_size(size)
    for start in range(0, length, size):
        yield np.arange(start, min(start + size, length), dtype=np.int64)


def regroup(parts: Iterable[NDArray[np.float64]], size: int) -> Iterator[NDArray[np.float64]]:
    """Yield the rows of `parts` in groups of exactly `size`; the last one may be smaller."""
    check_batch_size(size)
    waiting: list[NDArray[np.float64]] = []
    count = 0
    for part in parts:
        while count + len(part) >= size:
            cut = size - count
            yield np.concatenate([*waiting, part[:cut]])
            waiting, count, part = [], 0, part[cut:]
        if len(part):
            waiting.append(part)
            count += len(part)
    if waiting:
        yield np.concatenate(waiting)


def check_batch_size(size: int) -> None:
    """Raise InputError for a batch size below 1."""
    if size < 1:
        raise InputError(f"batch size: {size} is too small. Use at least 1.")


def check_index(index: NDArray[np.int64], length: int) -> None:
    """Raise IndexError unless indices are 0 … length − 1; negative indices would hide mistakes."""
    if index.ndim != 1 or not len(index):
        raise IndexError(f"index: shape {index.shape} is not supported. Pass at least one index in one dimension.")
    if index.min() < 0 or index.max() >= length:
        raise IndexError(f"index: {index.min()} to {index.max()} is out of range. Use 0 to {length - 1}.")
