"""From what people hand in to checked float tensors, and back to plain arrays of scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from onefold.errors import InputError
from onefold.memory import available, require
from onefold.types import ArrayLike, Batch, Scores

CHANNEL_COUNTS = (1, 3, 4)


@dataclass(frozen=True)
class Reader:
    """How the data of a fit was given, so that later data is read in the same way or refused.

    Vectors [N, D] stay as they are. Images [N, H, W], [N, C, H, W] or [N, H, W, C] become [N, C, H, W]; uint8 becomes
    [0, 1]. `low` and `high` are the range of the train values, which augmentations clip to.
    """

    shape: tuple[int, ...]
    uint8: bool
    low: float
    high: float

    @classmethod
    def learn(cls, x: ArrayLike, name: str = "x") -> tuple["Reader", Tensor]:
        """Read train data and remember its form."""
        raw = _as_tensor(x, name)
        if raw.ndim not in (2, 3, 4):
            raise InputError(
                f"{name} has shape {tuple(raw.shape)}: vectors [N, D] or images [N, H, W], [N, C, H, W], [N, H, W, C] "
                "are understood; for other inputs pass features of your model, as kernels.from_model computes them"
            )
        if raw.ndim == 4 and raw.shape[3] < raw.shape[1] and not {raw.shape[1], raw.shape[3]} & set(CHANNEL_COUNTS):
            raise InputError(
                f"{name} has shape {tuple(raw.shape)}: if the last axis is channels, move it to the front of each "
                "sample (numpy.moveaxis(x, -1, 1))"
            )
        if len(raw) < 2:
            raise InputError(f"{name} has one sample: what is familiar can only be learned from at least 2")
        reader = cls(tuple(raw.shape[1:]), raw.dtype == torch.uint8, 0.0, 1.0)
        values = reader._arrange(raw, name)
        if not reader.uint8:
            reader = cls(reader.shape, False, float(values.min()), float(values.max()))
        return reader, values

    def read(self, x: ArrayLike, name: str = "x") -> Tensor:
        """Read later data in the form of the train data; refuse any other."""
        raw = _as_tensor(x, name)
        if tuple(raw.shape[1:]) != self.shape:
            raise InputError(
                f"{name} has samples of shape {tuple(raw.shape[1:])}, the model was fitted on {self.shape}"
            )
        if (raw.dtype == torch.uint8) != self.uint8:
            fitted, given = ("uint8", str(raw.dtype).removeprefix("torch.")) if self.uint8 else ("other", "uint8")
            raise InputError(f"{name} is {given}, the model was fitted on {fitted} data: bring both to the same scale")
        return self._arrange(raw, name)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """(D,) for vectors, (C, H, W) for images."""
        if len(self.shape) == 1:
            return self.shape
        if len(self.shape) == 2:
            return (1, *self.shape)
        return (self.shape[2], *self.shape[:2]) if self._channels_last else self.shape

    @property
    def is_image(self) -> bool:
        return len(self.shape) > 1

    @property
    def _channels_last(self) -> bool:
        return len(self.shape) == 3 and self.shape[0] not in CHANNEL_COUNTS and self.shape[2] in CHANNEL_COUNTS

    def _arrange(self, raw: Tensor, name: str) -> Tensor:
        values = raw.float() / 255 if self.uint8 else raw.float()
        if not torch.isfinite(values).all():
            raise InputError(f"{name} has values that are NaN, infinite, or too large for float32")
        if self._channels_last:
            values = values.movedim(-1, 1)
        return values.reshape(len(raw), *self.sample_shape).contiguous()


def as_labels(y: ArrayLike, n: int, name: str = "y") -> Tensor:
    """Class labels 0, 1, … as int64 [N]."""
    labels = _as_tensor(y, name)
    if labels.ndim != 1 or len(labels) != n:
        raise InputError(
            f"{name} has shape {tuple(labels.shape)}: one class label for each of the {n} samples is needed"
        )
    if labels.is_floating_point() and not torch.equal(labels, labels.round()):
        raise InputError(f"{name} has values that are not whole numbers: class labels 0, 1, 2 … are needed")
    if labels.min() < 0:
        raise InputError(f"{name} has negative class labels: 0, 1, 2 … are needed")
    if not labels.max() < n:
        raise InputError(f"{name} has the class label {float(labels.max()):g} for {n} samples: number them 0, 1, 2 …")
    if labels.min() == labels.max():
        raise InputError(f"{name} has one class only: a classifier needs at least 2")
    return labels.long()


def check_seed(seed: int) -> int:
    """A seed that every generator here can take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InputError(f"the seed must be a whole number from 0 to 2³² − 1, not {seed!r}")
    return seed


def pick_device(device: str) -> torch.device:
    """'auto' is the first GPU if there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device {device!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:1'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is not supported: use 'auto', 'cpu', 'cuda' or 'cuda:1'")
    if chosen.type == "cuda" and not (chosen.index or 0) < torch.cuda.device_count():
        raise InputError(f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def to_device(x: Float[Tensor, "n *sample"], device: torch.device) -> Float[Tensor, "n *sample"]:
    """Move a whole data set, or say beforehand that it will not fit."""
    if x.device != device:
        way_out = "use device='cpu', or fit on fewer samples"
        require(x.nbytes, available(device), what=f"keeping {len(x)} samples on {device}", way_out=way_out)
    return x.to(device)


def in_batches(score: Callable[[Tensor], Tensor], x: Tensor, device: torch.device, size: int = 1024) -> Scores:
    """score(x) in batches on `device`, without gradients, as a NumPy array."""
    with torch.no_grad():
        scores = torch.cat([score(part.to(device)).double().cpu() for part in x.split(size)])
    if not scores.isfinite().all():
        bad = int((~scores.isfinite()).sum())
        raise InputError(f"{bad} of {len(x)} inputs have no finite score: their features overflow or are NaN")
    return scores.numpy()


def batch_length(x: Batch) -> int:
    """Number of samples in a batch, which every tensor in it must agree on."""
    lengths = {len(t) for t in batch_tensors(x)}
    if len(lengths) != 1:
        raise InputError(f"the tensors of one batch have different lengths: {sorted(lengths)}")
    length = lengths.pop()
    if length == 0:
        raise InputError("the batch is empty")
    return length


def batch_tensors(x: Batch) -> list[Tensor]:
    """The tensors of a batch, in order."""
    tensors = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    if not tensors or not all(isinstance(t, Tensor) and t.ndim > 0 for t in tensors):
        raise InputError("a model's input is a tensor, a tuple of tensors or a dict of tensors, samples first")
    return tensors


def batch_slices(x: Batch, size: int) -> list[Batch]:
    """The batch in parts of at most `size` samples."""
    return [map_batch(lambda t, i=i: t[i : i + size], x) for i in range(0, batch_length(x), size)]


def map_batch(function: Callable[[Tensor], Tensor], x: Batch) -> Batch:
    """The same batch with `function` applied to each tensor."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: function(value) for key, value in x.items()}
    return tuple(function(value) for value in x)


def _as_tensor(x: ArrayLike, name: str) -> Tensor:
    tensor = x.detach() if isinstance(x, Tensor) else torch.from_numpy(_as_array(x, name))
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        raise InputError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}: plain real numbers are needed")
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise InputError(f"{name} is empty: its shape is {tuple(tensor.shape)}")
    return tensor


def _as_array(x: ArrayLike, name: str) -> np.ndarray:
    """NumPy's view of `x`, copied where torch could not share it."""
    if not isinstance(x, list | tuple) and not hasattr(x, "__array__"):
        raise InputError(f"{name} is a {type(x).__name__}: a NumPy array, a tensor or lists of numbers are needed")
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, RuntimeError):
        raise InputError(f"{name} is ragged or mixed: every sample must be numbers of the same shape") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} has dtype {array.dtype}: numbers are needed (mixed columns must be encoded first)")
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise InputError(f"{name} has masked values: fill or drop them first")
    if (array.dtype.kind == "u" and array.dtype != np.uint8) or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()
