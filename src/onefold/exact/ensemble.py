"""Ensembles of wide networks, trained in parallel: the reference for the closed forms.

`train` runs full-batch gradient descent on M copies of an `NTKMLP` by `torch.func`. `reference_ensemble` uses it for
the ensemble whose law is `ntk_gp`, and `distil.known_query` for the regression of Section 3.1.
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
    """Raise InputError for networks other than an `NTKMLP` with one output."""
    if not isinstance(net, NTKMLP) or len(net.biases[-1]) != 1:
        raise InputError(f"net: {type(net).__name__} is not supported. Use an NTKMLP with one output.")


def initial_members(net: NTKMLP, members: int, generator: Generator) -> Members:
    """Return M independent draws of the parameters from N(0, 1)."""
    return {
        name: torch.randn(members, *p.shape, generator=generator, dtype=p.dtype) for name, p in net.named_parameters()
    }


def outputs(net: NTKMLP, members: Members, x: Float[Tensor, "n d"]) -> Float[Tensor, "m n"]:
    """Return f(x, θ_m) for every member and point."""
    return vmap(lambda params: functional_call(net, params, (x,)).squeeze(-1))(members)


def prior_correction(
    net: NTKMLP, members: Members, x: Float[Tensor, "n d"], generator: Generator
) -> Float[Tensor, "m n"]:
    """Return δ(x) = ∇_θ f(x, θ₀)ᵀ θ̃ with θ̃ ~ N(0, I), zero in the last layer (He et al., 2020).

    Its covariance is Θ − κ, so that f₀ + δ ~ N(0, Θ), and training leads to the NTK-GP of Eq. 6.

    Args:
        net: Network with one output, in NTK parametrisation.
        members: Parameters θ₀ of M members.
        x: Train points and queries together [N, D], because they share one θ̃.
        generator: Source of θ̃.

    Returns:
        δ for every member and point [M, N].
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
    """Run gradient descent on ½‖f(X, θ_m) − y_m‖² for every member; return trained members and the learning rate.

    `lr` defaults to 1/λ_max of the first member's tangent kernel. Without momentum, steps · lr is the training time t
    of `ntk_gp`. Momentum stays in the span of the same gradients, so it reaches the same limit in fewer steps.
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
        raise TrainingError(f"{label}: training diverged at learning rate {rate:.3g}. Use a smaller lr, or None.")
    return trained, rate


def stable_rate(net: NTKMLP, members: Members, x: Float[Tensor, "n d"]) -> float:
    """Return 1/λ_max of the empirical Θ(X, X), half of the largest rate at which gradient descent is stable."""
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
    """Train an ensemble of wide networks by full-batch gradient descent and return its predictions.

    Args:
        net: Network with one output, in NTK parametrisation; its parameters are not used or changed.
        x_train: Train points [N, D].
        y_train: Targets [N].
        x_query: Queries [Q, D].
        members: Number of networks M.
        steps: Steps of gradient descent.
        generator: Source of the initial parameters.
        corrected: Add the fixed function δ of He et al. (2020) to every member. The law of the members is then the
            NTK-GP; without it, it is Eq. 25 (`ntk_gp` with `nngp`).
        lr: Learning rate; None uses 1/λ_max of the tangent kernel.
        momentum: Momentum from 0 to below 1. Without it, steps · lr is the training time t of `ntk_gp`.
        label: Name in the progress display and in messages.

    Returns:
        Predictions [M, Q], and the learning rate.

    Raises:
        InputError: If the network is of another kind, or the numbers of points and targets differ.
        TrainingError: If the training diverges.
    """
    check_network(net)
    if y_train.shape != x_train.shape[:1]:
        shape = tuple(y_train.shape)
        raise InputError(f"y_train: shape {shape}, but there are {len(x_train)} train points. Pass a number for each.")
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
