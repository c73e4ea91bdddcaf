"""What every method that needs only data starts from: a random network that suits it, and checks that all share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.errors import InputError
from onefold.inputs import check_seed
from onefold.kernels import Features, ModelFeatures
from onefold.nets import MLP, Impala, Standardise, backbone
from onefold.reader import Reader
from onefold.samples import Learned
from onefold.types import FeatureKernel, Kernel

CHANNELS = (32,)  # of a random network for images (paper, Table "hpsettingsood")
LENGTH = 0.1  # variance of the logarithm of an encoding's length, in that of its direction
SHARPEST = 1e-3  # the least spread of that logarithm: a thousandth more or less is no difference
ONE_DIRECTION = 1e-6  # variance of directions below which they are all the same, and lengths are all there is


def generators(seed: int, count: int) -> list[Generator]:
    """Independent streams of random numbers from one seed."""
    check_seed(seed)
    return [Generator().manual_seed(int(s)) for s in np.random.SeedSequence(seed).generate_state(count)]


def random_network(
    shape: tuple[int, ...],
    generator: Generator | None,
    *,
    channels: Sequence[int],
    hidden: Sequence[int],
    outputs: int = 1,
) -> MLP | Impala:
    """A frozen random network. For vectors it has random biases: without them, relu networks see directions only."""
    bias_std = 1.0 if len(shape) == 1 else 0.0
    net = backbone(shape, channels=channels, hidden=hidden, outputs=outputs, generator=generator, bias_std=bias_std)
    return net.requires_grad_(False)


class Prior(nn.Module):
    """φ₀: the last hidden layer of a random network that sees standardised samples (Eq. 14)."""

    def __init__(self, first: nn.Module, net: MLP | Impala) -> None:
        super().__init__()
        self.first, self.net = first, net

    def forward(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, "n width"]:
        with torch.no_grad():
            return self.net.features(self.first(x))


def prior_kernel(first: nn.Module, net: MLP | Impala) -> Features:
    """Eq. 14 on a random network that sees samples through `first`."""
    return Features(Prior(first, net))


class FeatureMap(nn.Module):
    """φ₀ in two steps, z = encode(x) and features(z): of a random network of ours, or of a kernel that was handed in.

    What a random network of ours or a model of the user's makes of a sample is seen from `centre`, where there is one:
    what all samples have in common says nothing about any, and makes all of them similar. Of a model's encodings this
    is the mean direction, and their `length` (mean and weight of its logarithm) is a coordinate of its own: else a weak
    input would be near the centre whatever it shows. A handed-in kernel and the model inside it are no part of this
    module: never saved, moved or copied with it.
    """

    centre: Tensor | None
    length: Tensor | None

    def __init__(self, prior: Prior | None, kernel: Kernel | None) -> None:
        super().__init__()
        self.prior = prior
        self.__dict__["kernel"] = kernel
        self.register_buffer("centre", None)
        self.register_buffer("length", None)

    @property
    def handed_in(self) -> Kernel | None:
        return self.__dict__["kernel"]

    def encode(self, x: Any) -> Any:
        """What a model of the user's makes of a sample; else the sample itself."""
        kernel = self.handed_in
        if not isinstance(kernel, ModelFeatures):
            return x
        return self._seen(kernel.encode(x))

    def centre_encodings(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d1"]:
        """See encodings from the mean of these, from now on: directions from the mean direction, lengths apart."""
        direction, length = _polar(z)
        self.centre = direction.mean(0)
        spread = (direction - self.centre).square().sum(1).mean().clamp(min=ONE_DIRECTION)
        std, mean = torch.std_mean(length, correction=0)
        self.length = torch.stack([mean, (LENGTH * spread).sqrt() / std.clamp(min=SHARPEST)])
        return self._seen(z)

    def _seen(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d1"]:
        if self.centre is None or self.length is None:
            return z
        direction, length = _polar(z)
        return torch.cat([direction - self.centre, (length - self.length[0]) * self.length[1]], dim=1)

    def features(self, z: Any) -> Float[Tensor, "n width"]:
        """φ₀ of an encoded sample."""
        kernel = self.handed_in
        if self.prior is not None:
            return self.prior(z) if self.centre is None else self.prior(z) - self.centre
        if isinstance(kernel, ModelFeatures):
            return kernel.project(*self._parts(z))
        if not isinstance(kernel, FeatureKernel):
            raise InputError(f"{type(kernel).__name__} has no features, only similarities")
        return kernel.features(z)

    def _parts(self, z: Float[Tensor, "n d"]) -> tuple[Tensor, ...]:
        """An encoding as the kernel takes it: without its length, and the length, where there is one."""
        return (z,) if self.length is None else (z[:, :-1], z[:, -1:])

    def scale(self, z: Any) -> Float[Tensor, " n"]:
        """Θ(x, x), the prior variance of an encoded sample."""
        kernel = self.handed_in
        if kernel is None:
            return self.features(z).square().sum(1)
        return kernel.scale(*self._parts(z)) if isinstance(kernel, ModelFeatures) else kernel.diag(z)

    @property
    def labels(self) -> Kernel:
        """The kernel of encoded samples."""
        kernel = self.handed_in
        return Features(self.features) if kernel is None or isinstance(kernel, ModelFeatures) else kernel

    @property
    def has_features(self) -> bool:
        return self.handed_in is None or isinstance(self.handed_in, FeatureKernel)


def _polar(z: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n 1"]]:
    """Directions, of length √d, and the logarithm of lengths."""
    length = z.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return z / length * math.sqrt(z.shape[1]), length.log()


def feature_map(learned: Learned, kernel: Kernel | None, generator: Generator, width: int) -> FeatureMap:
    """The features of a kernel, or where there is none those of a random network that suits the data."""
    if kernel is not None:
        return FeatureMap(None, kernel)
    net = random_network(learned.reader.sample_shape, generator, channels=CHANNELS, hidden=(width,))
    return FeatureMap(Prior(learned.standardise, net.to(learned.standardise.mean.device)), None)


def empty_map(reader: Reader, kernel: Kernel | None, width: int) -> FeatureMap:
    """The same without weights, for those of a file."""
    if kernel is not None:
        return FeatureMap(None, kernel)
    net = random_network(reader.sample_shape, None, channels=CHANNELS, hidden=(width,))
    return FeatureMap(Prior(empty_standardise(reader.sample_shape), net), None)


def empty_standardise(shape: tuple[int, ...]) -> Standardise:
    """A standardisation for statistics from a file: one pair for every feature of vectors, one in all for images."""
    sizes = shape if len(shape) == 1 else ()
    return Standardise(torch.zeros(sizes, device="meta"), torch.ones(sizes, device="meta"))


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
