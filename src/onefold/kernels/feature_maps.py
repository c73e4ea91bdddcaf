"""Feature maps φ₀ of detectors, in two steps: z = encode(x) and features(z).

`RandomFeatures` has a random network of its own, `EncoderFeatures` uses a trained model, and `KernelLabels` any other
kernel. Kernels and models belong to the user: a feature map never saves, moves or copies them.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onefold.errors import InputError
from onefold.kernels.last_layer import Features
from onefold.kernels.model import ModelFeatures
from onefold.nn.nets import Prior
from onefold.types import FeatureKernel, Kernel

COMMON_SHARE = 0.5  # of the mean encoding, kept as an offset; see `encoder_centre`


@runtime_checkable
class FeatureMap(Protocol):
    """Features of samples and the kernel that they define; also an `nn.Module`."""

    centre: Tensor | None

    @property
    def has_features(self) -> bool:
        """True if `features` and `embed` are available."""
        ...

    @property
    def labels(self) -> Kernel:
        """Kernel of encoded samples, Θ in Eq. 13."""
        ...

    def encode(self, x: Any, /) -> Any:
        """Return encoded samples; without an encoder the samples themselves."""
        ...

    def features(self, z: Any, /) -> Float[Tensor, "n width"]:
        """Return φ₀ of encoded samples."""
        ...

    def embed(self, x: Any, /) -> Float[Tensor, "n d"]:
        """Return features of samples to compute distances with, without a random layer on top of a model."""
        ...

    def scale(self, z: Any, /) -> Float[Tensor, " n"]:
        """Return Θ(x, x), the prior variance of encoded samples."""
        ...


class RandomFeatures(nn.Module):
    """Features of a frozen random network, minus `centre` if it is set: the mean over the training data.

    What all samples have in common makes all of them similar and carries no information.
    """

    centre: Tensor | None
    has_features = True

    def __init__(self, prior: Prior, centre: Tensor | None = None) -> None:
        super().__init__()
        self.prior = prior
        self.register_buffer("centre", centre)

    @property
    def labels(self) -> Kernel:
        return Features(self.features)

    def encode(self, x: Any) -> Any:
        return x

    def features(self, z: Any) -> Float[Tensor, "n width"]:
        return _subtract(self.prior(z), self.centre)

    def embed(self, x: Any) -> Float[Tensor, "n width"]:
        return self.features(x)

    def scale(self, z: Any) -> Float[Tensor, " n"]:
        return self.features(z).square().sum(1)


class EncoderFeatures(nn.Module):
    """Features of a trained model, with encodings minus `centre` if it is set; see `encoder_centre`."""

    centre: Tensor | None
    has_features = True

    def __init__(self, kernel: ModelFeatures, centre: Tensor | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.register_buffer("centre", centre)

    @property
    def labels(self) -> Kernel:
        return Features(self.features)

    def encode(self, x: Any) -> Float[Tensor, "n d"]:
        return _subtract(self.kernel.encode(x), self.centre)

    def features(self, z: Any) -> Float[Tensor, "n width"]:
        return self.kernel.project(z)

    def embed(self, x: Any) -> Float[Tensor, "n d"]:
        return self.encode(x)

    def scale(self, z: Any) -> Float[Tensor, " n"]:
        return self.kernel.scale(z)


class KernelLabels(nn.Module):
    """A kernel used as it is; `features` and `embed` need a `FeatureKernel`."""

    centre: Tensor | None = None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = _Reference(kernel)

    @property
    def has_features(self) -> bool:
        return isinstance(self.labels, FeatureKernel)

    @property
    def labels(self) -> Kernel:
        return self._kernel.kernel

    def encode(self, x: Any) -> Any:
        return x

    def features(self, z: Any) -> Float[Tensor, "n width"]:
        kernel = self.labels
        if not isinstance(kernel, FeatureKernel):
            raise InputError(f"{type(kernel).__name__} has no features. Pass a kernel with features(x).")
        return kernel.features(z)

    def embed(self, x: Any) -> Float[Tensor, "n width"]:
        return self.features(x)

    def scale(self, z: Any) -> Float[Tensor, " n"]:
        return self.labels.diag(z)


class _Reference:
    """Reference to a kernel that is not a submodule, even if it is an `nn.Module`; copies refer to the same kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __deepcopy__(self, memo: object) -> "_Reference":
        return self


def encoder_centre(z: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Return the origin for a model's encodings: half-way from 0 to their mean.

    An input that activates the model little has an encoding near 0. Seen from this origin, it lies opposite to the
    training data; seen from the mean, it would lie among them, and seen from 0, all training data would be similar. The
    remaining part of the mean is at most half as long as the spread of the encodings, for models that add the same
    large vector to all of them.
    """
    mean = z.mean(0)
    spread = (z - mean).square().sum(1).mean().sqrt()
    length = mean.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return mean * (1 - COMMON_SHARE * (spread / length).clamp(max=1))


def _subtract(z: Float[Tensor, "n d"], centre: Tensor | None) -> Float[Tensor, "n d"]:
    return z if centre is None else z - centre
