"""The contextual regression model g(x, c) = φ(x)ᵀψ(c) of Eq. 13."""

import copy
from dataclasses import dataclass
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import MAX_SIZE, check_choice, check_integer, check_sizes
from onefold.distil.loss import PAIRS, Pairs, pair_loss
from onefold.nn.nets import backbone


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Networks φ and ψ, and the pairs that they are trained on (paper, Table "hpsettingsood").

    Args:
        channels: Channels of the convolutional stages; for images only.
        hidden: Widths of the hidden layers.
        outputs: Number of outputs of φ and ψ.
        normalise: Divide φ and ψ by their lengths, so that g is a cosine similarity.
        small_init: Subtract the networks at initialisation, so that training starts from zero (footnote to Eq. 9).
        pairs: Pairs of a minibatch in the loss: "all", or "random" for N random ones (Eq. 15 as printed).

    Raises:
        InputError: If a value is out of its range.
    """

    channels: tuple[int, ...] = (32,)
    hidden: tuple[int, ...] = (256, 256)
    outputs: int = 256
    normalise: bool = True
    small_init: bool = False
    pairs: Pairs = "all"

    def __post_init__(self) -> None:
        check_sizes(self.channels, "channels")
        check_sizes(self.hidden, "hidden")
        check_integer(self.outputs, "outputs", 1, MAX_SIZE)
        check_choice(self.pairs, "pairs", PAIRS)


def inner_products(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """Return a bᵀ in full precision: bfloat16 has too few digits for similarities that are close together."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.T


def unit(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return vectors of length one, computed in float32."""
    return F.normalize(z.float(), dim=1)


def half_squared_distance(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Return ½‖a − b‖², which is 1 − aᵀb for unit vectors; 1 if a vector is zero, whose inner products are 0."""
    is_zero = ~(a.any(1) & b.any(1))
    return torch.where(is_zero, 1.0, 0.5 * (a - b).square().sum(1))


class Similarity(nn.Module):
    """Contextual regression model g(x, c) = scale · φ(x)ᵀψ(c) of Eq. 13.

    Args:
        phi: Network φ of the inputs.
        psi: Network ψ of the contexts.
        normalise: Use unit vectors, g(x, c) = φ̄(x)ᵀψ̄(c), and ignore the scale (supplement, "Normalization").
        small_init: Use ĝ = g − g₀ with frozen copies of both networks (footnote to Eq. 9).
        scale: Factor of the inner product.
        pairs: Pairs of a minibatch in the loss, "all" or "random".
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
        """Return g(x_i, c_j) for every pair, from one pass over each side.

        Args:
            x: N inputs.
            c: M contexts.

        Returns:
            Outputs [N, M].
        """
        return self.match(self.left(x), self.right(c))

    def left(self, x: Float[Tensor, "n *sample"]) -> list[Float[Tensor, "n d"]]:
        """Return φ(x) and, with `small_init`, φ₀(x).

        Args:
            x: N inputs.

        Returns:
            One or two matrices [N, D], of unit vectors with `normalise`.
        """
        return list(map(self._vectors, (self.phi, *self.start[:1]), repeat(x)))

    def right(self, c: Float[Tensor, "m *sample"]) -> list[Float[Tensor, "m d"]]:
        """Return ψ(c) and, with `small_init`, ψ₀(c).

        Args:
            c: M contexts.

        Returns:
            One or two matrices [M, D], of unit vectors with `normalise`.
        """
        return list(map(self._vectors, (self.psi, *self.start[1:]), repeat(c)))

    def match(self, left: list[Tensor], right: list[Tensor]) -> Float[Tensor, "n m"]:
        """Return g for every pair of an output of `left` and an output of `right`.

        Args:
            left: Result of `left` for N inputs.
            right: Result of `right` for M contexts.

        Returns:
            Outputs [N, M].
        """
        current, *initial = (inner_products(a, b) for a, b in zip(left, right, strict=True))
        return self.scale * (current - initial[0] if initial else current)

    def loss(self, left: list[Tensor], right: list[Tensor], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
        """Return CSD's loss of a minibatch (Eq. 15), over the pairs that `pairs` names.

        Args:
            left: Result of `left` for N inputs.
            right: Result of `right` for their N contexts.
            labels: Kernel values Θ(x_i, c_j) [N, N].

        Returns:
            Scalar loss.
        """
        return pair_loss(self.pairs, self.match(left, right), labels)

    def confidence(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, " n"]:
        """Return g(x, x), the confidence term of Eq. 12.

        Args:
            x: N inputs.

        Returns:
            Confidence [N].
        """
        return (
            1 - self.gap(x)
            if self.normalise
            else self.scale * self._match_pairwise(self.phi, self.psi, x) - self._initial(x)
        )

    def gap(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, " n"]:
        """Return 1 − g(x, x) of a normalised model, as ½‖φ̄ − ψ̄‖² because the difference cancels in float32.

        Args:
            x: N inputs.

        Returns:
            Relative variance [N].
        """
        return half_squared_distance(self._vectors(self.phi, x), self._vectors(self.psi, x)) + self._initial(x)

    def _initial(self, x: Tensor) -> Tensor | float:
        return self.scale * self._match_pairwise(self.start[0], self.start[1], x) if self.start else 0.0

    def _match_pairwise(self, phi: nn.Module, psi: nn.Module, x: Tensor) -> Tensor:
        return (self._vectors(phi, x) * self._vectors(psi, x)).sum(1)

    def _vectors(self, net: nn.Module, x: Tensor) -> Tensor:
        return unit(net(x)) if self.normalise else net(x)


def similarity_model(
    shape: tuple[int, ...], first: nn.Module, architecture: Architecture, generator: Generator | None
) -> Similarity:
    """Return the model with new networks φ and ψ.

    Args:
        shape: Shape of one sample: (D,) or (C, H, W).
        first: Fixed module before both networks, such as the standardisation.
        architecture: Sizes of the networks.
        generator: Source of the initial weights; None leaves them unset.

    Returns:
        The model, with φ and ψ of the same architecture and different weights.
    """
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
