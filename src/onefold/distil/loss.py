"""The loss of CSD."""

from typing import Literal, TypeAlias, get_args

from jaxtyping import Float
from torch import Tensor

Pairs: TypeAlias = Literal["all", "random"]
PAIRS = get_args(Pairs)


def similarity_loss(g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Eq. 15 over all pairs of a minibatch: mean of the diagonal + mean of the rest of ½(g(x_i, c_j) − Θ(x_i, c_j))².

    The two means are kept apart as in the supplement ("Data and context sampling"): the N diagonal pairs, each an input
    with its own context, would drown among the N² − N others.
    """
    n = len(g)
    errors = 0.5 * (g - labels).square()
    diagonal = errors.diagonal().sum()
    return diagonal / n + (errors.sum() - diagonal) / (n * n - n)


def random_pairs_loss(g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Eq. 15 as it stands: the mean over N random pairs of ½(g(x_i, c_i) − Θ(x_i, c_i))².

    Minibatches are random, so that x_i with the context of the next sample is a random pair.
    """
    errors = 0.5 * (g - labels).square()
    return errors.roll(-1, dims=1).diagonal().mean()


def loss_over(pairs: Pairs, g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """The loss over these pairs of a minibatch."""
    return similarity_loss(g, labels) if pairs == "all" else random_pairs_loss(g, labels)
