"""Networks in two parts: `features(x)` up to the last hidden layer, and `head(z)`, the dense layer after it.

`MLP` and `Impala` are the practical networks of the paper's tables, with orthogonal weights. `NTKMLP` has the NTK
parametrisation of Section 2.2; at large width it follows the closed forms in `kernels` and `exact`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import MAX_SIZE, check_integer, check_sizes
from onefold.errors import InputError

Activation: TypeAlias = Literal["relu", "erf"]

MAX_STANDARDISED = 1e4  # standard deviations; larger values could overflow the features


class Standardise(nn.Module):
    """(x − mean) / std with the statistics of the training set: per feature for vectors, one pair for images."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Float[Tensor, "*features"], std: Float[Tensor, "*features"]) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        if not std.is_meta:  # arithmetic on the meta device loads torch's compiler, which takes seconds
            std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)
        self.register_buffer("std", std)

    @classmethod
    def of(cls, x: Float[Tensor, "n *sample"]) -> "Standardise":
        """Return the module with the statistics of `x`."""
        axes = 0 if x.ndim == 2 else tuple(range(x.ndim))
        std, mean = torch.std_mean(x, dim=axes, correction=0)
        return cls(mean, std)

    def forward(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, "n *sample"]:
        return ((x - self.mean) / self.std).clamp(-MAX_STANDARDISED, MAX_STANDARDISED)


class MLP(nn.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise(sizes)))
        self.head = nn.Linear(sizes[-1], outputs)

    def features(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n width"]:
        for layer in self.hidden:
            x = F.relu(layer(x))
        return x

    def forward(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
        return self.head(self.features(x))


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        return x + self.second(F.relu(self.first(F.relu(x))))


class Entry(nn.Conv2d):
    """The first 3 × 3 convolution of a stage; on a GPU its channels are padded (see `_pad_channels`)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n k h w"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not x.is_cuda:
            return super().forward(x)
        return F.conv2d(*_pad_channels(x, self.weight), self.bias, padding=1)


class Impala(nn.Module):
    """IMPALA's network (Espeholt et al., 2018): stages of conv, max-pool 3/2 and two residual units, then an MLP."""

    def __init__(
        self, shape: tuple[int, int, int], channels: Sequence[int], hidden: Sequence[int], outputs: int
    ) -> None:
        super().__init__()
        self.stage_sizes = (shape, tuple(channels))
        self.fused = False
        inputs, height, width = shape
        stages: list[nn.Module] = []
        for count in channels:
            stages += [
                Entry(inputs, count),
                nn.MaxPool2d(3, stride=2, padding=1),
                Residual(count),
                Residual(count),
            ]
            inputs, height, width = count, (height + 1) // 2, (width + 1) // 2
        self.trunk = nn.Sequential(*stages)
        self.flatten = nn.Sequential(nn.ReLU(), nn.Flatten())
        self.mlp = MLP(inputs * height * width, hidden, outputs)

    @property
    def head(self) -> nn.Linear:
        return self.mlp.head

    def features(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n width"]:
        if self.fused:
            return self.mlp.features(trunks([self], [x])[0])
        return self.mlp.features(self.flatten(self.trunk(x)))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n outputs"]:
        return self.head(self.features(x))


class FusedStages(Protocol):
    """Module with fused CUDA kernels for a whole stage of IMPALA; see `onefold.rl.fused.stages`."""

    def supports(self, shape: tuple[int, int, int], channels: Sequence[int], device: torch.device) -> bool: ...

    def stack_images(self, x: Sequence[Tensor]) -> Tensor: ...

    def stage(self, x: Tensor, entry: Tensor, entry_bias: Tensor, units: Tensor, units_bias: Tensor) -> Tensor: ...


fused_stages: FusedStages | None = None
"""Registered kernels; `import onefold.rl.fused` registers its own. Without them all networks use cuDNN."""


def fuse(module: nn.Module, device: torch.device) -> None:
    """Use the registered kernels in every network of `module` that they support; they compute in bfloat16."""
    for part in module.modules():
        sizes: Any = getattr(part, "stage_sizes", None)
        if isinstance(sizes, tuple):
            shape, channels = sizes
            part.fused = fused_stages is not None and fused_stages.supports(shape, channels, device)  # pyright: ignore[reportArgumentType]


def trunks(nets: Sequence[Impala], inputs: Sequence[Float[Tensor, "n c h w"]]) -> list[Float[Tensor, "n width"]]:
    """Return the trunk outputs of several networks of the same architecture, one input batch per network, in one pass.

    The networks run as one network with block-diagonal convolutions. On a GPU this takes hardly longer than one,
    because narrow convolutions leave most of the GPU idle. The result is the same up to rounding. Networks that are
    `fused` use the registered kernels instead.
    """
    if nets[0].fused:
        return _fused_trunks(nets, inputs)
    x = torch.cat(list(inputs), 1).to(memory_format=torch.channels_last)
    for layers in zip(*(net.trunk for net in nets), strict=True):
        if isinstance(layers[0], Residual):
            inner = _block_diagonal_conv([layer.first for layer in layers], F.relu(x))
            x = x + _block_diagonal_conv([layer.second for layer in layers], F.relu(inner))
        else:
            x = _block_diagonal_conv(layers, x) if isinstance(layers[0], Entry) else layers[0](x)
    return [F.relu(part).flatten(1) for part in x.chunk(len(nets), 1)]


def _fused_trunks(nets: Sequence[Impala], inputs: Sequence[Float[Tensor, "n c h w"]]) -> list[Float[Tensor, "n width"]]:
    """Return the same by the registered kernels, one stage at a time."""
    assert fused_stages is not None
    x = fused_stages.stack_images(inputs)
    for i in range(0, len(nets[0].trunk), 4):
        layers = [[c for c in net.trunk[i : i + 4].modules() if isinstance(c, nn.Conv2d)] for net in nets]
        x = fused_stages.stage(
            x,
            torch.stack([entry.weight for entry, *_ in layers]),
            torch.stack([_bias(entry) for entry, *_ in layers]),
            torch.stack([torch.stack([c.weight for c in units]) for _, *units in layers]),
            torch.stack([torch.stack([_bias(c) for c in units]) for _, *units in layers]),
        )
    return list(F.relu(x).permute(0, 1, 4, 2, 3).flatten(2).to(inputs[0].dtype).unbind())


def _bias(layer: nn.Conv2d) -> Tensor:
    """Return the bias, which every convolution here has."""
    assert layer.bias is not None
    return layer.bias


def _block_diagonal_conv(convolutions: Sequence[nn.Conv2d], x: Tensor) -> Tensor:
    """Return the outputs of several convolutions, each on its block of the channels of `x`."""
    count, channels = len(convolutions), convolutions[0].in_channels
    paddings = [(0, 0, 0, 0, i * channels, (count - 1 - i) * channels) for i in range(count)]
    weight = torch.cat([F.pad(c.weight, padding) for c, padding in zip(convolutions, paddings, strict=True)])
    bias = torch.cat([_bias(c) for c in convolutions])
    return F.conv2d(*_pad_channels(x, weight), bias, padding=1)


def _pad_channels(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` and `weight` with five or more channels padded by zeros to a multiple of eight on a GPU.

    Without the padding, tensor cores take up to twice as long.
    """
    missing = -x.shape[1] % 8 if x.is_cuda and x.shape[1] > 4 else 0
    padding = (0, 0, 0, 0, 0, missing)
    return (F.pad(x, padding), F.pad(weight, padding)) if missing else (x, weight)


def backbone(
    shape: tuple[int, ...],
    *,
    channels: Sequence[int],
    hidden: Sequence[int],
    outputs: int,
    generator: Generator | None,
    bias_std: float = 0.0,
) -> MLP | Impala:
    """Return the network for samples of this shape: an MLP for vectors (D,), IMPALA for images (C, H, W).

    For large images the last stage is repeated until the dense layers see at most 16 pixels on a side. Otherwise a
    photograph would need hundreds of millions of weights. Without a generator the network stays on the meta device, for
    weights to be loaded into.
    """
    check_sizes(channels, "channels")
    check_sizes(hidden, "hidden")
    check_integer(outputs, "outputs", 1, MAX_SIZE)
    with torch.device("meta"):  # draws no random numbers: every parameter is set below, from `generator`
        if len(shape) == 1:
            net = MLP(shape[0], hidden, outputs)
        else:
            if not channels:
                raise InputError("channels: a network for images needs at least one stage. Pass at least one size.")
            minimum = math.ceil(math.log2(max(shape[1:]) / 16)) if max(shape[1:]) > 16 else 0
            stages = [*channels, *[channels[-1]] * (minimum - len(channels))]
            net = Impala((shape[0], shape[1], shape[2]), stages, hidden, outputs)
    if generator is None:
        return net.float()
    net = net.to_empty(device="cpu").float()
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = 1.0 if module is net.head else math.sqrt(2)
            nn.init.orthogonal_(module.weight, gain, generator=generator)
            assert module.bias is not None
            nn.init.normal_(module.bias, std=bias_std, generator=generator)
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def random_network(
    shape: tuple[int, ...],
    generator: Generator | None,
    *,
    channels: Sequence[int],
    hidden: Sequence[int],
    outputs: int = 1,
) -> MLP | Impala:
    """Return a frozen random network; for vectors its biases are random, so that the length of an input matters."""
    bias_std = 1.0 if len(shape) == 1 else 0.0
    net = backbone(shape, channels=channels, hidden=hidden, outputs=outputs, generator=generator, bias_std=bias_std)
    return net.requires_grad_(False)


class Prior(nn.Module):
    """φ₀: the last hidden layer of a random network, after `first` has standardised the samples (Eq. 14)."""

    def __init__(self, first: nn.Module, net: MLP | Impala) -> None:
        super().__init__()
        self.first, self.net = first, net

    def forward(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, "n width"]:
        with torch.no_grad():
            return self.net.features(self.first(x))


class RNDScorer(nn.Module):
    """Random network distillation (Burda et al., 2018): ½ mean (predictor − target)² over the outputs."""

    def __init__(self, predictor: nn.Sequential, target: nn.Sequential) -> None:
        super().__init__()
        self.predictor, self.target = predictor, target

    @property
    def networks(self) -> nn.Module:
        """The trained network."""
        return self.predictor

    def forward(self, x: Float[Tensor, "n *sample"]) -> Float[Tensor, " n"]:
        return 0.5 * (self.predictor(x) - self.target(x)).float().square().mean(1)


def finished(net: nn.Module, device: torch.device) -> None:
    """Freeze a trained network in evaluation mode, on its device, in the memory layout that is fastest for float32."""
    layout = torch.contiguous_format if device.type == "cuda" else torch.channels_last
    net.to(device, memory_format=layout).eval().requires_grad_(False)  # pyright: ignore[reportCallIssue]


class NTKMLP(nn.Module):
    """A fully connected network in NTK parametrisation (Jacot et al., 2018).

    Every parameter is drawn from N(0, 1); a layer computes w_std / √fan_in · W a + b_std · b. `features` includes the
    factor w_std / √width of the last layer, so that f(x) = features(x)ᵀ θᴸ + b_std · bᴸ as in Eq. 14.

    Args:
        inputs: Number of input features D.
        hidden: Widths of the hidden layers.
        outputs: Number of outputs.
        activation: "relu" or "erf".
        w_std: Standard deviation of the weights before the factor 1 / √fan_in.
        b_std: Standard deviation of the biases.
        generator: Draws the parameters.
        dtype: Type of the parameters.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int = 1,
        *,
        activation: Activation = "relu",
        w_std: float = 1.0,
        b_std: float = 0.0,
        generator: Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.w_std, self.b_std = w_std, b_std
        sizes = [inputs, *hidden, outputs]

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype))

        self.weights = nn.ParameterList(normal(b, a) for a, b in itertools.pairwise(sizes))
        self.biases = nn.ParameterList(normal(b) for b in sizes[1:])

    def features(self, x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "*n width"]:
        """Return the scaled activations that enter the last layer, φ(x) in Eq. 14.

        Args:
            x: Inputs [N, D].

        Returns:
            Features [N, width].
        """
        nonlinearity = {"relu": F.relu, "erf": torch.erf}[self.activation]
        z = self._scale(x)
        for i in range(len(self.weights) - 1):  # by index: torch.func does not see a slice of a ParameterList
            z = self._scale(nonlinearity(F.linear(z, self.weights[i], self.b_std * self.biases[i])))
        return z

    def head(self, z: Float[Tensor, "*n width"]) -> Float[Tensor, "*n outputs"]:
        return F.linear(z, self.weights[-1], self.b_std * self.biases[-1])

    def forward(self, x: Float[Tensor, "*n inputs"]) -> Float[Tensor, "*n outputs"]:
        """Return f(x).

        Args:
            x: Inputs [N, D].

        Returns:
            Outputs [N, outputs].
        """
        return self.head(self.features(x))

    @property
    def last_layer(self) -> tuple[str, str]:
        """Names of the last layer's parameters; their part of the NTK is the NNGP kernel."""
        last = len(self.weights) - 1
        return f"weights.{last}", f"biases.{last}"

    def _scale(self, a: Float[Tensor, "*n width"]) -> Float[Tensor, "*n width"]:
        """Return w_std / √width · a."""
        return a * (self.w_std / math.sqrt(a.shape[-1]))
