"""The loss of CSD over the pairs of a minibatch."""

from typing import Literal, TypeAlias, get_args

from jaxtyping import Float
from torch import Tensor

Pairs: TypeAlias = Literal["all", "random"]
PAIRS = get_args(Pairs)


def similarity_loss(g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return the loss of Eq. 15 over all pairs of a minibatch.

    The squared errors are ½(g(x_i, c_j) − Θ(x_i, c_j))². The loss is their mean over the diagonal plus their mean over
    the other pairs (supplement, "Data and context sampling"). In one mean over all pairs, the N diagonal pairs would
    have too little weight against the N² − N others.

    Args:
        g: Outputs of the model for all pairs [N, N].
        labels: Kernel values Θ(x_i, c_j) [N, N].

    Returns:
        Scalar loss.
    """
    n = len(g)
    errors = 0.5 * (g - labels).square()
    diagonal = errors.diagonal().sum()
    return diagonal / n + (errors.sum() - diagonal) / (n * n - n)


def random_pairs_loss(g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return the loss of Eq. 15 as printed: the mean of ½(g(x_i, c_j) − Θ(x_i, c_j))² over N random pairs.

    Minibatches are random, so a sample and the context of the next sample are a random pair.

    Args:
        g: Outputs of the model for all pairs [N, N].
        labels: Kernel values Θ(x_i, c_j) [N, N].

    Returns:
        Scalar loss.
    """
    errors = 0.5 * (g - labels).square()
    return errors.roll(-1, dims=1).diagonal().mean()


def pair_loss(pairs: Pairs, g: Float[Tensor, "n n"], labels: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return the loss over all pairs of a minibatch, or over N random ones."""
    return similarity_loss(g, labels) if pairs == "all" else random_pairs_loss(g, labels)
