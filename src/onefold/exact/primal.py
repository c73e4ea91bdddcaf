"""Gaussian-process regression in feature space: one pass over the data, in any batches, in any order."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.core.memory import available, require
from onefold.errors import InputError


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
            6 * 8 * features**2,
            available(self.device),
            what=f"a covariance of {features:,} features",
            way_out="use fewer features (width=…)",
        )
        self._noise, self.count = noise, 0
        self.gram = torch.zeros(features, features, dtype=torch.float64, device=self.device)
        self.moment: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None

    def add(self, z: Float[Tensor, "n d"], y: Float[Tensor, "n outputs"] | None = None) -> "PrimalGP":
        """Take in more data. Batches may come at any time; the answer is that of all of them at once."""
        if not torch.isfinite(z).all() or (y is not None and not torch.isfinite(y).all()):
            raise InputError("the features or targets hold NaN or infinity")
        if z.shape[1:] != self.gram.shape[1:]:
            raise InputError(f"the features have shape {tuple(z.shape)}, [N, {len(self.gram)}] was expected")
        outputs = None if self.moment is None else self.moment.shape[1]
        if y is not None and (y.ndim != 2 or len(y) != len(z) or outputs not in (None, y.shape[1])):
            raise InputError(
                f"the targets have shape {tuple(y.shape)}, [{len(z)}, {outputs or 'outputs'}] was expected"
            )
        if self.count and (y is None) != (self.moment is None):
            raise InputError("targets must come with every batch or with none")
        z = self._double(z)
        self.gram += z.T @ z
        if y is not None:
            moment = z.T @ self._double(y)
            self.moment = moment if self.moment is None else self.moment + moment
        self.count += len(z)
        self._factors = None
        return self

    @classmethod
    def of(cls, gram: Float64[Tensor, "d d"], noise: float) -> "PrimalGP":
        """Of a given S."""
        self = cls(len(gram), noise, gram.device)
        self.gram = gram
        return self

    @property
    def root(self) -> Float64[Tensor, "d s"]:
        """C with CCᵀ = the covariance of w."""
        return self._solved()[1]

    @property
    def noise(self) -> float:
        return self._noise

    def grown(self, parts: Iterable[Float[Tensor, "n d"]], noise: float) -> "PrimalGP":
        """A copy that has taken in more features and assumes another noise; this one stays as it is."""
        other = PrimalGP(len(self.gram), noise, self.device)
        other.gram.copy_(self.gram)
        other.count, other.moment = self.count, self.moment
        for part in parts:
            other.add(part)
        return other

    def factorised(self) -> "PrimalGP":
        """This, with the work that the first answer would do already done."""
        self._solved()
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
            identity = torch.eye(len(self.gram), dtype=torch.float64, device=self.device)
            lower, failed = torch.linalg.cholesky_ex(self.gram + self.noise * identity)
            if self.noise == 0 or failed:
                self._factors = self._by_eigenvalues()
            else:
                root = torch.linalg.solve_triangular(lower, identity, upper=False).T
                self._factors = root, root * math.sqrt(self.noise)
        return self._factors

    def _by_eigenvalues(self) -> tuple[Tensor, Tensor]:
        """For no noise, or too little for a Cholesky factor: what is zero but for rounding counts as zero."""
        values, vectors = torch.linalg.eigh(self.gram)
        seen = values > len(values) * torch.finfo(torch.float64).eps * values[-1].clamp(min=0)
        root = vectors[:, seen] / (values[seen] + self.noise).sqrt()
        return root, torch.cat([vectors[:, ~seen], root * math.sqrt(self.noise)], dim=1)

    def _double(self, t: Tensor) -> Tensor:
        return t.to(self.device, torch.float64)


def last_layer_share(
    known: Float[Tensor, "n d"], query: Float[Tensor, "q d"], noise: float = 1e-3
) -> Float64[Tensor, " q"]:
    """The share of the prior variance that is left: λ φ̄ᵀ(Φ̄ᵀΦ̄ + λI)⁻¹φ̄ with features of unit length, λ = noise · N/D."""
    z, d = F.normalize(known, dim=1), known.shape[1]
    return PrimalGP(d, noise * len(z) / d, z.device).add(z).variance(F.normalize(query, dim=1))
