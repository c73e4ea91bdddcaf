"""The contextual model in the regime of the theory: wide networks, full-batch gradient descent, all pairs."""

import math

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from onefold.distil.limit import PairKernel, all_pairs, check_pairs
from onefold.distil.model import Similarity
from onefold.errors import TrainingError
from onefold.kernels import InfiniteMLP
from onefold.nn.nets import NTKMLP
from onefold.nn.train import descend, show_updates
from onefold.types import Kernel


def wide_similarity(inputs: int, law: InfiniteMLP, width: int, generator: Generator) -> Similarity:
    """ĝ(x, c) = (φ(x)ᵀψ(c) − φ₀(x)ᵀψ₀(c)) / √K with K = width, whose tangent kernel tends to PairKernel(law, law)."""
    phi, psi = (
        NTKMLP(
            inputs,
            [width] * law.hidden_layers,
            width,
            activation=law.activation,
            w_std=law.w_std,
            b_std=law.b_std,
            generator=generator,
        )
        for _ in range(2)
    )
    return Similarity(phi, psi, normalise=False, small_init=True, scale=1 / math.sqrt(width))


def distil_wide(
    model: Similarity,
    pair_kernel: PairKernel,
    labels: Kernel,
    x: Float[Tensor, "n d"],
    c: Float[Tensor, "m d"],
    *,
    steps: int,
    momentum: float = 0.95,
    shrink: float = 1.0,
    label: str = "CSD",
) -> float:
    """Gradient descent on ½ Σ (ĝ(x_i, c_j) − shrink · Θ(x_i, c_j))² over all pairs, in place; the share left unlearned.

    The rate is 1/λ_max of Θ_g over the pairs. What is returned is ‖ĝ − labels‖ / ‖labels‖; for `shrink` see
    `distil_known_queries`: the model then gives shrink times the similarity.
    """
    check_pairs(len(x) * len(c))
    pairs = all_pairs(x, c)
    rate = 1 / _largest_eigenvalue(pair_kernel(pairs, pairs))
    target = shrink * labels(x, c).to(x)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss() -> Tensor:
        return 0.5 * (model(x, c) - target).square().sum()

    for _ in show_updates(descend(parameters, loss, steps=steps, rate=rate, momentum=momentum), steps, label):
        pass
    with torch.no_grad():
        left = float((model(x, c) - target).norm() / target.norm())
    if not math.isfinite(left):
        raise TrainingError(f"{label}: training diverged; use a smaller momentum, or a wider model")
    return left


def _largest_eigenvalue(matrix: Float[Tensor, "n n"], iterations: int = 50) -> float:
    """By power iteration from a random vector."""
    vector = torch.randn(len(matrix), dtype=matrix.dtype, generator=Generator().manual_seed(0))
    for _ in range(iterations):
        vector = matrix @ vector
        vector = vector / vector.norm()
    return float(vector @ matrix @ vector)
