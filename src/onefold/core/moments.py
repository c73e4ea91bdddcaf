"""Running mean and variance: of all samples by Chan's merge, or of recent samples with exponential weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Moments:
    """Number of samples, their mean, and the sum of their squared deviations from it; an immutable value.

    Batches are merged by the formula of Chan et al. (1983), which avoids cancellation for means that are large compared
    with the spread, such as dates in seconds. The numbers are float64.
    """

    count: int
    mean: Float64[Tensor, "*shape"]
    squares: Float64[Tensor, "*shape"]

    @classmethod
    def of(cls, samples: Float[Tensor, "n *shape"]) -> "Moments":
        """Return the moments of a batch over its first axis; at least one sample."""
        samples = samples.double()
        mean = samples.mean(0)
        return cls(len(samples), mean, (samples - mean).square().sum(0))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both groups of samples together; a group of 0 samples changes nothing."""
        total = self.count + other.count
        share = other.count / total
        step = other.mean - self.mean
        squares = self.squares + other.squares + step.square() * (self.count * share)
        return Moments(total, self.mean + step * share, squares)

    @property
    def variance(self) -> Float64[Tensor, "*shape"]:
        """Mean of the squared deviations (divided by the count, not by the count less one)."""
        return self.squares / self.count


class DecayingMoments(nn.Module):
    """Mean and standard deviation with exponential weights: mainly of the last `memory` minibatches.

    The state is one buffer and `update` runs in place, so that it can be part of a CUDA graph.
    """

    sums: Float64[Tensor, "3"]

    def __init__(self, memory: float = 1000.0) -> None:
        super().__init__()
        self.decay = 1 - 1 / memory
        # Weighted sums of 1, x and x²; float32 has too few digits for the difference of the squares.
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float64))

    @torch.no_grad()
    def update(self, values: Float[Tensor, " n"]) -> None:
        """Add a minibatch, and reduce the weight of those before it."""
        values = values.double()
        means = torch.stack((torch.ones_like(values), values, values.square())).mean(1)
        self.sums.mul_(self.decay).add_(means, alpha=1 - self.decay)

    @property
    def is_empty(self) -> bool:
        """Whether no minibatch was added yet."""
        return bool(self.sums[0] == 0)

    def mean(self) -> Float64[Tensor, ""]:
        """Return the weighted mean."""
        return self.sums[1] / self.sums[0]

    def std(self) -> Float64[Tensor, ""]:
        """Return the weighted standard deviation, at least 1e-6."""
        return (self.sums[2] / self.sums[0] - self.mean().square()).clamp(min=1e-12).sqrt()

    def centre(self, values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the values less the mean."""
        return (values - self.mean()).to(values.dtype)

    def standardise(self, values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the values less the mean, in standard deviations."""
        return ((values - self.mean()) / self.std()).to(values.dtype)
