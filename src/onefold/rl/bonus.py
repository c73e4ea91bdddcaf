"""How new an observation is: networks that learn what has been seen, and the reward that comes of it.

A bonus is a module with two functions: `value(x)`, how new each observation is, and `loss(x, uniforms)`, whose
descent makes these observations less new. Both are pure functions of tensors, to be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.distil import Architecture, Similarity, similarity_loss, similarity_model
from onefold.methods.prior import Prior, random_network
from onefold.methods.rnd import RNDScorer
from onefold.nets import Standardise, backbone
from onefold.rl.views import Views, viewed

CHANNELS, HIDDEN, OUTPUTS = (16, 16, 32), (256,), 256  # paper, Table "hpsettingsvizdoom"


@runtime_checkable
class Bonus(Protocol):
    """What an agent needs of a bonus."""

    def value(self, x: Tensor) -> Float[Tensor, " n"]: ...

    def loss(self, x: Tensor, uniforms: Tensor) -> Float[Tensor, ""]: ...

    def standardise(self, x: Tensor) -> None: ...

    def parameters(self) -> Any: ...


class CSDBonus(nn.Module):
    """The standard deviation of an infinite ensemble, √(‖φ₀(x)‖² (1 − φ̄(x)ᵀψ̄(x))) (Eq. 12; Eq. 27 for normalised φ, ψ).

    Contexts are other views of the observations for images, the observations themselves for vectors.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        generator: Generator,
        *,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
        views: Views | None = None,
    ) -> None:
        super().__init__()
        self.first = Standardise(torch.zeros(()), torch.ones(()))
        sizes = Architecture(channels=tuple(channels), hidden=tuple(hidden), outputs=outputs)
        self.model: Similarity = similarity_model(shape, self.first, sizes, generator)
        prior = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],))
        self.prior = Prior(self.first, prior)
        self.views = (views or Views()) if len(shape) == 3 else None

    @torch.no_grad()
    def standardise(self, x: Tensor) -> None:
        """Take mean and standard deviation, one number each, from these observations."""
        _take(self.first, x)

    @torch.no_grad()
    def value(self, x: Tensor) -> Float[Tensor, " n"]:
        scale = self.prior(x).float().square().sum(1)
        return (scale * self.model.gap(x).clamp(min=0)).sqrt()

    def loss(self, x: Tensor, uniforms: Tensor) -> Float[Tensor, ""]:
        contexts = x if self.views is None else viewed(x, uniforms, self.views)
        own = nn.functional.normalize(self.prior(x).float(), dim=1)
        other = own if self.views is None else nn.functional.normalize(self.prior(contexts).float(), dim=1)
        return similarity_loss(self.model(x, contexts), own @ other.T)


class RNDBonus(nn.Module):
    """How badly a network predicts a random one (Burda et al., 2018)."""

    def __init__(
        self,
        shape: tuple[int, ...],
        generator: Generator,
        *,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
    ) -> None:
        super().__init__()
        self.first = Standardise(torch.zeros(()), torch.ones(()))
        target = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],), outputs=outputs)
        predictor = backbone(shape, channels=channels, hidden=hidden, outputs=outputs, generator=generator)
        self.scorer = RNDScorer(nn.Sequential(self.first, predictor), nn.Sequential(self.first, target))

    @torch.no_grad()
    def standardise(self, x: Tensor) -> None:
        """Take mean and standard deviation, one number each, from these observations."""
        _take(self.first, x)

    @torch.no_grad()
    def value(self, x: Tensor) -> Float[Tensor, " n"]:
        return self.scorer(x)

    def loss(self, x: Tensor, uniforms: Tensor) -> Float[Tensor, ""]:
        del uniforms
        return self.scorer(x).mean()


class Scale(nn.Module):
    """A running standard deviation: of the last `memory` minibatches, more or less."""

    def __init__(self, memory: float = 1000.0) -> None:
        super().__init__()
        self.keep = 1 - 1 / memory
        self.register_buffer("sums", torch.zeros(3))

    @torch.no_grad()
    def update(self, values: Float[Tensor, " n"]) -> None:
        now = torch.stack((torch.ones_like(values), values, values.square())).mean(1)
        self.sums: Tensor
        self.sums.mul_(self.keep).add_(now, alpha=1 - self.keep)

    def std(self) -> Float[Tensor, ""]:
        """Of all values so far, the latest counting most."""
        weight, mean, square = self.sums
        return (square / weight - (mean / weight).square()).clamp(min=1e-12).sqrt()


def _take(first: Standardise, x: Tensor) -> None:
    std, mean = torch.std_mean(x.float(), correction=0)
    first.mean.copy_(mean)
    first.std.copy_(std.clamp(min=1e-6))
