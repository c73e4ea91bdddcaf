"""Staging buffers that copy environment steps from the host to the device without waiting."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from onefold.rl.env_table import Steps


class StagingBuffer:
    """The last environment steps on the device, at fixed addresses so that CUDA graphs can read them."""

    def __init__(self, environments: int, frame: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host_frames = torch.zeros(environments, *frame, dtype=dtype, pin_memory=pinned)
        self._host_scalars = torch.zeros(5, environments, pin_memory=pinned)
        self.frames, self._scalars = self._host_frames.to(device), self._host_scalars.to(device)

    @property
    def rewards(self) -> Float[Tensor, " e"]:
        """Rewards."""
        return self._scalars[0]

    @property
    def flags(self) -> tuple[Bool[Tensor, " e"], ...]:
        """Terminated, truncated, began and lost; see `Steps`."""
        return tuple((self._scalars[1:] > 0).unbind())

    def copy(self, steps: Steps) -> None:
        """Copy steps to the device, asynchronously on a GPU."""
        self._host_frames.copy_(torch.from_numpy(steps.frames))
        rows = (steps.rewards, steps.terminated, steps.truncated, steps.began, steps.lost)
        self._host_scalars.copy_(torch.from_numpy(np.stack([row.astype(np.float32) for row in rows])))
        self.frames.copy_(self._host_frames, non_blocking=True)
        self._scalars.copy_(self._host_scalars, non_blocking=True)
