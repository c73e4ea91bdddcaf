"""A bounded, fair memory of a stream."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from onefold.errors import InputError
from onefold.inputs import batch_length, batch_tensors, joined, map_batch, named
from onefold.types import Batch


class Reservoir:
    """At most `capacity` of the samples seen so far, every one with the same chance; with a half-life, newer ones more.

    Sample i gets the key ln w_i + Gumbel noise, and the largest keys stay: sampling without replacement in proportion
    to the weights (Efraimidis & Spirakis, 2006), exact for streams of any length and for any cutting into batches. The
    weights are 2^(i / half-life), that is 1 without forgetting. A capacity of 0 remembers nothing, ever.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seen, self.age = capacity, 0, 0.0
        self.keys: NDArray[np.float64] = np.zeros(0)
        self.samples: Batch | None = None
        self._generator = np.random.default_rng([seed, 0x5EED])

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, batch: Batch, half_life: float | None = None) -> "Reservoir":
        """Take in a batch of raw samples; every sample of it counts as one unit of time for the half-life."""
        if half_life is not None and not half_life > 0:
            raise InputError(f"the half-life is a positive number of samples, not {half_life}")
        if not self.capacity:
            return self
        count = batch_length(batch)
        rate = 0.0 if half_life is None else math.log(2) / half_life
        ages = self.age + rate * np.arange(1, count + 1)
        keys = np.concatenate([self.keys, ages + self._generator.gumbel(size=count)])
        self.age, self.seen = float(ages[-1]), self.seen + count
        stay = np.sort(np.argsort(-keys, kind="stable")[: self.capacity])
        old, new = torch.from_numpy(stay[stay < len(self)]), torch.from_numpy(stay[stay >= len(self)] - len(self))
        chosen = map_batch(lambda t: t.detach().cpu()[new], batch)
        self.samples = chosen if self.samples is None else joined([map_batch(lambda t: t[old], self.samples), chosen])
        self.keys = keys[stay]
        return self

    def copy(self) -> "Reservoir":
        """An independent copy that goes on with the same random numbers."""
        other = Reservoir(self.capacity, 0)
        other.samples, other.keys, other.seen, other.age = self.samples, self.keys.copy(), self.seen, self.age
        other._generator.bit_generator.state = self._generator.bit_generator.state
        return other

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
            self.keys = tensors[f"{name}.keys"].numpy()
            self.samples = found["x"] if set(found) == {"x"} else found
            if batch_length(self.samples) != len(self.keys) or self.keys.dtype != np.float64 or self.keys.ndim != 1:
                raise ValueError("samples and keys do not belong together")
        if min(self.capacity, self.seen) < 0 or len(self) != min(self.capacity, self.seen) or not self.age >= 0:
            raise ValueError("a reservoir that has seen so many samples remembers as many as it can")
        if not np.isfinite(self.keys).all() or self.to_json() != content:
            raise ValueError("no reservoir has such keys or numbers")
        return self


def capacity_for(sample: Batch, most: int, budget: int) -> int:
    """How many samples like those of `sample` to remember: at most `most`, in at most `budget` bytes."""
    size = sum(t.nbytes for t in batch_tensors(sample)) / batch_length(sample)
    return int(min(most, max(16, budget // max(size, 1))))


def scrambled(batch: Batch, seed: int) -> Batch:
    """The same values in places where they do not belong: every sample's own are shuffled, or where it has one value,
    the samples' are exchanged."""
    generator = Generator().manual_seed(seed)

    def shuffle(t: Tensor) -> Tensor:
        rows = t.reshape(len(t), -1)
        if rows.shape[1] == 1:
            return t[torch.randperm(len(t), generator=generator)]
        order = torch.rand(rows.shape, generator=generator).argsort(1)
        return rows.gather(1, order).reshape(t.shape)

    return map_batch(shuffle, batch)
