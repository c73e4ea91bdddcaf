"""The familiar set that ships with scikit-learn: 1,797 handwritten digits of 8 × 8 pixels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int64
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """Train and held-out digits, pixels in [0, 1]."""

    x_train: Float32[np.ndarray, "n 8 8"]
    y_train: Int64[np.ndarray, " n"]
    x_test: Float32[np.ndarray, "m 8 8"]
    y_test: Int64[np.ndarray, " m"]


def digits(seed: int = 0, test_size: int = 500) -> Digits:
    """scikit-learn's digits, split at random with equal shares of each class."""
    images, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    x = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    y = labels.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=test_size, random_state=seed, stratify=y)
    return Digits(x[train], y[train], x[test], y[test])
