"""torch's data sets and loaders."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from onefold.core.batches import as_array, as_tensor
from onefold.errors import InputError
from onefold.inputs.arrays import named_tensors
from onefold.inputs.decode import to_bytes
from onefold.inputs.source import check_index, check_size, spans
from onefold.types import Batch

SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class DatasetSource:
    """A data set with numbered items. Of an item (x, y, …) only x is the sample; a dict is a named sample."""

    def __init__(self, dataset: Any, name: str = "x") -> None:
        self.dataset = dataset
        self._name = name
        self._length = len(dataset)
        if not self._length:
            raise InputError(f"{name} is an empty {type(dataset).__name__}")

    def __len__(self) -> int:
        return self._length

    def batches(self, size: int) -> Iterator[Batch]:
        for index in spans(len(self), size):
            yield self.take(index)

    def take(self, index: NDArray[np.int64]) -> Batch:
        check_index(index, len(self))
        return _collate([first_of(self.dataset[int(i)]) for i in index], self._name)

    def labels(self) -> Tensor | None:
        """The second entry of every item, whole numbers as int64 and others as float32; None if there is none."""
        first = self.dataset[0]
        if not isinstance(first, tuple | list) or len(first) < 2:
            return None
        seconds = [first[1], *(self.dataset[i][1] for i in range(1, len(self)))]
        labels = _stack(seconds, f"the labels of {self._name}")
        return labels.float() if labels.is_floating_point() else labels.long()


class LoaderSource:
    """A DataLoader: its batches as they come, whatever size is asked for. Of a batch [x, y, …] only x is used.

    Samples, and so scores, come in the order in which the loader gives them.
    """

    def __init__(self, loader: DataLoader[Any], name: str = "x") -> None:
        _refuse_one_shot(loader.dataset, name)
        self.loader = loader
        self._name = name

    @property
    def keeps_order(self) -> bool:
        """Whether samples come in the order of the data set; a stream has no order but its own."""
        batches, sampler = self._samplers
        usual = batches is None or type(batches) is BatchSampler
        stream = isinstance(self.loader.dataset, IterableDataset)
        return self.loader.in_order and (stream or (usual and isinstance(sampler, SequentialSampler)))

    @property
    def shuffles(self) -> bool:
        """Whether samples come in another order in each pass."""
        return any(isinstance(sampler, SHUFFLING) for sampler in self._samplers)

    @property
    def _samplers(self) -> tuple[Any, Any]:
        """The sampler of batches, if there is one, and that of samples."""
        batches = self.loader.batch_sampler
        return batches, getattr(batches, "sampler", self.loader.sampler)

    def labels(self) -> Tensor | None:
        """The second entries of all batches, if they have any; in the loader's order, so it must not shuffle."""
        parts = [item[1] for item in self.loader if isinstance(item, list | tuple) and len(item) > 1]
        return torch.cat([torch.as_tensor(part) for part in parts]) if parts else None

    def batches(self, size: int) -> Iterator[Batch]:
        check_size(size)
        batch = None
        for item in self.loader:
            batch = first_of(item)
            yield named_tensors(batch, self._name) if isinstance(batch, Mapping) else as_tensor(batch, self._name)
        if batch is None:
            raise InputError(f"{self._name}: the loader gives no batches")


class StreamSource:
    """An IterableDataset: its items, put together to batches, in the order in which it gives them."""

    def __init__(self, dataset: Iterable[Any], name: str = "x") -> None:
        _refuse_one_shot(dataset, name)
        self.dataset = dataset
        self._name = name

    def batches(self, size: int) -> Iterator[Batch]:
        check_size(size)
        items = iter(self.dataset)
        empty = True
        while part := list(itertools.islice(items, size)):
            empty = False
            yield _collate([first_of(item) for item in part], self._name)
        if empty:
            raise InputError(f"{self._name}: the data set gives no items")


def _refuse_one_shot(dataset: Any, name: str) -> None:
    """Data is read more than once: what gives the same iterator again would be short of what it has given."""
    if isinstance(dataset, IterableDataset) and iter(dataset) is iter(dataset):
        raise InputError(f"{name} can be read only once: let its __iter__ begin anew each time")


def first_of(item: Any) -> Any:
    """x of an item or a batch that is (x, y, …)."""
    if not isinstance(item, tuple | list):
        return item
    if not item:
        raise InputError("an item of the data set is an empty tuple: x or (x, y) is needed")
    return item[0]


def _collate(samples: list[Any], name: str) -> Batch:
    """Samples as one batch: a tensor, or for dicts a tensor of each name."""
    first = samples[0]
    if not isinstance(first, Mapping):
        return as_tensor(_stack(samples, name), name)
    if odd := [sample for sample in samples if not isinstance(sample, Mapping) or sample.keys() != first.keys()]:
        found = sorted(map(str, odd[0])) if isinstance(odd[0], Mapping) else type(odd[0]).__name__
        raise InputError(f"{name} mixes items: some are dicts of {sorted(map(str, first))}, one is {found}")
    stacked = {key: _stack([sample[key] for sample in samples], f"{name}[{key!r}]") for key in first}
    return named_tensors(stacked, name)


def _stack(values: list[Any], name: str) -> Tensor:
    tensors = [_tensor(value, name) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        few = ", ".join(map(str, sorted(shapes)[:3]))
        raise InputError(f"{name} has items of different shapes ({few}): bring them to the same one")
    return torch.stack(tensors)


def _tensor(value: Any, name: str) -> Tensor:
    """One entry of one item: a tensor, an array, a number, lists of numbers, or a Pillow image as [C, H, W]."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic | bool | int | float | list | tuple):
        return torch.from_numpy(as_array(_whole(value), name)).squeeze(0)
    from PIL import Image

    if isinstance(value, Image.Image):
        return torch.from_numpy(to_bytes(value))
    raise InputError(f"{name} has items of type {type(value).__name__}: tensors, arrays, numbers or images are needed")


def _whole(value: Any) -> Any:
    """The value with an axis in front, so that a single number keeps its shape."""
    array = np.asarray(value)[None] if isinstance(value, np.ndarray | np.generic | bool | int | float) else [value]
    if isinstance(array, np.ndarray) and array.dtype.kind == "u" and array.dtype.itemsize in (2, 4):
        return array.astype(np.int64)  # as_array would make floats of them, and token numbers must stay whole
    return array
