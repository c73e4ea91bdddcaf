"""One unit: fit, score, measure, and everything that is worth keeping of it."""

import resource
import time
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from onefold import metrics
from onefold.bench.methods import Job, classes, parameters, prepare, score, scores
from onefold.bench.sets import PERTURBED, familiar, label, strange_sets
from onefold.bench.units import METHODS, settings_of
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance

FORMAT = 1
RATES = tuple(float(f"{rate:.4g}") for rate in np.concatenate([np.geomspace(0.001, 0.1, 9), np.linspace(0.2, 1, 9)]))
BINS, KEPT = 40, tuple(round(1 - 0.05 * i, 2) for i in range(19))
TIMED = 10_000  # images whose scoring is timed


def run_unit(job: Job) -> dict[str, Any]:
    """Fit and measure; what the unit's file holds."""
    device = pick_device("auto")
    images, strange = familiar(job.data, job.unit.id, job.preset), strange_sets(job.data, job.unit.id, job.preset)
    assert images.y_test is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short preset does not converge, and the figures say how good it is
        fit = prepare(job)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        detector = fit()
        fitted = time.perf_counter() - started
        timed = images.x_test[:TIMED]
        score(job, detector, timed[:64])
        started = time.perf_counter()
        score(job, detector, timed)
        scored = time.perf_counter() - started
        found = scores(job, detector, images.x_test)
        others = {name: scores(job, detector, x) for name, x in strange.items()}
        right = classes(job, detector, images.x_test) == images.y_test
    method = METHODS[job.unit.method]
    chosen = method.default
    return {
        "format": FORMAT,
        "unit": str(job.unit),
        **provenance(device),
        "settings": {**settings_of(job.preset), "method": job.unit.method, "title": method.title, "ours": method.ours},
        "data": {
            "id": label(job.unit.id),
            "train": len(images.x_train),
            "test": len(images.x_test),
            "strange": {name: len(x) for name, x in strange.items()},
        },
        "accuracy": float(np.mean(right)),
        "default": chosen,
        "scores": {
            kind: {name: figures(values, other[kind]) for name, other in others.items()}
            for kind, values in found.items()
        },
        "curves": {
            "roc": {name: roc(found[chosen], other[chosen]) for name, other in others.items()},
            "histogram": histogram(found[chosen], {name: other[chosen] for name, other in others.items()}),
            "rejection": rejection(found[chosen], right),
        },
        "cost": {
            "fit_s": fitted,
            "score_us": 1e6 * scored / len(timed),
            "parameters": parameters(detector),
            "peak_mb": _peak(device) / 2**20,
        },
    }


def figures(familiar_scores: NDArray[Any], strange_scores: NDArray[Any]) -> dict[str, float]:
    """All metrics, in per cent; precision-recall at equal class weight, and plainly beside it."""
    pair = (familiar_scores, strange_scores)
    return {
        "auroc": 100 * metrics.auroc(*pair),
        "aupr_in": 100 * metrics.aupr_in(*pair),
        "aupr_out": 100 * metrics.aupr_out(*pair),
        "aupr_in_plain": 100 * metrics.aupr_in(*pair, balanced=False),
        "aupr_out_plain": 100 * metrics.aupr_out(*pair, balanced=False),
        "fpr95": 100 * metrics.fpr95(*pair),
    }


def means(strange: dict[str, dict[str, float]], metric: str) -> tuple[float, float]:
    """The mean over foreign sets and the unclipped perturbed one, as the paper has it, and over foreign sets alone."""
    foreign = [values[metric] for name, values in strange.items() if name not in PERTURBED]
    return float(np.mean([*foreign, strange[PERTURBED[0]][metric]])), float(np.mean(foreign))


def roc(familiar_scores: NDArray[Any], strange_scores: NDArray[Any]) -> list[float]:
    """The share of strange inputs that is found, at each of `RATES` of false alarms."""
    thresholds = np.quantile(familiar_scores, 1 - np.array(RATES), method="higher")
    return [
        round(float(np.mean(strange_scores > t)) if rate < 1 else 1.0, 5)
        for t, rate in zip(thresholds, RATES, strict=True)
    ]


def histogram(familiar_scores: NDArray[Any], strange: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Counts of scores between edges of equal width; what lies beyond the far percentiles is in the outer bins."""
    everything = np.concatenate([familiar_scores, *strange.values()])
    low, high = np.quantile(everything, [0.002, 0.998])
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    groups = {"familiar": familiar_scores, **strange}
    counts = {
        name: np.histogram(values.clip(edges[0], edges[-1]), edges)[0].tolist() for name, values in groups.items()
    }
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts}


def rejection(familiar_scores: NDArray[Any], right: NDArray[np.bool_]) -> list[float]:
    """Accuracy on the shares `KEPT` of the test set that look most familiar."""
    order = np.argsort(familiar_scores, kind="stable")
    return [round(float(np.mean(right[order[: max(1, round(share * len(order)))]])), 5) for share in KEPT]


def _peak(device: torch.device) -> int:
    """Bytes: on a GPU the most that was allocated for the fit and the scoring, else the process's own most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
