"""Error bars for regression: CSD's variance beside the exact NTK-GP and a deep ensemble.

    python benchmarks/regression.py -o results/regression.json [--seeds 0 1 2 3 4]

Two data sets: scikit-learn's diabetes (442 patients, ten columns, noisy), and a synthetic one (two clusters in the
plane, little noise) that is also tested between and beyond its clusters. Every method gives a variance v(x) up to a
factor. All share one prediction, the mean of the ensemble, so that only the error bars differ. The error bar is
s(x)² = a v(x) + b with a, b >= 0 of the highest likelihood on validation data; "constant" has b alone. Validation data
are familiar: no method sees an input outside the clusters before the test. Targets have unit variance. Sets and seeds
that are in the file are not run again.
"""

import argparse
import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.datasets import load_diabetes

from onefold import CSD, DeepEnsemble
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.exact import ntk_gp
from onefold.kernels import infinite
from onefold.metrics import rank_correlation
from onefold.nn.train import Recipe

Array = NDArray[np.float64]
MEMBERS, HIDDEN = 5, (64, 64)
STEPS = (250, 1000, 3000)  # of the networks; the number with the smallest validation error is used
CSD_RECIPE = Recipe(steps=2000, batch=128, lr=3e-3, warmup=200)
LAW = infinite(2, activation="relu", w_std=math.sqrt(2), b_std=0.5)
LEVEL, QUANTILE = 0.9, 1.6448536269514722
NOISE = 0.1


class Split(NamedTuple):
    """Samples for fitting and validation, and groups of test samples by name; standardised by the first."""

    train: tuple[Array, Array]
    validation: tuple[Array, Array]
    tests: dict[str, tuple[Array, Array]]


def diabetes(seed: int) -> Split:
    """Return a random split of the diabetes data: 242 to fit, 100 to validate, 100 to test."""
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(x))
    parts = [(x[rows], y[rows]) for rows in np.split(order, [242, 342])]
    return standardised(parts[0], parts[1], {"test": parts[2]})


def synthetic(seed: int) -> Split:
    """Return samples in two clusters of the plane, and test samples in them, between them and beyond them."""
    rng = np.random.default_rng(seed)

    def drawn(x: Array) -> tuple[Array, Array]:
        return x, np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + NOISE * rng.normal(size=len(x))

    def inside(count: int) -> Array:
        centres = np.array([[-2.0, 0.0], [2.0, 0.0]])[rng.integers(0, 2, count)]
        return centres + 0.7 * rng.uniform(-1, 1, (count, 2))

    between = rng.uniform(-1, 1, (200, 2)) * 0.7
    beyond = np.stack([rng.choice([-1, 1], 200) * rng.uniform(3.2, 4.2, 200), rng.uniform(-0.7, 0.7, 200)], 1)
    tests = {"in the clusters": inside(200), "between them": between, "beyond them": beyond}
    return standardised(drawn(inside(200)), drawn(inside(100)), {name: drawn(x) for name, x in tests.items()})


def standardised(
    train: tuple[Array, Array], validation: tuple[Array, Array], tests: dict[str, tuple[Array, Array]]
) -> Split:
    """Return the data with columns and targets of mean 0 and standard deviation 1 on the training samples."""
    x, y = train

    def scaled(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return (part[0] - x.mean(0)) / x.std(0), (part[1] - y.mean()) / y.std()

    return Split(scaled(train), scaled(validation), {name: scaled(part) for name, part in tests.items()})


def negative_log_likelihood(error: Array, variance: Array) -> float:
    """Return the mean −log density of the errors under normal distributions of these variances."""
    return float(np.mean(0.5 * np.log(2 * np.pi * variance) + 0.5 * error**2 / variance))


def calibrate(error: Array, variance: Array) -> tuple[float, float]:
    """Return a, b >= 0 of the highest likelihood of the errors under variances a v + b."""
    scale, best = float(variance.mean()), (math.inf, 0.0, float(np.mean(error**2)))

    def loss(logs: Array) -> float:
        a, b = np.exp(np.clip(logs, -30, 30))
        return negative_log_likelihood(error, a * variance / scale + b)

    for share in (0.01, 0.5, 0.99):
        start = np.log(np.mean(error**2) * np.array([share, 1 - share]))
        found = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10, "maxiter": 4000})
        best = min(best, (float(found.fun), *map(float, np.exp(np.clip(found.x, -30, 30)) / np.array([scale, 1.0]))))
    return best[1], best[2]


def variances(split: Split, ensemble: DeepEnsemble, seed: int) -> dict[str, dict[str, Array]]:
    """Return the variance of every method at the validation samples and at each group of test samples."""
    x = split.train[0]
    groups = {"validation": split.validation[0], **{name: part[0] for name, part in split.tests.items()}}
    csd = CSD(recipe=CSD_RECIPE, seed=seed).fit(x.astype(np.float32), progress=False)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(split.train[1])
    return {
        "constant": {name: np.zeros(len(part)) for name, part in groups.items()},
        "deep ensemble": {name: ensemble.score(part.astype(np.float32)) for name, part in groups.items()},
        "exact NTK-GP": {
            name: ntk_gp(LAW, inputs, targets, torch.from_numpy(part)).variance.numpy() for name, part in groups.items()
        },
        "CSD": {name: csd.variance(part.astype(np.float32)) for name, part in groups.items()},
    }


def measure(split: Split, seed: int) -> dict[str, Any]:
    """Return the figures of every method by group of test samples."""

    def fitted(steps: int) -> DeepEnsemble:
        recipe = Recipe(steps=steps, batch=64, lr=1e-3)
        ensemble = DeepEnsemble(MEMBERS, hidden=HIDDEN, task="regression", recipe=recipe, seed=seed)
        return ensemble.fit(split.train[0].astype(np.float32), split.train[1], progress=False)

    def errors(ensemble: DeepEnsemble, part: tuple[Array, Array]) -> Array:
        return part[1] - ensemble.predict(part[0].astype(np.float32)).ravel()

    ensembles = {steps: fitted(steps) for steps in STEPS}
    chosen = min(STEPS, key=lambda steps: float(np.mean(errors(ensembles[steps], split.validation) ** 2)))
    ensemble = ensembles[chosen]
    tested = {name: errors(ensemble, part) for name, part in split.tests.items()}
    error = errors(ensemble, split.validation)
    figures: dict[str, Any] = {}
    for method, by_group in variances(split, ensemble, seed).items():
        a, b = (0.0, float(np.mean(error**2))) if method == "constant" else calibrate(error, by_group["validation"])
        figures[method] = {"a": a, "b": b, "steps": chosen}
        for name, of_test in tested.items():
            total = a * by_group[name] + b
            deviation = np.sqrt(total)
            figures[method][name] = {
                "nll": negative_log_likelihood(of_test, total),
                "coverage": float(np.mean(np.abs(of_test) <= QUANTILE * deviation)),
                "width": float(np.mean(2 * QUANTILE * deviation)),
                "rmse": float(np.sqrt(np.mean(of_test**2))),
            }
            if method != "constant":
                figures[method][name]["rank"] = rank_correlation(by_group[name], np.abs(of_test))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cells: dict[str, Any] = json.loads(options.out.read_text("utf-8"))["cells"] if options.out.exists() else {}
    settings = {
        "members": MEMBERS, "hidden": HIDDEN, "steps": STEPS, "csd_steps": CSD_RECIPE.steps, "level": LEVEL,
    }  # fmt: skip
    for seed, (name, make) in itertools.product(options.seeds, (("diabetes", diabetes), ("synthetic", synthetic))):
        if f"{name}/seed{seed}" in cells:
            continue
        cells[f"{name}/seed{seed}"] = figures = measure(make(seed), seed)
        write_json(options.out, {**provenance(pick_device("auto")), **settings, "cells": cells})
        for method, by_group in figures.items():
            shown = {group: values for group, values in by_group.items() if isinstance(values, dict)}
            line = "; ".join(f"{group}: NLL {v['nll']:.2f}, {v['coverage']:.0%}" for group, v in shown.items())
            print(f"{name} seed {seed} {method:14} a {by_group['a']:.3g} b {by_group['b']:.3g} {line}", flush=True)


if __name__ == "__main__":
    main()
