"""One score out of variance and relative variance, each measured against held-out familiar data."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

Score: TypeAlias = Literal["combined", "variance", "relative"]
SCORES: tuple[Score, ...] = ("combined", "variance", "relative")

TINY = 1e-7  # what float32 can tell from zero in a relative variance


class Combine(nn.Module):
    """max(z_relative, z_variance − h): strange is what either finds strange, in standard deviations of familiar data.

    z is the logarithm less its mean over held-out familiar samples, divided by its standard deviation there. The
    relative variance r = 1 − φ̄ᵀψ̄ is free of the scale s = ‖φ₀‖² of the features; the variance s · r sees it, which
    helps where strange inputs have larger features and misleads where they have smaller ones. As a maximum, a small
    scale cannot hide what is relatively strange. A second opinion raises the maximum by chance alone; the handicap h
    is that gain, the mean of max(z_relative, z_variance) over the same samples: 0 if the two agree, 0.56 if they are
    independent and normal. Nothing here is chosen by strange data.
    """

    mean: Tensor
    std: Tensor
    handicap: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("std", torch.ones(2, dtype=torch.float32))
        self.register_buffer("handicap", torch.zeros((), dtype=torch.float32))

    def learn(self, relative: Float[Tensor, " n"], scale: Float[Tensor, " n"]) -> None:
        """Take the statistics of held-out familiar samples."""
        logs = self._logs(relative, scale).double()
        std, mean = torch.std_mean(logs, dim=0, correction=0)
        std = std.clamp(min=1e-3)
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.handicap.copy_(((logs - mean) / std).amax(dim=1).mean())

    def forward(self, relative: Float[Tensor, " n"], scale: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        z = (self._logs(relative, scale) - self.mean) / self.std
        return torch.maximum(z[:, 0], z[:, 1] - self.handicap)

    def _logs(self, relative: Tensor, scale: Tensor) -> Float[Tensor, "n 2"]:
        log_relative = relative.float().clamp(min=TINY).log()
        log_scale = scale.float().clamp(min=torch.finfo(torch.float32).tiny).log()
        return torch.stack([log_relative, log_relative + log_scale], dim=1)


def scored(kind: Score, combine: Combine, relative: Tensor, scale: Tensor) -> Tensor:
    """The score of that kind; variance and relative variance are never negative."""
    if kind == "relative":
        return relative
    return relative * scale if kind == "variance" else combine(relative, scale)
