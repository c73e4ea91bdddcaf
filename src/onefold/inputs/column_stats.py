"""Streaming statistics of a table column, in bounded memory."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onefold.inputs.cells import NotANumberError, to_numbers, to_texts

MOST_CATEGORIES = 64
MOST_COUNTED = 16384


class ColumnMoments:
    """Running mean, spread and range of a column, until a value is not a number."""

    def __init__(self) -> None:
        self.is_number = True
        self.missing = False
        self.infinite = False
        self.count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._low = math.inf
        self._high = -math.inf

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        if not self.is_number:
            return
        try:
            numbers = to_numbers(values)
        except NotANumberError:
            self.is_number = False
            return
        present = numbers[~np.isnan(numbers)]
        self.missing |= len(present) < len(numbers)
        self.infinite |= bool(np.isinf(present).any())
        if len(present) and not self.infinite:
            self._merge(present)

    def _merge(self, numbers: np.ndarray) -> None:
        """Merge a batch by Chan's update, which avoids cancellation for large means such as dates in seconds."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.mean(numbers)
            squares = np.sum((numbers - mean) ** 2)
            total = self.count + len(numbers)
            step = mean - self._mean
            self._mean = float(self._mean + step * (len(numbers) / total))
            self._squares = float(self._squares + squares + step**2 * (self.count * (len(numbers) / total)))
        self.count = total
        self._low = min(self._low, float(numbers.min()))
        self._high = max(self._high, float(numbers.max()))

    @property
    def centre(self) -> float:
        return self._low if self._low == self._high else self._mean

    @property
    def scale(self) -> float:
        """Standard deviation; 1 for a constant column, non-finite if the numbers overflow."""
        spread = math.sqrt(self._squares / self.count)
        return 1.0 if self._low == self._high or spread == 0 else spread


class CategoryCounts:
    """Counts of the texts in a column.

    Counts are exact up to 16,384 different texts. Beyond that, the rarer half is dropped whenever the limit is
    reached. The number of different texts is estimated from a sample of their hashes, to about 2 %.
    """

    def __init__(self) -> None:
        self.missing = False
        self.count = 0
        self._counts: Counter[str] = Counter()
        self._hashes: set[int] = set()
        self._mask = 0

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        batch = Counter(to_texts(values))
        self.missing |= batch.pop(None, 0) > 0
        texts = {text: count for text, count in batch.items() if text is not None}
        self.count += sum(texts.values())
        self._counts.update(texts)
        self._sample(texts)
        if len(self._counts) > MOST_COUNTED:
            self._counts = Counter(dict(self.most_common(MOST_COUNTED // 2)))

    def _sample(self, texts: Iterable[str]) -> None:
        hashes = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
        self._hashes |= {number for h in hashes if not (number := int.from_bytes(h, "little")) & self._mask}
        while len(self._hashes) > MOST_COUNTED:
            self._mask = 2 * self._mask + 1
            self._hashes = {number for number in self._hashes if not number & self._mask}

    def most_common(self, most: int = MOST_CATEGORIES) -> list[tuple[str, int]]:
        """Return the most frequent texts and their counts, ties sorted by text."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:most]

    @property
    def distinct(self) -> int:
        """Number of different texts, estimated beyond 16,384."""
        return len(self._hashes) * (self._mask + 1)

    @property
    def is_identifier(self) -> bool:
        """Whether nearly every value is different, as in an identifier column."""
        return self.distinct > max(MOST_CATEGORIES, self.count / 2)
