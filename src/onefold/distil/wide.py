"""The contextual model as in the theory: wide networks, full-batch gradient descent, all pairs."""

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
    """Return the model ĝ(x, c) = (φ(x)ᵀψ(c) − φ₀(x)ᵀψ₀(c)) / √K, whose tangent kernel tends to PairKernel(law, law).

    Args:
        inputs: Number of features of an input.
        law: Activation, depth and scales of both networks.
        width: Width of the hidden layers, and number of outputs K.
        generator: Source of the initial parameters.

    Returns:
        The model.
    """
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
    """Minimise ½ Σ (ĝ(x_i, c_j) − shrink · Θ(x_i, c_j))² over all pairs by gradient descent, in place.

    The learning rate is 1/λ_max of the pair kernel over the pairs.

    Args:
        model: Model to train.
        pair_kernel: Tangent kernel of the model.
        labels: Kernel Θ of the labels.
        x: N inputs [N, D].
        c: M contexts [M, D].
        steps: Steps of gradient descent.
        momentum: Momentum from 0 to below 1.
        shrink: Factor of the labels; see `distil_known_queries`. The trained model returns shrink · Θ.
        label: Name in the progress display and in messages.

    Returns:
        Relative error on the labels, ‖ĝ − labels‖ / ‖labels‖.

    Raises:
        NotEnoughMemoryError: If the kernel matrix over the pairs does not fit into memory.
        TrainingError: If the training diverges.
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
        error = float((model(x, c) - target).norm() / target.norm())
    if not math.isfinite(error):
        raise TrainingError(f"{label}: training diverged. Use a smaller momentum or a wider model.")
    return error


def _largest_eigenvalue(matrix: Float[Tensor, "n n"], iterations: int = 50) -> float:
    """Return the largest eigenvalue, by power iteration from a random vector."""
    vector = torch.randn(len(matrix), dtype=matrix.dtype, generator=Generator().manual_seed(0))
    for _ in range(iterations):
        vector = matrix @ vector
        vector = vector / vector.norm()
    return float(vector @ matrix @ vector)
