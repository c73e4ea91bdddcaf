"""A bounded, fair memory of a stream."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from onefold.core.arguments import check_number
from onefold.core.batches import batch_length, batch_tensors, joined, map_batch, named
from onefold.types import Batch

FEWEST = 16  # samples that even a short half-life leaves


class Reservoir:
    """At most `capacity` of the samples seen so far, every one with the same chance; with a half-life, newer ones more.

    Sample i gets the key ln w_i + Gumbel noise, and the largest keys stay: sampling without replacement in proportion
    to the weights (Efraimidis & Spirakis, 2006), exact for streams of any length and for any cutting into batches. The
    weights are 2^(i / half-life), that is 1 without forgetting; with it, no more samples stay than the weights of an
    endless stream add up to, half-life / ln 2. A capacity of 0 remembers nothing, ever.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seen, self.age = capacity, 0, 0.0
        self._keys: list[NDArray[np.float64]] = []
        self._parts: list[Batch] = []  # joined when they are asked for: one by one would take quadratic time
        self._generator = np.random.default_rng([seed, 0x5EED])

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    @property
    def keys(self) -> NDArray[np.float64]:
        if len(self._keys) != 1:
            self._keys = [np.concatenate([np.zeros(0), *self._keys])]
        return self._keys[0]

    @property
    def samples(self) -> Batch | None:
        """What is remembered, in the order in which it came."""
        if len(self._parts) > 1:
            self._parts = [joined(self._parts)]
        return self._parts[0] if self._parts else None

    def few(self, count: int) -> Batch:
        """A fair part of what is remembered: the samples with the largest keys."""
        assert self.samples is not None
        chosen = torch.from_numpy(np.sort(np.argsort(-self.keys, kind="stable")[:count]))
        return map_batch(lambda t: t[chosen], self.samples)

    def add(self, batch: Batch, half_life: float | None = None) -> "Reservoir":
        """Take in a batch of raw samples; every sample of it counts as one unit of time for the half-life."""
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
        limit = self.capacity if half_life is None else min(self.capacity, max(FEWEST, math.ceil(1 / rate)))
        if len(self) > limit:
            self._keep(np.sort(np.argsort(-self.keys, kind="stable")[:limit]))
        return self

    def without(self, batch: Batch | None) -> "Reservoir":
        """This, with the samples that are in `batch` forgotten, each as often as it is there."""
        if batch is None or self.samples is None:
            return self
        gone, stay = Counter(_rows(batch)), []
        for i, row in enumerate(_rows(self.samples)):
            if gone[row] > 0:
                gone[row] -= 1
            else:
                stay.append(i)
        self._keep(np.array(stay, np.int64))
        return self

    def arranged(self, samples: Batch) -> None:
        """The same samples in another arrangement, such as another order of names."""
        self._parts = [samples]

    def copy(self) -> "Reservoir":
        """An independent copy that goes on with the same random numbers."""
        other = Reservoir(self.capacity, 0)
        other._parts, other._keys, other.seen, other.age = [*self._parts], [*self._keys], self.seen, self.age
        other._generator.bit_generator.state = self._generator.bit_generator.state
        return other

    def _keep(self, stay: NDArray[np.int64]) -> None:
        kept, samples = torch.from_numpy(stay), self.samples
        assert samples is not None
        self._keys, self._parts = [self.keys[stay]], [map_batch(lambda t: t[kept], samples)]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The samples and their keys, under names that begin with `name`."""
        if self.samples is None:
            return {}
        samples = {f"{name}.samples.{key}": t for key, t in named(self.samples).items()}
        return {f"{name}.keys": torch.from_numpy(self.keys), **samples}

    def to_json(self) -> dict[str, Any]:
        state = self._generator.bit_generator.state
        return {"capacity": self.capacity, "seen": self.seen, "age": self.age, "generator": state}

    @classmethod
    def restored(cls, content: dict[str, Any], tensors: Mapping[str, Tensor], name: str) -> "Reservoir":
        """What `to_json` and `tensors` wrote; a ValueError for anything that no reservoir writes."""
        self = cls(int(content["capacity"]), 0)
        self.seen, self.age = int(content["seen"]), float(content["age"])
        self._generator.bit_generator.state = content["generator"]
        prefix = f"{name}.samples."
        found = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if found:
            samples = found["x"] if set(found) == {"x"} else found
            self._keys, self._parts = [tensors[f"{name}.keys"].numpy()], [samples]
            if batch_length(samples) != len(self.keys) or self.keys.dtype != np.float64 or self.keys.ndim != 1:
                raise ValueError("samples and keys do not belong together")
        if min(self.capacity, self.seen) < 0 or len(self) > min(self.capacity, self.seen) or not self.age >= 0:
            raise ValueError("no reservoir remembers more than it has seen or can hold")
        if not np.isfinite(self.keys).all() or self.to_json() != content:
            raise ValueError("no reservoir has such keys or numbers")
        return self


def capacity_for(sample: Batch, most: int, budget: int) -> int:
    """How many samples like those of `sample` to remember: at most `most`, in at most `budget` bytes."""
    size = sum(t.nbytes for t in batch_tensors(sample)) / batch_length(sample)
    return int(min(most, max(16, budget // max(size, 1))))


def scrambled(batch: Batch, seed: int) -> Batch:
    """Samples put together from values of several: each value is one that some sample has in that place."""
    generator = Generator().manual_seed(seed)

    def shuffle(t: Tensor) -> Tensor:
        rows = t.reshape(len(t), -1)
        return rows.gather(0, torch.rand(rows.shape, generator=generator).argsort(0)).reshape(t.shape)

    return map_batch(shuffle, batch)


def _rows(batch: Batch) -> list[bytes]:
    """Every sample's bytes."""
    tensors = [t.contiguous().reshape(len(t), -1).numpy() for t in named(batch).values()]
    return [b"".join(t[i].tobytes() for t in tensors) for i in range(batch_length(batch))]
