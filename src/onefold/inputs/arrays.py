"""Data that is in memory already: one array, or several by name."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.batches import as_tensor
from onefold.errors import InputError
from onefold.inputs.source import check_index, check_size, spans
from onefold.types import ArrayLike


class ArraySource:
    """A NumPy array, a tensor or nested lists of numbers, samples first."""

    def __init__(self, x: ArrayLike, name: str = "x") -> None:
        self.tensor = as_tensor(x, name)

    def __len__(self) -> int:
        return len(self.tensor)

    def batches(self, size: int) -> Iterator[Tensor]:
        check_size(size)
        yield from self.tensor.split(size)

    def take(self, index: NDArray[np.int64]) -> Tensor:
        check_index(index, len(self))
        return self.tensor[torch.from_numpy(index).to(self.tensor.device)]


class NamedSource:
    """Several arrays by name, such as the token numbers and the mask of a text model."""

    def __init__(self, x: Mapping[Any, ArrayLike], name: str = "x") -> None:
        self.tensors = named_tensors(x, name)
        self._length = len(next(iter(self.tensors.values())))

    def __len__(self) -> int:
        return self._length

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        for index in spans(len(self), size):
            yield {key: tensor[index[0] : index[-1] + 1] for key, tensor in self.tensors.items()}

    def take(self, index: NDArray[np.int64]) -> dict[str, Tensor]:
        check_index(index, len(self))
        rows = torch.from_numpy(index)
        return {key: tensor[rows.to(tensor.device)] for key, tensor in self.tensors.items()}


def named_tensors(x: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    """Named arrays as tensors of one length: whole numbers as int64, bytes and truth values as they are."""
    if not x:
        raise InputError(f"{name} is an empty dict: at least one named array is needed")
    if odd := [key for key in x if not isinstance(key, str)]:
        raise InputError(f"{name} has the key {odd[0]!r}: the names of arrays must be strings")
    tensors = {key: _named(value, f"{name}[{key!r}]") for key, value in x.items()}
    lengths = {key: len(tensor) for key, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the arrays of {name} have different numbers of samples: {lengths}")
    return tensors


def _named(value: Any, name: str) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype != np.uint8:
        if value.size and value.max() > np.iinfo(np.int64).max:
            raise InputError(f"{name} has the value {value.max()}: whole numbers must fit int64")
        value = value.astype(np.int64)  # token numbers, which as_tensor would turn into floats
    tensor = as_tensor(value, name)
    if tensor.dtype in (torch.bool, torch.uint8):  # a mask; pixels, which become [0, 1] later
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()
