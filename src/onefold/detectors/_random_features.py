"""What every method that needs only data starts from: a random network that suits it, and checks that all share."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from onefold.errors import InputError
from onefold.inputs.reader import Reader
from onefold.inputs.samples import TrainData
from onefold.kernels import Features, ModelFeatures
from onefold.nn.nets import MLP, Impala, Prior, Standardise, random_network
from onefold.types import FeatureKernel, Kernel

CHANNELS = (32,)  # of a random network for images (paper, Table "hpsettingsood")
KEPT = 0.5  # of what a model's encodings have in common


def prior_kernel(first: nn.Module, net: MLP | Impala) -> Features:
    """Eq. 14 on a random network that sees samples through `first`."""
    return Features(Prior(first, net))


class FeatureMap(nn.Module):
    """φ₀ in two steps, z = encode(x) and features(z): of a random network of ours, or of a kernel that was handed in.

    What a random network of ours or a model of the user's makes of a sample is seen from `centre`, where there is one:
    what all samples have in common says nothing about any, and makes all of them similar. This is the mean of features
    of ours; of a model's encodings see `middle`. A handed-in kernel and the model inside it are no part of this module:
    never saved, moved or copied with it.
    """

    centre: Tensor | None

    def __init__(self, prior: Prior | None, kernel: Kernel | None) -> None:
        super().__init__()
        self.prior = prior
        self.__dict__["kernel"] = kernel
        self.register_buffer("centre", None)

    @property
    def handed_in(self) -> Kernel | None:
        return self.__dict__["kernel"]

    def encode(self, x: Any) -> Any:
        """What a model of the user's makes of a sample; else the sample itself."""
        kernel = self.handed_in
        if not isinstance(kernel, ModelFeatures):
            return x
        return self._seen_from_centre(kernel.encode(x))

    def features(self, z: Any) -> Float[Tensor, "n width"]:
        """φ₀ of an encoded sample."""
        kernel = self.handed_in
        if self.prior is not None:
            return self._seen_from_centre(self.prior(z))
        if isinstance(kernel, ModelFeatures):
            return kernel.project(z)
        if not isinstance(kernel, FeatureKernel):
            raise InputError(f"{type(kernel).__name__} has no features, only similarities")
        return kernel.features(z)

    def _seen_from_centre(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return z if self.centre is None else z - self.centre

    def scale(self, z: Any) -> Float[Tensor, " n"]:
        """Θ(x, x), the prior variance of an encoded sample."""
        kernel = self.handed_in
        if kernel is None:
            return self.features(z).square().sum(1)
        return kernel.scale(z) if isinstance(kernel, ModelFeatures) else kernel.diag(z)

    @property
    def labels(self) -> Kernel:
        """The kernel of encoded samples."""
        kernel = self.handed_in
        return Features(self.features) if kernel is None or isinstance(kernel, ModelFeatures) else kernel

    @property
    def has_features(self) -> bool:
        return self.handed_in is None or isinstance(self.handed_in, FeatureKernel)


def middle(z: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """From where to see a model's encodings: half-way from 0, where the model finds nothing, to their mean.

    Seen from there, what excites the model little lies opposite to the familiar; from the mean it would be in their
    midst, and from 0 the familiar would be too much alike. No more of the mean is kept than half of how far encodings
    spread about it, in case a model adds the same large vector to all.
    """
    mean = z.mean(0)
    spread = (z - mean).square().sum(1).mean().sqrt()
    length = mean.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return mean * (1 - KEPT * (spread / length).clamp(max=1))


def feature_map(learned: TrainData, kernel: Kernel | None, generator: Generator, width: int) -> FeatureMap:
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
