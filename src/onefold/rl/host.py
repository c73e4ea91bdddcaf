"""From the host's memory to the device's, without waiting."""

import numpy as np
import torch
from torch import Tensor

from onefold.rl.env_table import Steps


class Host:
    """What the environments answered, on the device, at the same place every time."""

    def __init__(self, environments: int, frame: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._frames = torch.zeros(environments, *frame, dtype=dtype, pin_memory=pinned)
        self._numbers = torch.zeros(5, environments, pin_memory=pinned)
        self.frames, self.numbers = self._frames.to(device), self._numbers.to(device)

    @property
    def rewards(self) -> Tensor:
        return self.numbers[0]

    @property
    def flags(self) -> tuple[Tensor, ...]:
        """Terminated, truncated, began, lost."""
        return tuple((self.numbers[1:] > 0).unbind())

    def take(self, steps: Steps) -> None:
        self._frames.copy_(torch.from_numpy(steps.frames))
        rows = (steps.rewards, steps.terminated, steps.truncated, steps.began, steps.lost)
        self._numbers.copy_(torch.from_numpy(np.stack([row.astype(np.float32) for row in rows])))
        self.frames.copy_(self._frames, non_blocking=True)
        self.numbers.copy_(self._numbers, non_blocking=True)
