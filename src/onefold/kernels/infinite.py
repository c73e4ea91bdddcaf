"""Closed-form NNGP and NTK of infinitely wide fully connected networks."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from onefold.errors import InputError
from onefold.nn.nets import Activation
from onefold.types import Batch


class KernelPair(NamedTuple):
    """Two kernels of one network at the same pairs of inputs.

    Args:
        nngp: κ, the covariance of the outputs at initialisation (Eq. 24).
        ntk: Θ, the tangent kernel (Eq. 4).
    """

    nngp: Float64[Tensor, "..."]
    ntk: Float64[Tensor, "..."]


@dataclass(frozen=True)
class InfiniteMLP:
    """Kernel of an `NTKMLP` of infinite width.

    With K⁰ = w² xᵀx′/d + b² and Θ⁰ = K⁰, every hidden layer maps

        Kˡ⁺¹ = w² E[σ(u) σ(v)] + b²,    Θˡ⁺¹ = Kˡ⁺¹ + w² Θˡ · E[σ′(u) σ′(v)],    (u, v) ~ N(0, Kˡ).

    Args:
        hidden_layers: Number of hidden layers.
        activation: "relu" or "erf".
        w_std: Standard deviation w of the weights.
        b_std: Standard deviation b of the biases.
        kind: "ntk" or "nngp": which kernel a call returns.

    Raises:
        InputError: There is no closed form for these settings.
    """

    hidden_layers: int = 1
    activation: Activation = "relu"
    w_std: float = 1.0
    b_std: float = 0.0
    kind: Literal["ntk", "nngp"] = "ntk"

    def __post_init__(self) -> None:
        if self.hidden_layers < 0 or self.activation not in _EXPECTATIONS or self.kind not in KernelPair._fields:
            raise InputError(
                f"no closed form for {self.hidden_layers} hidden layers of {self.activation!r}, {self.kind}"
            )

    def __call__(self, x1: Batch, x2: Batch) -> Float64[Tensor, "n1 n2"]:
        """Return the kernel of every pair.

        Args:
            x1: Vectors [N1, D].
            x2: Vectors [N2, D].

        Returns:
            Kernel matrix [N1, N2].
        """
        return getattr(self.both(x1, x2), self.kind)

    def diag(self, x: Batch) -> Float64[Tensor, " n"]:
        """Return the kernel of every input with itself.

        Args:
            x: Vectors [N, D].

        Returns:
            Diagonal of the kernel matrix, [N].
        """
        squares = self._input_kernel(_rows(x).square().sum(1), _rows(x).shape[1])
        return getattr(self._propagate(squares, squares, squares), self.kind)

    def both(self, x1: Batch, x2: Batch) -> KernelPair:
        """Return both kernels of every pair.

        Args:
            x1: Vectors [N1, D].
            x2: Vectors [N2, D].

        Returns:
            κ and Θ, [N1, N2] each.
        """
        a, b = _rows(x1), _rows(x2)
        if a.shape[1] != b.shape[1]:
            raise InputError(f"the two sides have {a.shape[1]} and {b.shape[1]} features")
        d = a.shape[1]
        cross = self._input_kernel(a @ b.T, d)
        left, right = (self._input_kernel(v.square().sum(1), d) for v in (a, b))
        return self._propagate(cross, left[:, None], right[None, :])

    def _input_kernel(self, products: Tensor, inputs: int) -> Tensor:
        return self.w_std**2 * products / inputs + self.b_std**2

    def _propagate(self, cross: Tensor, left: Tensor, right: Tensor) -> KernelPair:
        expectation = _EXPECTATIONS[self.activation]
        ntk = cross
        for _ in range(self.hidden_layers):
            value, slope = expectation(cross, left, right)
            diagonals = [expectation(k, k, k)[0] for k in (left, right)]
            cross, left, right = (self.w_std**2 * k + self.b_std**2 for k in (value, *diagonals))
            ntk = cross + self.w_std**2 * ntk * slope
        return KernelPair(cross, ntk)


def infinite(
    hidden_layers: int = 1,
    *,
    activation: Activation = "relu",
    w_std: float = 1.0,
    b_std: float = 0.0,
    kind: Literal["ntk", "nngp"] = "ntk",
) -> InfiniteMLP:
    """Return the closed-form kernel of an infinitely wide MLP.

    Args:
        hidden_layers: Number of hidden layers.
        activation: "relu" or "erf".
        w_std: Standard deviation of the weights.
        b_std: Standard deviation of the biases.
        kind: "ntk" or "nngp". `both(x1, x2)` of the result returns the two.

    Returns:
        The kernel, for vectors [N, D].

    Raises:
        InputError: There is no closed form for these settings.
    """
    return InfiniteMLP(hidden_layers, activation, w_std, b_std, kind)


def _relu(cross: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[relu(u) relu(v)] and E[1(u > 0) 1(v > 0)] (Cho & Saul, 2009)."""
    norm = (left * right).sqrt()
    cosine = torch.where(norm > 0, cross / norm, 1.0).clamp(-1, 1)
    cosine = torch.where(cosine > 1 - 1e-14, 1.0, cosine)  # equal points up to rounding, which acos would amplify
    angle = cosine.acos()
    sine = (1 - cosine.square()).sqrt()
    return norm * (sine + (math.pi - angle) * cosine) / (2 * math.pi), (math.pi - angle) / (2 * math.pi)


def _erf(cross: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[erf(u) erf(v)] and E[erf′(u) erf′(v)] (Williams, 1997)."""
    norm = (1 + 2 * left) * (1 + 2 * right)
    value = 2 / math.pi * (2 * cross / norm.sqrt()).asin()
    return value, 4 / math.pi / (norm - 4 * cross.square()).sqrt()


_EXPECTATIONS = {"relu": _relu, "erf": _erf}


def _rows(x: Batch) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 2:
        raise InputError("closed-form kernels are for vectors [N, D]")
    return x.double()
