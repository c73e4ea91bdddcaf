"""What a benchmark runs: presets, units (a row of the table on one ID set with one seed) and grids of settings."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from onefold.errors import InputError
from onefold.nn.train import Recipe

PAPER_SETS = ("fashion_mnist", "mnist", "kmnist", "notmnist")
"""The image sets of the paper, in its order."""

RATES = {
    "classifier": 1e-3,
    "mc_dropout": 3e-4,
    "dropout": 0.1,
    "rnd": 3e-3,
    "csd": 1e-2,
    "csd_on_classifier": 3e-3,  # small heads on a trained network; the paper has none
}
"""Learning rates and the dropout rate that the paper's search found (Table "hpsettingsood")."""

Augmentation: TypeAlias = Literal["none", "crops", "flips"]
"""Augmentation in the training of a classifier: crops of zoom 1.0 to 1.3, with flips as in the paper, or none."""
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Length of training, amount of data and seeds. The rates are the paper's; it does not state the steps."""

    name: str
    steps: int
    batch: int
    warmup: int
    train: int | None = None
    """Most training images; None for all."""
    test: int | None = None
    """Most test images; None for all."""
    samples: int | None = None
    """Most ensemble members, dropout passes or posterior samples; None for the paper's number."""
    small: bool = False
    """Use embedded images of 8 × 8 pixels and networks for that size."""
    seeds: tuple[int, ...] = tuple(range(10))
    few_seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of rows that take long."""

    def recipe(self, lr: float, *, warmup: bool = False) -> Recipe:
        """Return the training recipe at a learning rate, with the preset's warm-up steps if `warmup`."""
        return Recipe(steps=self.steps, batch=self.batch, lr=lr, warmup=self.warmup if warmup else 0)

    def count(self, paper: int) -> int:
        """Return how many members, passes or samples to use where the paper uses `paper`."""
        return paper if self.samples is None else min(paper, self.samples)

    def settings(self) -> dict[str, Any]:
        """Return what all units of a results folder share: everything but the seeds."""
        return {key: value for key, value in asdict(self).items() if key not in ("seeds", "few_seeds")}


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(name="paper", steps=4000, batch=256, warmup=500),
        Preset(
            name="quick", steps=1000, batch=128, warmup=100, train=10_000, test=2000, samples=15,
            seeds=(0, 1), few_seeds=(0,),
        ),
        # A small batch, because the full NTK of 256 pairs is expensive.
        Preset(name="ablate", steps=4000, batch=64, warmup=500, seeds=(0, 1, 2)),
        Preset(
            name="smoke", steps=60, batch=64, warmup=10, train=1000, test=300, samples=3, small=True,
            seeds=(0,), few_seeds=(0,),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One row of the table on one ID set with one seed, and all that a process needs to evaluate it."""

    row: str
    id_set: str
    """Name of the ID set, or name=path for a set outside the data folder."""
    seed: int
    preset: Preset
    ood_sets: tuple[str, ...]
    """Names of the other sets."""
    data_dir: Path | None = None
    """Folder of the image sets; None for the embedded ones."""
    classifiers: Path | None = None
    """Folder of trained classifiers that units share; None to train one for each unit."""
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Replacements of `RATES`."""

    def __str__(self) -> str:
        return f"{self.row}/{set_name(self.id_set)}/seed{self.seed}"

    def rate(self, name: str) -> float:
        """Return one of `RATES` or its replacement."""
        return self.rates.get(name, RATES[name])


def set_name(name: str) -> str:
    """Return the name of a set without the path of name=path."""
    return name.partition("=")[0]


def order_units(seeds_by_row: Mapping[str, Sequence[int]], id_sets: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return (row, ID set, seed) seed by seed, so that a run that is cut short has all rows at its first seeds."""
    seeds = sorted({seed for row_seeds in seeds_by_row.values() for seed in row_seeds})
    return [
        (row, id_set, seed)
        for seed in seeds
        for id_set in id_sets
        for row, row_seeds in seeds_by_row.items()
        if seed in row_seeds
    ]


def grid_points(space: Mapping[str, Sequence[float]], most: int | None = None, seed: int = 0) -> list[dict[str, float]]:
    """Return every combination of the values of a search space, or a random subset.

    Args:
        space: Values to try, by the name of the setting.
        most: Largest number of combinations; more are reduced by drawing without repetition. None for all.
        seed: Seed of the draw.
    """
    points = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if most is None or most >= len(points):
        return points
    return [points[i] for i in np.random.default_rng(seed).permutation(len(points))[:most]]


def rank(results: Iterable[tuple[Item, float | None]]) -> list[tuple[Item, float]]:
    """Return the results of a search from the largest value to the smallest, without those that have none.

    NaN counts as no value. Of equal values, the first one stays first.
    """
    valued = [(item, value) for item, value in results if value is not None and value == value]
    return sorted(valued, key=lambda result: -result[1])


def point_name(point: Mapping[str, float]) -> str:
    """Return a combination of settings as text, such as "lr=0.001,dropout=0.1"."""
    return ",".join(f"{name}={value:g}" for name, value in point.items())


def check_seeds(seeds: Iterable[int]) -> None:
    """Refuse seeds outside 0 … 2³¹ − 1."""
    if invalid := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise InputError(f"seeds: a seed is an integer from 0 to 2³¹ − 1, not {invalid[0]}")
