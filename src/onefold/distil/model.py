"""The contextual regression model g(x, c) = φ(x)ᵀψ(c) of Eq. 13."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import MAX_SIZE, check_choice, check_integer, check_sizes
from onefold.distil.loss import PAIRS, Pairs
from onefold.nn.nets import backbone


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of φ and ψ (paper, Table "hpsettingsood"); `channels` matter for images only."""

    channels: tuple[int, ...] = (32,)
    hidden: tuple[int, ...] = (256, 256)
    outputs: int = 256
    normalise: bool = True
    small_init: bool = False
    pairs: Pairs = "all"
    """Which pairs of a minibatch the loss is over: all, or N random ones (Eq. 15 as it stands)."""

    def __post_init__(self) -> None:
        check_sizes(self.channels, "channels")
        check_sizes(self.hidden, "hidden")
        check_integer(self.outputs, "outputs", 1, MAX_SIZE)
        check_choice(self.pairs, "pairs", PAIRS)


def inner_products(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """a bᵀ in full precision: similarities lie close together, and bfloat16 has only two digits for them."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.T


def unit(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Vectors of length one, always made in float32."""
    return F.normalize(z.float(), dim=1)


def apart(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """1 − aᵀb of unit vectors as ½‖a − b‖²; a vector of zeros has no direction, and its inner products are 0."""
    dead = ~(a.any(1) & b.any(1))
    return torch.where(dead, 1.0, 0.5 * (a - b).square().sum(1))


class Similarity(nn.Module):
    """g(x, c) = scale · φ(x)ᵀψ(c); with `normalise`, φ̄ᵀψ̄ of unit vectors and no scale (supplement, "Normalization").

    With `small_init`, ĝ = g − g₀ (footnote to Eq. 9): frozen copies of both networks keep what g was at the start.
    """

    def __init__(
        self,
        phi: nn.Module,
        psi: nn.Module,
        *,
        normalise: bool = True,
        small_init: bool = False,
        scale: float = 1.0,
        pairs: Pairs = "all",
    ) -> None:
        super().__init__()
        self.phi, self.psi = phi, psi
        self.pairs: Pairs = pairs
        self.normalise, self.scale = normalise, 1.0 if normalise else scale
        self.start = nn.ModuleList(copy.deepcopy(net).requires_grad_(False) for net in (phi, psi) if small_init)

    def forward(self, x: Float[Tensor, "n *sample"], c: Float[Tensor, "m *sample"]) -> Float[Tensor, "n m"]:
        """g(x_i, c_j) for every pair, from one pass over each side."""
        return self.matched(self.left(x), self.right(c))

    def left(self, x: Float[Tensor, "n *sample"]) -> list[Float[Tensor, "n d"]]:
        """φ(x), and what it was at the start."""
        return [self._vectors(net, x) for net in (self.phi, *self.start[:1])]

    def right(self, c: Float[Tensor, "m *sample"]) -> list[Float[Tensor, "m d"]]:
        """ψ(c), and what it was at the start."""
        return [self._vectors(net, c) for net in (self.psi, *self.start[1:])]

    def matched(self, left: list[Tensor], right: list[Tensor]) -> Float[Tensor, "n m"]:
        """g for every pair of a left and a right side."""
        now, *before = (inner_products(a, b) for a, b in zip(left, right, strict=True))
        return self.scale * (now - before[0] if before else now)

    def confidence(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, " n"]:
        """g(x, x), the confidence term of Eq. 12."""
        return 1 - self.gap(x) if self.normalise else self.scale * self._paired(self.phi, self.psi, x) - self._before(x)

    def gap(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, " n"]:
        """1 − g(x, x) of a normalised model, as ½‖φ̄ − ψ̄‖²: the plain difference cancels in float32."""
        return apart(self._vectors(self.phi, x), self._vectors(self.psi, x)) + self._before(x)

    def _before(self, x: Tensor) -> Tensor | float:
        return self.scale * self._paired(self.start[0], self.start[1], x) if self.start else 0.0

    def _paired(self, phi: nn.Module, psi: nn.Module, x: Tensor) -> Tensor:
        return (self._vectors(phi, x) * self._vectors(psi, x)).sum(1)

    def _vectors(self, net: nn.Module, x: Tensor) -> Tensor:
        return unit(net(x)) if self.normalise else net(x)


def similarity_model(
    shape: tuple[int, ...], first: nn.Module, architecture: Architecture, generator: Generator | None
) -> Similarity:
    """φ and ψ for samples of this shape, each after the fixed module `first` (the standardisation)."""
    towers = [
        backbone(
            shape,
            channels=architecture.channels,
            hidden=architecture.hidden,
            outputs=architecture.outputs,
            generator=generator,
        )
        for _ in range(2)
    ]
    phi, psi = (nn.Sequential(first, tower) for tower in towers)
    return Similarity(
        phi, psi, normalise=architecture.normalise, small_init=architecture.small_init, pairs=architecture.pairs
    )
