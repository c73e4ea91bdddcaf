"""Image augmentations for contexts, one independent draw per sample.

The functions take their uniform numbers as an argument and never synchronise with the host. A whole training step can
therefore be captured as a CUDA graph.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

UNIFORMS = 14  # random numbers per sample


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Probabilities and strengths of the augmentation steps (paper, Table "Data augmentations", distribution shift).

    Args:
        apply: Probability that an image is augmented at all; the other probabilities apply within that case.
        flip_horizontal: Probability of a horizontal flip.
        flip_vertical: Probability of a vertical flip.
        rotate: Probability of a rotation by a random angle.
        blur: Probability of a Gaussian blur.
        blur_sigma: Standard deviation of the blur in pixels.
        crop_area: Smallest and largest area of the random crop, as shares of the image.
        crop_aspect: Largest aspect ratio of the crop; the smallest is its inverse.
        brightness: Probability of a change of brightness.
        brightness_range: Largest shift of the brightness; pixels range from 0 to 1.
        contrast: Probability of a change of contrast.
        contrast_range: Largest change of the contrast factor from 1.
    """

    apply: float = 0.25
    flip_horizontal: float = 0.25
    flip_vertical: float = 0.25
    rotate: float = 0.25
    blur: float = 0.25
    blur_sigma: float = 1.0
    crop_area: tuple[float, float] = (0.75, 1.0)
    crop_aspect: float = 4 / 3
    brightness: float = 0.5
    brightness_range: float = 1.0
    contrast: float = 0.5
    contrast_range: float = 1.0


def augment(
    x: Float[Tensor, "n c h w"], u: Float[Tensor, "n 14"], chain: Chain, low: float = 0.0, high: float = 1.0
) -> Float[Tensor, "n c h w"]:
    """Return augmented images: geometry in one resampling, then blur, brightness, contrast and clipping.

    Args:
        x: Images [N, C, H, W] with values in [low, high].
        u: Uniform random numbers in [0, 1), 14 per image.
        chain: Probabilities and strengths of the steps.
        low: Smallest pixel value.
        high: Largest pixel value.

    Returns:
        Images of the same shape and range.
    """
    pixels = (x - low) / (high - low) if high > low else x - low
    grid = F.affine_grid(_geometry(u, chain, x.shape[2], x.shape[3]), list(x.shape), align_corners=False)
    y = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    if chain.blur > 0:
        y = torch.where(_gate(u[:, 8], chain.blur), _blur(y, chain.blur_sigma), y)
    shift = (2 * u[:, 10] - 1) * chain.brightness_range * (u[:, 9] < chain.brightness)
    y = y + shift[:, None, None, None]
    factor = 1 + (2 * u[:, 12] - 1) * chain.contrast_range * (u[:, 11] < chain.contrast)
    mean = y.mean((1, 2, 3), keepdim=True)
    y = mean + factor[:, None, None, None] * (y - mean)
    return torch.where(_gate(u[:, 13], chain.apply), y.clamp(0, 1) * (high - low) + low, x)


def _gate(u: Float[Tensor, " n"], probability: float) -> Tensor:
    """Return [N, 1, 1, 1] booleans that are true with this probability."""
    return (u < probability)[:, None, None, None]


def _geometry(u: Float[Tensor, "n 14"], chain: Chain, height: int, width: int) -> Float[Tensor, "n 2 3"]:
    """Return maps from output to input coordinates in [−1, 1]²: a random crop, flips and a rotation."""
    area = chain.crop_area[0] + (chain.crop_area[1] - chain.crop_area[0]) * u[:, 0]
    stretch = torch.exp((2 * u[:, 1] - 1) * 0.5 * math.log(chain.crop_aspect))
    across = (area.sqrt() * stretch).clamp(max=1)
    down = (area.sqrt() / stretch).clamp(max=1)
    left = (1 - across) * (2 * u[:, 2] - 1)
    top = (1 - down) * (2 * u[:, 3] - 1)
    across = torch.where(u[:, 4] < chain.flip_horizontal, -across, across)
    down = torch.where(u[:, 5] < chain.flip_vertical, -down, down)
    angle = torch.where(u[:, 6] < chain.rotate, (2 * u[:, 7] - 1) * math.pi, 0.0)
    cosine, sine, aspect = angle.cos(), angle.sin(), height / width
    rows = (across * cosine, -across * sine * aspect, left, down * sine / aspect, down * cosine, top)
    return torch.stack(rows, 1).reshape(-1, 2, 3)


def _blur(x: Float[Tensor, "n c h w"], sigma: float) -> Float[Tensor, "n c h w"]:
    """Return images after a separable Gaussian blur."""
    radius = max(1, round(3 * sigma))
    offsets = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)
    y = F.conv2d(F.pad(x, (radius, radius, 0, 0), mode="replicate"), weights, groups=x.shape[1])
    return F.conv2d(F.pad(y, (0, 0, radius, radius), mode="replicate"), weights.mT, groups=x.shape[1])
