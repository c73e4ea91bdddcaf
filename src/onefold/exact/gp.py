"""The law of an infinite ensemble of wide networks, in closed form (Section 2.2 and Appendix A)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from onefold.core.batches import batch_length, batch_slices
from onefold.core.memory import available, require
from onefold.errors import InputError
from onefold.exact.primal import PrimalGP
from onefold.types import Batch, FeatureKernel, Kernel

SLICE = 4096  # train points whose features are held at once


class Law(NamedTuple):
    """What the ensemble predicts at the queries: mean, covariance, and the share of variances clamped to zero."""

    mean: Float64[Tensor, "q outputs"]
    covariance: Float64[Tensor, "q q"]
    clamped: float

    @property
    def variance(self) -> Float64[Tensor, " q"]:
        return self.covariance.diagonal()


class Gram:
    """Θ(X, X) by its eigenvalues, so that singular matrices need no jitter and any training time is one formula.

    Gradient flow never moves the directions in which Θ(X, X) vanishes, and neither does the pseudo-inverse: duplicate
    points, constant features and fewer features than points are all handled by the same cut-off.
    """

    def __init__(self, matrix: Float[Tensor, "n n"]) -> None:
        _check(matrix, "the train points")
        precision = torch.finfo(matrix.dtype).eps
        matrix = matrix.double()
        self.values, self.vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        self.cutoff = len(matrix) * precision * float(self.values[-1].clamp(min=0))

    def weights(self, cross: Float[Tensor, "q n"], time: float = math.inf) -> Float64[Tensor, "q n"]:
        """A_t = Θ(x, X) Θ(X, X)⁻¹ (I − e^{−tΘ(X, X)}), the smoother of Eq. 22; t counts α · time."""
        if not time >= 0:
            raise InputError(f"the training time must be zero or more, not {time}")
        _check(cross, "the queries")
        kept = self.values > self.cutoff
        safe = torch.where(kept, self.values, 1.0)
        gain = 1 / safe if math.isinf(time) else -torch.expm1(-time * safe) / safe
        return (cross.double() @ self.vectors * torch.where(kept, gain, 0.0)) @ self.vectors.T


def ntk_gp(
    kernel: Kernel,
    x_train: Batch,
    y_train: Float[Tensor, "n *outputs"],
    x_query: Batch,
    *,
    nngp: Kernel | None = None,
    time: float = math.inf,
) -> Law:
    """Mean and covariance of an infinite ensemble at the queries, trained on (x_train, y_train).

    With `kernel` Θ alone: the NTK-GP, Eq. 6–7, which is the law of networks with the prior correction of He et al.
    (2020). With `nngp` κ as well, such as `kernels.infinite(…, kind="nngp")`: networks from a plain initialisation
    f₀ ~ N(0, κ). Training for a time t maps
    f_t(x) = f₀(x) − A_t (f₀(X) − Y) with A_t as in `Gram.weights` (Eq. 22), so that

        mean = A_t Y,    Cov = κ(x, x′) + A_t κ(X, X) A_t′ᵀ − (A_t κ(X, x′) + h.c.).

    This is Eq. 25 as an affine map of a Gaussian gives it: **the quadratic term is added**; the paper prints a minus.
    A kernel of fewer features than points is solved in its feature space.
    """
    y, n, q = _targets(y_train, batch_length(x_train)), batch_length(x_train), batch_length(x_query)
    if nngp is None and math.isinf(time) and isinstance(kernel, FeatureKernel):
        z_query = kernel.features(x_query)
        if z_query.shape[1] < n:
            _check(z_query, "the queries")
            _fits(0, q)
            primal = PrimalGP(z_query.shape[1])
            for part, targets in zip(batch_slices(x_train, SLICE), y.split(SLICE), strict=True):
                primal.add(kernel.features(part), targets)
            return _clamped(primal.mean(z_query), primal.covariance(z_query))
    _fits(n, q)
    theta_prior, theta_cross, theta_train = _matrices(kernel, x_query, x_train)
    weights = Gram(theta_train).weights(theta_cross, time)
    same = (theta_prior, theta_cross, theta_train)
    prior, cross, train = (k.double() for k in (same if nngp is None else _matrices(nngp, x_query, x_train)))
    mixed = weights @ cross.T
    return _clamped(weights @ y, prior + weights @ train @ weights.T - mixed - mixed.T)


def _matrices(kernel: Kernel, query: Batch, train: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """k(query, query), k(query, train), k(train, train) on the CPU, in float64 where the kernel has features."""
    if isinstance(kernel, FeatureKernel):
        z, w = (kernel.features(x).double().cpu() for x in (query, train))
        return z @ z.T, z @ w.T, w @ w.T
    return kernel(query, query).cpu(), kernel(query, train).cpu(), kernel(train, train).cpu()


def _check(values: Tensor, where: str) -> None:
    if not torch.isfinite(values).all():
        raise InputError(f"the kernel gave NaN or infinity on {where}")


def _targets(y: Tensor, n: int) -> Float64[Tensor, "n outputs"]:
    y = torch.as_tensor(y).double().cpu()
    if len(y) != n:
        raise InputError(f"there are {n} train points and {len(y)} targets")
    if not torch.isfinite(y).all():
        raise InputError("the targets hold NaN or infinity")
    return y.reshape(n, -1)


def _fits(n: int, q: int) -> None:
    require(
        8 * (4 * n * n + 4 * n * q + 4 * q * q),
        available(torch.device("cpu")),
        what=f"the exact answer for {n:,} train points and {q:,} queries",
        way_out="use fewer points or queries, or a kernel of fewer features than points, such as kernels.last_layer",
    )


def _clamped(mean: Tensor, covariance: Tensor) -> Law:
    covariance = (covariance + covariance.T) / 2
    negative = covariance.diagonal() < 0
    covariance.diagonal().clamp_(min=0)
    return Law(mean, covariance, float(negative.double().mean()))
