"""CSD for queries known beforehand (Section 3.1): exact for wide networks, with no ensemble and no matrix inverse."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from onefold.exact.ensemble import check_network, outputs, train
from onefold.nn.nets import NTKMLP
from onefold.types import Kernel


class KnownQueries(NamedTuple):
    """The variance at each query (Eq. 10) and each query's regression g_{x_t} on the points asked for (Eq. 9).

    `clamped` is the share of variances that came out negative and were set to zero, `unlearned` what training has left
    of its labels, ‖ĝ − labels‖ / ‖labels‖.
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
    """Train ĝ = g − g₀ by gradient descent on the labels Θ(X, x_t), one copy of `net` for each query x_t.

    ĝ starts at zero, so in the wide limit it ends at Θ(x, X) Θ(X, X)⁻¹ Θ(X, x_t) (Eq. 9), and
    V(x_t) = Θ(x_t, x_t) − ĝ(x_t) (Eq. 10). Every copy starts from the parameters that `net` has; `net` is not changed.

    `shrink` < 1 trains on shrink · Θ(X, x_t) and divides by it afterwards: the limit is linear in its labels, and with
    small ones a network of finite width moves less and stays closer to it.
    """
    check_network(net)
    start = {name: p.detach().expand(len(x_query), *p.shape).clone() for name, p in net.named_parameters()}
    labels = kernel(x_query, x_train).to(x_train)
    with torch.no_grad():
        at_start = net(x_train).squeeze(-1)
    trained, _ = train(net, start, x_train, shrink * labels + at_start, steps=steps, momentum=momentum, label=label)

    def regression(x: Tensor) -> Tensor:
        with torch.no_grad():
            return (outputs(net, trained, x) - net(x).squeeze(-1)) / shrink

    gap = kernel.diag(x_query).to(x_train) - regression(x_query).diagonal()
    clamped = float((gap < 0).double().mean())
    unlearned = float((regression(x_train) - labels).norm() / labels.norm())
    return KnownQueries(gap.clamp(min=0), regression(x_query if points is None else points), clamped, unlearned)
