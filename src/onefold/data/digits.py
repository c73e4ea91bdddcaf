"""Handwritten digits: 1,797 grey images of 8 × 8 pixels that ship with scikit-learn."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int64


class Digits(NamedTuple):
    """Train and test digits, with pixels in [0, 1] and labels 0 to 9.

    Args:
        x_train: Train images.
        y_train: Their labels.
        x_test: Test images.
        y_test: Their labels.
    """

    x_train: Float32[np.ndarray, "n 8 8"]
    y_train: Int64[np.ndarray, " n"]
    x_test: Float32[np.ndarray, "m 8 8"]
    y_test: Int64[np.ndarray, " m"]


def digits(seed: int = 0, test_size: int = 500) -> Digits:
    """Return the digits of scikit-learn, split at random with equal shares of each class.

    Args:
        seed: Seed of the split.
        test_size: Number of test images.

    Returns:
        Train and test images and labels.
    """
    from sklearn.datasets import load_digits  # takes more than a second to load
    from sklearn.model_selection import train_test_split

    images, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    x = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    y = labels.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=test_size, random_state=seed, stratify=y)
    return Digits(x[train], y[train], x[test], y[test])
