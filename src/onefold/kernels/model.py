"""Kernels on the features of a user's trained model, which stays unchanged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_integer
from onefold.core.batches import batch_slices, batch_tensors
from onefold.core.runtime import available, require
from onefold.core.schema import from_json
from onefold.errors import InputError, LayerError, OnefoldError
from onefold.inputs import Form, Picture, Source, Text, TextSource, form_of
from onefold.inputs.reader import Prepare, Reader
from onefold.kernels.embedding import ModelOutputs, ModuleEncoder, Places, program_outputs
from onefold.kernels.last_layer import SLICE, FeatureProduct
from onefold.nn.modules import flattened, run_model
from onefold.nn.programs import cut_program, input_shapes, is_program, program_caller
from onefold.types import Batch, Model

MAX_WIDTH = 2**17
LARGEST_EMBEDDING = 2**30  # numbers, in a file
LONGEST_NAME = 1000  # characters of a layer's name in a file


@runtime_checkable
class Encoder(Protocol):
    """A frozen model that gives embeddings. Its properties may be unknown before the first batch: 0, "" and None."""

    @property
    def size(self) -> int:
        """Length of the embedding."""
        ...

    @property
    def origin(self) -> str:
        """Origin of the embedding, such as "pooler_output"."""
        ...

    @property
    def places(self) -> Places | None:
        """Where the outputs are in the model, or None."""
        ...

    def outputs(self, x: Any, *, stages: bool) -> ModelOutputs:
        """Return the outputs of one forward pass, with pooled stages if `stages` is set."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Where a pretrained encoder comes from, by which `load` finds it again.

    Args:
        name: Name, Hugging Face id, or folder.
        revision: Commit on the hub, version of the package, or empty for a folder.
        checksum: SHA-256 of its files.
    """

    name: str
    revision: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What determines a kernel on a model, besides the model; stored in the files of detectors.

    Args:
        layer: Name of the layer that outputs the embedding, or None.
        width: Width of the random layer, or None.
        normalise: Scale features to unit length.
        seed: Seed of the random layer.
        outputs: True for the model's outputs, `kernels.logits`.
        places: Where the outputs of the model are, after the first batch.
        pretrained: Origin of the encoder of `from_pretrained`, or None for a user's model.
    """

    layer: str | None
    width: int | None
    normalise: bool
    seed: int
    outputs: bool
    places: Places | None
    pretrained: Pretrained | None = None

    def __post_init__(self) -> None:
        if self.width is not None:
            check_integer(self.width, "width", 1, MAX_WIDTH)
        check_integer(self.seed, "seed", 0)


def from_model(
    net: Model,
    layer: str | None = None,
    width: int | None = 2048,
    *,
    normalise: bool = False,
    seed: int = 0,
    capturable: bool = False,
) -> "ModelFeatures":
    """Return the kernel of a trained model's embeddings.

    The embedding z is the tensor that the model's authors document as such; the guide lists them. It goes through a
    random ReLU layer, √(2/width) · relu(z R) with R ~ N(0, 1/D). As the width grows, the kernel becomes the arc-cosine
    kernel of z. The model may take a tensor, a tuple of tensors or a dict. It is neither moved nor changed, and it
    stays in its mode.

    Args:
        net: A `torch.nn.Module` or a `torch.export` program.
        layer: Name of the layer whose output is the embedding, flattened to one row per sample: a map [C, H, W] gives
            C · H · W numbers. By default the input of the classifier head, or what the model without a head returns;
            of a `torch.export` program what it returns.
        width: Width of the random layer; None leaves it out.
        normalise: Scale features to unit length.
        seed: Seed of the random layer.
        capturable: True if the model is on the GPU of the fit and its forward pass never waits for the host. A fit that
            calls the model in every step is then several times faster.

    Returns:
        The kernel.

    Raises:
        InputError: `net` is not a model, or `width` or `seed` is out of range.
        LayerError: The model has no such layer. At the first batch: its embedding cannot be determined.
    """
    _check_model(net)
    settings = ModelSettings(
        layer=None if layer is None else str(layer),
        width=width,
        normalise=bool(normalise),
        seed=seed,
        outputs=False,
        places=None,
    )
    return kernel_of(net, settings, capturable=capturable)


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
    settings = ModelSettings(layer=None, width=None, normalise=False, seed=0, outputs=True, places=None)
    return kernel_of(net, settings)


def kernel_of(net: Model, settings: ModelSettings, *, capturable: bool = False) -> "ModelFeatures":
    """Return the kernel on a model with these settings; raise LayerError if the model lacks a layer of them."""
    if settings.outputs:
        encoder: Encoder = OutputEncoder(net)
    elif is_program(net):
        encoder = ProgramEncoder(net, settings.layer)
    else:
        encoder = ModuleEncoder(net, settings.layer, settings.places)
    form = picture_for(net) if is_program(net) else None
    return ModelFeatures(encoder, settings, capturable=capturable, form=form)


def parse_settings(content: Any) -> ModelSettings:
    """Return the settings in a detector's file; raise InputError if no kernel has them."""
    settings = from_json(ModelSettings, content, "kernel")
    names = {settings.layer or ""} | (set() if settings.places is None else settings.places.modules)
    if any(len(name) > LONGEST_NAME for name in names):
        raise InputError("the name of a layer is too long", argument="kernel")
    if settings.places is not None and not 0 < settings.places.size <= LARGEST_EMBEDDING:
        raise InputError("the embedding has an impossible size", argument="kernel")
    return settings


class ProgramEncoder:
    """Outputs of a `torch.export` program: one embedding, or a pair of logits and embedding.

    Args:
        program: Program.
        layer: Name of the layer whose output is the embedding; None takes what the program returns.

    Raises:
        LayerError: The program has no such layer.
    """

    places = None

    def __init__(self, program: Model, layer: str | None) -> None:
        self._call = program_caller(program) if layer is None else cut_program(program, layer)
        self._layer, self.size, self.origin = layer, 0, ""

    def outputs(self, x: Batch, *, stages: bool) -> ModelOutputs:
        """Return the outputs of one call; a program has no stages."""
        del stages
        output = self._call(x)
        if self._layer is None:
            outputs, self.origin = program_outputs(output)
        else:
            outputs, self.origin = ModelOutputs(flattened(output).float()), f"output of {self._layer}"
        self.size = outputs.embedding.shape[1]
        return outputs


class OutputEncoder:
    """The first tensor that a model returns, as logits and embedding.

    Args:
        net: Model.
    """

    places = None

    def __init__(self, net: Model) -> None:
        self._call = program_caller(net) if is_program(net) else lambda x: run_model(net, x)
        self.size, self.origin = 0, "output"

    def outputs(self, x: Batch, *, stages: bool) -> ModelOutputs:
        """Return the outputs of one call."""
        del stages
        output = self._call(x)
        entry = output.get("logits") if isinstance(output, Mapping) else None
        rows = flattened(output if entry is None else entry).float()
        self.size = rows.shape[1]
        return ModelOutputs(rows, rows if rows.shape[1] > 1 else None)


class ModelFeatures(FeatureProduct):
    """The kernel k(x, x′) = φ(x)ᵀφ(x′) with φ(x) = project(encode(x)): a model, then a fixed random layer.

    `from_model` and `logits` make it. The model and these settings determine the kernel.

    Args:
        encoder: Gives the outputs of the model.
        settings: Arguments of `from_model`.
        capturable: True if `encoder` can be part of a CUDA graph.
        form: Form of the data that the encoder takes: size of images, or texts. None for tensors as they are.
    """

    def __init__(
        self, encoder: Encoder, settings: ModelSettings, *, capturable: bool = False, form: Form | None = None
    ) -> None:
        self.capturable, self.normalise, self.form = capturable, settings.normalise, form
        self._encoder, self._settings = encoder, settings
        self._projection = None if settings.width is None else RandomReLU(settings.width, settings.seed)

    @property
    def encoder(self) -> Encoder:
        """The frozen model that gives embeddings."""
        return self._encoder

    def with_encoder(self, encoder: Encoder) -> "ModelFeatures":
        """Return the same kernel with another encoder of the same embeddings, such as one that stores them."""
        return ModelFeatures(encoder, self._settings, capturable=self.capturable, form=self.form)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a kernel of a model cannot be pickled, nor can a detector on it. Use detector.save(path) and "
            "onefold.load(path, model=…)."
        )

    def __deepcopy__(self, memo: object) -> "ModelFeatures":
        return self  # immutable, and the model belongs to the user

    def __repr__(self) -> str:
        return f"{type(self).__name__}(features: {self.description or 'determined at the first batch'})"

    @property
    def description(self) -> str:
        """Size and origin of the embedding, such as "384 numbers, pooler_output"; empty before the first batch."""
        return f"{self.size:,} numbers, {self._encoder.origin}" if self.size else ""

    @property
    def size(self) -> int:
        """Length of the embedding; 0 before the first batch."""
        return self._encoder.size

    @property
    def pretrained(self) -> Pretrained | None:
        """Origin of the encoder of `from_pretrained`, whose logits are not of the user's classes; else None."""
        return self._settings.pretrained

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the kernel, besides the model, as JSON content for a detector's file."""
        return asdict(replace(self._settings, places=self._encoder.places))

    def outputs(self, x: Batch | Sequence[str]) -> ModelOutputs:
        """Return embedding, logits and pooled stages, from one forward pass of the model.

        The first call makes another pass, of two samples, to find the classifier head and the ends of the stages.

        Args:
            x: Inputs, or texts for an encoder of texts.

        Returns:
            Embedding [N, D], logits [N, classes] or None, and stages [N, P] or None, in float32 on the device of `x`.
            None of them is standardised. The stages of a convolutional network are channel means and maxima. Those of a
            transformer are the class token or the mean over tokens, at four depths. Those of an MLP are its hidden
            layers.

        Raises:
            LayerError: The model's embedding cannot be determined.
            NotEnoughMemoryError: The embeddings do not fit into memory.
        """
        x = self._to_batch(x)
        device = batch_tensors(x)[0].device
        values = self._encoder.outputs(x, stages=True)
        return ModelOutputs(*(None if value is None else value.to(device, torch.float32) for value in values))  # pyright: ignore[reportArgumentType]

    def encode(self, x: Batch | Sequence[str]) -> Float[Tensor, "n d"]:
        """Return the model's embedding in float32, not standardised, on the device of `x`.

        Args:
            x: Inputs, or texts for an encoder of texts.

        Returns:
            Embedding [N, D].

        Raises:
            LayerError: The model's embedding cannot be determined.
            NotEnoughMemoryError: The embeddings do not fit into memory.
        """
        x = self._to_batch(x)
        return self._encoder.outputs(x, stages=False).embedding.to(batch_tensors(x)[0].device, torch.float32)

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

    def features(self, x: Batch | Sequence[str]) -> Float[Tensor, "n width"]:
        """Return φ(x).

        Args:
            x: Inputs, or texts for an encoder of texts.

        Returns:
            Features [N, width].
        """
        return torch.cat([self.project(self.encode(part)) for part in batch_slices(self._to_batch(x), SLICE)])

    def _to_batch(self, x: Any) -> Batch:
        """Return a batch as it is, and a list of texts as their bytes."""
        if isinstance(self.form, Text) and not isinstance(x, Tensor):
            source = TextSource(x)
            return source.take(np.arange(len(source)))
        return x


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


class RandomReLU:
    """Fixed random ReLU layer; its weights are drawn from the seed at the first call."""

    def __init__(self, width: int, seed: int) -> None:
        self._width, self._seed = width, seed
        self._matrix: Tensor | None = None

    def __call__(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n width"]:
        if self._matrix is None:
            generator = Generator().manual_seed(self._seed)
            what = f"a random layer of {self._width:,} features on an embedding of {z.shape[1]:,} numbers"
            way_out = "name a layer after the pooling, or pass a smaller width"
            require(8 * z.shape[1] * self._width, available(torch.device("cpu")), what=what, way_out=way_out)
            self._matrix = torch.randn(z.shape[1], self._width, generator=generator) / math.sqrt(z.shape[1])
        if len(self._matrix) != z.shape[1]:
            raise LayerError(
                f"the layer gave {z.shape[1]} features, {len(self._matrix)} before. Name a layer of fixed size."
            )
        self._matrix = self._matrix.to(z.device)
        return F.relu(z @ self._matrix) * math.sqrt(2 / self._width)
