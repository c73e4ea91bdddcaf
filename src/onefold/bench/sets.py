"""Image sets of a benchmark: ID and OOD sets in one shape, contexts for CSD-OOD, and previews."""

import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F  # noqa: N812

from onefold.bench.grid import PAPER_SETS, Preset, Unit, set_name
from onefold.core.storage import fingerprint, write_bytes
from onefold.data.digits import digits
from onefold.data.glyphs import letters
from onefold.data.perturb import perturb
from onefold.data.sets import ImageSet, list_sets, read_set
from onefold.errors import InputError

EMBEDDED = ("digits", "letters")
PERTURBED = ("perturbed", "perturbed_clipped")
"""OOD sets made from the ID test set: as in the paper, and clipped to the range of pixels."""
MOST_CONTEXTS = 15_000  # images of each OOD set that CSD-OOD is fitted with
LUMINANCE = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R BT.601)
COLUMNS, SIDE, GAP, MARGIN = 12, 56, 4, 190  # previews: images per row, their size, gap and the width for names
PAPER, INK = (255, 255, 255), (30, 30, 30)
LONGEST_NAME = 24  # characters of a set's name in a preview


def choose_sets(
    preset: Preset, folder: Path, id_sets: Sequence[str], ood_sets: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ID sets of a run and all its sets.

    Every set is an OOD set for every other ID set. If the ID sets are some of the paper's and no OOD set is named, the
    rest of the paper's sets are OOD sets. Units of several runs then fit into one table.

    Args:
        preset: A small preset runs on the embedded sets.
        folder: Folder of the image sets.
        id_sets: Names of ID sets, or name=path; empty for the paper's sets that are in the folder.
        ood_sets: Sets that are OOD sets only.

    Raises:
        InputError: A set is missing, or a name is used twice or is reserved.
    """
    id_sets, ood_sets = tuple(dict.fromkeys(id_sets)), tuple(dict.fromkeys(ood_sets))
    if preset.small:
        if id_sets not in ((), EMBEDDED[:1]) or ood_sets:
            raise InputError(f"preset {preset.name}: runs on embedded data. Leave out --ids and --ood.")
        return EMBEDDED[:1], EMBEDDED
    available = list(list_sets(folder))
    paper_sets = tuple(name for paper_name in PAPER_SETS for name in _versions(paper_name, available)[:1])
    if id_sets and not ood_sets and set(id_sets) <= set(paper_sets):
        ood_sets = tuple(name for name in paper_sets if name not in id_sets)
    if not id_sets:
        id_sets = paper_sets
        if len(id_sets) + len(ood_sets) < 2:
            raise InputError(
                f"{folder}: not enough image sets for a benchmark ({', '.join(available) or 'no image sets'}). Get the "
                f"paper's with onefold data fetch {' '.join(PAPER_SETS)} --data-dir {folder}, or pass --ids "
                "name=file.npz."
            )
    every_set = tuple(dict.fromkeys((*id_sets, *ood_sets)))
    _check_names([set_name(name) for name in every_set])
    return id_sets, every_set


def _check_names(names: Sequence[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two sets have the name {repeated[0]!r}. Pass one of them under another name, as name=path.")
    if reserved := [name for name in names if name in (*PERTURBED, "familiar")]:
        raise InputError(f"the set name {reserved[0]!r} is reserved. Pass the set under another name, as name=path.")


def _versions(paper_name: str, available: Sequence[str]) -> list[str]:
    """Return the available sets that are a set of the paper or a part of it, such as kmnist_10k of kmnist."""
    return [name for name in (paper_name, *sorted(available)) if name in available and paper_set(name) == paper_name]


def paper_set(name: str) -> str | None:
    """Return the paper's set that a set is, or is a part of by its name; None for other sets."""
    return next((paper for paper in PAPER_SETS if name == paper or name.startswith(f"{paper}_")), None)


@functools.lru_cache(maxsize=16)
def load_set(name: str, folder: Path | None, train: int | None = None, test: int | None = None) -> ImageSet:
    """Return the first `train` and `test` images of a set as fractions in [0, 1]; no folder means the embedded sets."""
    if folder is not None:
        images = read_set(name, folder)
    elif name == "letters":
        drawn = letters(600, seed=0)
        images = ImageSet(name, drawn[:300], None, drawn[300:], None)
    else:
        images = ImageSet(name, *digits(0))
    y_train, y_test = images.y_train, images.y_test
    return ImageSet(
        set_name(name),
        _to_fractions(images.x_train[:train]),
        None if y_train is None else y_train[:train],
        _to_fractions(images.x_test[:test]),
        None if y_test is None else y_test[:test],
    )


def _to_fractions(x: np.ndarray) -> Float32[np.ndarray, "n *shape"]:
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)


def load_id_set(name: str, folder: Path | None, preset: Preset) -> ImageSet:
    """Return a set to fit on; InputError if it has no labels."""
    images = load_set(name, folder, preset.train, preset.test)
    if images.y_train is None or images.y_test is None:
        raise InputError(f"{set_name(name)}: no labels, so it can only be an OOD set. Pass it with --ood.")
    return images


def load_ood_sets(unit: Unit) -> dict[str, Float32[np.ndarray, "n *shape"]]:
    """Return the OOD test images of a unit by set, the same for all rows and seeds, in the shape of the ID images."""
    x_test = _load(unit, unit.id_set).x_test
    ood = {set_name(name): match_shape(_load(unit, name).x_test, x_test.shape[1:]) for name in unit.ood_sets}
    return {**ood, **{kind: perturb(x_test, seed=0, clip=kind == PERTURBED[1]) for kind in PERTURBED}}


def draw_contexts(unit: Unit) -> Float32[np.ndarray, "n *shape"]:
    """Return contexts for CSD-OOD: images of the OOD sets' training splits and perturbed ID training images.

    There are as many of each set. None of them is evaluated.
    """
    rng = np.random.default_rng([unit.seed, 1])
    x_train = _load(unit, unit.id_set).x_train
    sources = [match_shape(_load(unit, name).x_train, x_train.shape[1:]) for name in unit.ood_sets]
    count = min(MOST_CONTEXTS, len(x_train))
    picked = [source[rng.choice(len(source), count, replace=len(source) < count)] for source in sources]
    perturbed = perturb(x_train[rng.choice(len(x_train), count, replace=False)], seed=int(rng.integers(1, 2**31)))
    return np.concatenate([*picked, perturbed])


def _load(unit: Unit, name: str) -> ImageSet:
    return load_set(name, unit.data_dir, unit.preset.train, unit.preset.test)


def match_shape(x: Float32[np.ndarray, "n *shape"], shape: Sequence[int]) -> Float32[np.ndarray, "n *other"]:
    """Return images in another shape, [height, width] or [channels, height, width].

    Grey images are repeated for every channel, colour images become grey by luminance, and sizes are interpolated
    bilinearly with antialiasing. Images in that shape already are returned as they are.
    """
    if x.shape[1:] == tuple(shape):
        return x
    images = with_channels(x)
    channels = 1 if len(shape) == 2 else shape[0]
    if images.shape[1] != channels:
        weights = np.array(LUMINANCE if images.shape[1] == 3 else [1 / images.shape[1]] * images.shape[1], np.float32)
        images = np.einsum("nchw,c->nhw", images, weights)[:, None].repeat(channels, axis=1)
    if images.shape[2:] != tuple(shape[-2:]):
        resized = F.interpolate(torch.from_numpy(images), list(shape[-2:]), mode="bilinear", antialias=True)
        images = resized.clamp(0, 1).numpy()
    return np.ascontiguousarray(images.reshape(len(x), *shape))


def with_channels(x: np.ndarray) -> np.ndarray:
    """Return images as [N, channels, height, width]; grey images [N, height, width] get one channel."""
    return x[:, None] if x.ndim == 3 else x


def fingerprint_sets(names: Iterable[str], folder: Path | None, preset: Preset) -> dict[str, str]:
    """Return a hash of the content of every set: a results folder is for one version of the data."""
    hashes = {}
    for name in names:
        images = load_set(name, folder, preset.train, preset.test)
        parts = (images.x_train, images.y_train, images.x_test, images.y_test)
        hashes[images.name] = fingerprint(*(torch.from_numpy(part) for part in parts if part is not None))
    return hashes


def write_previews(units: Iterable[Unit], folder: Path) -> None:
    """Write one PNG for each ID set with the first test images of it and of its OOD sets; keep existing files."""
    for unit in {unit.id_set: unit for unit in units}.values():
        name = set_name(unit.id_set)
        path = folder / f"{name}.png"
        if not path.exists():
            content = io.BytesIO()
            draw_preview({f"{name}, familiar": _load(unit, unit.id_set).x_test, **load_ood_sets(unit)}).save(
                content, "PNG"
            )
            write_bytes(path, content.getvalue())


def draw_preview(rows: Mapping[str, np.ndarray]) -> Image.Image:
    """Return a picture of the first images of each set beside its name, with pixels clipped to [0, 1]."""
    step = SIDE + GAP
    picture = Image.new("RGB", (MARGIN + COLUMNS * step + GAP, len(rows) * step + GAP), PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for i, (name, images) in enumerate(rows.items()):
        top = GAP + i * step
        shown_name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        draw.text((MARGIN - 2 * GAP, top + SIDE // 2), shown_name, INK, font, "rm")
        for j, image in enumerate(with_channels(images[:COLUMNS])):
            pixels = (255 * np.clip(image, 0, 1)).round().astype(np.uint8)
            tile = Image.fromarray(np.moveaxis(pixels, 0, -1) if len(pixels) == 3 else pixels[0])
            picture.paste(tile.resize((SIDE, SIDE), Image.Resampling.NEAREST), (MARGIN + j * step, top))
    return picture
