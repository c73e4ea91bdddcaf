"""Kernels with an explicit feature map, such as the last-layer kernel of Eq. 14."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.batches import batch_slices, batch_tensors
from onefold.nn.modules import last_linear, read_layer, to_model
from onefold.nn.nets import MLP, NTKMLP, Impala
from onefold.types import Batch

SLICE = 1024  # samples per forward pass


class FeatureProduct(ABC):
    """Base of the kernels k(x, x′) = φ(x)ᵀφ(x′); a subclass defines φ."""

    @abstractmethod
    def features(self, x: Batch) -> Float[Tensor, "n d"]:
        """Return φ(x).

        Args:
            x: Inputs.

        Returns:
            Features [N, D].
        """

    def __call__(self, x1: Batch, x2: Batch) -> Float[Tensor, "n1 n2"]:
        """Return k(x1_i, x2_j) for every pair.

        Args:
            x1: N1 inputs.
            x2: N2 inputs.

        Returns:
            Kernel matrix [N1, N2].
        """
        return self.features(x1) @ self.features(x2).T

    def diag(self, x: Batch) -> Float[Tensor, " n"]:
        """Return k(x_i, x_i).

        Args:
            x: N inputs.

        Returns:
            Diagonal of the kernel matrix, [N].
        """
        return self.features(x).square().sum(1)


class Features(FeatureProduct):
    """The kernel k(x, x′) = φ(x)ᵀφ(x′) of a feature map φ.

    Args:
        feature_map: Function from a batch to features [N, D].
        normalise: Scale features to unit length.
    """

    def __init__(self, feature_map: Callable[[Any], Tensor], *, normalise: bool = False) -> None:
        self._map = feature_map
        self.normalise = normalise

    def features(self, x: Batch) -> Float[Tensor, "n d"]:
        """Return φ(x) on the device of `x`.

        Args:
            x: Inputs.

        Returns:
            Features [N, D].
        """
        parts = list(map(self._map, batch_slices(x, SLICE)))
        z = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(batch_tensors(x)[0].device)
        return F.normalize(z, dim=1) if self.normalise else z


def last_layer(net: nn.Module, *, normalise: bool = False) -> Features:
    """Return the last-layer kernel of a network, Θᴸ(x, x′) = ∇_{θᴸ} f(x)ᵀ ∇_{θᴸ} f(x′) = φ(x)ᵀφ(x′) (Eq. 14).

    φ(x) is the input of the last dense layer. The network is not changed.

    Args:
        net: A network of onefold, or a module with its last `nn.Linear` as the head.
        normalise: Scale features to unit length.

    Returns:
        The kernel.

    Raises:
        LayerError: The module has no `nn.Linear`.
    """
    if isinstance(net, MLP | Impala | NTKMLP):

        def last_hidden(x: Any) -> Tensor:
            with torch.no_grad():
                return net.features(to_model(net, x))  # pyright: ignore[reportArgumentType]

        return Features(last_hidden, normalise=normalise)
    head = last_linear(net)
    return Features(lambda x: read_layer(net, head, x, before=True), normalise=normalise)
