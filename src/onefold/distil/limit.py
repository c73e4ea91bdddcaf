"""The limit of the contextual model (Appendix B, Eq. 26): the reference for CSD at arbitrary queries."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from onefold.core.runtime import available, require
from onefold.errors import InputError
from onefold.exact.gp import Gram
from onefold.kernels import InfiniteMLP
from onefold.types import Kernel


@dataclass(frozen=True)
class PairKernel:
    """Tangent kernel of g(x, c) = φ(x)ᵀψ(c)/√K over pairs (x, c), for wide φ and ψ with many outputs K.

    The gradients are ∂g/∂θ_φ = ∇φ(x) ψ(c) / √K and ∂g/∂θ_ψ = ∇ψ(c) φ(x) / √K. Their inner products converge to

        Θ_g((x, c), (x′, c′)) = Θ_φ(x, x′) κ_ψ(c, c′) + κ_φ(x, x′) Θ_ψ(c, c′).

    Args:
        phi: Law of φ, from `kernels.infinite`.
        psi: Law of ψ.
    """

    phi: InfiniteMLP
    psi: InfiniteMLP

    def __call__(self, p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> Float64[Tensor, "n1 n2"]:
        """Return the kernel between two lists of pairs.

        Args:
            p: N1 inputs and N1 contexts.
            q: N2 inputs and N2 contexts.

        Returns:
            Kernel matrix [N1, N2].
        """
        features, contexts = self.phi.both(p[0], q[0]), self.psi.both(p[1], q[1])
        return features.ntk * contexts.nngp + features.nngp * contexts.ntk

    def diag(self, p: tuple[Tensor, Tensor]) -> Float64[Tensor, " n"]:
        """Return the kernel of each pair with itself.

        Args:
            p: N inputs and N contexts.

        Returns:
            Diagonal of the kernel matrix [N].
        """
        return torch.stack([self((x[None], c[None]), (x[None], c[None]))[0, 0] for x, c in zip(*p, strict=True)])


def all_pairs(x: Float[Tensor, "n d"], c: Float[Tensor, "m d"]) -> tuple[Tensor, Tensor]:
    """Return (x_i, c_j) for every i and j, in the order of i, then j.

    Args:
        x: N inputs.
        c: M contexts.

    Returns:
        N · M inputs and as many contexts.
    """
    return x.repeat_interleave(len(c), 0), c.repeat(len(x), 1)


def check_pairs(count: int) -> None:
    """Raise NotEnoughMemoryError if the kernel matrix over so many pairs does not fit into memory."""
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
    """Return the trained contextual model at the queries, g(x, c) = Θ_g(xᶜ, Xᶜ) Θ_g(Xᶜ, Xᶜ)⁻¹ Θ(Xᶜ) (Eq. 26).

    Args:
        pair_kernel: Tangent kernel Θ_g of pairs: `PairKernel` for the infinite limit, or `kernels.empirical_ntk` of a
            module that takes (x, c).
        labels: Kernel values Θ(Xᶜ) of the train pairs [T].
        pairs: T train inputs and T contexts.
        queries: Q inputs and Q contexts.
        time: Training time from ĝ₀ = 0; infinite by default.

    Returns:
        Outputs at the queries [Q].

    Raises:
        InputError: If the numbers of pairs and labels differ, or the time is negative.
        NotEnoughMemoryError: If the kernel matrix does not fit into memory.
    """
    if labels.shape != pairs[0].shape[:1]:
        raise InputError(
            f"labels: shape {tuple(labels.shape)}, but there are {len(pairs[0])} pairs. Pass one for each."
        )
    check_pairs(len(labels))
    gram = Gram(pair_kernel(pairs, pairs))
    return gram.weights(pair_kernel(queries, pairs), time) @ labels.double()
