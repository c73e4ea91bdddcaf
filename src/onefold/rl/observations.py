"""What agents of other libraries see, as one tensor: vectors, images, and dicts and tuples of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from onefold.errors import InputError

Observations: TypeAlias = Any
"""A batch: an array or tensor [n, …], or a dict or tuple of them. The entries of a tuple are named "0", "1", …"""

SMALLEST_IMAGE = 16  # pixels a side: a grid of fewer is a vector


@dataclass(frozen=True)
class Entry:
    """One array of an observation: its name in the dict (empty: there is no dict), and its shape without the batch."""

    name: str
    shape: tuple[int, ...]

    @property
    def last(self) -> bool:
        """Whether an image's channels come last, as they do in most environments."""
        return len(self.shape) == 3 and self.shape[2] < self.shape[0]

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width, or None for what is no image."""
        if len(self.shape) not in (2, 3):
            return None
        moved = (*self.shape[2:], *self.shape[:2]) if self.last else self.shape
        channels, height, width = moved if len(moved) == 3 else (1, *moved)
        return (channels, height, width) if min(height, width) >= SMALLEST_IMAGE else None

    def read(self, values: Any, device: torch.device) -> Tensor:
        """[n, numbers] of a vector, [n, channels, height, width] of an image."""
        x = _tensor(values, self.name).to(device, torch.float32)
        if x.ndim == 0 or tuple(x.shape[1:]) != self.shape:
            raise InputError(f"{_called(self.name)} has the shape {tuple(x.shape)}, not [n, {_shown(self.shape)}]")
        if self.image is None:
            return x.flatten(1)
        return (x.movedim(3, 1) if self.last else x).reshape(-1, *self.image)


@dataclass(frozen=True)
class Form:
    """How observations look: known from the first batch, and the same from then on."""

    entries: tuple[Entry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one observation, as a tensor."""
        images = [entry.image for entry in self.entries if entry.image is not None]
        numbers = sum(int(np.prod(entry.shape)) for entry in self.entries if entry.image is None)
        return (sum(image[0] for image in images) + numbers, *images[0][1:]) if images else (numbers,)

    def tensor(self, observations: Observations, device: torch.device) -> Tensor:
        """Vectors one after another; beside images every number is a plane of its own."""
        observations, named = _named(observations), self.entries[0].name != ""
        if named != isinstance(observations, Mapping):
            raise InputError("observations were a dict or a tuple and now are none, or the other way round")
        absent = [entry.name for entry in self.entries if named and entry.name not in observations]
        if absent:
            raise InputError(f"the observations lack {absent[0]!r}")
        parts = [entry.read(observations[entry.name] if named else observations, device) for entry in self.entries]
        if len({len(part) for part in parts}) != 1 or len(parts[0]) == 0:
            raise InputError(f"a batch of observations has as many of each kind, not {[len(part) for part in parts]}")
        size = self.shape[1:]
        if size:
            parts = [part if part.ndim == 4 else part[:, :, None, None].expand(-1, -1, *size) for part in parts]
        x = torch.cat(parts, 1)
        if not bool(x.isfinite().all()):
            raise InputError("there is an observation with NaN or infinity in it")
        return x


def form_of(observations: Observations, keys: Sequence[str] | None = None) -> Form:
    """The form of a batch of observations; of a dict or tuple these entries, or all."""
    observations = _named(observations)
    if not isinstance(observations, Mapping):
        found = [Entry("", _shape(observations, ""))]
    else:
        names = sorted(observations) if keys is None else list(keys)
        absent = [name for name in names if name not in observations]
        if absent or not names:
            there = ", ".join(map(repr, sorted(observations))) or "nothing"
            raise InputError(
                f"there is no {absent[0]!r} in the observations: {there}" if absent else "no keys are named"
            )
        found = [Entry(name, _shape(observations[name], name)) for name in names]
    sizes = {entry.image[1:] for entry in found if entry.image is not None}
    if len(sizes) > 1:
        raise InputError(f"images of different sizes, {sorted(sizes)}: choose one with keys=…")
    return Form(tuple(found))


def copied(observations: Observations) -> Observations:
    """A batch that the environment cannot write over."""
    if isinstance(observations, Mapping):
        return {name: copied(part) for name, part in observations.items()}
    if isinstance(observations, tuple):
        return tuple(map(copied, observations))
    return np.array(observations)


def joined(batches: Sequence[Observations]) -> Observations:
    """Several batches as one."""
    if isinstance(batches[0], Mapping):
        return {name: joined([batch[name] for batch in batches]) for name in batches[0]}
    if isinstance(batches[0], tuple):
        return tuple(map(joined, zip(*batches, strict=True)))
    return np.concatenate(batches)


def _named(observations: Observations) -> Observations:
    """Return the entries of a tuple as a dict, and anything else unchanged."""
    return {str(i): part for i, part in enumerate(observations)} if isinstance(observations, tuple) else observations


def _shape(values: Any, name: str) -> tuple[int, ...]:
    shape = tuple(_tensor(values, name).shape)
    if len(shape) < 2:
        raise InputError(
            f"{_called(name)} has the shape {shape}; a batch [n, …] is needed, and numbers of states one-hot"
            " (gymnasium.wrappers.FlattenObservation)"
        )
    return shape[1:]


def _tensor(values: Any, name: str) -> Tensor:
    if isinstance(values, Mapping | tuple):
        raise InputError(
            f"{_called(name)} is a {type(values).__name__} itself; leave it out with keys=…, or flatten it "
            "(gymnasium.wrappers.FlattenObservation)"
        )
    try:
        return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError):
        raise InputError(f"{_called(name)} holds no numbers; leave it out with keys=…") from None


def _called(name: str) -> str:
    return f"observation {name!r}" if name else "the observation"


def _shown(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
