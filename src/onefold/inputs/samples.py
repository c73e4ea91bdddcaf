"""Access to train samples by index, in memory or on demand, and the pass that reads them."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Generator, Tensor, nn

from onefold.core.batches import batch_length, batch_slices, batch_tensors, concatenate, map_batch, to_device
from onefold.core.moments import Moments
from onefold.core.runtime import available, human
from onefold.errors import InputError, warn
from onefold.inputs import ArraySource, Form, IndexedSource, NamedSource, Picture, Source, Text, form_of, open_source
from onefold.inputs.reader import TEXTS, TEXTS_HINT, Prepare, Reader
from onefold.inputs.reservoir import Reservoir, capacity_for
from onefold.nn.nets import Standardise
from onefold.types import ArrayLike, Batch

CPU_BUDGET = 256 * 2**20  # bytes of raw samples to keep; reading is fast compared with a training step on a CPU
HELD_OUT = 1000
RESERVOIR_SIZE, RESERVOIR_BYTES = 5000, 32 * 2**20  # of samples stored in the detector's file
ENCODED_BYTES = 8 * 2**20  # of images stored with a pretrained encoder: they are large, and more would serve pages only


@runtime_checkable
class Samples(Protocol):
    """Train samples by index: prepared on the device of the fit, or raw on the CPU."""

    in_memory: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any: ...

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch: ...


class InMemorySamples:
    """Raw samples in memory, prepared on access."""

    in_memory = True

    def __init__(self, raw: Batch, prepare: nn.Module) -> None:
        self.raw, self.prepare = raw, prepare

    def __len__(self) -> int:
        return batch_length(self.raw)

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any:
        return self.prepare(map_batch(lambda t: t[index], self.raw))

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch:
        return map_batch(lambda t: t[index.to(t.device)].cpu(), self.raw)


class LazySamples:
    """Samples read from their source, such as files on disk, on access."""

    in_memory = False

    def __init__(self, source: IndexedSource, reader: Reader, prepare: nn.Module, device: torch.device) -> None:
        self.source, self.reader, self.prepare, self.device = source, reader, prepare, device

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any:
        return self.prepare(map_batch(lambda t: t.to(self.device), self.raw_samples(index)))

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch:
        return self.reader.check(self.source.take(index.cpu().numpy()))


class SampleSubset:
    """Subset of samples in a fixed order."""

    def __init__(self, samples: Samples, order: Int[Tensor, " n"]) -> None:
        self.samples, self.order, self.in_memory = samples, order, samples.in_memory

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any:
        return self.samples[self.order[index]]

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch:
        return self.samples.raw_samples(self.order[index.to(self.order.device)])


def hold_out(samples: Samples, seed: int, device: torch.device) -> tuple[Samples, Batch | None]:
    """Return the samples to train on and a held-out tenth (at most 1,000); None if there are fewer than 100."""
    count = min(HELD_OUT, len(samples) // 10)
    if len(samples) < 100:
        return samples, None
    order = torch.randperm(len(samples), generator=Generator().manual_seed(seed)).to(device)
    return SampleSubset(samples, order[count:]), samples.raw_samples(order[:count])


class TrainData(NamedTuple):
    """Reader, samples, standardisation and reservoir with which a fit starts."""

    reader: Reader
    prepare: Prepare
    samples: Samples
    standardise: Standardise
    reservoir: Reservoir


class TrainStatistics:
    """Mean, standard deviation and range of prepared samples: per feature of vectors, over all pixels of images."""

    def __init__(self) -> None:
        self.moments: Moments | None = None
        self.low, self.high = float("inf"), float("-inf")
        self.vectors = True

    def add(self, x: Tensor) -> None:
        """Add a batch."""
        self.vectors = x.ndim == 2
        values = x if x.is_floating_point() else x.double()  # boolean inputs of a user's model
        moments = Moments.of(values if self.vectors else values.reshape(-1, 1))
        self.moments = moments if self.moments is None else self.moments.merge(moments)
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def standardise(self) -> Standardise:
        """Return the module that standardises later samples."""
        if self.moments is None:
            return Standardise(torch.zeros(1), torch.ones(1))
        mean, std = self.moments.mean.float(), self.moments.variance.sqrt().float()
        return Standardise(mean, std) if self.vectors else Standardise(mean[0], std[0])


class _SampleBuffer:
    """Buffer of raw samples: all up to a limit, then a uniform sample, or none if the source can be read again."""

    def __init__(self, limit: int, seed: int, *, rereadable: bool) -> None:
        self.limit, self.seed, self.rereadable = limit, seed, rereadable
        self.parts: list[Batch] = []
        self.size = 0
        self.reservoir: Reservoir | None = None

    def add(self, raw: Batch) -> None:
        if self.reservoir is not None:
            self.reservoir.add(raw)
            return
        self.size += sum(t.nbytes for t in batch_tensors(raw))
        if self.size <= self.limit or self.rereadable:
            self.parts = [*self.parts, raw] if self.size <= self.limit else []
            return
        self.reservoir = Reservoir(capacity_for(raw, 10**9, self.limit), self.seed)
        for part in [*self.parts, raw]:
            self.reservoir.add(part)
        self.parts = []

    def samples(self) -> Batch | None:
        """Return the samples, or None if they must be read again."""
        if self.reservoir is not None and self.reservoir.samples is not None:
            warn(
                f"x: does not fit into {human(self.limit)} and cannot be read by index, so a random sample of "
                f"{len(self.reservoir)} out of {self.reservoir.seen} is used. Pass a .npy file or a Dataset to use all."
            )
            return self.reservoir.samples
        return concatenate(self.parts) if self.size <= self.limit else None


def read_train_data(
    x: ArrayLike, device: torch.device, seed: int, *, as_given: bool = False, form: Form | None = None
) -> TrainData:
    """Read train data once; return its reader, standardisation, reservoir and access to its samples by index.

    Args:
        x: Train data.
        device: Device of the fit.
        seed: Seed of the reservoir.
        as_given: The detector is fitted on a user's model.
        form: Form of the data that this model takes; None for arrays as they are.
    """
    source = open_source(x, form=form)
    if isinstance(form_of(source), Text) and not isinstance(form, Text):
        raise InputError(TEXTS, argument="x", hint=TEXTS_HINT)
    reader = Reader.infer(_first(source), form_of(source), as_given=as_given)
    prepare, statistics, reservoir = Prepare(reader).to(device), TrainStatistics(), None
    most_bytes = ENCODED_BYTES if isinstance(form, Picture) else RESERVOIR_BYTES
    limit = available(device) // 4 if device.type == "cuda" else CPU_BUDGET
    if isinstance(source, ArraySource | NamedSource) or isinstance(form_of(source), Text):
        limit = 0  # they are in memory already
    buffer = _SampleBuffer(limit, seed, rereadable=isinstance(source, IndexedSource))
    for batch in source.batches(reader.batch_size):
        for part in batch_slices(batch, reader.batch_size):
            raw = reader.check(part)
            reservoir = reservoir or Reservoir(capacity_for(raw, RESERVOIR_SIZE, most_bytes), seed)
            reservoir.add(raw)
            buffer.add(raw)
            if isinstance(raw, Tensor) and raw.dtype != torch.int64 and reader.kind != "text":
                statistics.add(prepare(raw.to(device)))
    if reservoir is None or reservoir.seen < 2:
        raise InputError("only one sample", argument="x", hint="Pass at least 2.")
    arrays = (
        source.tensor
        if isinstance(source, ArraySource)
        else source.tensors
        if isinstance(source, NamedSource)
        else None
    )
    in_memory = buffer.samples() if arrays is None else reader.check(arrays)
    if in_memory is None:
        assert isinstance(source, IndexedSource)
        samples: Samples = LazySamples(source, reader, prepare, device)
    else:
        samples = InMemorySamples(map_batch(lambda t: to_device(t, device), in_memory), prepare)
    if statistics.moments is not None:
        reader = reader.with_range(statistics.low, statistics.high)
    return TrainData(reader, prepare, samples, statistics.standardise().to(device), reservoir)


def _first(source: Source) -> Batch:
    for batch in source.batches(2):
        return batch
    raise InputError("empty", argument="x", hint="Pass at least 2 samples.")
