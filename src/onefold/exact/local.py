"""The exact variance of Eq. 7 on a query's nearest training points: nothing is trained.

The kernel of unit vectors is k(u, v) = exp((uᵀv − 1) / τ), an exponential of the cosine similarity. For a query u with
its K nearest training points U, and the ridge ε,

    variance(u) = 1 − bᵀ (K + εI)⁻¹ b,    K_ij = k(U_i, U_j),  b_i = k(u, U_i).
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

NEIGHBOURS = 50
RIDGE = 0.01
TINY = 1e-20


def unit_vectors(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return z / ‖z‖; zero stays zero."""
    return F.normalize(z, dim=1, eps=TINY)


def local_bandwidth(mean: Float[Tensor, " d"], count: int) -> float:
    """Return τ, half of the mean of 1 − uᵀv over pairs of different training points.

    Args:
        mean: Mean of the `count` unit vectors.
        count: Number of training points, at least 2.

    Returns:
        τ, at least 1e-6.
    """
    dissimilarity = (1 - float(mean.double().square().sum())) * count / (count - 1)
    return max(dissimilarity / 2, 1e-6)


def local_variance(
    query: Float[Tensor, "q d"],
    bank: Float[Tensor, "n d"],
    bandwidth: float | Tensor,
    *,
    neighbours: int = NEIGHBOURS,
    ridge: float = RIDGE,
) -> Float[Tensor, " q"]:
    """Return the variance of Eq. 7 for each query, given its nearest points of the bank; in [0, 1].

    Args:
        query: Unit vectors.
        bank: Unit vectors of the training points.
        bandwidth: τ of the kernel.
        neighbours: Number of nearest points; all of them if the bank has fewer.
        ridge: ε, added to the diagonal of K.

    Returns:
        1 far from all points of the bank, about 0 at one of them.
    """
    rows = (query @ bank.T).topk(min(neighbours, len(bank)), dim=1).indices
    steps = bank[rows] - query[:, None]  # 1 − uᵀv = ½‖u − v‖², without cancellation where all vectors are alike
    half_squares = steps.square().sum(2) / 2
    distances = half_squares[:, :, None] + half_squares[:, None] - steps @ steps.transpose(1, 2)
    gram, cross = torch.exp(-distances.clamp(min=0) / bandwidth), torch.exp(-half_squares / bandwidth)
    return remaining_variance(gram, cross, ridge).clamp(min=0)


def remaining_variance(gram: Float[Tensor, "q k k"], cross: Float[Tensor, "q k"], ridge: float) -> Float[Tensor, " q"]:
    """Return 1 − bᵀ(K + εI)⁻¹b, the Schur complement of K + εI in [[K + εI, b], [bᵀ, 1]], by Gaussian elimination.

    K + εI is positive definite, so no pivot is less than ε, and elimination needs no exchange of rows. It needs only
    products and differences, which every export format has. Conjugate gradients cost the same, and their result after a
    fixed number of steps depends on rounding, and so on the batch size.
    """
    count = gram.shape[-1]
    diagonal = ridge * torch.eye(count, dtype=gram.dtype, device=gram.device)
    top = torch.cat([gram + diagonal, cross[:, :, None]], dim=2)
    bottom = torch.cat([cross, torch.ones_like(cross[:, :1])], dim=1)[:, None, :]
    matrix = torch.cat([top, bottom], dim=1)
    for _ in range(count):
        row = matrix[:, :1, 1:]
        matrix = matrix[:, 1:, 1:] - row.transpose(1, 2) * (row / matrix[:, :1, :1])
    return matrix[:, 0, 0]
