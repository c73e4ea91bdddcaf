"""How new an observation is: networks that learn what has been seen.

Each is a module with two functions: `value(x)`, how new each observation is, and `seen(x, uniforms)`, the same
with the loss whose descent makes these observations less new, in one pass. Both are pure functions of tensors, to be
captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.distil import Architecture, Similarity, similarity_loss, similarity_model
from onefold.distil.model import apart, inner_products, unit
from onefold.errors import InputError
from onefold.methods.prior import Prior, random_network
from onefold.methods.rnd import RNDScorer
from onefold.nets import Standardise, backbone, trunks
from onefold.rl.agents import Agent
from onefold.rl.views import UNIFORMS, Views, viewed
from onefold.streams import side_by_side

CHANNELS, HIDDEN, OUTPUTS = (16, 16, 32), (256,), 256  # paper, Table "hpsettingsvizdoom"


@runtime_checkable
class Novelty(Protocol):
    """What an agent's bonus comes from; `uniforms` is how many random numbers an observation takes."""

    uniforms: int

    def value(self, x: Tensor) -> Float[Tensor, " n"]: ...

    def seen(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]: ...

    def parameters(self) -> Any: ...


class CSDNovelty(nn.Module):
    """The variance of an infinite ensemble, ‖φ₀(x)‖² (1 − φ̄(x)ᵀψ̄(x)) (Eq. 12; Eq. 27 for normalised φ, ψ).

    `relative` leaves ‖φ₀(x)‖² out.

    φ₀ is seen from `centre`, which is zero until `centre_on` moves it: all frames of a game look much alike to a random
    network, and without what they have in common new rooms stand out more. From then on the variance is a share of
    ‖φ₀(x)‖² + `usual`, its mean. How long features are is a matter of pictures and not of visits, and differs up to
    twentyfold from room to room: by the variance an agent stays where they are longest, and by its share of ‖φ₀(x)‖²
    where they are short, since the direction of a short vector is hard to learn (docs/log.md).

    Contexts have to be where queries will be, beyond what was seen: other views of images; of vectors, every second one
    with noise of so many standard deviations.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        generator: Generator | None,
        *,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
        noise: float = 0.0,
        relative: bool = False,
        first: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.noise = noise
        self.relative = relative
        self.first: Any = first or Standardise(torch.zeros(()), torch.ones(()))
        sizes = Architecture(channels=tuple(channels), hidden=tuple(hidden), outputs=outputs)
        self.model: Similarity = similarity_model(shape, self.first, sizes, generator)
        prior = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],))
        self.prior = Prior(self.first, prior)
        self.views = Views()
        self.uniforms = UNIFORMS if len(shape) == 3 else shape[0] + 1
        self.centre: Tensor
        self.usual: Tensor
        self.register_buffer("centre", torch.zeros(HIDDEN[0]))
        self.register_buffer("usual", torch.zeros(()))

    @torch.no_grad()
    def centre_on(self, x: Tensor) -> None:
        """See φ₀ from its mean over these observations, and know how long it usually is from there."""
        features = torch.cat([self.prior(part) for part in x.split(256)])
        self.centre.copy_(features.mean(0))
        self.usual.copy_((features - self.centre).square().sum(1).mean())

    @torch.no_grad()
    def value(self, x: Tensor) -> Float[Tensor, " n"]:
        if not (x.is_cuda and x.ndim == 4):
            return self._variance(self.prior(x) - self.centre, self.model.gap(x))
        x, (phi, psi, prior) = self.first(x), self._nets
        left, right, own = trunks((phi, psi, prior), (x, x, x))
        gap = apart(unit(phi.mlp(left)), unit(psi.mlp(right)))
        return self._variance(prior.mlp.features(own) - self.centre, gap)

    def seen(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        contexts = self._contexts(x, uniforms)
        passes = self._at_once if x.is_cuda and x.ndim == 4 else self._in_turn
        left, right, here, own, other = passes(x, contexts)
        own, other = own - self.centre, other - self.centre
        labels = inner_products(unit(own), unit(other))
        value = self._variance(own, apart(left, here)).detach()
        return value, similarity_loss(self.model.matched([left], [right]), labels)

    def _in_turn(self, x: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """φ̄(x), ψ̄(c), ψ̄(x), φ₀(x) and φ₀(c); gradients go through the first two."""
        (left,), (right,) = self.model.left(x), self.model.right(contexts)
        if contexts is x:
            own = self.prior(x)
            return left, right, right, own, own
        with torch.no_grad():
            (here,) = self.model.right(x)
        return left, right, here, self.prior(x), self.prior(contexts)

    def _at_once(self, x: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """The same for images: two passes instead of five."""
        x, contexts = self.first(x), self.first(contexts)
        phi, psi, prior = self._nets

        def with_gradients() -> list[Tensor]:
            first, second = trunks((phi, psi), (x, contexts))
            return [unit(phi.mlp(first)), unit(psi.mlp(second))]

        @torch.no_grad()
        def without() -> list[Tensor]:
            here, own, other = trunks((psi, prior, prior), (x, x, contexts))
            return [unit(psi.mlp(here)), prior.mlp.features(own), prior.mlp.features(other)]

        both = side_by_side([with_gradients, without], x.device)
        return tuple(z for part in both for z in part)

    @property
    def _nets(self) -> list[Any]:
        """φ, ψ and φ₀ without the standardisation that they share."""
        return [self.model.phi[1], self.model.psi[1], self.prior.net]  # pyright: ignore[reportIndexIssue]

    def _variance(self, features: Float[Tensor, "n d"], gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        gap = gap.clamp(min=0)
        if self.relative:
            return gap
        length = features.square().sum(1)
        return gap * torch.where(self.usual > 0, length / (length + self.usual), length)

    def _contexts(self, x: Tensor, uniforms: Float[Tensor, "n u"]) -> Tensor:
        if x.ndim == 4:
            return viewed(x, uniforms, self.views)
        if self.noise == 0:
            return x
        noise = torch.erfinv(uniforms[:, 1:].clamp(1e-6, 1 - 1e-6) * 2 - 1) * (2**0.5 * self.noise)
        return torch.where(uniforms[:, :1] < 0.5, x + noise * self.first.std, x)


class RNDNovelty(nn.Module):
    """How badly a network predicts a random one (Burda et al., 2018)."""

    uniforms = 1

    def __init__(
        self,
        shape: tuple[int, ...],
        generator: Generator | None,
        *,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
        first: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.first = first or Standardise(torch.zeros(()), torch.ones(()))
        target = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],), outputs=outputs)
        predictor = backbone(shape, channels=channels, hidden=hidden, outputs=outputs, generator=generator)
        self.scorer = RNDScorer(nn.Sequential(self.first, predictor), nn.Sequential(self.first, target))

    @torch.no_grad()
    def value(self, x: Tensor) -> Float[Tensor, " n"]:
        return self.scorer(x)

    def seen(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        del uniforms
        errors = self.scorer(x)
        return errors.detach(), errors.mean()


def novelty_of(agent: Agent, shape: tuple[int, ...], actions: int, generator: Generator) -> Novelty | None:
    """What an agent that sees stacks of this shape is curious by."""
    if agent.untried and len(shape) > 1:
        raise InputError("untried actions can be told from others in worlds of vectors only")
    if agent.untried:
        return CSDNovelty((actions * math.prod(shape),), generator, relative=True)
    if agent.bonus == "csd":
        return CSDNovelty(shape, generator)
    return RNDNovelty(shape, generator) if agent.bonus == "rnd" else None


@torch.no_grad()
def standardise_by(first: Standardise, x: Tensor) -> None:
    """By mean and standard deviation of these observations, one number each."""
    std, mean = torch.std_mean(x.float(), correction=0)
    first.mean.copy_(mean)
    first.std.copy_(std.clamp(min=1e-6))


class Settling(nn.Module):
    """(x − mean) / std of the first `settle` observations, clipped at ±5 (Burda et al., 2018), and fixed from then on.

    Every number of a vector has its own, and so has every channel of an image.
    """

    mean: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], settle: int) -> None:
        super().__init__()
        self.settle = settle
        size = shape if len(shape) == 1 else (shape[0], 1, 1)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def take(self, x: Tensor) -> None:
        """Mean and variance of what was there and of these together (Chan et al., 1983)."""
        if int(self.count) >= self.settle:
            return
        axes = [0] if x.ndim == 2 else [0, 2, 3]
        there, new = float(self.count), float(len(x))
        share, square = new / (there + new), (self.std.square() if there else torch.zeros_like(self.std))
        variance, mean = torch.var_mean(x, dim=axes, correction=0)
        shift = mean.view_as(self.mean) - self.mean
        spread = (1 - share) * square + share * variance.view_as(self.std) + share * (1 - share) * shift.square()
        self.mean += share * shift
        self.std.copy_(spread.sqrt())
        self.count += len(x)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std.clamp(min=1e-6)).clamp(-5, 5)


class Scale(nn.Module):
    """Running mean and standard deviation: of the last `memory` minibatches, more or less."""

    def __init__(self, memory: float = 1000.0) -> None:
        super().__init__()
        self.keep = 1 - 1 / memory
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float64))  # float32 has too few digits for differences

    @torch.no_grad()
    def update(self, values: Float[Tensor, " n"]) -> None:
        values = values.double()
        now = torch.stack((torch.ones_like(values), values, values.square())).mean(1)
        self.sums: Tensor
        self.sums.mul_(self.keep).add_(now, alpha=1 - self.keep)

    def mean(self) -> Float[Tensor, ""]:
        """Of all values so far, the latest counting most."""
        return self.sums[1] / self.sums[0]

    def std(self) -> Float[Tensor, ""]:
        return (self.sums[2] / self.sums[0] - self.mean().square()).clamp(min=1e-12).sqrt()

    def above(self, values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Above the mean: a bonus that is never negative would make every end of an episode a loss, the goal's too."""
        return (values - self.mean()).to(values.dtype)

    def forward(self, values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """In standard deviations above the mean."""
        return ((values - self.mean()) / self.std()).to(values.dtype)

    @property
    def empty(self) -> bool:
        return bool(self.sums[0] == 0)


@torch.no_grad()
def rewarded(agent: Agent, scale: Scale, news: Tensor, weight: Tensor, rewards: Tensor) -> Float[Tensor, "s n"]:
    """Rewards with the bonus, or beside it, in deviations of its own unless it is a share."""
    scale.update(news)
    if agent.apart:
        return torch.stack([rewards, agent.weight.first * scale(news)])
    return (rewards + weight * (news if agent.untried else scale(news)))[None]
