"""Other views of what an agent has seen, as contexts for CSD (paper, Table "Data augmentations", VizDoom)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

UNIFORMS = 15  # random numbers that one stack of frames needs


@dataclass(frozen=True, kw_only=True)
class Views:
    """Each step's probability and strength; `apply` is the probability that a context is changed at all.

    A perspective pulls every corner inwards by up to `distortion` of half a side, as kornia's and torchvision's do.
    """

    apply: float = 0.25
    perspective: float = 0.5
    distortion: float = 0.5
    flip: float = 0.5
    crop_area: tuple[float, float] = (0.75, 1.0)
    crop_aspect: float = 4 / 3


def viewed(x: Float[Tensor, "n c h w"], u: Float[Tensor, "n 15"], views: Views) -> Float[Tensor, "n c h w"]:
    """Stacks of frames, all frames of one alike, through perspective, flip and crop in one resampling.

    Coordinates are computed number by number: as products of matrices, autocast would round them to a tenth of a pixel.
    """
    height, width = x.shape[2:]
    across, left, down, top = _crop(u[:, :5], views)
    seen_x = across * _middles(width, x)[None, None, :] + left
    seen_y = down * _middles(height, x)[None, :, None] + top
    a, b, c = _perspective(u[:, 5:14], views)[..., None, None].unbind(1)
    moved_x, moved_y, depth = (row[:, 0] * seen_x + row[:, 1] * seen_y + row[:, 2] for row in (a, b, c))
    grid = torch.stack((moved_x / depth, moved_y / depth), -1)
    changed = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.where((u[:, 14] < views.apply)[:, None, None, None], changed, x)


def _middles(count: int, like: Tensor) -> Float[Tensor, " count"]:
    """Where the middles of so many pixels lie between −1 and 1."""
    return (2 * torch.arange(count, device=like.device, dtype=like.dtype) + 1) / count - 1


def _crop(u: Float[Tensor, "n 5"], views: Views) -> tuple[Float[Tensor, "n 1 1"], ...]:
    """From the outcome's coordinates in [−1, 1]² to those of the picture that is flipped and cropped: factor and shift
    across, factor and shift down."""
    low, high = views.crop_area
    side = (low + (high - low) * u[:, 0]).sqrt()
    stretch = views.crop_aspect ** (u[:, 1] - 0.5)
    across, down = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    left, top = (1 - across) * (2 * u[:, 2] - 1), (1 - down) * (2 * u[:, 3] - 1)
    across = torch.where(u[:, 4] < views.flip, -across, across)
    return tuple(part[:, None, None] for part in (across, left, down, top))


def _perspective(u: Float[Tensor, "n 9"], views: Views) -> Float[Tensor, "n 3 3"]:
    """From the distorted picture's coordinates in [−1, 1]² to the picture's own, homogeneous.

    The corners of the square go inwards to four points; the map of a square onto four points is known in closed form
    (Heckbert, 1989), and its adjugate leads back. No constant comes from the host, so that it can be captured.
    """
    strength = torch.where(u[:, 8] < views.perspective, views.distortion, 0.0)
    pulled = 1 - u[:, :8].view(-1, 4, 2) * strength[:, None, None]
    left, right, up, down = (-pulled[:, ::3, 0], pulled[:, 1:3, 0], -pulled[:, :2, 1], pulled[:, 2:, 1])
    x = torch.stack((left[:, 0], right[:, 0], right[:, 1], left[:, 1]), 1)
    y = torch.cat((up, down), 1)
    first, second = (x[:, 1] - x[:, 2], y[:, 1] - y[:, 2]), (x[:, 3] - x[:, 2], y[:, 3] - y[:, 2])
    skew = (x[:, 0] - x[:, 1] + x[:, 2] - x[:, 3], y[:, 0] - y[:, 1] + y[:, 2] - y[:, 3])
    area = first[0] * second[1] - second[0] * first[1]
    g = (skew[0] * second[1] - second[0] * skew[1]) / area
    h = (first[0] * skew[1] - skew[0] * first[1]) / area
    one = torch.ones_like(g)
    onto = torch.stack(
        (
            x[:, 1] - x[:, 0] + g * x[:, 1], x[:, 3] - x[:, 0] + h * x[:, 3], x[:, 0],
            y[:, 1] - y[:, 0] + g * y[:, 1], y[:, 3] - y[:, 0] + h * y[:, 3], y[:, 0],
            g, h, one,
        ),
        1,
    ).view(-1, 3, 3)  # fmt: skip
    a, b, c = onto.unbind(2)
    back = torch.stack((b.cross(c, dim=1), c.cross(a, dim=1), a.cross(b, dim=1)), 1)
    across, along, depth = back.unbind(1)
    return torch.stack((2 * across - depth, 2 * along - depth, depth), 1)  # from [0, 1]² to [−1, 1]²
