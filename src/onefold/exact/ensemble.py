"""Wide networks trained for real, many at once: the ground that the closed forms are tested on.

`train` runs full-batch gradient descent on M copies of an `NTKMLP` by `torch.func`. `reference_ensemble` uses it for
the ensemble whose law `ntk_gp` gives; `distil.known_query` for the regression of Section 3.1.
"""

import copy
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.func import functional_call, jvp, vmap

from onefold.errors import InputError, TrainingError
from onefold.kernels import empirical_ntk
from onefold.nn.nets import NTKMLP
from onefold.nn.train import descend, show_updates

Members: TypeAlias = dict[str, Tensor]
"""Parameters by name, each with a leading axis of M members."""


def check_network(net: object) -> None:
    """Theory holds for networks in NTK parametrisation; here they have one output."""
    if not isinstance(net, NTKMLP) or len(net.biases[-1]) != 1:
        raise InputError("the exact laws are for an NTKMLP of one output")


def initial_members(net: NTKMLP, members: int, generator: Generator) -> Members:
    """M independent draws of the parameters from N(0, 1)."""
    return {
        name: torch.randn(members, *p.shape, generator=generator, dtype=p.dtype) for name, p in net.named_parameters()
    }


def outputs(net: NTKMLP, members: Members, x: Float[Tensor, "n d"]) -> Float[Tensor, "m n"]:
    """f(x, θ_m) for every member and point; networks of one output."""
    return vmap(lambda params: functional_call(net, params, (x,)).squeeze(-1))(members)


def prior_correction(
    net: NTKMLP, members: Members, x: Float[Tensor, "n d"], generator: Generator
) -> Float[Tensor, "m n"]:
    """δ(x) = ∇_θ f(x, θ₀)ᵀ θ̃, with θ̃ ~ N(0, I) but zero in the last layer (He et al., 2020).

    Its covariance is Θ − κ, so that f₀ + δ ~ N(0, Θ) and training leads to the NTK-GP of Eq. 6. The points must be
    given all at once: train points and queries share one θ̃.
    """
    tangents = {
        name: torch.zeros_like(p)
        if name in net.last_layer
        else torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in members.items()
    }

    def one(params: Members, tangent: Members) -> Tensor:
        return jvp(lambda p: functional_call(net, p, (x,)).squeeze(-1), (params,), (tangent,))[1]

    return vmap(one)(members, tangents)


def train(
    net: NTKMLP,
    members: Members,
    x: Float[Tensor, "n d"],
    targets: Float[Tensor, "m n"],
    *,
    steps: int,
    lr: float | None = None,
    momentum: float = 0.0,
    label: str = "networks",
) -> tuple[Members, float]:
    """Gradient descent on ½‖f(X, θ_m) − y_m‖² for every member; the trained members and the learning rate used.

    `lr` defaults to 1/λ_max of the first member's tangent kernel. Without momentum, steps · lr is the training time t
    of `ntk_gp`. Momentum stays in the span of the same gradients: the same limit, sooner.
    """
    rate = stable_rate(net, members, x) if lr is None else lr
    theta = {name: p.clone().requires_grad_() for name, p in members.items()}

    def loss() -> Tensor:
        return 0.5 * (outputs(net, theta, x) - targets).square().sum()

    updates = descend(list(theta.values()), loss, steps=steps, rate=rate, momentum=momentum)
    for _ in show_updates(updates, steps, label):
        pass
    trained = {name: p.detach() for name, p in theta.items()}
    if not all(p.isfinite().all() for p in trained.values()):
        raise TrainingError(f"training diverged at learning rate {rate:.3g}: use a smaller lr, or leave it out")
    return trained, rate


def stable_rate(net: NTKMLP, members: Members, x: Float[Tensor, "n d"]) -> float:
    """1/λ_max of the empirical Θ(X, X), half of the largest rate at which gradient descent is stable."""
    first = copy.deepcopy(net)
    with torch.no_grad():
        for name, p in first.named_parameters():
            p.copy_(members[name][0])
    return 1 / float(torch.linalg.eigvalsh(empirical_ntk(first)(x, x))[-1])


def reference_ensemble(
    net: NTKMLP,
    x_train: Float[Tensor, "n d"],
    y_train: Float[Tensor, " n"],
    x_query: Float[Tensor, "q d"],
    *,
    members: int,
    steps: int,
    generator: Generator,
    corrected: bool = False,
    lr: float | None = None,
    momentum: float = 0.0,
    label: str = "networks",
) -> tuple[Float[Tensor, "m q"], float]:
    """Predictions of M trained networks at the queries, and the learning rate used.

    Plain, their law is Eq. 25 (`ntk_gp` with `nngp`); `corrected` adds the fixed function δ of He et al. (2020) to
    every member, which makes it the NTK-GP.
    """
    check_network(net)
    if y_train.shape != x_train.shape[:1]:
        raise InputError(f"there are {len(x_train)} train points and targets of shape {tuple(y_train.shape)}")
    start = initial_members(net, members, generator)
    points = torch.cat([x_train, x_query])
    delta = (
        prior_correction(net, start, points, generator) if corrected else torch.zeros(members, len(points)).to(points)
    )
    n = len(x_train)
    trained, rate = train(
        net, start, x_train, y_train[None] - delta[:, :n], steps=steps, lr=lr, momentum=momentum, label=label
    )
    with torch.no_grad():
        return outputs(net, trained, x_query) + delta[:, n:], rate
