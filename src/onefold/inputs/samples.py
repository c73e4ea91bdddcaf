"""Train samples by index: in memory where they fit, read when asked for where they do not."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Generator, Tensor, nn

from onefold.core.batches import batch_length, batch_slices, batch_tensors, joined, map_batch, to_device
from onefold.core.memory import available, human
from onefold.errors import InputError, warn
from onefold.inputs import ArraySource, Indexed, NamedSource, Source, form_of, open_source
from onefold.inputs.reader import Prepare, Reader
from onefold.inputs.reservoir import Reservoir, capacity_for
from onefold.nn.nets import Standardise
from onefold.types import ArrayLike, Batch

CPU_BUDGET = 256 * 2**20  # bytes of raw samples to keep: reading is quick beside a training step on a CPU
HELD_OUT = 1000
REMEMBERED, REMEMBERED_BYTES = 5000, 32 * 2**20  # samples that go with the detector into its file


@runtime_checkable
class Samples(Protocol):
    """Train samples by index: prepared on the device of the fit, or raw on the CPU."""

    in_memory: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any: ...

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch: ...


class Resident:
    """Raw samples in memory, prepared as they are asked for."""

    in_memory = True

    def __init__(self, raw: Batch, prepare: nn.Module) -> None:
        self.raw, self.prepare = raw, prepare

    def __len__(self) -> int:
        return batch_length(self.raw)

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any:
        return self.prepare(map_batch(lambda t: t[index], self.raw))

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch:
        return map_batch(lambda t: t[index.to(t.device)].cpu(), self.raw)


class OnDemand:
    """Samples that stay where they are, as files on a disk, and are read when they are asked for."""

    in_memory = False

    def __init__(self, source: Indexed, reader: Reader, prepare: nn.Module, device: torch.device) -> None:
        self.source, self.reader, self.prepare, self.device = source, reader, prepare, device

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any:
        return self.prepare(map_batch(lambda t: t.to(self.device), self.raw_samples(index)))

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch:
        return self.reader.check(self.source.take(index.cpu().numpy()))


class Part:
    """Some of the samples, in some order."""

    def __init__(self, samples: Samples, order: Int[Tensor, " n"]) -> None:
        self.samples, self.order, self.in_memory = samples, order, samples.in_memory

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Int[Tensor, " n"], /) -> Any:
        return self.samples[self.order[index]]

    def raw_samples(self, index: Int[Tensor, " n"], /) -> Batch:
        return self.samples.raw_samples(self.order[index.to(self.order.device)])


def hold_out(samples: Samples, seed: int, device: torch.device) -> tuple[Samples, Batch | None]:
    """Most of the samples to train on, and a tenth (at most 1,000) that no training sees; none of fewer than 100."""
    count = min(HELD_OUT, len(samples) // 10)
    if len(samples) < 100:
        return samples, None
    order = torch.randperm(len(samples), generator=Generator().manual_seed(seed)).to(device)
    return Part(samples, order[count:]), samples.raw_samples(order[:count])


class Learned(NamedTuple):
    """What a fit starts from."""

    reader: Reader
    prepare: Prepare
    samples: Samples
    standardise: Standardise
    reservoir: Reservoir


class Moments:
    """Mean, standard deviation and range in one pass: of every feature of vectors, of all pixels of images together."""

    def __init__(self) -> None:
        self.count, self.low, self.high = 0, float("inf"), float("-inf")
        self.shift: Tensor | None = None
        self.vectors = True

    def add(self, x: Tensor) -> None:
        rows = (x if x.ndim == 2 else x.reshape(-1, 1)).double()
        self.vectors = x.ndim == 2
        if self.shift is None:  # sums about a point near the mean: squares of large numbers would drown the spread
            self.shift = rows.mean(0)
            self.total, self.squares = torch.zeros_like(self.shift), torch.zeros_like(self.shift)
        rows = rows - self.shift
        self.count += len(rows)
        self.total += rows.sum(0)
        self.squares += rows.square().sum(0)
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def standardise(self) -> Standardise:
        assert self.shift is not None
        mean = self.total / self.count
        std = (self.squares / self.count - mean.square()).clamp(min=0).sqrt()
        mean, std = (mean + self.shift).float(), std.float()
        return Standardise(mean, std) if self.vectors else Standardise(mean[0], std[0])


class _Keeper:
    """Raw samples as they come by: all while they fit, then a fair part, or none where they can be had again."""

    def __init__(self, limit: int, seed: int, *, again: bool) -> None:
        self.limit, self.seed, self.again = limit, seed, again
        self.parts: list[Batch] = []
        self.size = 0
        self.part: Reservoir | None = None

    def add(self, raw: Batch) -> None:
        if self.part is not None:
            self.part.add(raw)
            return
        self.size += sum(t.nbytes for t in batch_tensors(raw))
        if self.size <= self.limit or self.again:
            self.parts = [*self.parts, raw] if self.size <= self.limit else []
            return
        self.part = Reservoir(capacity_for(raw, 10**9, self.limit), self.seed)
        for part in [*self.parts, raw]:
            self.part.add(part)
        self.parts = []

    def kept(self) -> Batch | None:
        """The samples, or None if they have to be read again."""
        if self.part is not None and self.part.samples is not None:
            warn(
                f"the data does not fit into {human(self.limit)} and cannot be read by index: a fair sample of "
                f"{len(self.part)} out of {self.part.seen} is used"
            )
            return self.part.samples
        return joined(self.parts) if self.size <= self.limit else None


def learn(x: ArrayLike, device: torch.device, seed: int, *, as_given: bool = False) -> Learned:
    """Read train data once: its form, its range and spread, a memory of it, and access to every sample by index."""
    source = open_source(x)
    reader = Reader.learn(_first(source), form_of(source), as_given=as_given)
    prepare, moments, reservoir = Prepare(reader).to(device), Moments(), None
    limit = available(device) // 4 if device.type == "cuda" else CPU_BUDGET
    if isinstance(source, ArraySource | NamedSource):
        limit = 0  # it is in memory already
    keeper = _Keeper(limit, seed, again=isinstance(source, Indexed))
    for given in source.batches(reader.batch_size):
        for part in batch_slices(given, reader.batch_size):
            raw = reader.check(part)
            reservoir = reservoir or Reservoir(capacity_for(raw, REMEMBERED, REMEMBERED_BYTES), seed)
            reservoir.add(raw)
            keeper.add(raw)
            if isinstance(raw, Tensor) and raw.dtype != torch.int64:
                moments.add(prepare(raw.to(device)))
    if reservoir is None or reservoir.seen < 2:
        raise InputError("x has one sample: what is familiar can only be learned from at least 2")
    at_hand = (
        source.tensor
        if isinstance(source, ArraySource)
        else source.tensors
        if isinstance(source, NamedSource)
        else None
    )
    kept = keeper.kept() if at_hand is None else reader.check(at_hand)
    if kept is None:
        assert isinstance(source, Indexed)
        samples: Samples = OnDemand(source, reader, prepare, device)
    else:
        samples = Resident(map_batch(lambda t: to_device(t, device), kept), prepare)
    reader = reader.with_range(moments.low, moments.high) if moments.count else reader
    standardise = moments.standardise().to(device) if moments.count else Standardise(torch.zeros(1), torch.ones(1))
    return Learned(reader, prepare, samples, standardise, reservoir)


def _first(source: Source) -> Batch:
    for batch in source.batches(2):
        return batch
    raise InputError("x is empty")
