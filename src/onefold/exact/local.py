"""The exact variance of Eq. 7 on a query's nearest training points: nothing is trained.

The kernel of unit vectors is k(u, v) = exp((uᵀv − 1) / τ), an exponential of the cosine similarity. For a query u with
its K nearest training points U, and the ridge ε,

    variance(u) = 1 − bᵀ (K + εI)⁻¹ b,    K_ij = k(U_i, U_j),  b_i = k(u, U_i).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

NEIGHBOURS = 50
RIDGE = 0.01
STEPS = 10
"""Steps of conjugate gradients. With these defaults the ranking agrees with a direct solve within 0.1 AUROC."""
TINY = 1e-20


def unit_vectors(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return z / ‖z‖; zero stays zero."""
    return F.normalize(z, dim=1, eps=TINY)


def local_bandwidth(mean: Float[Tensor, " d"], count: int) -> float:
    """Return τ, half of the mean of 1 − uᵀv over pairs of different training points.

    Args:
        mean: Mean of the `count` unit vectors.
        count: Number of training points, at least 2.
    """
    dissimilarity = (1 - float(mean.double().square().sum())) * count / (count - 1)
    return max(dissimilarity / 2, 1e-6)


def nearest(
    query: Float[Tensor, "q d"], bank: Float[Tensor, "n d"], count: int
) -> tuple[Float[Tensor, "q k"], Int[Tensor, "q k"]]:
    """Return the largest cosine similarities of unit vectors to the bank, and the rows of the bank."""
    similarities, rows = (query @ bank.T).topk(min(count, len(bank)), dim=1)
    return similarities, rows


def local_variance(
    query: Float[Tensor, "q d"],
    bank: Float[Tensor, "n d"],
    bandwidth: float | Tensor,
    *,
    neighbours: int = NEIGHBOURS,
    ridge: float = RIDGE,
    steps: int | None = STEPS,
) -> Float[Tensor, " q"]:
    """Return the variance of Eq. 7 for each query, given its nearest points of the bank; in [0, 1].

    Args:
        query: Unit vectors.
        bank: Unit vectors of the training points.
        bandwidth: τ of the kernel.
        neighbours: Number of nearest points; all of them if the bank has fewer.
        ridge: ε, added to the diagonal of K.
        steps: Steps of conjugate gradients in the dtype of the query, which need products of matrices only and can be
            exported; None for a direct solve in float64.

    Returns:
        1 far from all points of the bank, about 0 at one of them.
    """
    similarities, rows = nearest(query, bank, neighbours)
    points = bank[rows]
    cross = torch.exp((similarities - 1) / bandwidth)
    gram = torch.exp((points @ points.transpose(1, 2) - 1) / bandwidth)
    if steps is None:
        gram, cross = gram.double(), cross.double()
        diagonal = ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        solution = torch.linalg.solve(gram + diagonal, cross[..., None])[..., 0]
    else:
        solution = conjugate_gradients(gram, cross, ridge, steps)
    return (1 - (cross * solution).sum(1)).clamp(min=0).to(query.dtype)


def conjugate_gradients(
    matrix: Float[Tensor, "q k k"], vector: Float[Tensor, "q k"], ridge: float, steps: int
) -> Float[Tensor, "q k"]:
    """Return `steps` steps towards (matrix + ridge · I)⁻¹ vector, from zero (Hestenes & Stiefel, 1952).

    Every step lowers the quadratic form's error, so vᵀx never exceeds the exact value by more than rounding.
    """
    solution, residual, direction = torch.zeros_like(vector), vector, vector
    square = residual.square().sum(1, keepdim=True)
    for _ in range(steps):
        product = (matrix @ direction[..., None])[..., 0] + ridge * direction
        length = square / (direction * product).sum(1, keepdim=True).clamp(min=TINY)
        solution, residual = solution + length * direction, residual - length * product
        new_square = residual.square().sum(1, keepdim=True)
        direction = residual + new_square / square.clamp(min=TINY) * direction
        square = new_square
    return solution
