"""Augmentation of stacks of frames, for the contexts of CSD (paper, Table "Data augmentations", ViZDoom)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

UNIFORMS = 15  # random numbers per stack of frames


@dataclass(frozen=True, kw_only=True)
class FrameAugmentation:
    """Probabilities and strengths of the augmentation steps.

    Args:
        apply: Probability that a stack is augmented at all; the other probabilities apply within that case.
        perspective: Probability of a random perspective.
        distortion: Largest inward shift of a corner, as a share of half a side, as in kornia and torchvision.
        flip: Probability of a horizontal flip.
        crop_area: Smallest and largest area of the random crop, as shares of the frame.
        crop_aspect: Ratio of the largest to the smallest aspect ratio of the crop.
    """

    apply: float = 0.25
    perspective: float = 0.5
    distortion: float = 0.5
    flip: float = 0.5
    crop_area: tuple[float, float] = (0.75, 1.0)
    crop_aspect: float = 4 / 3


def augment_frames(
    x: Float[Tensor, "n c h w"], u: Float[Tensor, "n 15"], augmentation: FrameAugmentation
) -> Float[Tensor, "n c h w"]:
    """Return stacks after perspective, flip and crop, in one resampling; all frames of a stack change alike.

    The coordinates are computed elementwise: in a matrix product, autocast would round them to a tenth of a pixel.
    """
    height, width = x.shape[2:]
    scale_x, shift_x, scale_y, shift_y = _crop(u[:, :5], augmentation)
    crop_x = scale_x * _pixel_centres(width, x)[None, None, :] + shift_x
    crop_y = scale_y * _pixel_centres(height, x)[None, :, None] + shift_y
    a, b, c = _inverse_perspective(u[:, 5:14], augmentation)[..., None, None].unbind(1)
    source_x, source_y, depth = (row[:, 0] * crop_x + row[:, 1] * crop_y + row[:, 2] for row in (a, b, c))
    grid = torch.stack((source_x / depth, source_y / depth), -1)
    augmented = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.where((u[:, 14] < augmentation.apply)[:, None, None, None], augmented, x)


def _pixel_centres(count: int, like: Tensor) -> Float[Tensor, " count"]:
    """Return the coordinates of `count` pixel centres between −1 and 1."""
    return (2 * torch.arange(count, device=like.device, dtype=like.dtype) + 1) / count - 1


def _crop(u: Float[Tensor, "n 5"], augmentation: FrameAugmentation) -> tuple[Float[Tensor, "n 1 1"], ...]:
    """Return scale and shift in x, then in y, from output coordinates in [−1, 1]² to those before crop and flip."""
    low, high = augmentation.crop_area
    side = (low + (high - low) * u[:, 0]).sqrt()
    stretch = augmentation.crop_aspect ** (u[:, 1] - 0.5)
    scale_x, scale_y = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    shift_x, shift_y = (1 - scale_x) * (2 * u[:, 2] - 1), (1 - scale_y) * (2 * u[:, 3] - 1)
    scale_x = torch.where(u[:, 4] < augmentation.flip, -scale_x, scale_x)
    return tuple(part[:, None, None] for part in (scale_x, shift_x, scale_y, shift_y))


def _inverse_perspective(u: Float[Tensor, "n 9"], augmentation: FrameAugmentation) -> Float[Tensor, "n 3 3"]:
    """Return the homographies from distorted coordinates in [−1, 1]² to those of the original frame.

    The corners of the square move inwards to four points. The homography of a square onto four points has a closed form
    (Heckbert, 1989), and its adjugate is the inverse up to a factor. No constant is copied from the host, so the
    function can be captured in a CUDA graph.
    """
    strength = torch.where(u[:, 8] < augmentation.perspective, augmentation.distortion, 0.0)
    corners = 1 - u[:, :8].view(-1, 4, 2) * strength[:, None, None]
    left, right, up, down = (-corners[:, ::3, 0], corners[:, 1:3, 0], -corners[:, :2, 1], corners[:, 2:, 1])
    x = torch.stack((left[:, 0], right[:, 0], right[:, 1], left[:, 1]), 1)
    y = torch.cat((up, down), 1)
    edge_1, edge_2 = (x[:, 1] - x[:, 2], y[:, 1] - y[:, 2]), (x[:, 3] - x[:, 2], y[:, 3] - y[:, 2])
    skew = (x[:, 0] - x[:, 1] + x[:, 2] - x[:, 3], y[:, 0] - y[:, 1] + y[:, 2] - y[:, 3])
    area = edge_1[0] * edge_2[1] - edge_2[0] * edge_1[1]
    g = (skew[0] * edge_2[1] - edge_2[0] * skew[1]) / area
    h = (edge_1[0] * skew[1] - skew[0] * edge_1[1]) / area
    one = torch.ones_like(g)
    homography = torch.stack(
        (
            x[:, 1] - x[:, 0] + g * x[:, 1], x[:, 3] - x[:, 0] + h * x[:, 3], x[:, 0],
            y[:, 1] - y[:, 0] + g * y[:, 1], y[:, 3] - y[:, 0] + h * y[:, 3], y[:, 0],
            g, h, one,
        ),
        1,
    ).view(-1, 3, 3)  # fmt: skip
    a, b, c = homography.unbind(2)
    inverse = torch.stack((b.cross(c, dim=1), c.cross(a, dim=1), a.cross(b, dim=1)), 1)
    row_x, row_y, depth = inverse.unbind(1)
    return torch.stack((2 * row_x - depth, 2 * row_y - depth, depth), 1)  # from [0, 1]² to [−1, 1]²
