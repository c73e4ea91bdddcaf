"""Image sets by name, in any of the layouts they come in, checked; and one's own."""

import os
import re
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from onefold.data.catalogue import CATALOGUE, IDX_FILES
from onefold.data.idx import read_images, read_labels
from onefold.errors import FileError, InputError, OnefoldWarning
from onefold.inputs import ImageFolder, Picture, open_npz
from onefold.inputs.zip_files import ZIP_ERRORS

NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
SIDE = 28
MOST_CLASSES = 1000
KMNIST_FILES = {
    "x_train": "kmnist-train-imgs.npz",
    "y_train": "kmnist-train-labels.npz",
    "x_test": "kmnist-test-imgs.npz",
    "y_test": "kmnist-test-labels.npz",
}
KEYS = tuple(IDX_FILES)
IMAGES, LABELS = ("x_train", "x_test"), ("y_train", "y_test")
FLAT_BATCH = 256

Images: TypeAlias = UInt8[np.ndarray, "n 28 28"] | Float32[np.ndarray, "n 28 28"]
"""Bytes 0 … 255, or fractions 0 … 1."""
Labels: TypeAlias = Int64[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Train and test images, [N, height, width] or [N, channels, height, width], with labels 0, 1, … or without."""

    name: str
    x_train: UInt8[np.ndarray, "n *image"] | Float32[np.ndarray, "n *image"]
    y_train: Int64[np.ndarray, " n"] | None
    x_test: UInt8[np.ndarray, "m *image"] | Float32[np.ndarray, "m *image"]
    y_test: Int64[np.ndarray, " m"] | None


class _Place(NamedTuple):
    """Where an array lies: an idx file, or a key of an .npz file."""

    path: Path
    key: str | None = None


def data_dir(given: Path | None = None) -> Path:
    """The folder of the image sets: the one given, else $ONEFOLD_DATA, else the user's cache."""
    if given is not None:
        return given
    if named := os.environ.get("ONEFOLD_DATA"):
        return Path(named).expanduser()
    import pooch

    return Path(pooch.os_cache("onefold"))


def read_set(name: str, folder: Path) -> ImageSet:
    """A set from `folder` by its name, or one's own as name=path: an .npz file, or a folder of train/ and test/.

    In `folder` a set is NAME.npz with x_train, y_train, x_test and y_test; or a folder NAME of the four idx files,
    gzipped or not, of KMNIST's own .npz files, or of train/ and test/ with a folder of images for each class.
    """
    name, own, path = name.partition("=")
    if not NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot be the name of a set: use letters, digits, '_', '-' and '.'")
    place = Path(path).expanduser() if own else _find(name, folder)
    if place.is_dir() and not _files(place):
        arrays = _read_pictures(place)
    else:
        arrays = {key: _read(where) for key, where in _places(place).items()}
    return _checked(name, arrays, place)


def found(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The sets in a folder: their names and their files."""
    sets: dict[str, tuple[Path, ...]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix == ".npz" and path.is_file() and NAME.fullmatch(path.stem):
            sets[path.stem] = (path,)
        elif path.is_dir() and NAME.fullmatch(path.name) and path.name not in sets:
            files = _files(path)
            if len(files) == len(KEYS):
                sets[path.name] = tuple(where.path for where in files.values())
            elif not files and _has_pictures(path):
                sets[path.name] = (path,)
    return dict(sorted(sets.items()))


def _find(name: str, folder: Path) -> Path:
    for path in (folder / f"{name}.npz", folder / name):
        if path.is_file() or (path.is_dir() and (_files(path) or _has_pictures(path))):
            return path
    there = f"found there: {', '.join(found(folder)) or 'nothing'}"
    if name in CATALOGUE:
        way = f"get it with onefold data fetch {name} --data-dir {folder}"
        raise InputError(f"the set {name!r} is not in {folder} ({there}): {way}")
    raise InputError(
        f"there is no set {name!r} in {folder} ({there}); known are {', '.join(CATALOGUE)}, got with onefold data "
        f"fetch NAME --data-dir {folder}; a set of your own is {name}=path/to/file.npz"
    )


def _files(folder: Path) -> dict[str, _Place]:
    """Those of the four arrays that lie in a folder as files of their official names."""
    places: dict[str, _Place] = {}
    for key in KEYS:
        stem = IDX_FILES[key]
        choices = (_Place(folder / f"{stem}.gz"), _Place(folder / stem), _Place(folder / KMNIST_FILES[key], "arr_0"))
        if there := [place for place in choices if place.path.is_file()]:
            places[key] = there[0]
    return places


def _places(path: Path) -> dict[str, _Place]:
    """Where the arrays of a set lie; labels may be missing from an .npz file."""
    if path.is_dir():
        places = _files(path)
        absent = [key for key in KEYS if key not in places]
        if absent:
            names = ", ".join(f"{IDX_FILES[key]}.gz" for key in absent)
            way = f": onefold data fetch {path.name} --data-dir {path.parent} goes on" if path.name in CATALOGUE else ""
            raise FileError(f"{path}: lacks {names}{way}")
        return places
    if not path.is_file():
        raise InputError(f"{path}: there is no such file or folder")
    keys = _keys(path)
    if absent := [key for key in IMAGES if key not in keys]:
        raise FileError(
            f"{path}: has no {' and no '.join(absent)} (found: {', '.join(sorted(keys)[:20]) or 'nothing'})"
        )
    return {key: _Place(path, key) for key in KEYS if key in keys}


def _keys(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
    except ZIP_ERRORS as error:
        raise FileError(f"{path}: is no .npz file of {', '.join(KEYS)}, or damaged ({error})") from None


def _read(place: _Place) -> np.ndarray:
    if place.key is not None:
        return open_npz(place.path, place.key).tensor.numpy()
    return read_images(place.path) if "images" in place.path.name else read_labels(place.path)


def _has_pictures(folder: Path) -> bool:
    return all((folder / part).is_dir() for part in ("train", "test"))


def _read_pictures(folder: Path) -> dict[str, np.ndarray]:
    """train/ and test/ as grey images of 28 × 28; labels from the names of their folders, if all are in folders."""
    if not _has_pictures(folder):
        raise InputError(f"{folder}: has neither idx files nor the folders train and test")
    picture = Picture(SIDE, SIDE, 1)
    parts = {part: ImageFolder(folder / part, picture) for part in ("train", "test")}
    arrays: dict[str, np.ndarray] = {}
    for part, source in parts.items():
        arrays[f"x_{part}"] = np.concatenate([batch.numpy()[:, 0] for batch in source.batches(FLAT_BATCH)])
        if source.skipped:
            name, why = next(iter(source.skipped.items()))
            left_out = f"{len(source.skipped)} could not be read and are left out, such as {name!r}: {why}"
            warnings.warn(f"{folder / part}: of its images {left_out}", OnefoldWarning, stacklevel=2)
    owners = {part: _owners(source.names) for part, source in parts.items()}
    if any(None in names for names in owners.values()):
        return arrays
    classes = sorted({str(name) for name in owners["train"]})
    if strange := sorted({str(name) for name in owners["test"]} - set(classes)):
        raise InputError(f"{folder}: test has the class {strange[0]!r}, train has not")
    for part, names in owners.items():
        arrays[f"y_{part}"] = np.array([classes.index(str(name)) for name in names], np.int64)
    return arrays


def _owners(names: Sequence[str]) -> list[str | None]:
    """The folder that each image lies in; None for those that lie in none."""
    return [name.partition("/")[0] if "/" in name else None for name in names]


def _checked(name: str, arrays: dict[str, np.ndarray], place: Path) -> ImageSet:
    x_train, x_test = (_images(arrays[key], f"{place}: {key}") for key in IMAGES)
    given = [key for key in LABELS if key in arrays]
    if len(given) == 1:
        raise FileError(f"{place}: has {given[0]} alone: labels are needed for the train and the test images, or none")
    if not given:
        return ImageSet(name, x_train, None, x_test, None)
    y_train = _labels(arrays["y_train"], len(x_train), f"{place}: y_train")
    y_test = _labels(arrays["y_test"], len(x_test), f"{place}: y_test")
    if y_test.max() > y_train.max():
        raise FileError(f"{place}: y_test has the label {y_test.max()}, y_train none above {y_train.max()}")
    return ImageSet(name, x_train, y_train, x_test, y_test)


def _images(x: np.ndarray, what: str) -> Images:
    if x.ndim != 3 or x.shape[1:] != (SIDE, SIDE):
        raise FileError(f"{what} has the shape {x.shape}: grey images [N, {SIDE}, {SIDE}] are needed")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f":
        raise FileError(f"{what} holds {x.dtype}: bytes 0 … 255 (uint8) or fractions 0 … 1 (float32) are needed")
    if not (x.min() >= 0 and x.max() <= 1):  # false for NaN, too
        raise FileError(f"{what} has values from {x.min():g} to {x.max():g}: fractions must lie in 0 … 1")
    return x.astype(np.float32, copy=False)


def _labels(y: np.ndarray, count: int, what: str) -> Labels:
    if y.shape != (count,):
        raise FileError(f"{what} has the shape {y.shape}: one label for each of the {count:,} images is needed")
    if y.dtype.kind not in "iu" and not np.array_equal(y, np.round(y)):
        raise FileError(f"{what} holds {y.dtype}: whole numbers 0, 1, … are needed")
    if not (y.min() >= 0 and y.max() < MOST_CLASSES):
        raise FileError(f"{what} has labels from {y.min():g} to {y.max():g}: they must lie in 0 … {MOST_CLASSES - 1}")
    return y.astype(np.int64)
