"""Image sets on disk, by name or by path, in several layouts; any image size, grey or colour."""

import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from onefold.data.catalogue import CATALOGUE, IDX_FILES
from onefold.data.formats.idx import read_images, read_labels
from onefold.errors import FileError, InputError, warn
from onefold.inputs import ImageFolder, open_npz
from onefold.inputs.arrays import ZIP_ERRORS

NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
LONGEST_SIDE = 1024  # pixels
MOST_CLASSES = 1000
KMNIST_FILES = {
    "x_train": "kmnist-train-imgs.npz",
    "y_train": "kmnist-train-labels.npz",
    "x_test": "kmnist-test-imgs.npz",
    "y_test": "kmnist-test-labels.npz",
}
KEYS = tuple(IDX_FILES)
IMAGES, LABELS = ("x_train", "x_test"), ("y_train", "y_test")
BATCH = 256

Images: TypeAlias = UInt8[np.ndarray, "n *c h w"] | Float32[np.ndarray, "n *c h w"]
"""Grey images [N, H, W] or colour images [N, 3, H, W]: bytes from 0 to 255, or floats from 0 to 1."""
Labels: TypeAlias = Int64[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Train and test images of one size, grey or colour, with or without labels.

    Args:
        name: Name of the set.
        x_train: Train images, grey [N, H, W] or colour [N, 3, H, W]: bytes from 0 to 255 or floats from 0 to 1.
        y_train: Labels 0, 1, … [N]; None without labels.
        x_test: Test images [M, H, W] or [M, 3, H, W].
        y_test: Labels [M]; None without labels.
    """

    name: str
    x_train: UInt8[np.ndarray, "n *c h w"] | Float32[np.ndarray, "n *c h w"]
    y_train: Int64[np.ndarray, " n"] | None
    x_test: UInt8[np.ndarray, "m *c h w"] | Float32[np.ndarray, "m *c h w"]
    y_test: Int64[np.ndarray, " m"] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image: (H, W) if grey, else (3, H, W)."""
        return self.x_train.shape[1:]

    @property
    def channels(self) -> int:
        """Number of channels: 1 if grey, 3 if colour."""
        return 1 if self.x_train.ndim == 3 else self.x_train.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes; 0 without labels."""
        return 0 if self.y_train is None else int(self.y_train.max()) + 1


class _Location(NamedTuple):
    """Location of an array: an idx file, or an entry of an .npz file."""

    path: Path
    key: str | None = None


def data_dir(folder: Path | None = None) -> Path:
    """Return the folder of the image sets.

    Args:
        folder: Used as it is; None uses $ONEFOLD_DATA or, if that is not set, the user's cache folder.

    Returns:
        The folder, which may not exist yet.
    """
    if folder is not None:
        return folder
    if variable := os.environ.get("ONEFOLD_DATA"):
        return Path(variable).expanduser()
    import pooch

    return Path(pooch.os_cache("onefold"))


def read_set(name: str, folder: Path) -> ImageSet:
    """Return an image set by name, or any set by name=path.

    A set has one of three layouts:

    - NAME.npz with x_train, y_train, x_test and y_test.
    - A folder NAME with the four idx files, gzipped or not, or with KMNIST's own .npz files.
    - A folder NAME with train/ and test/. Each has a folder of images for each class; they are scaled to one size.

    Args:
        name: Name of a set in `folder`, or name=path of an .npz file or a folder elsewhere.
        folder: Folder of the image sets; see `data_dir`.

    Returns:
        The images and labels.

    Raises:
        InputError: If there is no such set, or its name has other characters than letters, digits, "_", "-" and ".".
        FileError: If a file is damaged, or its arrays do not make up a set.
    """
    name, equals, path = name.partition("=")
    if not NAME.fullmatch(name):
        raise InputError(f"{name!r}: not a name of a set. Use letters, digits, '_', '-' and '.'.")
    place = Path(path).expanduser() if equals else _locate(name, folder)
    if place.is_dir() and not _array_files(place):
        arrays = _read_image_folders(place)
    else:
        arrays = {key: _read_array(location) for key, location in _array_locations(place).items()}
    return _check_set(name, arrays, place)


def list_sets(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the names of the sets in a folder, with their files."""
    sets: dict[str, tuple[Path, ...]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix == ".npz" and path.is_file() and NAME.fullmatch(path.stem):
            sets[path.stem] = (path,)
        elif path.is_dir() and NAME.fullmatch(path.name) and path.name not in sets:
            files = _array_files(path)
            if len(files) == len(KEYS):
                sets[path.name] = tuple(location.path for location in files.values())
            elif not files and _has_image_folders(path):
                sets[path.name] = (path,)
    return dict(sorted(sets.items()))


def _locate(name: str, folder: Path) -> Path:
    """Return the file or folder of a set in `folder`."""
    for path in (folder / f"{name}.npz", folder / name):
        if path.is_file() or (path.is_dir() and (_array_files(path) or _has_image_folders(path))):
            return path
    available = ", ".join(list_sets(folder)) or "no sets"
    if name in CATALOGUE:
        hint = f"Download it: onefold data fetch {name} --data-dir {folder}"
        raise InputError(f"{name!r}: no such set in {folder} (it has {available}). {hint}")
    raise InputError(
        f"{name!r}: no such set in {folder} (it has {available}). Download {', '.join(CATALOGUE)} with onefold data "
        f"fetch NAME --data-dir {folder}, or name another file: {name}=path/to/file.npz"
    )


def _array_files(folder: Path) -> dict[str, _Location]:
    """Return those of the four arrays that are in a folder under their usual file names."""
    locations: dict[str, _Location] = {}
    for key in KEYS:
        stem = IDX_FILES[key]
        choices = (
            _Location(folder / f"{stem}.gz"),
            _Location(folder / stem),
            _Location(folder / KMNIST_FILES[key], "arr_0"),
        )
        if existing := [location for location in choices if location.path.is_file()]:
            locations[key] = existing[0]
    return locations


def _array_locations(path: Path) -> dict[str, _Location]:
    """Return the locations of the arrays of a set; labels may be missing from an .npz file."""
    if path.is_dir():
        locations = _array_files(path)
        if missing := [key for key in KEYS if key not in locations]:
            names = ", ".join(f"{IDX_FILES[key]}.gz" for key in missing)
            command = f"onefold data fetch {path.name} --data-dir {path.parent}"
            hint = f" Download the rest: {command}" if path.name in CATALOGUE else ""
            raise FileError(f"{path}: {names} missing.{hint}")
        return locations
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder. Check the path.")
    keys = _npz_keys(path)
    if missing := [key for key in IMAGES if key not in keys]:
        raise FileError(f"{path}: no {' and no '.join(missing)} (it has {', '.join(sorted(keys)[:20]) or 'no arrays'})")
    return {key: _Location(path, key) for key in KEYS if key in keys}


def _npz_keys(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
    except ZIP_ERRORS as error:
        raise FileError(f"{path}: not an .npz file of {', '.join(KEYS)}, or damaged ({error})") from None


def _read_array(location: _Location) -> np.ndarray:
    if location.key is not None:
        return open_npz(location.path, location.key).tensor.numpy()
    return read_images(location.path) if "images" in location.path.name else read_labels(location.path)


def _has_image_folders(folder: Path) -> bool:
    return all((folder / part).is_dir() for part in ("train", "test"))


def _read_image_folders(folder: Path) -> dict[str, np.ndarray]:
    """Return the images in train/ and test/, with the names of their folders as labels if all are in folders.

    The train images decide the common size, and whether the set is grey.
    """
    if not _has_image_folders(folder):
        raise InputError(f"{folder}: neither idx files nor folders train and test. Check the path.")
    train = ImageFolder(folder / "train")
    sources = {"train": train, "test": ImageFolder(folder / "test", train.picture)}
    arrays: dict[str, np.ndarray] = {}
    for part, source in sources.items():
        arrays[f"x_{part}"] = np.concatenate([batch.numpy() for batch in source.batches(BATCH)])
        if source.skipped:
            file, reason = next(iter(source.skipped.items()))
            warn(f"{folder / part}: skipped {len(source.skipped)} unreadable images, such as {file!r}: {reason}")
    class_names = {part: _class_names(source.names) for part, source in sources.items()}
    if any(None in names for names in class_names.values()):
        return arrays
    classes = sorted({str(name) for name in class_names["train"]})
    if extra := sorted({str(name) for name in class_names["test"]} - set(classes)):
        raise InputError(f"{folder}: class {extra[0]!r} is in test only. Add train images of it.")
    for part, names in class_names.items():
        arrays[f"y_{part}"] = np.array([classes.index(str(name)) for name in names], np.int64)
    return arrays


def _class_names(paths: Sequence[str]) -> list[str | None]:
    """Return the folder of each image; None for one outside of a folder."""
    return [path.partition("/")[0] if "/" in path else None for path in paths]


def _check_set(name: str, arrays: dict[str, np.ndarray], place: Path) -> ImageSet:
    x_train, x_test = (_check_images(arrays[key], f"{place}: {key}") for key in IMAGES)
    if x_train.shape[1:] != x_test.shape[1:]:
        shapes = f"{x_train.shape[1:]} and {x_test.shape[1:]}"
        raise FileError(f"{place}: train and test images have different shapes, {shapes}. Scale them to one size.")
    labels = [key for key in LABELS if key in arrays]
    if len(labels) == 1:
        raise FileError(f"{place}: only {labels[0]}. Labels are needed for the train and the test images, or for none.")
    if not labels:
        return ImageSet(name, x_train, None, x_test, None)
    y_train = _check_labels(arrays["y_train"], len(x_train), f"{place}: y_train")
    y_test = _check_labels(arrays["y_test"], len(x_test), f"{place}: y_test")
    if y_test.max() > y_train.max():
        raise FileError(f"{place}: label {y_test.max()} in y_test, but none above {y_train.max()} in y_train")
    return ImageSet(name, x_train, y_train, x_test, y_test)


def _check_images(x: np.ndarray, label: str) -> Images:
    """Return grey images as [N, H, W] and colour images as [N, 3, H, W], also from [N, H, W, C]."""
    shape = x.shape
    if x.ndim == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3):
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    if x.ndim == 4 and x.shape[1] == 1:
        x = x[:, 0]
    is_image = x.ndim == 3 or (x.ndim == 4 and x.shape[1] == 3)
    if not (is_image and len(x) and max(x.shape[-2:]) <= LONGEST_SIDE and min(x.shape[-2:]) >= 1):
        raise FileError(
            f"{label}: shape {shape} is not supported. Save grey images [N, H, W] or colour images [N, 3, H, W], of at "
            f"most {LONGEST_SIDE} pixels a side."
        )
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f":
        raise FileError(f"{label}: dtype {x.dtype} is not supported. Save bytes from 0 to 255 or floats from 0 to 1.")
    if not (x.min() >= 0 and x.max() <= 1):  # also false for NaN
        raise FileError(f"{label}: values from {x.min():g} to {x.max():g}. Floats must lie between 0 and 1.")
    return x.astype(np.float32, copy=False)


def _check_labels(y: np.ndarray, count: int, label: str) -> Labels:
    if y.shape != (count,):
        raise FileError(f"{label}: shape {y.shape}, but there are {count:,} images. Save one label for each.")
    if y.dtype.kind not in "iu" and not np.array_equal(y, np.round(y)):
        raise FileError(f"{label}: dtype {y.dtype} with fractions. Save integers 0, 1, ….")
    if not (y.min() >= 0 and y.max() < MOST_CLASSES):
        raise FileError(f"{label}: labels from {y.min():g} to {y.max():g}. They must be 0 to {MOST_CLASSES - 1}.")
    return y.astype(np.int64)
