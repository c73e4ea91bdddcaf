"""The law of an infinite ensemble of wide networks, in closed form (Section 2.2 and Appendix A)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from onefold.core.batches import batch_length, batch_slices
from onefold.core.runtime import available, require
from onefold.errors import InputError
from onefold.exact.primal import PrimalGP
from onefold.types import Batch, FeatureKernel, Kernel

SLICE = 4096  # train points whose features are in memory at once


class Law(NamedTuple):
    """Predictions of an infinite ensemble at the queries.

    Attributes:
        mean: Mean prediction [Q, outputs].
        covariance: Covariance between the queries [Q, Q], the same for every output.
        clamped: Share of the variances that were negative, by rounding, and were set to zero.
    """

    mean: Float64[Tensor, "q outputs"]
    covariance: Float64[Tensor, "q q"]
    clamped: float

    @property
    def variance(self) -> Float64[Tensor, " q"]:
        """Variance at each query [Q]."""
        return self.covariance.diagonal()


class Gram:
    """Kernel matrix Θ(X, X) of the train points by its eigenvalues.

    Eigenvalues make singular matrices work without jitter, and give every training time in one formula. Gradient flow
    never moves along directions in which Θ(X, X) is zero, and neither does the pseudo-inverse. So one cut-off handles
    duplicate points, constant features and fewer features than points.

    Args:
        matrix: Θ(X, X) [N, N].

    Raises:
        InputError: If a value is NaN or infinite.
    """

    def __init__(self, matrix: Float[Tensor, "n n"]) -> None:
        _check_finite(matrix, "the train points")
        precision = torch.finfo(matrix.dtype).eps
        matrix = matrix.double()
        self.values, self.vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        self.cutoff = len(matrix) * precision * float(self.values[-1].clamp(min=0))

    def weights(self, cross: Float[Tensor, "q n"], time: float = math.inf) -> Float64[Tensor, "q n"]:
        """Return A_t = Θ(x, X) Θ(X, X)⁻¹ (I − e^{−tΘ(X, X)}), the smoother of Eq. 22.

        Args:
            cross: Θ(x, X) between queries and train points [Q, N].
            time: Training time t, the learning rate times the number of steps; infinite by default.

        Returns:
            Weights of the train targets for each query [Q, N].

        Raises:
            InputError: If the time is negative, or a value is NaN or infinite.
        """
        if not time >= 0:
            raise InputError(f"time: {time} is not supported. Use zero or a positive number.")
        _check_finite(cross, "the queries")
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
    """Return mean and covariance of an infinite ensemble of networks trained on (x_train, y_train).

    With the kernel Θ only, this is the NTK-GP of Eq. 6 and 7, the law of networks with the prior correction of He et
    al. (2020). With the kernel κ (`nngp`) too, it is the law of networks from a plain initialisation f₀ ~ N(0, κ).
    Training for a time t maps f_t(x) = f₀(x) − A_t (f₀(X) − Y) with A_t as in `Gram.weights` (Eq. 22), so that

        mean = A_t Y,    Cov = κ(x, x′) + A_t κ(X, X) A_t′ᵀ − (A_t κ(X, x′) + h.c.).

    This is Eq. 25 as the affine map of a Gaussian: **the quadratic term is added**, where the paper prints a minus.
    A kernel with fewer features than points is solved in its feature space.

    Args:
        kernel: The tangent kernel Θ.
        x_train: N train inputs.
        y_train: N targets [N] or [N, outputs].
        x_query: Q queries.
        nngp: The kernel κ of the initial networks, such as `kernels.infinite(…, kind="nngp")`; None for the NTK-GP.
        time: Training time t; infinite by default.

    Returns:
        Mean, covariance, and the share of clamped variances.

    Raises:
        InputError: If the numbers of points and targets differ, a value is NaN or infinite, or the time is negative.
        NotEnoughMemoryError: If the matrices do not fit into memory.
    """
    y, n, q = _check_targets(y_train, batch_length(x_train)), batch_length(x_train), batch_length(x_query)
    if nngp is None and math.isinf(time) and isinstance(kernel, FeatureKernel):
        z_query = kernel.features(x_query)
        if z_query.shape[1] < n:
            _check_finite(z_query, "the queries")
            _check_memory(0, q)
            primal = PrimalGP(z_query.shape[1])
            for part, targets in zip(batch_slices(x_train, SLICE), y.split(SLICE), strict=True):
                primal.add(kernel.features(part), targets)
            return _clamp(primal.mean(z_query), primal.covariance(z_query))
    _check_memory(n, q)
    theta_prior, theta_cross, theta_train = _matrices(kernel, x_query, x_train)
    weights = Gram(theta_train).weights(theta_cross, time)
    same = (theta_prior, theta_cross, theta_train)
    prior, cross, train = (k.double() for k in (same if nngp is None else _matrices(nngp, x_query, x_train)))
    mixed = weights @ cross.T
    return _clamp(weights @ y, prior + weights @ train @ weights.T - mixed - mixed.T)


def _matrices(kernel: Kernel, query: Batch, train: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return k(query, query), k(query, train), k(train, train) on the CPU; float64 for a kernel with features."""
    if isinstance(kernel, FeatureKernel):
        z, w = (kernel.features(x).double().cpu() for x in (query, train))
        return z @ z.T, z @ w.T, w @ w.T
    return kernel(query, query).cpu(), kernel(query, train).cpu(), kernel(train, train).cpu()


def _check_finite(values: Tensor, where: str) -> None:
    if not torch.isfinite(values).all():
        raise InputError(f"kernel: NaN or infinity for {where}. Check the inputs.")


def _check_targets(y: Tensor, n: int) -> Float64[Tensor, "n outputs"]:
    y = torch.as_tensor(y).double().cpu()
    if len(y) != n:
        raise InputError(f"y_train: {len(y)} targets, but there are {n} train points. Pass one for each.")
    if not torch.isfinite(y).all():
        raise InputError("y_train: NaN or infinity. Remove or replace these targets.")
    return y.reshape(n, -1)


def _check_memory(n: int, q: int) -> None:
    require(
        8 * (4 * n * n + 4 * n * q + 4 * q * q),
        available(torch.device("cpu")),
        what=f"the exact answer for {n:,} train points and {q:,} queries",
        way_out="use fewer points or queries, or a kernel of fewer features than points, such as kernels.last_layer",
    )


def _clamp(mean: Tensor, covariance: Tensor) -> Law:
    """Return the law with a symmetric covariance and variances of at least zero."""
    covariance = (covariance + covariance.T) / 2
    negative = covariance.diagonal() < 0
    covariance.diagonal().clamp_(min=0)
    return Law(mean, covariance, float(negative.double().mean()))
