"""Networks of the exploration bonuses: CSD's and RND's.

Both have `value(x)`, the bonus of each observation, and `value_and_loss(x, uniforms)`, the bonus and the training loss
from one pass. These are pure functions of tensors and can be captured in a CUDA graph.
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
from onefold.distil.model import Architecture, Similarity, half_squared_distance, inner_products, similarity_model, unit
from onefold.errors import InputError
from onefold.nn.cuda_graphs import side_by_side
from onefold.nn.nets import Prior, RNDScorer, Standardise, backbone, random_network, trunks
from onefold.rl.agents import Agent, BonusForm
from onefold.rl.augmentation import UNIFORMS, FrameAugmentation, augment_frames

CHANNELS, HIDDEN, OUTPUTS = (16, 16, 32), (256,), 256  # paper, Table "hpsettingsvizdoom"
LARGEST_STANDARDISED = 5.0  # standard deviations


@runtime_checkable
class BonusNetworks(Protocol):
    """Networks that compute a bonus and its training loss from `uniforms` random numbers per observation."""

    uniforms: int

    def value(self, x: Tensor) -> Float[Tensor, " n"]: ...

    def value_and_loss(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]: ...

    def reset(self, generator: Generator) -> None: ...

    def parameters(self) -> Any: ...


class CSDNetworks(nn.Module):
    """Networks of CSD: the variance of an infinite ensemble trained on the observations so far (Eq. 12).

    The contexts of the regression should cover future queries. For images they are augmented frames. For vectors they
    are the minibatch itself, half of it with Gaussian noise.

    Args:
        shape: Shape of an observation: (d,) or (c, h, w).
        generator: Source of the initial weights; None leaves them on the meta device, to be loaded.
        channels: Channels of the convolution stages; used for images only.
        hidden: Widths of the hidden layers.
        outputs: Number of outputs of φ and ψ.
        noise: Standard deviation of the noise of vector contexts, in standard deviations of the observations.
        form: "variance", ‖φ₀‖²(1 − φ̄ᵀψ̄) (Eq. 27); "centred", where the mean of φ₀ is subtracted and the variance is
            divided by ‖φ₀‖² plus its mean; or "relative", 1 − φ̄ᵀψ̄.
        standardise: Module that standardises observations; None creates one with mean 0 and deviation 1.
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
        standardise: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.noise, self.form = noise, form
        self.standardise: Any = standardise or Standardise(torch.zeros(()), torch.ones(()))
        self._shape = shape
        self._sizes = Architecture(channels=tuple(channels), hidden=tuple(hidden), outputs=outputs)
        self.model: Similarity = similarity_model(shape, self.standardise, self._sizes, generator)
        prior = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],))
        self.prior = Prior(self.standardise, prior)
        self.augmentation = FrameAugmentation()
        self.uniforms = UNIFORMS if len(shape) == 3 else shape[0] + 1
        self.centre: Tensor
        self.mean_square: Tensor
        self.register_buffer("centre", torch.zeros(HIDDEN[0]))
        self.register_buffer("mean_square", torch.zeros(()))

    @torch.no_grad()
    def set_centre(self, x: Float[Tensor, "n *shape"]) -> None:
        """Set the origin of φ₀ to its mean over these observations, for the form "centred".

        Args:
            x: Observations.
        """
        features = torch.cat([self.prior(part) for part in x.split(256)])
        self.centre.copy_(features.mean(0))
        self.mean_square.copy_((features - self.centre).square().sum(1).mean())

    def reset(self, generator: Generator) -> None:
        """Draw new weights for φ and ψ. The prior φ₀, the standardisation and the centre stay.

        Args:
            generator: Source of the weights.
        """
        new = similarity_model(self._shape, copy.deepcopy(self.standardise), self._sizes, generator)
        _copy_parameters(new, self.model)

    @torch.no_grad()
    def value(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return the bonus of each observation.

        Args:
            x: Observations.

        Returns:
            Variances in the chosen form, at least 0.
        """
        if not (x.is_cuda and x.ndim == 4):
            return self._variance(self.prior(x) - self.centre, self.model.gap(x))
        x, (phi, psi, prior) = self.standardise(x), self._networks
        left, right, features = trunks((phi, psi, prior), (x, x, x))
        gap = half_squared_distance(unit(phi.mlp(left)), unit(psi.mlp(right)))
        return self._variance(prior.mlp.features(features) - self.centre, gap)

    def value_and_loss(
        self, x: Float[Tensor, "n *shape"], uniforms: Float[Tensor, "n u"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """Return the bonus of each observation and the loss of CSD (Eq. 15), from shared passes.

        Args:
            x: Observations, at least two: the loss is over pairs.
            uniforms: Random numbers in [0, 1) for the contexts, `self.uniforms` per observation.

        Returns:
            The bonuses, without gradients, and the loss, with gradients for φ and ψ.
        """
        contexts = self._contexts(x, uniforms)
        passes = self._joint_passes if x.is_cuda and x.ndim == 4 else self._separate_passes
        left, right, right_of_x, prior, prior_contexts = passes(x, contexts)
        prior, prior_contexts = prior - self.centre, prior_contexts - self.centre
        labels = inner_products(unit(prior), unit(prior_contexts))
        value = self._variance(prior, half_squared_distance(left, right_of_x)).detach()
        return value, self.model.loss([left], [right], labels)

    def _separate_passes(self, x: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Return φ̄(x), ψ̄(c), ψ̄(x), φ₀(x) and φ₀(c); gradients flow through the first two."""
        (left,), (right,) = self.model.left(x), self.model.right(contexts)
        if contexts is x:
            prior = self.prior(x)
            return left, right, right, prior, prior
        with torch.no_grad():
            (right_of_x,) = self.model.right(x)
        return left, right, right_of_x, self.prior(x), self.prior(contexts)

    def _joint_passes(self, x: Tensor, contexts: Tensor) -> tuple[Tensor, ...]:
        """Return the same for images, from two joint passes instead of five separate ones."""
        x, contexts = self.standardise(x), self.standardise(contexts)
        phi, psi, prior = self._networks

        def with_gradients() -> list[Tensor]:
            phi_x, psi_contexts = trunks((phi, psi), (x, contexts))
            return [unit(phi.mlp(phi_x)), unit(psi.mlp(psi_contexts))]

        @torch.no_grad()
        def without_gradients() -> list[Tensor]:
            psi_x, prior_x, prior_contexts = trunks((psi, prior, prior), (x, x, contexts))
            return [unit(psi.mlp(psi_x)), prior.mlp.features(prior_x), prior.mlp.features(prior_contexts)]

        both = side_by_side([with_gradients, without_gradients], x.device)
        return tuple(z for part in both for z in part)

    @property
    def _networks(self) -> list[Any]:
        """φ, ψ and φ₀ without the standardisation that they share."""
        return [self.model.phi[1], self.model.psi[1], self.prior.net]  # pyright: ignore[reportIndexIssue]

    def _variance(self, features: Float[Tensor, "n d"], gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the bonus from φ₀ and 1 − φ̄ᵀψ̄."""
        gap = gap.clamp(min=0)
        if self.form == "relative":
            return gap
        square = features.square().sum(1)
        return gap * (square / (square + self.mean_square).clamp(min=1e-12) if self.form == "centred" else square)

    def _contexts(self, x: Tensor, uniforms: Float[Tensor, "n u"]) -> Tensor:
        """Return augmented frames, or vectors with noise on half of them."""
        if x.ndim == 4:
            return augment_frames(x, uniforms, self.augmentation)
        if self.noise == 0:
            return x
        noise = torch.erfinv(uniforms[:, 1:].clamp(1e-6, 1 - 1e-6) * 2 - 1) * (2**0.5 * self.noise)
        return torch.where(uniforms[:, :1] < 0.5, x + noise * self.standardise.std, x)


class RNDNetworks(nn.Module):
    """Networks of RND: a predictor of a frozen random target network, whose error is the bonus (Burda et al., 2018).

    Args:
        shape: Shape of an observation: (d,) or (c, h, w).
        generator: Source of the initial weights; None leaves them on the meta device, to be loaded.
        channels: Channels of the convolution stages; used for images only.
        hidden: Widths of the predictor's hidden layers.
        outputs: Number of outputs of both networks.
        standardise: Module that standardises observations; None creates one with mean 0 and deviation 1.
    """

    uniforms = 1

    def __init__(
        self,
        shape: tuple[int, ...],
        generator: Generator | None,
        *,
        channels: Sequence[int] = CHANNELS,
        hidden: Sequence[int] = HIDDEN,
        outputs: int = OUTPUTS,
        standardise: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.standardise = standardise or Standardise(torch.zeros(()), torch.ones(()))
        self._shape, self._sizes = shape, {"channels": channels, "hidden": hidden, "outputs": outputs}
        target = random_network(shape, generator, channels=channels, hidden=(HIDDEN[0],), outputs=outputs)
        predictor = backbone(shape, **self._sizes, generator=generator)
        self.scorer = RNDScorer(nn.Sequential(self.standardise, predictor), nn.Sequential(self.standardise, target))

    def reset(self, generator: Generator) -> None:
        """Draw new weights for the predictor. The target and the standardisation stay.

        Args:
            generator: Source of the weights.
        """
        predictor = backbone(self._shape, **self._sizes, generator=generator)
        _copy_parameters(nn.Sequential(copy.deepcopy(self.standardise), predictor), self.scorer.predictor)

    @torch.no_grad()
    def value(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return the bonus of each observation.

        Args:
            x: Observations.

        Returns:
            Half the mean squared error of the predictor, at least 0.
        """
        return self.scorer(x)

    def value_and_loss(
        self, x: Float[Tensor, "n *shape"], uniforms: Float[Tensor, "n 1"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """Return the bonus of each observation and its mean, which is the loss.

        Args:
            x: Observations.
            uniforms: Not used.

        Returns:
            The bonuses, without gradients, and the loss, with gradients for the predictor.
        """
        del uniforms
        errors = self.scorer(x)
        return errors.detach(), errors.mean()


@torch.no_grad()
def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters of one module to another of the same structure."""
    for new, old in zip(source.parameters(), target.parameters(), strict=True):
        old.copy_(new)


def reset_generator(seed: int, index: int) -> Generator:
    """Return the source of the weights that networks get at their reset number `index`."""
    return Generator().manual_seed(int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1)[0]))


def make_bonus_networks(
    agent: Agent, shape: tuple[int, ...], actions: int, generator: Generator
) -> BonusNetworks | None:
    """Return the bonus networks of an agent for stacks of this shape; None if it has no bonus."""
    if agent.optimistic and len(shape) > 1:
        raise InputError("agent.optimistic: images are not supported. Use vector observations, or optimistic=False.")
    if agent.optimistic:
        return CSDNetworks((actions * math.prod(shape),), generator, form="relative")
    if agent.bonus == "csd":
        return CSDNetworks(shape, generator, form=agent.bonus_form)
    return RNDNetworks(shape, generator) if agent.bonus == "rnd" else None


@torch.no_grad()
def fit_standardise(standardise: Standardise, x: Tensor) -> None:
    """Set the mean and standard deviation of a module, one number each, to those of all elements of `x`."""
    std, mean = torch.std_mean(x.float(), correction=0)
    standardise.mean.copy_(mean)
    standardise.std.copy_(std.clamp(min=1e-6))


class WarmupStandardise(nn.Module):
    """(x − mean) / std with the statistics of the first `warmup` observations, clipped to ±5 (Burda et al., 2018).

    Each feature of a vector and each channel of an image has its own statistics.
    """

    mean: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], warmup: int) -> None:
        super().__init__()
        self.warmup = warmup
        size = shape if len(shape) == 1 else (shape[0], 1, 1)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def is_fixed(self) -> bool:
        """True once `warmup` observations were seen."""
        return int(self.count) >= self.warmup

    @torch.no_grad()
    def update(self, x: Float[Tensor, "n *shape"]) -> None:
        """Merge the statistics of a batch into those so far, until `warmup` observations were seen."""
        if self.is_fixed:
            return
        rows = x if x.ndim == 2 else x.movedim(1, -1).flatten(0, -2)  # one row per pixel
        count = int(self.count) * (len(rows) // len(x))
        moments = Moments(count, self.mean.double().flatten(), count * self.std.double().square().flatten())
        moments = moments.merge(Moments.of(rows))
        self.mean.copy_(moments.mean.view_as(self.mean))
        self.std.copy_(moments.variance.sqrt().view_as(self.std))
        self.count += len(x)

    def forward(self, x: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *shape"]:
        standardised = (x - self.mean) / self.std.clamp(min=1e-6)
        return standardised.clamp(-LARGEST_STANDARDISED, LARGEST_STANDARDISED)


@torch.no_grad()
def bonus_rewards(
    agent: Agent,
    moments: DecayingMoments,
    bonuses: Float[Tensor, " n"],
    bonus_weight: Tensor,
    rewards: Float[Tensor, " n"],
) -> Float[Tensor, "heads n"]:
    """Return rewards and scaled bonuses in two rows or, without a bonus head, their weighted sum in one.

    The running moments of the bonus are updated first.
    """
    moments.update(bonuses)
    if agent.bonus_head:
        return torch.stack([rewards, agent.bonus_scale * moments.standardise(bonuses)])
    scaled = bonuses if agent.optimistic else agent.bonus_scale * moments.standardise(bonuses)
    return (rewards + bonus_weight * scaled)[None]
