"""What every kind of data is turned into: raw samples, in order or by number."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from onefold.errors import InputError
from onefold.types import Batch


@runtime_checkable
class Source(Protocol):
    """Raw samples, nothing scaled, that may be gone through again and again."""

    def batches(self, size: int) -> Iterator[Batch]:
        """All samples in order, about `size` at a time."""
        ...


@runtime_checkable
class Indexed(Source, Protocol):
    """A source whose samples are numbered."""

    def __len__(self) -> int: ...

    def take(self, index: NDArray[np.int64]) -> Batch:
        """The samples of these numbers, in this order; a number may come more than once."""
        ...


def spans(length: int, size: int) -> Iterator[NDArray[np.int64]]:
    """0 … length − 1 in runs of at most `size` numbers."""
    check_size(size)
    for start in range(0, length, size):
        yield np.arange(start, min(start + size, length), dtype=np.int64)


def regroup(parts: Iterable[NDArray[np.float64]], size: int) -> Iterator[NDArray[np.float64]]:
    """The rows of `parts` in groups of exactly `size`, the last one smaller."""
    check_size(size)
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


def check_size(size: int) -> None:
    """A batch has at least one sample."""
    if size < 1:
        raise InputError(f"the batch size must be at least 1, not {size}")


def check_index(index: NDArray[np.int64], length: int) -> None:
    """Sample numbers are 0 … length − 1; Python's negative ones would hide mistakes."""
    if index.ndim != 1 or not len(index):
        raise IndexError(f"sample numbers must be a list of at least one, not an array of shape {index.shape}")
    if index.min() < 0 or index.max() >= length:
        raise IndexError(f"sample numbers {index.min()} to {index.max()} were asked for, there are 0 to {length - 1}")
