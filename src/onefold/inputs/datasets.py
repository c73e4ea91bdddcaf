"""Sources for PyTorch Datasets, IterableDatasets and DataLoaders."""

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
from onefold.decode import to_bytes
from onefold.errors import InputError
from onefold.inputs.arrays import named_tensors
from onefold.inputs.source import check_batch_size, check_index, split_range
from onefold.types import Batch

SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class DatasetSource:
    """Map-style Dataset. Of an item (x, y, …) only x is the sample; a dict is a sample of named arrays."""

    def __init__(self, dataset: Any, name: str = "x") -> None:
        self.dataset = dataset
        self._name = name
        self._length = len(dataset)
        if not self._length:
            raise InputError(f"empty {type(dataset).__name__}", argument=name, hint="Pass at least one item.")

    def __len__(self) -> int:
        return self._length

    def batches(self, size: int) -> Iterator[Batch]:
        for index in split_range(len(self), size):
            yield self.take(index)

    def take(self, index: NDArray[np.int64]) -> Batch:
        check_index(index, len(self))
        return _collate([take_input(self.dataset[int(i)]) for i in index], self._name)

    def labels(self) -> Tensor | None:
        """Return the second entry of every item, integers as int64 and others as float32; None without one."""
        first = self.dataset[0]
        if not isinstance(first, tuple | list) or len(first) < 2:
            return None
        seconds = [first[1], *(self.dataset[i][1] for i in range(1, len(self)))]
        labels = _stack(seconds, f"the labels of {self._name}")
        return labels.float() if labels.is_floating_point() else labels.long()


class LoaderSource:
    """DataLoader. Batches keep the loader's size and order; of a batch [x, y, …] only x is used."""

    def __init__(self, loader: DataLoader[Any], name: str = "x") -> None:
        _refuse_one_shot(loader.dataset, name)
        self.loader = loader
        self._name = name

    @property
    def keeps_order(self) -> bool:
        """Whether samples keep the order of the dataset; True for iterable datasets."""
        batches, sampler = self._samplers
        usual = batches is None or type(batches) is BatchSampler
        stream = isinstance(self.loader.dataset, IterableDataset)
        return self.loader.in_order and (stream or (usual and isinstance(sampler, SequentialSampler)))

    @property
    def shuffles(self) -> bool:
        """Whether every pass has another order."""
        return any(isinstance(sampler, SHUFFLING) for sampler in self._samplers)

    @property
    def _samplers(self) -> tuple[Any, Any]:
        """Batch sampler, if any, and sampler."""
        batches = self.loader.batch_sampler
        return batches, getattr(batches, "sampler", self.loader.sampler)

    def labels(self) -> Tensor | None:
        """Return the second entries of all batches in the loader's order, or None. The loader must not shuffle."""
        parts = [item[1] for item in self.loader if isinstance(item, list | tuple) and len(item) > 1]
        return torch.cat([torch.as_tensor(part) for part in parts]) if parts else None

    def batches(self, size: int) -> Iterator[Batch]:
        check_batch_size(size)
        batch = None
        for item in self.loader:
            batch = take_input(item)
            yield named_tensors(batch, self._name) if isinstance(batch, Mapping) else as_tensor(batch, self._name)
        if batch is None:
            raise InputError(f"{self._name}: the DataLoader has no batches. Pass at least one sample.")


class StreamSource:
    """IterableDataset, its items grouped into batches in their order."""

    def __init__(self, dataset: Iterable[Any], name: str = "x") -> None:
        _refuse_one_shot(dataset, name)
        self.dataset = dataset
        self._name = name

    def batches(self, size: int) -> Iterator[Batch]:
        check_batch_size(size)
        items = iter(self.dataset)
        empty = True
        while part := list(itertools.islice(items, size)):
            empty = False
            yield _collate([take_input(item) for item in part], self._name)
        if empty:
            raise InputError(f"{self._name}: the dataset has no items. Pass at least one sample.")


def _refuse_one_shot(dataset: Any, name: str) -> None:
    """Refuse a dataset that returns the same iterator again: data is read more than once."""
    if isinstance(dataset, IterableDataset) and iter(dataset) is iter(dataset):
        raise InputError("can be read only once", argument=name, hint="Return a new iterator from __iter__.")


def take_input(item: Any) -> Any:
    """Return x of an item or a batch (x, y, …)."""
    if not isinstance(item, tuple | list):
        return item
    if not item:
        raise InputError("dataset: an item is an empty tuple. Return x or (x, y).")
    return item[0]


def _collate(samples: list[Any], name: str) -> Batch:
    """Return samples as one batch: a tensor, or for dicts a tensor per name."""
    first = samples[0]
    if not isinstance(first, Mapping):
        return as_tensor(_stack(samples, name), name)
    if odd := [sample for sample in samples if not isinstance(sample, Mapping) or sample.keys() != first.keys()]:
        other = sorted(map(str, odd[0])) if isinstance(odd[0], Mapping) else type(odd[0]).__name__
        keys = sorted(map(str, first))
        raise InputError(
            f"mixes items (dicts of {keys}, and {other})", argument=name, hint="Return the same keys for every item."
        )
    stacked = {key: _stack([sample[key] for sample in samples], f"{name}[{key!r}]") for key in first}
    return named_tensors(stacked, name)


def _stack(values: list[Any], name: str) -> Tensor:
    tensors = [_to_tensor(value, name) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        few = ", ".join(map(str, sorted(shapes)[:3]))
        raise InputError(f"items have different shapes ({few})", argument=name, hint="Resize or pad them to one shape.")
    return torch.stack(tensors)


def _to_tensor(value: Any, name: str) -> Tensor:
    """Return one entry of an item (tensor, array, number, lists, or Pillow image as [C, H, W]) as a tensor."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic | bool | int | float | list | tuple):
        return torch.from_numpy(as_array(_add_batch_axis(value), name)).squeeze(0)
    from PIL import Image

    if isinstance(value, Image.Image):
        return torch.from_numpy(to_bytes(value))
    raise InputError(
        f"items of type {type(value).__name__} are not supported",
        argument=name,
        hint="Return tensors, arrays or images.",
    )


def _add_batch_axis(value: Any) -> Any:
    """Return the value with a leading axis, so that a single number keeps its shape."""
    array = np.asarray(value)[None] if isinstance(value, np.ndarray | np.generic | bool | int | float) else [value]
    if isinstance(array, np.ndarray) and array.dtype.kind == "u" and array.dtype.itemsize in (2, 4):
        return array.astype(np.int64)  # as_array would turn token ids into floats
    return array
