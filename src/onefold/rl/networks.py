"""Networks of agents: IMPALA's trunk with spectral normalisation, a dense layer for vectors, and value heads."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.nn import nets
from onefold.nn.nets import Entry


class Trunk(nn.Module):
    """IMPALA's stages (Espeholt et al., 2018) on float images in [0, 1]: [N, C, H, W] to features [N, width].

    The convolutions of the residual units are divided by their largest singular value (Miyato et al., 2018; Gogianu et
    al., 2021), as in the baseline agent of the paper (Schmidt & Schmied, 2021). The weights of a stage's four
    convolutions are stacked in one tensor, so that one power iteration updates all four. Only `power_iteration` updates
    the singular vectors; a forward pass does not.
    """

    def __init__(self, shape: tuple[int, int, int], channels: Sequence[int], generator: Generator) -> None:
        super().__init__()
        self.stage_sizes, self.fused = (shape, tuple(channels)), False
        inputs, height, width = shape
        self.entries, self.units, self.biases = nn.ModuleList(), nn.ParameterList(), nn.ParameterList()
        self.left, self.right = nn.ParameterList(), nn.ParameterList()
        for count in channels:
            self.entries.append(Entry(inputs, count))
            self.units.append(nn.Parameter(torch.empty(4, count, count, 3, 3)))
            self.biases.append(nn.Parameter(torch.zeros(4, count)))
            for side, size in ((self.left, count), (self.right, 9 * count)):
                vectors = F.normalize(torch.randn(4, size, generator=generator), dim=1)
                side.append(nn.Parameter(vectors, requires_grad=False))
            inputs, height, width = count, (height + 1) // 2, (width + 1) // 2
        self.width = inputs * height * width
        weights: list[Tensor] = [*(entry.weight for entry in self.entries), *self.units]  # pyright: ignore[reportAssignmentType]
        for weight in weights:
            he_uniform_(weight, math.prod(weight.shape[-3:]), generator)
        for entry in self.entries:
            nn.init.zeros_(entry.bias)  # pyright: ignore[reportArgumentType]
        for _ in range(15):
            self.power_iteration()

    @torch.no_grad()
    def power_iteration(self) -> None:
        """Update the singular vectors of every residual convolution by one power iteration."""
        for unit, left, right in zip(self.units, self.left, self.right, strict=True):
            matrix = unit.flatten(2)
            right.copy_(F.normalize(torch.einsum("kij,ki->kj", matrix, left), dim=1))
            left.copy_(F.normalize(torch.einsum("kij,kj->ki", matrix, right), dim=1))

    def normalised_weights(self) -> list[Float[Tensor, "4 c c 3 3"]]:
        """Return the weights of the residual convolutions divided by their largest singular values."""
        weights = []
        for unit, left, right in zip(self.units, self.left, self.right, strict=True):
            largest = torch.einsum("ki,kij,kj->k", left, unit.flatten(2), right)
            weights.append(unit / largest[:, None, None, None, None])
        return weights

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n width"]:
        if self.fused:
            return self._fused(x)
        x = x.to(memory_format=torch.channels_last)
        for entry, weights, biases in zip(self.entries, self.normalised_weights(), self.biases, strict=True):
            x = F.max_pool2d(entry(x), 3, stride=2, padding=1)
            for first, second in ((0, 1), (2, 3)):
                inner = F.conv2d(F.relu(x), weights[first], biases[first], padding=1)
                x = x + F.conv2d(F.relu(inner), weights[second], biases[second], padding=1)
        return F.relu(x).flatten(1)

    def _fused(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n width"]:
        """Return the same by the registered kernels, in bfloat16, one stage at a time."""
        assert nets.fused_stages is not None
        z = nets.fused_stages.stack_images([x])
        for entry, weights, biases in zip(self.entries, self.normalised_weights(), self.biases, strict=True):
            z = nets.fused_stages.stage(z, entry.weight[None], entry.bias[None], weights[None], biases[None])  # pyright: ignore[reportIndexIssue]
        return F.relu(z[0]).permute(0, 3, 1, 2).flatten(1).to(x.dtype)


class Dense(nn.Module):
    """One hidden layer, the trunk for vectors."""

    def __init__(self, inputs: int, width: int, generator: Generator) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(inputs, width)
        he_uniform_(self.layer.weight, inputs, generator)
        nn.init.zeros_(self.layer.bias)

    def power_iteration(self) -> None:
        """Do nothing: dense layers are not normalised."""

    def forward(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n width"]:
        return F.relu(self.layer(x))


class Heads(nn.Module):
    """Value heads with one hidden layer each: features [N, width] to values [heads, N, actions, atoms].

    With `dueling`, a head adds a state value to centred advantages (Wang et al., 2016). The last layers compute in
    float32: bfloat16 cannot resolve the differences between actions.
    """

    def __init__(
        self, inputs: int, hidden: int, actions: int, generator: Generator, *, heads: int, atoms: int, dueling: bool
    ) -> None:
        super().__init__()
        self.heads, self.actions, self.atoms = heads, actions, atoms
        self.hidden = _BatchedLinear(heads, inputs, 2 * hidden if dueling else hidden, generator)
        self.value = _BatchedLinear(heads, hidden, atoms, generator) if dueling else None
        self.advantage = _BatchedLinear(heads, hidden, actions * atoms, generator)

    @torch.no_grad()
    def initialise_output(self, values: Float[Tensor, " atoms"]) -> None:
        """Initialise the last layers so that every state and action has the output `values`.

        Random last layers give differences between actions ten times the true ones; each target update shrinks them
        only by γⁿ.
        """
        nn.init.zeros_(self.advantage.weight)
        if self.value is None:
            self.advantage.bias.copy_(values.repeat(self.actions))
        else:
            nn.init.zeros_(self.value.weight)
            self.value.bias.copy_(values)

    def forward(self, features: Float[Tensor, "n width"]) -> Float[Tensor, "heads n actions atoms"]:
        hidden = F.relu(self.hidden(features.expand(self.heads, -1, -1)))
        with torch.autocast(features.device.type, enabled=False):
            hidden = hidden.float()
            if self.value is None:
                return self.advantage(hidden).unflatten(-1, (self.actions, self.atoms))
            state, action = hidden.chunk(2, -1)
            value = self.value(state)[:, :, None, :]
            advantage = self.advantage(action).unflatten(-1, (self.actions, self.atoms))
            return value + advantage - advantage.mean(2, keepdim=True)


class _BatchedLinear(nn.Module):
    """Dense layers of all heads, one matrix per head."""

    def __init__(self, heads: int, inputs: int, outputs: int, generator: Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(heads, 1, outputs))
        he_uniform_(self.weight, inputs, generator)

    def forward(self, x: Float[Tensor, "heads n inputs"]) -> Float[Tensor, "heads n outputs"]:
        return torch.baddbmm(self.bias, x, self.weight)


@torch.no_grad()
def he_uniform_(weight: Tensor, inputs: int, generator: Generator) -> None:
    """Draw a weight uniformly from ±√(6 / inputs) (He et al., 2015), the paper's initialisation of agents."""
    bound = math.sqrt(6 / inputs)
    weight.copy_(torch.rand(weight.shape, generator=generator) * 2 * bound - bound)


def make_trunk(shape: tuple[int, ...], channels: Sequence[int], hidden: int, generator: Generator) -> Trunk | Dense:
    """Return the trunk for stacks of this shape."""
    if len(shape) == 1:
        return Dense(shape[0], hidden, generator)
    return Trunk((shape[0], shape[1], shape[2]), channels, generator)
