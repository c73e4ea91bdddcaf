"""Kernels of finitely many features: the last-layer kernel of Eq. 14, also on a model of the user's own."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_integer
from onefold.core.batches import batch_slices, batch_tensors
from onefold.errors import InputError, LayerError
from onefold.kernels.model import (
    cut_program,
    find_layer,
    first_dense,
    flattened,
    is_program,
    last_linear,
    program_inputs,
    run_model,
    tap,
    to_model,
)
from onefold.nn.nets import MLP, NTKMLP, Impala
from onefold.types import Batch, Model

SLICE = 1024  # samples that go through a model at once
MAX_WIDTH = 2**17


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
    net: Model,
    layer: str | None = None,
    width: int | None = 2048,
    *,
    normalise: bool = False,
    seed: int = 0,
    capturable: bool = False,
) -> "ModelFeatures":
    """The features of a trained model, or of a torch.export program: the output of a named layer, by default what
    enters its dense head (the last nn.Linear, or the first of several that follow convolutions).

    They go through a random ReLU layer of that `width`, √(2/width) · relu(z R) with R ~ N(0, 1/D): as the width grows
    the kernel becomes the arc-cosine kernel of the model's features. With width=None they are the features themselves.
    The model may take a tensor, a tuple of tensors or a dict; it is neither moved nor changed nor left in another mode,
    and its hooks are removed after every call. A model on the GPU of the fit whose forward pass never looks at the host
    is `capturable`: a fit that calls it in every step is then several times faster.
    """
    _check_model(net)
    width = None if width is None else check_integer(width, "width", 1, MAX_WIDTH)
    settings = {"layer": layer, "width": width, "normalise": normalise, "seed": check_integer(seed, "seed", 0)}
    if is_program(net):
        return ModelFeatures(cut_program(net, layer), settings, capturable=capturable)
    module = first_dense(net) if layer is None else find_layer(net, layer)
    return ModelFeatures(lambda x: tap(net, module, x, before=layer is None), settings, capturable=capturable)


def logits(net: Model) -> "ModelFeatures":
    """What a model itself gives out, as features."""
    _check_model(net)
    settings = {"layer": None, "width": None, "normalise": False, "seed": 0, "outputs": True}
    if is_program(net):
        module = net.module()
        assert isinstance(module, GraphModule)
        return ModelFeatures(lambda x: flattened(module(*program_inputs(module, to_model(module, x)))), settings)
    return ModelFeatures(lambda x: run_model(net, x), settings)


class ModelFeatures:
    """k(x, x′) = φ(x)ᵀφ(x′) with φ in two steps: what a model makes of an input, `encode`, and a fixed layer on top.

    `settings` are those of `from_model`: with them and the model, the same kernel can be made again.
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
        return self  # it does not change, and the model is the user's

    def encode(self, x: Batch) -> Float[Tensor, "n d"]:
        """What the model makes of a batch, in float32, where the batch lies."""
        return self._encoder(x).to(batch_tensors(x)[0].device, torch.float32)

    def project(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n width"]:
        """φ from what `encode` gave."""
        z = z if self._projection is None else self._projection(z)
        return F.normalize(z, dim=1) if self.normalise else z

    def scale(self, z: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """k(x, x) from what `encode` gave, without the random layer: it is ‖z‖²/D however wide, up to chance."""
        if self.normalise:
            return torch.ones_like(z[:, 0])
        return z.square().sum(1) if self._projection is None else z.square().mean(1)

    def features(self, x: Batch) -> Float[Tensor, "n width"]:
        return torch.cat([self.project(self.encode(part)) for part in batch_slices(x, SLICE)])

    def __call__(self, x1: Batch, x2: Batch) -> Float[Tensor, "n1 n2"]:
        return self.features(x1) @ self.features(x2).T

    def diag(self, x: Batch) -> Float[Tensor, " n"]:
        return self.features(x).square().sum(1)


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
