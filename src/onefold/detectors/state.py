"""State of a fitted detector, and the evaluation of its scorer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onefold.core.batches import batch_slices, map_batch
from onefold.detectors.build import Spec, Summary
from onefold.errors import InputError
from onefold.inputs.reader import Prepare, Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import HELD_OUT, TrainData
from onefold.nn.cudnn import exact_float32
from onefold.types import ArrayLike, Batch, Scores


@dataclass(frozen=True, kw_only=True)
class DetectorState:
    """Everything that a fitted detector consists of besides its settings and its calibration.

    Args:
        reader: Layout of the training data, by which later data is read and checked.
        prepare: Module from raw samples to the inputs of `scorer`.
        scorer: Module from prepared samples to scores.
        spec: Specification that `scorer` was built from.
        summary: Numbers that the fit measured, such as its loss.
        device: Device of the scorer.
        reservoir: Random sample of the raw training data.
        held_out: Random sample of the raw held-out data; empty for methods without it.
    """

    reader: Reader
    prepare: Prepare
    scorer: nn.Module
    spec: Spec
    device: torch.device
    reservoir: Reservoir
    held_out: Reservoir = field(default_factory=lambda: Reservoir(HELD_OUT, 0))
    summary: Summary = field(default_factory=Summary)

    @classmethod
    def from_data(
        cls, data: TrainData, scorer: nn.Module, spec: Spec, device: torch.device, **fields: Any
    ) -> "DetectorState":
        """Return the state after a fit on `data`; `fields` replace or add others, such as `summary`."""
        read = {"reader": data.reader, "prepare": data.prepare, "reservoir": data.reservoir}
        return cls(scorer=scorer, spec=spec, device=device, **{**read, **fields})

    @property
    def samples_seen(self) -> int:
        """Number of training samples in the fit and in updates; 0 if the detector was saved without samples."""
        return self.reservoir.seen

    @property
    def parameters(self) -> int:
        """Number of parameters of the trained networks, or of the random network if the method trains none."""
        networks: nn.Module = getattr(self.scorer, "networks", self.scorer)
        return sum(p.numel() for p in networks.parameters())

    @property
    def stored_features(self) -> int:
        """Number of training samples whose features the scorer stores."""
        return getattr(self.scorer, "stored_features", 0)

    @property
    def stored_samples(self) -> list[Batch]:
        """Raw samples that `save` writes: training samples, then held-out ones if there are any."""
        return [memory.samples for memory in self.reservoirs.values() if memory.samples is not None]

    @property
    def reservoirs(self) -> dict[str, Reservoir]:
        """Reservoirs by their names in files."""
        return {"reservoir": self.reservoir, "held_out": self.held_out}

    @property
    def reference(self) -> Reservoir:
        """In-distribution samples to take statistics of: held-out ones if there are any."""
        return self.reservoir if self.held_out.samples is None else self.held_out

    @property
    def batch_size(self) -> int:
        """Number of samples to score at once; larger on a GPU."""
        return self.reader.batch_size * (8 if self.device.type == "cuda" else 1)

    def batches(self, x: ArrayLike, *, ordered: bool = True) -> Iterator[Batch]:
        """Yield raw, checked batches of `x`; `ordered` warns if a DataLoader changes the order."""
        return self.reader.batches(x, size=self.batch_size, device=self.device, ordered=ordered)

    def prepared(self, raw: Batch) -> Iterator[Any]:
        """Yield the inputs of the scorer for raw samples, in parts of `batch_size`."""
        for part in batch_slices(raw, self.batch_size):
            with torch.no_grad():
                batch = self.prepare(map_batch(lambda t: t.to(self.device), part))
            yield batch

    def evaluate(self, raw: Batch, function: Callable[[Any], Tensor] | None = None) -> Scores:
        """Return `function` of raw samples, by default the score.

        Args:
            raw: Raw samples.
            function: Function of prepared samples that returns one number per sample; by default the scorer.

        Raises:
            InputError: Some numbers are not finite.
        """
        function = self.scorer if function is None else function
        with exact_float32(), torch.no_grad():
            return np.concatenate(list(map(to_scores, map(function, self.prepared(raw)))))

    def evaluate_all(self, raw: Batch, function: Callable[[Any], tuple[Tensor, ...]]) -> list[Scores]:
        """Return each of several numbers that `function` computes for raw samples, in one pass; see `evaluate`."""
        with exact_float32(), torch.no_grad():
            parts = [map(to_scores, values) for values in map(function, self.prepared(raw))]
            return [np.concatenate(values) for values in zip(*parts, strict=True)]


def to_scores(values: Tensor) -> Scores:
    """Return numbers in float64 on the CPU; raise InputError if some are not finite."""
    if not values.isfinite().all():
        bad = int((~values.isfinite()).sum())
        raise InputError(f"{bad} of {len(values)} inputs have no finite score: their features overflow or are NaN.")
    return values.double().cpu().numpy()
