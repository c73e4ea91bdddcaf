"""Reservoir sampling of a stream, with optional forgetting."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from onefold.core import storage
from onefold.core.arguments import check_number
from onefold.core.batches import batch_length, batch_tensors, concatenate, map_batch, named
from onefold.errors import InputError
from onefold.types import Batch

MIN_SAMPLES = 16  # kept even with a short half-life


class Reservoir:
    """Random sample of at most `capacity` samples of a stream: uniform, or favouring newer samples with a half-life.

    Sample i gets the key ln w_i + Gumbel noise, and the samples with the largest keys are kept. This is sampling
    without replacement in proportion to the weights (Efraimidis & Spirakis, 2006). It is exact for streams of any
    length and any division into batches. The weights are 2^(i / half-life), or 1 without a half-life. With one, at most
    half-life / ln 2 samples are kept, the sum of the weights of an endless stream. A capacity of 0 keeps nothing.
    """

    def __init__(self, capacity: int, seed: int, salt: int = 0) -> None:
        """`salt` distinguishes reservoirs of one seed that are to be merged."""
        self.capacity, self.seen, self.age = capacity, 0, 0.0
        self._keys: list[NDArray[np.float64]] = []
        self._parts: list[Batch] = []  # joined lazily: joining every batch would take quadratic time
        self._generator = np.random.default_rng([seed, 0x5EED, salt])

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    @property
    def keys(self) -> NDArray[np.float64]:
        if len(self._keys) != 1:
            self._keys = [np.concatenate([np.zeros(0), *self._keys])]
        return self._keys[0]

    @property
    def samples(self) -> Batch | None:
        """Kept samples in the order of the stream."""
        if len(self._parts) > 1:
            self._parts = [concatenate(self._parts)]
        return self._parts[0] if self._parts else None

    def subsample(self, count: int) -> Batch:
        """Return a random part of the kept samples: those with the largest keys."""
        assert self.samples is not None
        chosen = torch.from_numpy(self._largest(count))
        return map_batch(lambda t: t[chosen], self.samples)

    def add(self, batch: Batch, half_life: float | None = None) -> "Reservoir":
        """Add a batch of raw samples; each sample is one time unit of the half-life."""
        if half_life is not None:
            check_number(half_life, "half_life")
        if not self.capacity:
            return self
        count = batch_length(batch)
        rate = 0.0 if half_life is None else math.log(2) / half_life
        ages = self.age + rate * np.arange(1, count + 1)
        self.age, self.seen = float(ages[-1]), self.seen + count
        self._keys.append(ages + self._generator.gumbel(size=count))
        self._parts.append(map_batch(lambda t: t.detach().cpu().clone(), batch))
        limit = self.capacity if half_life is None else min(self.capacity, max(MIN_SAMPLES, math.ceil(1 / rate)))
        if len(self) > limit:
            self._keep_largest(limit)
        return self

    def merge(self, other: "Reservoir") -> "Reservoir":
        """Return a reservoir of two streams, whose newest samples have the same age; it goes on as this one.

        It keeps nothing if one of the two keeps nothing: a sample of one stream would not be one of both.

        Raises:
            InputError: Both contain the same samples, or samples that were drawn with the same random numbers.
        """
        merged = self.copy()
        merged.capacity, merged.age = min(self.capacity, other.capacity), max(self.age, other.age)
        merged.seen = self.seen + other.seen if merged.capacity else 0
        pairs = [(stream.keys + (merged.age - stream.age), stream.samples) for stream in (self, other)]
        merged._keys = [keys for keys, samples in pairs if samples is not None] if merged.capacity else []
        merged._parts = [samples for _, samples in pairs if samples is not None] if merged.capacity else []
        if len(np.unique(merged.keys)) < len(merged):
            raise InputError(
                "contains the same samples, or samples drawn with the same random numbers",
                argument="other",
                hint="Fit it on other data, with like= this detector.",
            )
        if len(merged) > merged.capacity:
            merged._keep_largest(merged.capacity)
        return merged

    def remove(self, batch: Batch | None) -> "Reservoir":
        """Remove the samples of `batch`, each as often as it occurs there, and return self."""
        if batch is None or self.samples is None:
            return self
        removals, kept = Counter(_sample_bytes(batch)), []
        for i, row in enumerate(_sample_bytes(self.samples)):
            if removals[row] > 0:
                removals[row] -= 1
            else:
                kept.append(i)
        self._keep(np.array(kept, np.int64))
        return self

    def replace_samples(self, samples: Batch) -> None:
        """Replace the samples by the same ones in another structure, such as another order of names."""
        self._parts = [samples]

    def copy(self) -> "Reservoir":
        """Return an independent copy with the same state of the random generator."""
        other = Reservoir(self.capacity, 0)
        other._parts, other._keys, other.seen, other.age = [*self._parts], [*self._keys], self.seen, self.age
        other._generator.bit_generator.state = self._generator.bit_generator.state
        return other

    def _largest(self, count: int) -> NDArray[np.int64]:
        """Return the rows with the largest keys, in order."""
        return np.sort(np.argsort(-self.keys, kind="stable")[:count])

    def _keep_largest(self, count: int) -> None:
        self._keep(self._largest(count))

    def _keep(self, rows: NDArray[np.int64]) -> None:
        index, samples = torch.from_numpy(rows), self.samples
        assert samples is not None
        self._keys, self._parts = [self.keys[rows]], [map_batch(lambda t: t[index], samples)]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the samples and their keys as tensors, with names prefixed by `name`."""
        if self.samples is None:
            return {}
        samples = storage.with_prefix("samples", named(self.samples))
        return storage.with_prefix(name, {"keys": torch.from_numpy(self.keys), **samples})

    def to_json(self) -> dict[str, Any]:
        state = self._generator.bit_generator.state
        return {"capacity": self.capacity, "seen": self.seen, "age": self.age, "generator": state}

    @classmethod
    def restore(cls, content: dict[str, Any], tensors: Mapping[str, Tensor], name: str) -> "Reservoir":
        """Return the reservoir that `to_json` and `tensors` describe; raise ValueError if they are inconsistent."""
        self = cls(int(content["capacity"]), 0)
        self.seen, self.age = int(content["seen"]), float(content["age"])
        self._generator.bit_generator.state = content["generator"]
        tensors = storage.under_prefix(name, tensors)
        named_samples = storage.under_prefix("samples", tensors)
        if named_samples:
            samples = named_samples["x"] if set(named_samples) == {"x"} else named_samples
            self._keys, self._parts = [tensors["keys"].numpy()], [samples]
            if batch_length(samples) != len(self.keys) or self.keys.dtype != np.float64 or self.keys.ndim != 1:
                raise ValueError("reservoir: numbers of samples and keys differ, or keys are not float64")
        if min(self.capacity, self.seen) < 0 or len(self) > min(self.capacity, self.seen) or not self.age >= 0:
            raise ValueError("reservoir: more samples than its capacity or than it has seen")
        if not np.isfinite(self.keys).all() or self.to_json() != content:
            raise ValueError("reservoir: keys are not finite, or numbers have another form")
        return self


def capacity_for(sample: Batch, most: int, budget: int) -> int:
    """Return how many samples like those of `sample` to keep: at most `most`, in at most `budget` bytes."""
    size = sum(t.nbytes for t in batch_tensors(sample)) / batch_length(sample)
    return int(min(most, max(16, budget // max(size, 1))))


def shuffle_values(batch: Batch, seed: int) -> Batch:
    """Return samples whose values are shuffled between samples, independently at each position."""
    generator = Generator().manual_seed(seed)

    def shuffle(t: Tensor) -> Tensor:
        rows = t.reshape(len(t), -1)
        return rows.gather(0, torch.rand(rows.shape, generator=generator).argsort(0)).reshape(t.shape)

    return map_batch(shuffle, batch)


def _sample_bytes(batch: Batch) -> list[bytes]:
    """Return the bytes of each sample, without the zeros at its end, by which texts in two batches may differ."""
    tensors = [t.contiguous().reshape(len(t), -1).numpy() for t in named(batch).values()]
    return [b"".join(t[i].tobytes() for t in tensors).rstrip(b"\0") for i in range(batch_length(batch))]
