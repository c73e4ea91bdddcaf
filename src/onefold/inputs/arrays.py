"""Sources for arrays in memory: one array, or a dict of named arrays."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.batches import as_tensor
from onefold.errors import InputError
from onefold.inputs.source import check_batch_size, check_index, split_range
from onefold.types import ArrayLike


class ArraySource:
    """NumPy array, tensor or nested lists of numbers; the first axis counts samples."""

    def __init__(self, x: ArrayLike, name: str = "x") -> None:
        self.tensor = as_tensor(x, name)

    def __len__(self) -> int:
        return len(self.tensor)

    def batches(self, size: int) -> Iterator[Tensor]:
        check_batch_size(size)
        yield from self.tensor.split(size)

    def take(self, index: NDArray[np.int64]) -> Tensor:
        check_index(index, len(self))
        return self.tensor[torch.from_numpy(index).to(self.tensor.device)]


class NamedSource:
    """Named arrays of one length, such as the token ids and the mask of a text model."""

    def __init__(self, x: Mapping[Any, ArrayLike], name: str = "x") -> None:
        self.tensors = named_tensors(x, name)
        self._length = len(next(iter(self.tensors.values())))

    def __len__(self) -> int:
        return self._length

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        for index in split_range(len(self), size):
            yield {key: tensor[index[0] : index[-1] + 1] for key, tensor in self.tensors.items()}

    def take(self, index: NDArray[np.int64]) -> dict[str, Tensor]:
        check_index(index, len(self))
        rows = torch.from_numpy(index)
        return {key: tensor[rows.to(tensor.device)] for key, tensor in self.tensors.items()}


def named_tensors(x: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    """Return named arrays as tensors of one length: integers as int64; uint8 and bool stay as they are."""
    if not x:
        raise InputError("empty dict", argument=name, hint="Pass at least one named array.")
    if odd := [key for key in x if not isinstance(key, str)]:
        raise InputError(f"key {odd[0]!r} is not a string", argument=name, hint="Name arrays by strings.")
    tensors = {key: _to_named_tensor(value, f"{name}[{key!r}]") for key, value in x.items()}
    lengths = {key: len(tensor) for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"arrays have different numbers of samples ({lengths})", argument=name, hint="Pass arrays of one length."
        )
    return tensors


def _to_named_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype != np.uint8:
        if value.size and value.max() > np.iinfo(np.int64).max:
            raise InputError(f"value {value.max()} does not fit int64", argument=name, hint="Pass smaller integers.")
        value = value.astype(np.int64)  # as_tensor would turn token ids into floats
    tensor = as_tensor(value, name)
    if tensor.dtype in (torch.bool, torch.uint8):  # masks; pixels are scaled to [0, 1] later
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()
