"""What every method that needs only data starts from: read, checked, standardised samples and a random network."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Generator, nn

from onefold.errors import InputError, NotFittedError
from onefold.inputs import check_seed
from onefold.kernels import Features
from onefold.nets import MLP, Impala, backbone

State = TypeVar("State")


def generators(seed: int, count: int) -> list[Generator]:
    """Independent streams of random numbers from one seed."""
    check_seed(seed)
    return [Generator().manual_seed(int(s)) for s in np.random.SeedSequence(seed).generate_state(count)]


def random_network(
    shape: tuple[int, ...],
    generator: Generator,
    *,
    channels: Sequence[int],
    hidden: Sequence[int],
    outputs: int = 1,
) -> MLP | Impala:
    """A frozen random network. For vectors it has random biases: without them, relu networks see directions only."""
    bias_std = 1.0 if len(shape) == 1 else 0.0
    net = backbone(shape, channels=channels, hidden=hidden, outputs=outputs, generator=generator, bias_std=bias_std)
    return net.requires_grad_(False)


def prior_kernel(first: nn.Module, net: MLP | Impala) -> Features:
    """Eq. 14 on a random network that sees samples through `first`."""
    return Features(torch.no_grad()(lambda x: net.features(first(x))))


def check_kernel(kernel: object, kind: type) -> None:
    """Refuse what is not a kernel of the kind that is needed."""
    if kernel is None or isinstance(kernel, kind):
        return
    if isinstance(kernel, nn.Module):
        raise InputError("the kernel is a model: use kernels.from_model(model) for the kernel of its features")
    needed = ", ".join(f".{name}" for name in ("features", "diag") if hasattr(kind, name))
    raise InputError(
        f"{type(kernel).__name__} is no kernel that can be used here: it needs a call k(x1, x2) and {needed}"
    )


def fitted(state: State | None, name: str) -> State:
    """The state that `fit` left, or a refusal to score before it."""
    if state is None:
        raise NotFittedError(f"this {name} is not fitted yet: call fit first")
    return state
