"""Batches of one or several tensors, and checks of arrays, labels and devices."""

import math
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from onefold.core.arguments import check_integer
from onefold.core.runtime import available, require
from onefold.errors import InputError
from onefold.types import ArrayLike, Batch

DEVICE_HINT = "Use 'auto', 'cpu', 'cuda' or 'cuda:1'."


def as_labels(y: ArrayLike, n: int, name: str = "y") -> Tensor:
    """Return class labels 0, 1, … as int64 [N]."""
    labels = as_tensor(y, name)
    if labels.ndim != 1 or len(labels) != n:
        raise InputError(
            f"shape {tuple(labels.shape)} does not fit {n} samples",
            argument=name,
            hint=f"Pass one class label for each of the {n} samples.",
        )
    if labels.is_floating_point() and not torch.equal(labels, labels.round()):
        raise InputError("some values are not whole numbers", argument=name, hint="Pass class labels 0, 1, 2 ….")
    if labels.min() < 0:
        raise InputError("some class labels are negative", argument=name, hint="Pass class labels 0, 1, 2 ….")
    if not labels.max() < n:
        raise InputError(
            f"class label {float(labels.max()):g} is too large for {n} samples",
            argument=name,
            hint="Number the classes 0, 1, 2 ….",
        )
    if labels.min() == labels.max():
        raise InputError("one class only", argument=name, hint="Pass labels of at least 2 classes.")
    return labels.long()


def check_seed(seed: int) -> int:
    """Return `seed` if every random generator that onefold uses accepts it."""
    return check_integer(seed, "seed", 0, 2**32 - 1)


def whole(value: float, name: str, least: int = 1) -> int:
    """Return a count as an int; it may be a float such as 5e6."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value == int(value) and value >= least):
        raise InputError(f"{value} is not a count", argument=name, hint=f"Pass a whole number of at least {least}.")
    return int(value)


def pick_device(device: str) -> torch.device:
    """Return the torch device; 'auto' is a GPU if one is available, a different one for each process, else the CPU."""
    if device == "auto":
        rank = int(os.environ.get("LOCAL_RANK", 0))  # of the processes that torchrun started on this machine
        device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"{device!r} is unknown", argument="device", hint=DEVICE_HINT) from None
    if chosen.type == "mps":
        raise InputError("'mps' is not supported, as Apple's GPU has no float64", argument="device", hint="Use 'cpu'.")
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"{device!r} is not supported", argument="device", hint=DEVICE_HINT)
    if chosen.type == "cuda" and not (chosen.index or 0) < torch.cuda.device_count():
        raise InputError(
            f"{device!r} is not available (torch sees {torch.cuda.device_count()} CUDA devices)",
            argument="device",
            hint="Use 'auto' or 'cpu'.",
        )
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a whole data set on `device`; raise an error first if it would not fit."""
    if x.device != device:
        way_out = "use the device 'cpu', or fit on fewer samples"
        require(x.nbytes, available(device), what=f"keeping {len(x)} samples on {device}", way_out=way_out)
    return x.to(device)


def batch_length(x: Batch) -> int:
    """Return the number of samples in a batch; its tensors must all have the same length."""
    lengths = {len(t) for t in batch_tensors(x)}
    if len(lengths) != 1:
        raise InputError(
            f"batch: its tensors have different lengths: {sorted(lengths)}. Pass as many rows in each tensor."
        )
    length = lengths.pop()
    if length == 0:
        raise InputError("batch: the batch is empty. Pass at least one sample.")
    return length


def batch_tensors(x: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in order."""
    tensors = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    if not tensors or not all(isinstance(t, Tensor) and t.ndim > 0 for t in tensors):
        raise InputError(
            f"batch: a {type(x).__name__} is not supported here. "
            "Pass a tensor, a tuple of tensors or a dict of tensors, samples first."
        )
    return tensors


def batch_slices(x: Batch, size: int) -> list[Batch]:
    """Return the batch in parts of at most `size` samples."""
    return [map_batch(lambda t, i=i: t[i : i + size], x) for i in range(0, batch_length(x), size)]


def map_batch(function: Callable[[Tensor], Tensor], x: Batch) -> Batch:
    """Return the batch with `function` applied to each tensor."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: function(value) for key, value in x.items()}
    return tuple(function(value) for value in x)


def named(batch: Batch | None) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; a single tensor is named x."""
    if batch is None:
        return {}
    return dict(batch) if isinstance(batch, Mapping) else {"x": batch_tensors(batch)[0]}


def concatenate(parts: Sequence[Batch]) -> Batch:
    """Return several batches as one; bytes of texts [N, length] are padded with 0 to the longest."""
    first = parts[0]
    if isinstance(first, Tensor):
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if first.dtype == torch.uint8 and first.ndim == 2:
            longest = max(part.shape[1] for part in tensors)
            tensors = [pad(part, (0, longest - part.shape[1])) for part in tensors]
        return torch.cat(tensors)
    if isinstance(first, Mapping):
        return {key: torch.cat([part[key] for part in parts if isinstance(part, Mapping)]) for key in first}
    return tuple(torch.cat([part[i] for part in parts if isinstance(part, tuple)]) for i in range(len(first)))


def as_tensor(x: ArrayLike, name: str) -> Tensor:
    """Return `x` as a dense real tensor that is not empty."""
    tensor = x.detach() if isinstance(x, Tensor) else torch.from_numpy(as_array(x, name))
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        raise InputError(
            f"a {tensor.layout} tensor of {tensor.dtype} is not supported",
            argument=name,
            hint="Pass plain real numbers.",
        )
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise InputError(f"empty (shape {tuple(tensor.shape)})", argument=name, hint="Pass at least one sample.")
    return tensor


def as_array(x: ArrayLike, name: str) -> np.ndarray:
    """Return `x` as a NumPy array, copied where torch could not share its memory."""
    if not isinstance(x, list | tuple) and not hasattr(x, "__array__"):
        raise InputError(
            f"a {type(x).__name__} is not supported",
            argument=name,
            hint="Pass a NumPy array, a tensor or lists of numbers.",
        )
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, RuntimeError):
        raise InputError(
            "samples are ragged or mixed", argument=name, hint="Pass numbers of the same shape for every sample."
        ) from None
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"dtype {array.dtype} is not supported",
            argument=name,
            hint="Pass numbers; encode text and mixed columns first.",
        )
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise InputError("some values are masked values", argument=name, hint="Fill or drop them first.")
    if (array.dtype.kind == "u" and array.dtype != np.uint8) or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()
