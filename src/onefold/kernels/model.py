"""Kernels on the features of a user's trained model, which stays unchanged."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_integer
from onefold.core.batches import batch_slices, batch_tensors
from onefold.errors import InputError, LayerError, OnefoldError
from onefold.inputs import Picture, Source, form_of
from onefold.inputs.reader import Prepare, Reader
from onefold.kernels.last_layer import SLICE, FeatureProduct
from onefold.nn.modules import find_layer, first_dense, flattened, run_model, tap, to_model
from onefold.nn.programs import cut_program, input_shapes, is_program, program_inputs
from onefold.types import Batch, Model

MAX_WIDTH = 2**17


def from_model(
    net: Model,
    layer: str | None = None,
    width: int | None = 2048,
    *,
    normalise: bool = False,
    seed: int = 0,
    capturable: bool = False,
) -> "ModelFeatures":
    """Return the kernel of a trained model's features.

    The features z go through a random ReLU layer, √(2/width) · relu(z R) with R ~ N(0, 1/D). As the width grows, the
    kernel becomes the arc-cosine kernel of z. The model may take a tensor, a tuple of tensors or a dict. It is neither
    moved nor changed, and it stays in its mode.

    Args:
        net: A `torch.nn.Module` or a `torch.export` program.
        layer: Name of the layer that outputs the features. By default the features are the input of the dense head: of
            the last `nn.Linear`, or of the first of several that follow convolutions.
        width: Width of the random layer; None leaves it out.
        normalise: Scale features to unit length.
        seed: Seed of the random layer.
        capturable: True if the model is on the GPU of the fit and its forward pass never waits for the host. A fit that
            calls the model in every step is then several times faster.

    Returns:
        The kernel.

    Raises:
        InputError: `net` is not a model, or `width` or `seed` is out of range.
        LayerError: The model has no such layer.
    """
    _check_model(net)
    width = None if width is None else check_integer(width, "width", 1, MAX_WIDTH)
    settings = {"layer": layer, "width": width, "normalise": normalise, "seed": check_integer(seed, "seed", 0)}
    if is_program(net):
        return ModelFeatures(cut_program(net, layer), settings, capturable=capturable)
    module = first_dense(net) if layer is None else find_layer(net, layer)
    return ModelFeatures(lambda x: tap(net, module, x, before=layer is None), settings, capturable=capturable)


def logits(net: Model) -> "ModelFeatures":
    """Return the kernel of a model's outputs.

    Args:
        net: A `torch.nn.Module` or a `torch.export` program.

    Returns:
        A kernel with the model's outputs as its features.

    Raises:
        InputError: `net` is not a model.
    """
    _check_model(net)
    settings = {"layer": None, "width": None, "normalise": False, "seed": 0, "outputs": True}
    if is_program(net):
        module = net.module()
        assert isinstance(module, GraphModule)
        return ModelFeatures(lambda x: flattened(module(*program_inputs(module, to_model(module, x)))), settings)
    return ModelFeatures(lambda x: run_model(net, x), settings)


class ModelFeatures(FeatureProduct):
    """The kernel k(x, x′) = φ(x)ᵀφ(x′) with φ(x) = project(encode(x)): a model, then a fixed random layer.

    `from_model` and `logits` make it. The model and these settings determine the kernel.

    Args:
        encoder: Function from a batch to the model's features [N, D].
        settings: Arguments of `from_model`.
        capturable: True if `encoder` can be part of a CUDA graph.
    """

    def __init__(self, encoder: Callable[[Any], Tensor], settings: dict[str, Any], *, capturable: bool = False) -> None:
        self.capturable = capturable
        self._encoder, self.settings, self.normalise = encoder, settings, settings["normalise"]
        self._projection = None if settings["width"] is None else _RandomReLU(settings["width"], settings["seed"])

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a kernel of a model cannot be pickled, nor can a detector on it. Use detector.save(path) and "
            "onefold.load(path, model=…)."
        )

    def __deepcopy__(self, memo: object) -> "ModelFeatures":
        return self  # immutable, and the model belongs to the user

    def encode(self, x: Batch) -> Float[Tensor, "n d"]:
        """Return the model's features in float32, on the device of `x`.

        Args:
            x: Inputs.

        Returns:
            Features [N, D].
        """
        return self._encoder(x).to(batch_tensors(x)[0].device, torch.float32)

    def project(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n width"]:
        """Return φ(x) of encoded inputs.

        Args:
            z: Features from `encode`.

        Returns:
            Features [N, width].
        """
        z = z if self._projection is None else self._projection(z)
        return F.normalize(z, dim=1) if self.normalise else z

    def scale(self, z: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Return k(x, x) of encoded inputs, for the random layer in the limit of infinite width: ‖z‖²/D.

        Args:
            z: Features from `encode`.

        Returns:
            Diagonal of the kernel matrix, [N].
        """
        if self.normalise:
            return torch.ones_like(z[:, 0])
        return z.square().sum(1) if self._projection is None else z.square().mean(1)

    def features(self, x: Batch) -> Float[Tensor, "n width"]:
        """Return φ(x).

        Args:
            x: Inputs.

        Returns:
            Features [N, width].
        """
        return torch.cat([self.project(self.encode(part)) for part in batch_slices(x, SLICE)])


def picture_for(net: Model) -> Picture | None:
    """Return the size of the images that a model takes, or None if it takes images of any size or other data."""
    shapes = [shape[1:] for shape in input_shapes(net) if len(shape) == 4]
    if len(shapes) != 1 or not all(isinstance(size, int) for size in shapes[0]) or shapes[0][0] not in (1, 3):
        return None
    channels, height, width = shapes[0]
    return Picture(height, width, channels)


def check_model_accepts_data(path: Path, kernel: Any, source: Source, name: str) -> None:
    """Raise InputError if a model does not accept the first samples of a source."""
    first = next(source.batches(2))
    reader = Reader.infer(first, form_of(source), as_given=True)
    batch = Prepare(reader)(reader.check(first, name))
    try:
        kernel.encode(batch)
    except OnefoldError:
        raise
    except Exception as error:  # a user's model may fail in any way
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        shape = tuple(batch.shape[1:])
        raise InputError(f"{path}: cannot take samples of shape {shape} from {name} ({reason})") from None


def _check_model(net: object) -> None:
    if isinstance(net, nn.Module) or is_program(net):
        return
    name = type(net).__name__
    if hasattr(net, "features") and callable(net):
        raise InputError(f"the model is a kernel already ({name}). Pass it to the detector as it is.")
    module = type(net).__module__.partition(".")[0]
    hint = {
        "sklearn": "Fit the detector on what its transform() returns, or use onefold.sklearn.OnefoldDetector.",
        "keras": "Fit the detector on the features that it predicts.",
    }.get(module, "Pass a torch.nn.Module or a torch.export program.")
    raise InputError(f"the model is not a PyTorch model ({name}). {hint}")


class _RandomReLU:
    """Fixed random ReLU layer; its weights are drawn from the seed at the first call."""

    def __init__(self, width: int, seed: int) -> None:
        self._width, self._seed = width, seed
        self._matrix: Tensor | None = None

    def __call__(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n width"]:
        if self._matrix is None:
            generator = Generator().manual_seed(self._seed)
            self._matrix = torch.randn(z.shape[1], self._width, generator=generator) / math.sqrt(z.shape[1])
        if len(self._matrix) != z.shape[1]:
            raise LayerError(
                f"the layer gave {z.shape[1]} features, {len(self._matrix)} before. Name a layer of fixed size."
            )
        self._matrix = self._matrix.to(z.device)
        return F.relu(z @ self._matrix) * math.sqrt(2 / self._width)
