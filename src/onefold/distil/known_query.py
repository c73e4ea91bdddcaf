"""CSD for queries known in advance (Section 3.1): exact for wide networks, without ensemble or matrix inverse."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from onefold.exact.ensemble import check_network, outputs, train
from onefold.nn.nets import NTKMLP
from onefold.types import Kernel


class KnownQueries(NamedTuple):
    """Variances and regressions of queries.

    Attributes:
        variance: Variance at each query (Eq. 10) [Q].
        regression: Regression g_{x_t} of each query at the points (Eq. 9) [Q, P].
        clamped: Share of variances that were negative and were set to zero.
        unlearned: Relative error of the trained networks on their labels, ‖ĝ − labels‖ / ‖labels‖.
    """

    variance: Float[Tensor, " q"]
    regression: Float[Tensor, "q p"]
    clamped: float
    unlearned: float


def distil_known_queries(
    net: NTKMLP,
    kernel: Kernel,
    x_train: Float[Tensor, "n d"],
    x_query: Float[Tensor, "q d"],
    points: Float[Tensor, "p d"] | None = None,
    *,
    steps: int,
    momentum: float = 0.9,
    shrink: float = 1.0,
    label: str = "known queries",
) -> KnownQueries:
    """Train a copy of a network for each query, and return the variances at the queries.

    The copy for x_t minimises the error of ĝ = g − g₀ on the labels Θ(X, x_t) by gradient descent. ĝ starts at zero, so
    in the wide limit it ends at Θ(x, X) Θ(X, X)⁻¹ Θ(X, x_t) (Eq. 9), and V(x_t) = Θ(x_t, x_t) − ĝ(x_t) (Eq. 10).

    Args:
        net: Network with one output, in NTK parametrisation; every copy starts from its parameters.
        kernel: Tangent kernel Θ.
        x_train: Train points X [N, D].
        x_query: Queries [Q, D].
        points: Points of the returned regressions [P, D]; None uses the queries.
        steps: Steps of gradient descent.
        momentum: Momentum from 0 to below 1.
        shrink: Train on shrink · Θ(X, x_t) and divide the result by it. The limit is linear in its labels; with small
            ones a network of finite width moves less and stays closer to the limit.
        label: Name in the progress display and in messages.

    Returns:
        Variances, regressions, share of clamped variances, and relative error on the labels.

    Raises:
        InputError: If the network is of another kind.
        TrainingError: If the training diverges.
    """
    check_network(net)
    start = {name: p.detach().expand(len(x_query), *p.shape).clone() for name, p in net.named_parameters()}
    labels = kernel(x_query, x_train).to(x_train)
    with torch.no_grad():
        initial = net(x_train).squeeze(-1)
    trained, _ = train(net, start, x_train, shrink * labels + initial, steps=steps, momentum=momentum, label=label)

    def regression(x: Tensor) -> Tensor:
        with torch.no_grad():
            return (outputs(net, trained, x) - net(x).squeeze(-1)) / shrink

    gap = kernel.diag(x_query).to(x_train) - regression(x_query).diagonal()
    clamped = float((gap < 0).double().mean())
    unlearned = float((regression(x_train) - labels).norm() / labels.norm())
    return KnownQueries(gap.clamp(min=0), regression(x_query if points is None else points), clamped, unlearned)
