"""What the contextual model converges to (Appendix B, Eq. 26): the judge of CSD for arbitrary queries."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from onefold.core.memory import available, require
from onefold.errors import InputError
from onefold.exact.gp import Gram
from onefold.kernels import InfiniteMLP
from onefold.types import Kernel


@dataclass(frozen=True)
class PairKernel:
    """The tangent kernel of g(x, c) = φ(x)ᵀψ(c)/√K over pairs, for wide φ and ψ of many outputs K.

    ∂g/∂θ_f = ∇φ(x) ψ(c) / √K and ∂g/∂θ_c = ∇ψ(c) φ(x) / √K, whose inner products converge to

        Θ_g((x, c), (x′, c′)) = Θ_φ(x, x′) κ_ψ(c, c′) + κ_φ(x, x′) Θ_ψ(c, c′).
    """

    phi: InfiniteMLP
    psi: InfiniteMLP

    def __call__(self, p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> Float64[Tensor, "n1 n2"]:
        features, contexts = self.phi.both(p[0], q[0]), self.psi.both(p[1], q[1])
        return features.ntk * contexts.nngp + features.nngp * contexts.ntk

    def diag(self, p: tuple[Tensor, Tensor]) -> Float64[Tensor, " n"]:
        return torch.stack([self((x[None], c[None]), (x[None], c[None]))[0, 0] for x, c in zip(*p, strict=True)])


def all_pairs(x: Float[Tensor, "n d"], c: Float[Tensor, "m d"]) -> tuple[Tensor, Tensor]:
    """(x_i, c_j) for every i and j, i slowest."""
    return x.repeat_interleave(len(c), 0), c.repeat(len(x), 1)


def check_pairs(count: int) -> None:
    """Refuse a matrix over so many pairs that it would not fit."""
    require(
        4 * 8 * count**2,
        available(torch.device("cpu")),
        what=f"the tangent kernel of {count:,} pairs of points and contexts",
        way_out="use fewer points or contexts",
    )


def contextual_limit(
    pair_kernel: Kernel,
    labels: Float[Tensor, " t"],
    pairs: tuple[Tensor, Tensor],
    queries: tuple[Tensor, Tensor],
    *,
    time: float = math.inf,
) -> Float64[Tensor, " q"]:
    """Eq. 26: g(x, c) = Θ_g(xᶜ, Xᶜ) Θ_g(Xᶜ, Xᶜ)⁻¹ Θ(Xᶜ) at the queries, after training on `pairs` from ĝ₀ = 0.

    `pair_kernel` is `PairKernel` for the infinite limit, or `kernels.empirical_ntk` of a module that takes (x, c).
    """
    if labels.shape != pairs[0].shape[:1]:
        raise InputError(f"there are {len(pairs[0])} pairs and labels of shape {tuple(labels.shape)}")
    check_pairs(len(labels))
    gram = Gram(pair_kernel(pairs, pairs))
    return gram.weights(pair_kernel(queries, pairs), time) @ labels.double()
