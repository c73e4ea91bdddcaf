"""Gaussian-process regression in feature space, in one pass over the data."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.core.runtime import available, require
from onefold.errors import InputError


class PrimalGP:
    """Gaussian process f = φ(x)ᵀw with w ~ N(0, I), observed with noise; sums are kept in float64.

    With S = ΦᵀΦ: mean = φᵀ(S + noise·I)⁻¹ΦᵀY and covariance = noise · φᵀ(S + noise·I)⁻¹φ′. Without noise it is the
    limit φᵀPφ′ with P the projection onto the complement of the train features, which is Eq. 7.

    Args:
        features: Number of features D.
        noise: Variance of the noise; 0 for the limit.
        device: Device of the sums.

    Raises:
        InputError: If the noise is negative or not finite.
        NotEnoughMemoryError: If matrices [D, D] do not fit into memory.
    """

    def __init__(self, features: int, noise: float = 0.0, device: torch.device | str = "cpu") -> None:
        if not 0 <= noise < math.inf:
            raise InputError(f"noise: {noise} is not supported. Use zero or a positive number.")
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
        """Add a batch of train data; the order and division into batches do not matter.

        Args:
            z: Features [N, D].
            y: Targets [N, outputs]; None if only the covariance is needed.

        Returns:
            This object.

        Raises:
            InputError: If a shape is wrong, a value is NaN or infinite, or only some batches have targets.
        """
        if not torch.isfinite(z).all() or (y is not None and not torch.isfinite(y).all()):
            raise InputError("features or targets: NaN or infinity. Remove or replace these samples.")
        if z.shape[1:] != self.gram.shape[1:]:
            raise InputError(f"features: shape {tuple(z.shape)}. Pass [N, {len(self.gram)}].")
        outputs = None if self.moment is None else self.moment.shape[1]
        if y is not None and (y.ndim != 2 or len(y) != len(z) or outputs not in (None, y.shape[1])):
            raise InputError(f"targets: shape {tuple(y.shape)}. Pass [{len(z)}, {outputs or 'outputs'}].")
        if self.count and (y is None) != (self.moment is None):
            raise InputError("targets: missing in some batches. Pass them with every batch or with none.")
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
        """Return the process with these sums, without targets.

        Args:
            gram: S = ΦᵀΦ [D, D].
            noise: Variance of the noise.

        Returns:
            The process.
        """
        self = cls(len(gram), noise, gram.device)
        self.gram = gram
        return self

    @property
    def root(self) -> Float64[Tensor, "d s"]:
        """C [D, S] with CCᵀ = the covariance of w."""
        return self._factorise()[1]

    @property
    def noise(self) -> float:
        """Variance of the noise."""
        return self._noise

    def mean(self, z: Float[Tensor, "q d"]) -> Float64[Tensor, "q outputs"]:
        """Return the mean at queries.

        Args:
            z: Features of the queries [Q, D].

        Returns:
            Mean [Q, outputs].

        Raises:
            InputError: If no targets were added.
        """
        if self.moment is None:
            raise InputError("mean: no targets were added. Pass y to add().")
        inverse_root, _ = self._factorise()
        return self._double(z) @ (inverse_root @ (inverse_root.T @ self.moment))

    def covariance(self, z: Float[Tensor, "q d"]) -> Float64[Tensor, "q q"]:
        """Return the covariance between queries.

        Args:
            z: Features of the queries [Q, D].

        Returns:
            Covariance [Q, Q].
        """
        rows = self._double(z) @ self._factorise()[1]
        return rows @ rows.T

    def variance(self, z: Float[Tensor, "q d"]) -> Float64[Tensor, " q"]:
        """Return the diagonal of the covariance, as a sum of squares that cannot be negative.

        Args:
            z: Features of the queries [Q, D].

        Returns:
            Variances [Q].
        """
        return (self._double(z) @ self._factorise()[1]).square().sum(1)

    def _factorise(self) -> tuple[Float64[Tensor, "d r"], Float64[Tensor, "d s"]]:
        """Return R with RRᵀ = (S + noise·I)⁻¹, or the pseudo-inverse of S, and C with CCᵀ = the covariance of w."""
        if self._factors is None:
            identity = torch.eye(len(self.gram), dtype=torch.float64, device=self.device)
            lower, failed = torch.linalg.cholesky_ex(self.gram + self.noise * identity)
            if self.noise == 0 or failed:
                self._factors = self._factorise_by_eigenvalues()
            else:
                root = torch.linalg.solve_triangular(lower, identity, upper=False).T
                self._factors = root, root * math.sqrt(self.noise)
        return self._factors

    def _factorise_by_eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Return the factors without noise, or with too little for Cholesky; tiny eigenvalues count as zero."""
        values, vectors = torch.linalg.eigh(self.gram)
        positive = values > len(values) * torch.finfo(torch.float64).eps * values[-1].clamp(min=0)
        root = vectors[:, positive] / (values[positive] + self.noise).sqrt()
        return root, torch.cat([vectors[:, ~positive], root * math.sqrt(self.noise)], dim=1)

    def _double(self, t: Tensor) -> Tensor:
        return t.to(self.device, torch.float64)


def last_layer_share(
    train: Float[Tensor, "n d"], query: Float[Tensor, "q d"], noise: float = 1e-3
) -> Float64[Tensor, " q"]:
    """Return the share of prior variance that is left: λ φ̄ᵀ(Φ̄ᵀΦ̄ + λI)⁻¹φ̄ for unit features, λ = noise · N/D."""
    z, d = F.normalize(train, dim=1), train.shape[1]
    return PrimalGP(d, noise * len(z) / d, z.device).add(z).variance(F.normalize(query, dim=1))
