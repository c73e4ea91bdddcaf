"""Streaming statistics of a table column, in bounded memory."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from onefold.core.moments import Moments
from onefold.inputs.cells import NotANumberError, to_numbers, to_texts

MOST_CATEGORIES = 64
MOST_COUNTED = 16384


class NumberStatistics:
    """Mean, spread and range of a column, until a value is not a number."""

    def __init__(self) -> None:
        self.is_number = True
        self.missing = False
        self.infinite = False
        self._moments: Moments | None = None
        self._low = math.inf
        self._high = -math.inf

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        """Add a batch of values."""
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
            moments = Moments.of(torch.from_numpy(present))
            self._moments = moments if self._moments is None else self._moments.merge(moments)
            self._low = min(self._low, float(present.min()))
            self._high = max(self._high, float(present.max()))

    @property
    def count(self) -> int:
        return 0 if self._moments is None else self._moments.count

    @property
    def centre(self) -> float:
        assert self._moments is not None
        return self._low if self._low == self._high else float(self._moments.mean)

    @property
    def scale(self) -> float:
        """Standard deviation; 1 for a constant column, non-finite if the numbers overflow."""
        assert self._moments is not None
        spread = math.sqrt(float(self._moments.variance))
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
