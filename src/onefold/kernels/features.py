"""Kernels of finitely many features: the last-layer kernel of Eq. 14, also on a model of the user's own."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.errors import InputError, LayerError
from onefold.inputs import batch_slices, batch_tensors
from onefold.kernels.borrow import find_layer, last_linear, tap, to_model
from onefold.nets import MLP, NTKMLP, Impala
from onefold.types import Batch

SLICE = 1024  # samples that go through a model at once


class Features:
    """k(x, x′) = φ(x)ᵀφ(x′), with φ of unit length if `normalise`."""

    def __init__(self, feature_map: Callable[[Any], Tensor], *, normalise: bool = False) -> None:
        self._map = feature_map
        self.normalise = normalise

    def features(self, x: Batch) -> Float[Tensor, "n d"]:
        parts = [self._map(part) for part in batch_slices(x, SLICE)]
        z = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(batch_tensors(x)[0].device)
        return F.normalize(z, dim=1) if self.normalise else z

    def __call__(self, x1: Batch, x2: Batch) -> Float[Tensor, "n1 n2"]:
        return self.features(x1) @ self.features(x2).T

    def diag(self, x: Batch) -> Float[Tensor, " n"]:
        return self.features(x).square().sum(1)


def last_layer(net: nn.Module, *, normalise: bool = False) -> Features:
    """Eq. 14: Θᴸ(x, x′) = ∇_{θᴸ} f(x)ᵀ ∇_{θᴸ} f(x′) = φ(x)ᵀφ(x′), φ being what enters the last dense layer.

    `net` may be one of onefold's networks or any module whose last nn.Linear is its head. It is not changed.
    """
    if isinstance(net, MLP | Impala | NTKMLP):

        def own(x: Any) -> Tensor:
            with torch.no_grad():
                return net.features(to_model(net, x))  # pyright: ignore[reportArgumentType]

        return Features(own, normalise=normalise)
    head = last_linear(net)
    return Features(lambda x: tap(net, head, x, before=True), normalise=normalise)


def from_model(
    net: nn.Module, layer: str | None = None, width: int | None = None, *, normalise: bool = False, seed: int = 0
) -> Features:
    """The features of a trained model: the output of a named layer, by default what enters its last nn.Linear.

    `width` sends them through a wide random ReLU layer, √(2/width) · relu(z R) with R ~ N(0, 1/D): as the width grows
    the kernel becomes the arc-cosine kernel of the model's features. The model may take a tensor, a tuple of tensors or
    a dict; it is neither moved nor changed nor left in another mode, and its hooks are removed after every call.
    """
    if width is not None and (not isinstance(width, int) or width < 1):
        raise InputError(f"width must be a whole number of at least 1, not {width}")
    module = last_linear(net) if layer is None else find_layer(net, layer)
    projection = None if width is None else _RandomReLU(width, seed)

    def features(x: Batch) -> Tensor:
        z = tap(net, module, x, before=layer is None).to(batch_tensors(x)[0].device, torch.float32)
        return z if projection is None else projection(z)

    return Features(features, normalise=normalise)


class _RandomReLU:
    """A fixed random layer, made from the seed when the number of inputs is known."""

    def __init__(self, width: int, seed: int) -> None:
        self._width, self._seed = width, seed
        self._matrix: Tensor | None = None

    def __call__(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n width"]:
        if self._matrix is None:
            generator = Generator().manual_seed(self._seed)
            self._matrix = torch.randn(z.shape[1], self._width, generator=generator) / math.sqrt(z.shape[1])
        if len(self._matrix) != z.shape[1]:
            raise LayerError(
                f"the layer gave {z.shape[1]} features, {len(self._matrix)} before: name one of fixed size"
            )
        self._matrix = self._matrix.to(z.device)
        return F.relu(z @ self._matrix) * math.sqrt(2 / self._width)
