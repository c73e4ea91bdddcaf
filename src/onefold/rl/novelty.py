"""How new an observation is: networks that learn what has been seen, and the reward that comes of it.

A bonus is a module with two functions: `value(x)`, how new each observation is, and `seen(x, uniforms)`, the same
with the loss whose descent makes these observations less new, in one pass. Both are pure functions of tensors, to be
captured in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.distil import Architecture, Similarity, similarity_loss, similarity_model
from onefold.distil.model import apart, inner_products
from onefold.methods.prior import Prior, random_network
from onefold.methods.rnd import RNDScorer
from onefold.nets import Standardise, backbone
from onefold.rl.views import Views, viewed
from onefold.streams import side_by_side

CHANNELS, HIDDEN, OUTPUTS = (16, 16, 32), (256,), 256  # paper, Table "hpsettingsvizdoom"


@runtime_checkable
class Bonus(Protocol):
    """What an agent needs of a bonus."""

    def value(self, x: Tensor) -> Float[Tensor, " n"]: ...

    def seen(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]: ...

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
        return _deviation(self.prior(x).float(), self.model.gap(x))

    def seen(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        views, model, no_grad = self.views, self.model, torch.no_grad()
        contexts = x if views is None else viewed(x, uniforms, views)
        functions: list[Callable[[], Any]] = [
            lambda: model.left(x),
            lambda: model.right(contexts),
            lambda: self.prior(x),
        ]
        if views is not None:
            functions += [lambda: no_grad(model.right)(x), lambda: self.prior(contexts)]
        left, right, own, *others = side_by_side(functions, x.device)
        here, other = others if others else (right, own)
        labels = inner_products(*(nn.functional.normalize(z.float(), dim=1) for z in (own, other)))
        value = _deviation(own.float(), apart(left[0], here[0])).detach()
        return value, similarity_loss(model.matched(left, right), labels)


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

    def seen(self, x: Tensor, uniforms: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        del uniforms
        errors = self.scorer(x)
        return errors.detach(), errors.mean()


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


def _deviation(features: Float[Tensor, "n d"], gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return (features.square().sum(1) * gap.clamp(min=0)).sqrt()


def _take(first: Standardise, x: Tensor) -> None:
    std, mean = torch.std_mean(x.float(), correction=0)
    first.mean.copy_(mean)
    first.std.copy_(std.clamp(min=1e-6))
