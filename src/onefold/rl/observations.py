"""Observations as one tensor: vectors, images, and dicts or tuples of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from onefold.errors import InputError

Observations: TypeAlias = Any
"""A batch: an array or tensor [n, …], or a dict or tuple of them. The entries of a tuple are named "0", "1", …"""

SMALLEST_IMAGE = 16  # pixels on a side; a smaller grid is treated as a vector


@dataclass(frozen=True)
class ObservationEntry:
    """One array of an observation.

    Args:
        name: Key in the dict, or position in the tuple; empty if the observation is a single array.
        shape: Shape without the batch axis.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def channels_last(self) -> bool:
        """Whether an image has its channels on the last axis, as in most environments."""
        return len(self.shape) == 3 and self.shape[2] < self.shape[0]

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width; None if the entry is not an image."""
        if len(self.shape) not in (2, 3):
            return None
        channels_first = (*self.shape[2:], *self.shape[:2]) if self.channels_last else self.shape
        channels, height, width = channels_first if len(channels_first) == 3 else (1, *channels_first)
        return (channels, height, width) if min(height, width) >= SMALLEST_IMAGE else None

    def tensor(self, values: Any, device: torch.device) -> Float[Tensor, "n *features"]:
        """Return a batch of this entry: vectors [n, d] or images [n, c, h, w].

        Raises:
            InputError: The values are not numbers, or have another shape.
        """
        x = _as_tensor(values, self.name).to(device, torch.float32)
        if x.ndim == 0 or tuple(x.shape[1:]) != self.shape:
            sizes = ", ".join(map(str, self.shape))
            raise InputError(
                f"{_label(self.name)}: shape {tuple(x.shape)} differs from that of the first batch, [n, {sizes}]. "
                "Use another bonus for observations of another shape."
            )
        if self.image_shape is None:
            return x.flatten(1)
        return (x.movedim(3, 1) if self.channels_last else x).reshape(-1, *self.image_shape)


@dataclass(frozen=True)
class ObservationSpec:
    """Entries of an observation, in the order of the tensor. The first batch determines it."""

    entries: tuple[ObservationEntry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one observation as a tensor: (d,), or (c, h, w) if there is an image."""
        images = [entry.image_shape for entry in self.entries if entry.image_shape is not None]
        vectors = sum(int(np.prod(entry.shape)) for entry in self.entries if entry.image_shape is None)
        return (sum(image[0] for image in images) + vectors, *images[0][1:]) if images else (vectors,)

    def tensor(self, observations: Observations, device: torch.device) -> Float[Tensor, "n *shape"]:
        """Return a batch as one tensor.

        Vectors are concatenated. If there is an image, each number of a vector becomes a constant channel.

        Raises:
            InputError: The batch differs in structure from the first one, is empty, or has NaN or infinity.
        """
        observations, is_named = _name_entries(observations), self.entries[0].name != ""
        if is_named != isinstance(observations, Mapping):
            first = "dicts or tuples" if is_named else "single arrays"
            raise InputError(f"observations: the first batch had {first}, this one has not. Keep one structure.")
        missing = [entry.name for entry in self.entries if is_named and entry.name not in observations]
        if missing:
            raise InputError(f"observations: {missing[0]!r} is missing. Pass the entries of the first batch.")
        parts = [entry.tensor(observations[entry.name] if is_named else observations, device) for entry in self.entries]
        if len({len(part) for part in parts}) != 1 or len(parts[0]) == 0:
            lengths = ", ".join(str(len(part)) for part in parts)
            raise InputError(
                f"observations: entries of length {lengths}. Pass at least one row, as many in each entry."
            )
        size = self.shape[1:]
        if size:
            parts = [part if part.ndim == 4 else part[:, :, None, None].expand(-1, -1, *size) for part in parts]
        x = torch.cat(parts, 1)
        if not bool(x.isfinite().all()):
            raise InputError("observations: some values are NaN or infinite. Check the environment.")
        return x


def infer_spec(observations: Observations, keys: Sequence[str] | None = None) -> ObservationSpec:
    """Return the spec of a batch.

    Args:
        observations: The first batch.
        keys: Entries of a dict or tuple to use; None uses all, in alphabetical order.

    Raises:
        InputError: A key is missing, an entry is not numeric or has no batch axis, or images differ in size.
    """
    observations = _name_entries(observations)
    if not isinstance(observations, Mapping):
        entries = [ObservationEntry("", _shape(observations, ""))]
    else:
        names = sorted(observations) if keys is None else list(keys)
        if not names:
            raise InputError("keys: empty. Name at least one entry of the observations.")
        missing = [name for name in names if name not in observations]
        if missing:
            available = ", ".join(map(repr, sorted(observations))) or "none"
            raise InputError(f"keys: {missing[0]!r} is not in the observations. Entries: {available}.")
        entries = [ObservationEntry(name, _shape(observations[name], name)) for name in names]
    sizes = {entry.image_shape[1:] for entry in entries if entry.image_shape is not None}
    if len(sizes) > 1:
        raise InputError(f"observations: images of different sizes ({sorted(sizes)}). Select one with keys=[…].")
    return ObservationSpec(tuple(entries))


def copy_observations(observations: Observations) -> Observations:
    """Return a copy of a batch: environments may reuse their arrays."""
    if isinstance(observations, Mapping):
        return {name: copy_observations(part) for name, part in observations.items()}
    if isinstance(observations, tuple):
        return tuple(map(copy_observations, observations))
    return np.array(observations)


def concatenate_observations(batches: Sequence[Observations]) -> Observations:
    """Return several batches as one."""
    if isinstance(batches[0], Mapping):
        return {name: concatenate_observations([batch[name] for batch in batches]) for name in batches[0]}
    if isinstance(batches[0], tuple):
        return tuple(map(concatenate_observations, zip(*batches, strict=True)))
    return np.concatenate(batches)


def _name_entries(observations: Observations) -> Observations:
    """Return the entries of a tuple as a dict, and anything else unchanged."""
    return {str(i): part for i, part in enumerate(observations)} if isinstance(observations, tuple) else observations


def _shape(values: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one sample of a batch [n, …]."""
    shape = tuple(_as_tensor(values, name).shape)
    if len(shape) < 2:
        raise InputError(
            f"{_label(name)}: shape {shape} is not a batch [n, …]. Pass batches; encode discrete states one-hot "
            "(gymnasium.wrappers.FlattenObservation)."
        )
    return shape[1:]


def _as_tensor(values: Any, name: str) -> Tensor:
    """Return an array of numbers as a tensor."""
    if isinstance(values, Mapping | tuple):
        raise InputError(
            f"{_label(name)}: a nested {type(values).__name__} is not supported. Leave it out with keys=[…], or "
            "flatten it (gymnasium.wrappers.FlattenObservation)."
        )
    try:
        return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError):
        raise InputError(f"{_label(name)}: not numeric. Leave it out with keys=[…].") from None


def _label(name: str) -> str:
    """Return how messages name an entry."""
    return f"observation {name!r}" if name else "observations"
