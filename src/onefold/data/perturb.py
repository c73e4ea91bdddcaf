"""The paper's perturbed images: brightness, contrast, and a blanked box."""

import numpy as np
from jaxtyping import Float, Float32


def perturb(
    x: Float[np.ndarray, "n *channels h w"], seed: int = 0, *, clip: bool = False
) -> Float32[np.ndarray, "n *channels h w"]:
    """Images in [0, 1], each with brightness + U(−1, 1), contrast × (1 + U(−1, 1)) about its mean, and a box set to 0.

    The box has a side of a quarter to a half of the image's. Values may leave [0, 1], as in the paper's figures; `clip`
    keeps them inside, which is what a camera could produce and far harder to tell.
    """
    rng = np.random.default_rng(seed)
    n, height, width = len(x), *x.shape[-2:]
    each = (n, *[1] * (x.ndim - 1))
    y = x.astype(np.float32) + rng.uniform(-1, 1, each).astype(np.float32)
    mean = y.mean(tuple(range(1, x.ndim)), keepdims=True)
    y = mean + (1 + rng.uniform(-1, 1, each).astype(np.float32)) * (y - mean)
    side = rng.integers([height // 4, width // 4], [height // 2 + 1, width // 2 + 1], (n, 2))
    corner = rng.integers(0, np.array([height, width]) - side + 1)
    rows, columns = (np.arange(size)[None] for size in (height, width))
    inside_rows = (rows >= corner[:, :1]) & (rows < corner[:, :1] + side[:, :1])
    inside_columns = (columns >= corner[:, 1:]) & (columns < corner[:, 1:] + side[:, 1:])
    box = (inside_rows[:, :, None] & inside_columns[:, None, :]).reshape(n, *[1] * (x.ndim - 3), height, width)
    y[np.broadcast_to(box, y.shape)] = 0
    return np.clip(y, 0, 1) if clip else y
