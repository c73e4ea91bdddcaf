"""Networks behind the exploration bonuses: CSD's and RND's.

Each is a module with two functions: `value(x)`, the bonus of each observation, and `value_and_loss(x, uniforms)`, the
same with the loss that teaches the networks these observations, in one pass. Both are pure functions of tensors and can
be captured in a CUDA graph.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.core.moments import DecayingMoments, Moments
from onefold.distil.loss import similarity_loss
from onefold.distil.model import Architecture, Similarity, apart, inner_products, similarity_model, unit
from onefold.errors import InputError
from onefold.nn.cuda_graphs import side_by_side
from onefold.nn.nets import Prior, RNDScorer, Standardise, backbone, random_network, trunks
from onefold.rl.agents import Agent, BonusForm
from onefold.rl.views import UNIFORMS, Views, viewed

CHANNELS, HIDDEN, OUTPUTS = (16, 16, 32), (256,), 256  # paper, Table "hpsettingsvizdoom"


@runtime_checkable
class BonusNetworks(Protocol):
    """What an agent's bonus is computed by; `uniforms` is how many random numbers an observation takes."""

    uniforms: int

    def value(self, x: Tensor) -> Float[Tensor, " n"]: ...

    def value_and_loss(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]: ...

    def reset(self, generator: Generator) -> None: ...

    def parameters(self) -> Any: ...


class CSDNetworks(nn.Module):
    """The variance of an infinite ensemble trained on the observations seen, by CSD (Eq. 12).

    `form` is "variance", ‖φ₀‖²(1 − φ̄ᵀψ̄) (Eq. 27); "centred", where the mean of φ₀ (`centre_on`) is subtracted
    and the variance is divided by ‖φ₀‖² plus its mean; or "relative", 1 − φ̄ᵀψ̄.

    Contexts should cover future queries: augmented views for images; for vectors, the batch itself, with Gaussian noise
    of `noise` standard deviations on every second one.
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
        form: BonusForm = "variance",
        first: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.noise, self.form = noise, form
        self.first: Any = first or Standardise(torch.zeros(()), torch.ones(()))
        self._shape = shape
        self._sizes = Architecture(channels=tuple(channels), hidden=tuple(hidden), outputs=outputs)
        self.model: Similarity = similarity_model(shape, self.first, self._sizes, generator)
        prior = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],))
        self.prior = Prior(self.first, prior)
        self.views = Views()
        self.uniforms = UNIFORMS if len(shape) == 3 else shape[0] + 1
        self.centre: Tensor
        self.mean_square: Tensor
        self.register_buffer("centre", torch.zeros(HIDDEN[0]))
        self.register_buffer("mean_square", torch.zeros(()))

    @torch.no_grad()
    def centre_on(self, x: Tensor) -> None:
        """Set the origin of φ₀ to its mean over these observations, and the mean of ‖φ₀‖² from there."""
        features = torch.cat([self.prior(part) for part in x.split(256)])
        self.centre.copy_(features.mean(0))
        self.mean_square.copy_((features - self.centre).square().sum(1).mean())

    def reset(self, generator: Generator) -> None:
        """Draw new weights for φ and ψ; φ₀, standardisation and centre stay."""
        _copy_parameters(similarity_model(self._shape, copy.deepcopy(self.first), self._sizes, generator), self.model)

    @torch.no_grad()
    def value(self, x: Tensor) -> Float[Tensor, " n"]:
        if not (x.is_cuda and x.ndim == 4):
            return self._variance(self.prior(x) - self.centre, self.model.gap(x))
        x, (phi, psi, prior) = self.first(x), self._nets
        left, right, features = trunks((phi, psi, prior), (x, x, x))
        gap = apart(unit(phi.mlp(left)), unit(psi.mlp(right)))
        return self._variance(prior.mlp.features(features) - self.centre, gap)

    def value_and_loss(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        contexts = self._contexts(x, uniforms)
        passes = self._passes_together if x.is_cuda and x.ndim == 4 else self._passes_in_turn
        left, right, same, prior, prior_contexts = passes(x, contexts)
        prior, prior_contexts = prior - self.centre, prior_contexts - self.centre
        labels = inner_products(unit(prior), unit(prior_contexts))
        value = self._variance(prior, apart(left, same)).detach()
        return value, similarity_loss(self.model.matched([left], [right]), labels)

    def _passes_in_turn(self, x: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Return φ̄(x), ψ̄(c), ψ̄(x), φ₀(x) and φ₀(c); gradients flow through the first two."""
        (left,), (right,) = self.model.left(x), self.model.right(contexts)
        if contexts is x:
            prior = self.prior(x)
            return left, right, right, prior, prior
        with torch.no_grad():
            (same,) = self.model.right(x)
        return left, right, same, self.prior(x), self.prior(contexts)

    def _passes_together(self, x: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Return the same for images in two passes instead of five."""
        x, contexts = self.first(x), self.first(contexts)
        phi, psi, prior = self._nets

        def with_gradients() -> list[Tensor]:
            first, second = trunks((phi, psi), (x, contexts))
            return [unit(phi.mlp(first)), unit(psi.mlp(second))]

        @torch.no_grad()
        def without_gradients() -> list[Tensor]:
            same, first, second = trunks((psi, prior, prior), (x, x, contexts))
            return [unit(psi.mlp(same)), prior.mlp.features(first), prior.mlp.features(second)]

        both = side_by_side([with_gradients, without_gradients], x.device)
        return tuple(z for part in both for z in part)

    @property
    def _nets(self) -> list[Any]:
        """φ, ψ and φ₀ without the standardisation that they share."""
        return [self.model.phi[1], self.model.psi[1], self.prior.net]  # pyright: ignore[reportIndexIssue]

    def _variance(self, features: Float[Tensor, "n d"], gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        gap = gap.clamp(min=0)
        if self.form == "relative":
            return gap
        square = features.square().sum(1)
        return gap * (square / (square + self.mean_square).clamp(min=1e-12) if self.form == "centred" else square)

    def _contexts(self, x: Tensor, uniforms: Float[Tensor, "n u"]) -> Tensor:
        if x.ndim == 4:
            return viewed(x, uniforms, self.views)
        if self.noise == 0:
            return x
        noise = torch.erfinv(uniforms[:, 1:].clamp(1e-6, 1 - 1e-6) * 2 - 1) * (2**0.5 * self.noise)
        return torch.where(uniforms[:, :1] < 0.5, x + noise * self.first.std, x)


class RNDNetworks(nn.Module):
    """The error of a network that predicts a random one (Burda et al., 2018)."""

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
        self._shape, self._sizes = shape, {"channels": channels, "hidden": hidden, "outputs": outputs}
        target = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],), outputs=outputs)
        predictor = backbone(shape, **self._sizes, generator=generator)
        self.scorer = RNDScorer(nn.Sequential(self.first, predictor), nn.Sequential(self.first, target))

    def reset(self, generator: Generator) -> None:
        """Draw new weights for the predictor; the target and the standardisation stay."""
        fresh = nn.Sequential(copy.deepcopy(self.first), backbone(self._shape, **self._sizes, generator=generator))
        _copy_parameters(fresh, self.scorer.predictor)

    @torch.no_grad()
    def value(self, x: Tensor) -> Float[Tensor, " n"]:
        return self.scorer(x)

    def value_and_loss(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        del uniforms
        errors = self.scorer(x)
        return errors.detach(), errors.mean()


@torch.no_grad()
def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    for new, old in zip(source.parameters(), target.parameters(), strict=True):
        old.copy_(new)


def reset_generator(seed: int, index: int) -> Generator:
    """Return the source of the weights that networks start from after their reset of this index."""
    return Generator().manual_seed(int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1)[0]))


def bonus_networks(agent: Agent, shape: tuple[int, ...], actions: int, generator: Generator) -> BonusNetworks | None:
    """Return the networks of an agent's bonus, for stacks of this shape."""
    if agent.optimistic and len(shape) > 1:
        raise InputError("agent.optimistic: needs vector observations. Leave it out for images")
    if agent.optimistic:
        return CSDNetworks((actions * math.prod(shape),), generator, form="relative")
    if agent.bonus == "csd":
        return CSDNetworks(shape, generator, form=agent.bonus_form)
    return RNDNetworks(shape, generator) if agent.bonus == "rnd" else None


@torch.no_grad()
def standardise_by(first: Standardise, x: Tensor) -> None:
    """Set mean and standard deviation, one number each, to those of these observations."""
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
        """Merge the mean and variance of a batch into those so far, until `settle` observations were seen."""
        if int(self.count) >= self.settle:
            return
        rows = x if x.ndim == 2 else x.movedim(1, -1).flatten(0, -2)  # one row per pixel
        per_sample, size = len(rows) // len(x), self.mean.shape
        count = int(self.count) * per_sample
        before = Moments(count, self.mean.double().flatten(), count * self.std.double().square().flatten())
        merged = before.merge(Moments.of(rows))
        self.mean.copy_(merged.mean.view(size))
        self.std.copy_(merged.variance.sqrt().view(size))
        self.count += len(x)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std.clamp(min=1e-6)).clamp(-5, 5)


@torch.no_grad()
def bonus_rewards(
    agent: Agent, scale: DecayingMoments, bonus: Float[Tensor, " n"], bonus_weight: Tensor, rewards: Float[Tensor, " n"]
) -> Float[Tensor, "heads n"]:
    """Return rewards and scaled bonuses in two rows or, without a bonus head, their weighted sum in one."""
    scale.update(bonus)
    if agent.bonus_head:
        return torch.stack([rewards, agent.bonus_scale * scale.standardise(bonus)])
    scaled = bonus if agent.optimistic else agent.bonus_scale * scale.standardise(bonus)
    return (rewards + bonus_weight * scaled)[None]
