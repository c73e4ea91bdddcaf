"""Gaussian-process regression in feature space: one pass over the data, in any batches, in any order."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from onefold.errors import InputError
from onefold.memory import available, require


class PrimalGP:
    """f = φ(x)ᵀw with w ~ N(0, I), seen through noise of variance `noise`; sums are kept in float64.

    With S = ΦᵀΦ: mean = φᵀ(S + noise·I)⁻¹ΦᵀY and covariance = noise · φᵀ(S + noise·I)⁻¹φ′. Without noise the limit is
    taken: the covariance is φᵀPφ′ with P the projection onto what no train point has shown, which is Eq. 7.
    """

    def __init__(self, features: int, noise: float = 0.0, device: torch.device | str = "cpu") -> None:
        if not 0 <= noise < math.inf:
            raise InputError(f"the noise must be zero or positive, not {noise}")
        self.device = torch.device(device)
        require(
            4 * 8 * features**2,
            available(self.device),
            what=f"a covariance of {features:,} features",
            way_out="use fewer features (width=…)",
        )
        self.noise, self.count = noise, 0
        self.gram = torch.zeros(features, features, dtype=torch.float64, device=self.device)
        self.moment: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None

    def add(self, z: Float[Tensor, "n d"], y: Float[Tensor, "n outputs"] | None = None) -> "PrimalGP":
        """Take in more data. Batches may come at any time; the answer is that of all of them at once."""
        if not torch.isfinite(z).all():
            raise InputError("the features hold NaN or infinity")
        z = self._double(z)
        self.gram += z.T @ z
        if y is not None:
            moment = z.T @ self._double(y)
            self.moment = moment if self.moment is None else self.moment + moment
        self.count += len(z)
        self._factors = None
        return self

    def mean(self, z: Float[Tensor, "q d"]) -> Float64[Tensor, "q outputs"]:
        if self.moment is None:
            raise InputError("no targets were given, so there is no mean to predict")
        inverse_root, _ = self._solved()
        return self._double(z) @ (inverse_root @ (inverse_root.T @ self.moment))

    def covariance(self, z: Float[Tensor, "q d"]) -> Float64[Tensor, "q q"]:
        rows = self._double(z) @ self._solved()[1]
        return rows @ rows.T

    def variance(self, z: Float[Tensor, "q d"]) -> Float64[Tensor, " q"]:
        """The diagonal of the covariance: a sum of squares, so it cannot be negative."""
        return (self._double(z) @ self._solved()[1]).square().sum(1)

    def _solved(self) -> tuple[Float64[Tensor, "d r"], Float64[Tensor, "d s"]]:
        """R with RRᵀ = (S + noise·I)⁻¹, or the pseudo-inverse of S, and C with CCᵀ = the covariance of w."""
        if self._factors is None:
            self._factors = self._with_noise() if self.noise > 0 else self._without_noise()
        return self._factors

    def _with_noise(self) -> tuple[Tensor, Tensor]:
        identity = torch.eye(len(self.gram), dtype=torch.float64, device=self.device)
        lower = torch.linalg.cholesky(self.gram + self.noise * identity)
        root = torch.linalg.solve_triangular(lower, identity, upper=False).T
        return root, root * math.sqrt(self.noise)

    def _without_noise(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.gram)
        seen = values > len(values) * torch.finfo(torch.float64).eps * values[-1].clamp(min=0)
        return vectors[:, seen] / values[seen].sqrt(), vectors[:, ~seen]

    def _double(self, t: Tensor) -> Tensor:
        return t.to(self.device, torch.float64)
