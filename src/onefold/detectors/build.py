"""Specifications of detectors: `fit` and `load` build every scorer from one, by `Detector.build`.

A spec holds the constructor's settings and what the data decide, such as shapes and numbers of outputs. `fit` builds
the scorer with initial weights from the seed; `load` builds it on the meta device and fills in the weights of the file.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from onefold.core.rng import generators
from onefold.errors import InputError
from onefold.kernels.feature_maps import EncoderFeatures, FeatureMap, KernelLabels, RandomFeatures
from onefold.kernels.model import ModelFeatures
from onefold.nn.nets import Prior, Standardise, random_network
from onefold.types import Kernel

CHANNELS = (32,)  # of the random network for images (paper, Table "hpsettingsood")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything except weights and kernel that determines a scorer; stored in the header of the detector's file.

    Subclasses add the constructor's settings, under the names of its arguments, and what the data decide.

    Args:
        seed: Seed of the detector.
        inputs: Shape of a sample at the input of the networks: (D,) or (C, H, W); () without networks.
    """

    seed: int
    inputs: tuple[int, ...] = ()

    @property
    def least_tensors(self) -> int:
        """Lower bound on the number of tensors of the scorer; `load` checks it before it builds the scorer."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Numbers that a fit measured; stored in the header of the detector's file. Subclasses add fields."""


def streams(seed: int, count: int, *, meta: bool) -> list[Generator | None]:
    """Return independent generators for initial weights, or None in their place on the meta device."""
    return [None] * count if meta else [*generators(seed, count)]


def initial_standardise(shape: tuple[int, ...], *, meta: bool) -> Standardise:
    """Return a standardisation without statistics: per feature for vectors, one pair for images."""
    sizes, device = (shape if len(shape) == 1 else ()), "meta" if meta else "cpu"
    return Standardise(torch.zeros(sizes, device=device), torch.ones(sizes, device=device))


def set_standardisation(scorer: nn.Module, statistics: Standardise) -> None:
    """Set the mean and the standard deviation of every standardisation in a scorer."""
    for module in scorer.modules():
        if isinstance(module, Standardise):
            module.mean, module.std = statistics.mean, statistics.std


def feature_map(
    spec: Spec,
    kernel: Kernel | None,
    width: int,
    generator: Generator | None,
    *,
    centre: int | None = None,
    channels: tuple[int, ...] = CHANNELS,
) -> FeatureMap:
    """Return the feature map of a kernel, or of a random network if there is none.

    Args:
        spec: Specification; `inputs` is the shape of the random network's samples.
        kernel: Kernel of the detector, or None.
        width: Width of the random network.
        generator: Draws the random network; None leaves it on the meta device.
        centre: Size of the vector that is subtracted from the features, or None.
        channels: Channels of the random network's convolutional stages, for images.
    """
    offset = None if centre is None else _empty(centre, meta=generator is None)
    if isinstance(kernel, ModelFeatures):
        return EncoderFeatures(kernel, offset)
    if kernel is not None:
        return KernelLabels(kernel)
    network = random_network(spec.inputs, generator, channels=channels, hidden=(width,))
    return RandomFeatures(Prior(initial_standardise(spec.inputs, meta=generator is None), network), offset)


def _empty(size: int, *, meta: bool) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device="meta" if meta else "cpu")


def data_format(kernel: Kernel | None) -> dict[str, Any]:
    """Return the arguments of `read_train_data` for the data that a kernel takes."""
    if not isinstance(kernel, ModelFeatures):
        return {}
    return {"as_given": True, "form": kernel.form}


def check_kernel(kernel: object, kind: type) -> None:
    """Raise InputError if `kernel` is neither None nor of the kind of kernel that a detector needs."""
    if kernel is None or isinstance(kernel, kind):
        return
    if isinstance(kernel, nn.Module):
        raise InputError(
            "a model is not a kernel",
            argument="kernel",
            hint="Pass kernels.from_model(model), the kernel of its features.",
        )
    needed = ", ".join(f".{name}" for name in ("features", "diag") if hasattr(kind, name))
    raise InputError(
        f"{type(kernel).__name__} is not supported here",
        argument="kernel",
        hint=f"Pass a kernel with a call k(x1, x2) and {needed}.",
    )
