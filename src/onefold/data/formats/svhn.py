"""The cropped digits of SVHN: a MATLAB 5 file of images X [32, 32, 3, N] and labels y [N, 1], where 10 stands for 0."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from onefold.data.formats.matlab import read_mat
from onefold.errors import FileError

SIDE, CHANNELS, CLASSES = 32, 3, 10
PARTS = ("train", "test")


def read_svhn(paths: Sequence[Path]) -> dict[str, UInt8[np.ndarray, "..."]]:
    """Return x_train [N, 3, 32, 32], y_train [N], x_test and y_test from train_32x32.mat and test_32x32.mat."""
    arrays: dict[str, np.ndarray] = {}
    for part, path in zip(PARTS, paths, strict=True):
        arrays[f"x_{part}"], arrays[f"y_{part}"] = _read(path)
    return arrays


def _read(path: Path) -> tuple[UInt8[np.ndarray, "n 3 32 32"], UInt8[np.ndarray, " n"]]:
    arrays = read_mat(path, ("X", "y"))
    x, y = arrays["X"], arrays["y"]
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (SIDE, SIDE, CHANNELS):
        raise FileError(f"{path}: X has shape {x.shape} and dtype {x.dtype}, not (32, 32, 3, N) and uint8")
    if y.shape != (x.shape[3], 1):
        raise FileError(f"{path}: y has shape {y.shape}, not one label for each of {x.shape[3]:,} images")
    if not ((y >= 1) & (y <= CLASSES) & (y == np.round(y))).all():
        raise FileError(f"{path}: labels from {y.min():g} to {y.max():g}. They must be integers from 1 to {CLASSES}.")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), (y[:, 0] % CLASSES).astype(np.uint8)
