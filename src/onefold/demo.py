"""The demo: detectors fitted on handwritten digits, tested on letters, perturbed digits and noise."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from onefold import metrics
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.data import Digits, digits, letters, perturb
from onefold.detectors import CSD, RND, DeepEnsemble, LastLayerGP
from onefold.distil import Architecture
from onefold.nn.train import Recipe

RECIPE = Recipe(steps=2000, batch=64, lr=1e-2, warmup=300)
CLASSIFIER_RECIPE = Recipe(steps=400, batch=64, lr=1e-3)
METRICS: dict[str, Callable[[Any, Any], float]] = {
    "AUROC": metrics.auroc,
    "AUPR-IN": metrics.aupr_in,
    "AUPR-OUT": metrics.aupr_out,
    "FPR95": metrics.fpr95,
}


class Sets(NamedTuple):
    """Familiar digits, train and test, and the unfamiliar sets by name."""

    familiar: Digits
    unfamiliar: dict[str, Float[np.ndarray, "n 8 8"]]


@dataclass(frozen=True)
class Outcome:
    """Scores of one method on the familiar test set and on the unfamiliar sets, and its times."""

    name: str
    note: str
    fit_seconds: float
    score_seconds: float
    familiar: NDArray[np.float64]
    unfamiliar: dict[str, NDArray[np.float64]]

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """Every metric on every unfamiliar set, and the mean over the sets, in per cent."""
        table = {
            metric: {name: 100 * measure(self.familiar, scores) for name, scores in self.unfamiliar.items()}
            for metric, measure in METRICS.items()
        }
        return {metric: {**row, "mean": float(np.mean(list(row.values())))} for metric, row in table.items()}


def sets(seed: int = 0) -> Sets:
    """Return the data of the demo; it needs no download."""
    familiar = digits(seed)
    count = len(familiar.x_test)
    unfamiliar = {
        "letters": letters(count, seed),
        "perturbed digits": perturb(familiar.x_test, seed),
        "perturbed, clipped": perturb(familiar.x_test, seed, clip=True),
        "noise": np.random.default_rng(seed).random((count, 8, 8), dtype=np.float32),
    }
    return Sets(familiar, unfamiliar)


def compare(data: Sets, seed: int = 0) -> Iterator[Outcome]:
    """Yield the outcome of each method with its default score; settings were fixed in advance."""
    small = Architecture(channels=(16,))
    x, y = data.familiar.x_train, data.familiar.y_train
    csd = CSD(augment=0.0, recipe=RECIPE, architecture=small, seed=seed)
    yield _measure("CSD", "one model, contexts from the train set", csd, lambda: csd.fit(x), data)
    augmented = CSD(augment=0.5, recipe=RECIPE, architecture=small, seed=seed)
    yield _measure("CSD-Aug", "half of the contexts augmented", augmented, lambda: augmented.fit(x), data)
    gp = LastLayerGP(seed=seed)
    yield _measure("LastLayerGP", "closed form, 2,048 random features", gp, lambda: gp.fit(x), data)
    rnd = RND(recipe=RECIPE, seed=seed)
    yield _measure("RND", "error against a random network", rnd, lambda: rnd.fit(x), data)
    ensemble = DeepEnsemble(5, channels=(16, 32), recipe=CLASSIFIER_RECIPE, seed=seed)
    yield _measure("ENS(5)", "five classifiers, needs labels", ensemble, lambda: ensemble.fit(x, y), data)


def summary(outcomes: list[Outcome], data: Sets, seed: int) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        **provenance(pick_device("auto")),
        "seed": seed,
        "data": "scikit-learn digits (8 × 8) against letters from matplotlib's fonts, perturbed digits and noise",
        "train": len(data.familiar.x_train),
        "held_out": len(data.familiar.x_test),
        "recipe": asdict(RECIPE),
        "classifier_recipe": asdict(CLASSIFIER_RECIPE),
        "methods": {
            o.name: {**o.figures, "fit_seconds": o.fit_seconds, "score_seconds": o.score_seconds} for o in outcomes
        },
    }


def _measure(name: str, note: str, method: Any, fit: Callable[[], Any], data: Sets) -> Outcome:
    """Fit a method and return its scores and times."""
    started = time.perf_counter()
    fit()
    fitted = time.perf_counter()
    familiar = method.score(data.familiar.x_test)
    unfamiliar = {label: method.score(x) for label, x in data.unfamiliar.items()}
    return Outcome(name, note, fitted - started, time.perf_counter() - fitted, familiar, unfamiliar)
