"""Scorers of the methods that estimate a variance, and the scores that combine several numbers of an input."""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onefold.kernels.feature_maps import FeatureMap

Score: TypeAlias = Literal["combined", "variance", "relative"]
SCORES: tuple[Score, ...] = ("combined", "variance", "relative")
ModelScore: TypeAlias = Literal["surprisal", "combined", "variance", "relative"]
"""Scores of a detector on a trained model."""
MODEL_SCORES: tuple[ModelScore, ...] = ("surprisal", *SCORES)

TINY = 1e-7  # resolution of a relative variance in float32
TAIL = 0.05  # share of familiar inputs for which the variance may speak in the surprisal score
SERIES_FROM = 4.0  # standard deviations; from here on the series of `surprisal` is within 1e-4, as 1 − erf is below it


def surprisal(z: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return −log(1 − Φ(z)): how surprising it is, in nats, that a standard normal number is at least z.

    1 − Φ(z) cancels in float32 for large z. There it is φ(z)/z · (1 − 1/z² + 3/z⁴ − 15/z⁶), the asymptotic series. Both
    forms need only operations that every export format has. The result never falls as z grows; its relative error is
    at most 1.1e-4 for positive z.
    """
    far = z.clamp(min=SERIES_FROM)
    inverse = far.square().reciprocal()
    series = torch.log1p(-inverse + 3 * inverse**2 - 15 * inverse**3)
    tail = far.square() / 2 + far.log() + 0.5 * math.log(2 * math.pi) - series
    near = -torch.log(0.5 * (1 - torch.erf(z.clamp(max=SERIES_FROM) / math.sqrt(2))))
    return torch.where(z > SERIES_FROM, tail, near)


class SurprisalScore(nn.Module):
    """L(z_e) + max(0, L(z_v) + log τ), or L(z_v) for a model without logits of these data's classes.

    e is the energy of the model's logits, v the logarithm of the variance. z_e and z_v are standardised by the mean and
    the standard deviation over held-out in-distribution samples. L is `surprisal`, and τ is 0.05. Energy detects inputs
    near the training data that fit no class. The variance detects inputs far from the training data, whose logits may
    be confident. It adds to the score only where L(z_v) exceeds −log τ: where the variance alone is higher than that of
    95 % of familiar inputs, if it is log-normal. No labels and no OOD data enter.

    Args:
        has_energy: True if the model has logits of these data's classes.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, *, has_energy: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1 + has_energy, dtype=torch.float32))
        self.register_buffer("std", torch.ones(1 + has_energy, dtype=torch.float32))

    def set_statistics(self, relative: Tensor, scale: Tensor, *energy: Tensor) -> None:
        """Set mean and standard deviation from held-out in-distribution samples."""
        std, mean = torch.std_mean(_stack_logs(relative, scale, *energy).double(), dim=0, correction=0)
        self.mean.copy_(mean)
        self.std.copy_(std.clamp(min=1e-3))

    def forward(self, relative: Tensor, scale: Tensor, *energy: Tensor) -> Float[Tensor, " n"]:
        """Return the score from relative variance, prior variance and, for a classifier, energy, [N] each."""
        parts = surprisal((_stack_logs(relative, scale, *energy) - self.mean) / self.std)
        if not energy:
            return parts[:, 0]
        return parts[:, 1] + (parts[:, 0] + math.log(TAIL)).clamp(min=0)


def _stack_logs(relative: Tensor, scale: Tensor, *energy: Tensor) -> Float[Tensor, "n parts"]:
    """Return the logarithm of the variance and, if there is one, the energy."""
    return torch.stack([log_positive(relative, TINY) + log_positive(scale), *energy], dim=1)


def log_positive(x: Float[Tensor, " n"], least: float = torch.finfo(torch.float32).tiny) -> Float[Tensor, " n"]:
    """Return log max(x, least) in float32."""
    return x.float().clamp(min=least).log()


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
        log_relative = log_positive(relative, TINY)
        return torch.stack([log_relative, log_relative + log_positive(scale)], dim=1)


class VarianceScorer(nn.Module, ABC):
    """Relative variance and prior variance of a batch, and the score computed from them.

    Args:
        features: Feature map.
        kind: Kind of score.
        has_energy: True if `parts` also returns an energy, for the kind "surprisal".
    """

    def __init__(self, features: FeatureMap, kind: ModelScore, *, has_energy: bool = False) -> None:
        super().__init__()
        self.map, self.kind = features, kind
        self.combine = SurprisalScore(has_energy=has_energy) if kind == "surprisal" else CombinedScore()

    @abstractmethod
    def parts(self, x: Any) -> tuple[Tensor, ...]:
        """Return the relative variance, the prior variance and, with `has_energy`, the energy of a batch, [N] each."""

    def relative(self, x: Any) -> Float[Tensor, " n"]:
        """Return the relative variance."""
        return self.parts(x)[0]

    def outputs(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, variance and relative variance, from one pass."""
        relative, scale, *energy = self.parts(x)
        return self.score(relative, scale, *energy), relative * scale, relative

    def score(self, relative: Tensor, scale: Tensor, *energy: Tensor) -> Float[Tensor, " n"]:
        """Return the score of the chosen kind; variance and relative variance are never negative."""
        if self.kind == "relative":
            return relative
        return relative * scale if self.kind == "variance" else self.combine(relative, scale, *energy)

    def forward(self, x: Any) -> Float[Tensor, " n"]:
        return self.score(*self.parts(x))
