"""State of a fitted detector."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onefold.inputs.reader import Prepare, Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import HELD_OUT
from onefold.types import Batch


@dataclass(frozen=True, kw_only=True)
class DetectorState:
    """Everything that a fitted detector consists of, besides its settings and its calibration.

    Args:
        reader: Layout of the training data, by which later data is read and checked.
        prepare: Module from raw samples to the inputs of `scorer`.
        scorer: Module from prepared samples to scores.
        reservoir: Random sample of the raw training data.
        held: Random sample of the held-out data.
        about: Numbers that the fit measured, such as its loss.
    """

    reader: Reader
    prepare: Prepare
    scorer: nn.Module
    reservoir: Reservoir
    held: Reservoir = field(default_factory=lambda: Reservoir(HELD_OUT, 0))
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def samples_seen(self) -> int:
        """Number of training samples that the detector has seen, in the fit and in updates; 0 if saved without any."""
        return self.reservoir.seen

    @property
    def parameters(self) -> int:
        """Number of parameters of the fitted networks, or of the random network if the method trains none."""
        networks: nn.Module = getattr(self.scorer, "networks", self.scorer)
        return sum(p.numel() for p in networks.parameters())

    @property
    def stored_features(self) -> int:
        """Number of training samples whose features the scorer stores."""
        return getattr(self.scorer, "stored_features", 0)

    @property
    def stored_samples(self) -> list[Batch]:
        """Raw samples that `save` writes to the file: training samples and held-out ones."""
        return [memory.samples for memory in self.memories.values() if memory.samples is not None]

    @property
    def familiar(self) -> Reservoir:
        """In-distribution samples to take statistics of: held-out ones if there are any."""
        return self.held if self.held.samples is not None else self.reservoir

    @property
    def memories(self) -> dict[str, Reservoir]:
        """Return the reservoirs by their names in files."""
        return {"reservoir": self.reservoir, "held": self.held}
