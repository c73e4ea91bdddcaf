"""The perturbed images of the paper: brightness, contrast, and a blank box."""

import numpy as np
from jaxtyping import Float, Float32


def perturb(x: Float[np.ndarray, "n *c h w"], seed: int = 0, *, clip: bool = False) -> Float32[np.ndarray, "n *c h w"]:
    """Return images with random brightness, contrast and a blank box.

    Each image gets brightness + U(−1, 1), contrast × (1 + U(−1, 1)) about its mean, and a box of zeros. A side of the
    box is a quarter to a half of the image's.

    Args:
        x: Images with values in [0, 1]: grey [N, H, W] or with channels [N, C, H, W].
        seed: Seed of the random numbers.
        clip: Clip the result to [0, 1], as a camera would. Unclipped values are those of the paper's figures and much
            easier to detect.

    Returns:
        Perturbed images of the same shape.
    """
    rng = np.random.default_rng(seed)
    n, height, width = len(x), *x.shape[-2:]
    axes = tuple(range(1, x.ndim))
    per_image = (n, *(1 for _ in axes))
    y = x.astype(np.float32) + rng.uniform(-1, 1, per_image).astype(np.float32)
    mean = y.mean(axes, keepdims=True)
    y = mean + (1 + rng.uniform(-1, 1, per_image).astype(np.float32)) * (y - mean)
    side = rng.integers([height // 4, width // 4], [height // 2 + 1, width // 2 + 1], (n, 2))
    corner = rng.integers(0, np.array([height, width]) - side + 1)
    rows, columns = (np.arange(size)[None] for size in (height, width))
    in_rows = (rows >= corner[:, :1]) & (rows < corner[:, :1] + side[:, :1])
    in_columns = (columns >= corner[:, 1:]) & (columns < corner[:, 1:] + side[:, 1:])
    box = in_rows[:, :, None] & in_columns[:, None, :]
    y = np.where(box if x.ndim == 3 else box[:, None], np.float32(0), y)
    return np.clip(y, 0, 1) if clip else y
