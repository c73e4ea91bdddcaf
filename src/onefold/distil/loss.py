"""The loss of CSD."""

from jaxtyping import Float
from torch import Tensor


def similarity_loss(g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Eq. 15 over all pairs of a minibatch: mean of the diagonal + mean of the rest of ½(g(x_i, c_j) − Θ(x_i, c_j))².

    The two means are kept apart as in the supplement ("Data and context sampling"): the N diagonal pairs, each an input
    with its own context, would drown among the N² − N others.
    """
    n = len(g)
    errors = 0.5 * (g - labels).square()
    diagonal = errors.diagonal().sum()
    return diagonal / n + (errors.sum() - diagonal) / (n * n - n)
