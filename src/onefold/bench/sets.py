"""The data of a benchmark: images as fractions, the strange sets of a familiar one, and contexts from train splits."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from onefold.bench.units import FAMILIES, Preset
from onefold.core.storage import fingerprint
from onefold.data.digits import digits
from onefold.data.glyphs import letters
from onefold.data.perturb import perturb
from onefold.data.sets import found, read_set
from onefold.errors import InputError

EMBEDDED = ("digits",)
PERTURBED = ("perturbed", "perturbed_clipped")
CONTEXTS = 15_000  # images of each strange set, for CSD-OOD


class Images(NamedTuple):
    """Fractions 0 … 1 and labels."""

    x_train: Float32[np.ndarray, "n h w"]
    y_train: Int64[np.ndarray, " n"] | None
    x_test: Float32[np.ndarray, "m h w"]
    y_test: Int64[np.ndarray, " m"] | None


@dataclass(frozen=True)
class Data:
    """Where the sets come from, which of them are familiar in turn, and which are only ever strange."""

    ids: tuple[str, ...]
    strange: tuple[str, ...]
    folder: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All sets, without what follows the '=' of one's own."""
        return tuple(dict.fromkeys((*self.ids, *self.strange)))


def choose(preset: Preset, folder: Path, ids: tuple[str, ...], strange: tuple[str, ...]) -> Data:
    """The sets of a run: embedded ones for smoke, else those asked for, else what is there of the paper's four.

    Some of the paper's sets alone still meet all the others, so that units of several runs can stand in one table.
    """
    if preset.small:
        if ids not in ((), EMBEDDED) or strange:
            raise InputError(f"the preset {preset.name!r} runs on embedded data: leave --ids and --strange out")
        return Data(EMBEDDED, ("letters",))
    ids, strange = tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(strange))
    there = found(folder)
    of_the_paper = tuple(name for family in FAMILIES for name in _of_family(family, list(there))[:1])
    if ids and not strange and set(ids) <= set(of_the_paper):
        strange = tuple(name for name in of_the_paper if name not in ids)
    if not ids:
        ids = of_the_paper
        if len(ids) + len(strange) < 2:
            raise InputError(
                f"{folder} holds {', '.join(there) or 'no image sets'}: get the paper's with onefold data fetch "
                f"{' '.join(FAMILIES)} --data-dir {folder}, or name your own with --ids name=file.npz"
            )
    names = [label(name) for name in dict.fromkeys((*ids, *strange))]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two sets are called {twice[0]!r}: give each a name of its own, as in name=path")
    if taken := [name for name in names if name in (*PERTURBED, "familiar")]:
        raise InputError(f"a set cannot be called {taken[0]!r}, which is what the benchmark calls one of its own")
    return Data(ids, strange, folder)


def _of_family(family: str, there: list[str]) -> list[str]:
    """The set of that name, or else a part of it, as kmnist_10k is of kmnist."""
    return [
        name
        for name in (family, *sorted(there))
        if name in there and (name == family or name[: len(family) + 1] == f"{family}_")
    ]


def label(name: str) -> str:
    """The name of a set, without the path of one's own."""
    return name.partition("=")[0]


@functools.lru_cache(maxsize=16)
def load(name: str, folder: Path | None, train: int | None, test: int | None) -> Images:
    """A set as fractions; of its images the first `train` and `test`."""
    if folder is None:
        if name == "letters":
            drawn = letters(600, seed=0)
            return Images(drawn[:300], None, drawn[300:][:test], None)
        embedded = digits(0)
        return Images(
            embedded.x_train[:train], embedded.y_train[:train], embedded.x_test[:test], embedded.y_test[:test]
        )
    given = read_set(name, folder)
    x = [_fractions(part) for part in (given.x_train[:train], given.x_test[:test])]
    y = [None if part is None else part[:most] for part, most in ((given.y_train, train), (given.y_test, test))]
    return Images(x[0], y[0], x[1], y[1])


def familiar(data: Data, name: str, preset: Preset) -> Images:
    """The set that is learned; it needs labels."""
    images = load(name, data.folder, preset.train, preset.test)
    if images.y_train is None or images.y_test is None:
        raise InputError(f"{label(name)} has no labels: it can be a strange set (--strange) only")
    return images


def strange_sets(data: Data, name: str, preset: Preset) -> dict[str, Float32[np.ndarray, "n h w"]]:
    """The test images of the other sets, and those of this one perturbed, the same for every method and seed."""
    found = {
        label(other): load(other, data.folder, preset.train, preset.test).x_test
        for other in data.names
        if other != name
    }
    own = load(name, data.folder, preset.train, preset.test).x_test
    return {**found, **{kind: perturb(own, seed=0, clip=kind == PERTURBED[1]) for kind in PERTURBED}}


def contexts(data: Data, name: str, preset: Preset, seed: int) -> Float32[np.ndarray, "n h w"]:
    """For CSD-OOD: as many images of each other set's train split and of perturbed train images; none is evaluated."""
    rng = np.random.default_rng([seed, 1])
    own = load(name, data.folder, preset.train, preset.test).x_train
    sources = [load(other, data.folder, preset.train, preset.test).x_train for other in data.names if other != name]
    count = min(CONTEXTS, len(own))
    picked = [source[rng.choice(len(source), count, replace=len(source) < count)] for source in sources]
    perturbed = perturb(own[rng.choice(len(own), count, replace=False)], seed=int(rng.integers(1, 2**31)))
    return np.concatenate([*picked, perturbed])


def identity(data: Data, preset: Preset) -> dict[str, str]:
    """What every set is known by: a results folder belongs to its data."""
    found = {}
    for name in data.names:
        images = load(name, data.folder, preset.train, preset.test)
        parts = [part for part in images if part is not None]
        found[label(name)] = fingerprint(*(np.ascontiguousarray(part) for part in parts))
    return found


def _fractions(x: np.ndarray) -> Float32[np.ndarray, "n h w"]:
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)
