"""What there is to run: a unit is one method on one in-distribution set with one seed, under a preset."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onefold.errors import InputError
from onefold.nn.train import Recipe

FAMILIES = ("fashion_mnist", "mnist", "kmnist", "notmnist")


@dataclass(frozen=True)
class Method:
    """A row of the table. `ours` is every form of CSD; `few` is run with fewer seeds, for it takes long."""

    name: str
    title: str
    ours: bool = False
    few: bool = False
    ablation: bool = False
    """A form of CSD that is in the table of ablations only."""
    augment: str | None = None
    """How the images of its classifier are changed, for methods that have one."""
    default: str = "score"
    """The score it is ranked by if nothing is chosen in hindsight."""
    form_of: str = ""
    """Whose row of the table it is a candidate for, if not its own."""

    @property
    def row(self) -> str:
        return self.form_of or self.name


def _both(name: str, title: str, form_of: str = "", **more: Any) -> list[Method]:
    """A method with a classifier, trained with the paper's flips and crops, and with crops alone."""
    return [
        Method(name, title, augment="flips", form_of=form_of, **more),
        Method(f"{name}-noflips", f"{title}, no flips", augment="crops", form_of=form_of or name, **more),
    ]


MI: dict[str, Any] = {"default": "mutual_information"}
METHODS: dict[str, Method] = {
    method.name: method
    for method in [
        *_both("mcd", "MCD", few=True, **MI),
        *_both("laplace", "BNN-Laplace", few=True, **MI),
        Method("sgmcmc", "BNN-MCMC", few=True, augment="flips", **MI),
        Method(
            "sgmcmc-noflips", "BNN-MCMC, corrected, no flips", few=True, augment="none", form_of="sgmcmc", **MI
        ),  # nor crops
        Method("sgmcmc-baoa", "BNN-MCMC, BAOA (uncorrected)", few=True, augment="crops", **MI),
        Method("rnd", "RND"),
        *_both("ens3", "ENS(3)", few=True, **MI),
        *_both("ens15", "ENS(15)", few=True, **MI),
        Method("csd", "CSD", ours=True),
        Method("csd_aug", "CSD-Aug", ours=True),
        Method("csd_ood", "CSD-OOD", ours=True),
        Method("csd_default", "CSD-Aug, centred", ours=True),
        Method("last_layer_gp", "LastLayerGP"),
        *_both("gp_post_hoc", "LastLayerGP on the classifier"),
        *_both("knn", "kNN on the classifier"),
        *_both("knn-last", "kNN on the classifier, last layer", form_of="knn"),
        *_both("energy", "Energy of the classifier"),
        Method("csd_post_hoc", "CSD-Aug on the classifier", ours=True, augment="crops"),
        Method("csd-small_init", "CSD, small-function initialisation", ours=True, ablation=True),
        Method("csd-random_pairs", "CSD, loss over random pairs (Eq. 15)", ours=True, ablation=True),
        Method("csd-full_ntk", "CSD, full empirical NTK", ours=True, ablation=True),
        Method("csd_post_hoc-train", "CSD on the classifier", ours=True, augment="crops", ablation=True),
    ]
}
TABLE = tuple(name for name, method in METHODS.items() if not method.ablation)
ABLATED = tuple(name for name, method in METHODS.items() if method.ablation)
ABLATION = ("csd", *ABLATED, "csd_aug", "csd_default", "csd_ood", "csd_post_hoc")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the paper searched for, and found (Table "hpsettingsood")."""

    classifier: float = 1e-3
    mcd: float = 3e-4
    dropout: float = 0.1
    rnd: float = 3e-3
    csd: float = 1e-2
    post_hoc: float = 3e-3
    """Of small heads on a trained network, which the paper has not."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How long and on how much. Rates are the paper's, the number of steps is not in it."""

    name: str
    steps: int
    batch: int
    warmup: int
    train: int | None = None
    test: int | None = None
    samples: int | None = None
    """Fewer members, draws or samples than the paper's, for a quick look."""
    small: bool = False
    """Networks for images of 8 × 8."""
    seeds: tuple[int, ...] = tuple(range(10))
    few_seeds: tuple[int, ...] = (0, 1, 2)

    def recipe(self, lr: float, *, warmup: bool = False) -> Recipe:
        return Recipe(steps=self.steps, batch=self.batch, lr=lr, warmup=self.warmup if warmup else 0)

    def count(self, paper: int) -> int:
        """How many members, draws or samples."""
        return paper if self.samples is None else min(paper, self.samples)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(name="paper", steps=4000, batch=256, warmup=500),
        Preset(
            name="quick", steps=1000, batch=128, warmup=100, train=10_000, test=2000, samples=15,
            seeds=(0, 1), few_seeds=(0,),
        ),
        Preset(name="ablate", steps=4000, batch=64, warmup=500, seeds=(0, 1, 2)),  # the full NTK of 256 pairs is dear
        Preset(
            name="smoke", steps=60, batch=64, warmup=10, train=1000, test=300, samples=3, small=True,
            seeds=(0,), few_seeds=(0,),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """One method on one set with one seed."""

    method: str
    id: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}/{self.id}/seed{self.seed}"


def grid(preset: Preset, ids: Sequence[str], methods: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Unit]:
    """The units of a run, seed by seed, so that a run that is cut short has all methods at some seeds."""
    chosen = list(dict.fromkeys(methods)) or list(TABLE)
    for name in chosen:
        if name not in METHODS:
            raise InputError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    if bad := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise InputError(f"a seed is a whole number from 0 to 2³¹ − 1, not {bad[0]}")

    def wanted(name: str) -> Sequence[int]:
        return seeds or (preset.few_seeds if METHODS[name].few else preset.seeds)

    every = sorted({seed for name in chosen for seed in wanted(name)})
    return [Unit(name, id_, seed) for seed in every for id_ in ids for name in chosen if seed in wanted(name)]


def settings_of(preset: Preset) -> dict[str, Any]:
    """What a results folder must agree on to be gone on with; which seeds were run is no part of it."""
    return {key: value for key, value in asdict(preset).items() if key not in ("seeds", "few_seeds")}
