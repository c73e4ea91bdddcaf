"""Scorers of the methods that estimate a variance, and the combined score of variance and relative variance."""

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onefold.kernels.feature_maps import FeatureMap

Score: TypeAlias = Literal["combined", "variance", "relative"]
SCORES: tuple[Score, ...] = ("combined", "variance", "relative")

TINY = 1e-7  # resolution of a relative variance in float32


class CombinedScore(nn.Module):
    """max(z_relative, z_variance − h): an input is unfamiliar if either variance says so.

    z is the logarithm of a variance, standardised by its mean and standard deviation over held-out in-distribution
    samples. The relative variance r = 1 − φ̄ᵀψ̄ does not depend on the scale s = ‖φ₀‖² of the features. The variance
    s · r does, which helps if unfamiliar inputs have larger features and misleads if they have smaller ones. As a
    maximum, a small scale cannot hide a large relative variance. The maximum of two numbers is larger by chance alone.
    The handicap h corrects for that: it is the mean of max(z_relative, z_variance) over the same samples. It is 0 if
    the two are equal, and 0.56 if they are independent and normal. No OOD data enters.
    """

    mean: Tensor
    std: Tensor
    handicap: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("std", torch.ones(2, dtype=torch.float32))
        self.register_buffer("handicap", torch.zeros((), dtype=torch.float32))

    def set_statistics(self, relative: Float[Tensor, " n"], scale: Float[Tensor, " n"]) -> None:
        """Set mean, standard deviation and handicap from held-out in-distribution samples."""
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


class VarianceScorer(nn.Module, ABC):
    """Relative variance and prior variance of a batch, and the score computed from them."""

    def __init__(self, features: FeatureMap, kind: Score) -> None:
        super().__init__()
        self.map, self.combine = features, CombinedScore()
        self.kind: Score = kind

    @abstractmethod
    def parts(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the relative variance and the prior variance of a batch, [N] each."""

    def relative(self, x: Any) -> Float[Tensor, " n"]:
        """Return the relative variance."""
        return self.parts(x)[0]

    def outputs(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, variance and relative variance, from one pass."""
        relative, scale = self.parts(x)
        return self.score(relative, scale), relative * scale, relative

    def score(self, relative: Float[Tensor, " n"], scale: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the score of the chosen kind; variance and relative variance are never negative."""
        if self.kind == "relative":
            return relative
        return relative * scale if self.kind == "variance" else self.combine(relative, scale)

    def forward(self, x: Any) -> Float[Tensor, " n"]:
        return self.score(*self.parts(x))
