"""What a fit leaves behind."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onefold.inputs.reader import Prepare, Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import HELD_OUT


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What `fit` leaves behind: how data is read, the module that scores it, and a memory of the data.

    `scorer` maps prepared samples to scores, `reservoir` remembers train samples and `held` samples that no training
    saw. `about` is what the fit wants to remember, in numbers.
    """

    reader: Reader
    prepare: Prepare
    scorer: nn.Module
    reservoir: Reservoir
    held: Reservoir = field(default_factory=lambda: Reservoir(HELD_OUT, 0))
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def familiar(self) -> Reservoir:
        """Familiar samples to take statistics of: those that no training saw, if there are any."""
        return self.held if self.held.samples is not None else self.reservoir

    @property
    def memories(self) -> dict[str, Reservoir]:
        return {"reservoir": self.reservoir, "held": self.held}
