"""Evaluation of one unit: fit, score, measure, and the content of the unit's file."""

import resource
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray

from onefold import metrics
from onefold.bench.classifier import load_or_train_classifier, predict_classes
from onefold.bench.grid import Unit, set_name
from onefold.bench.results import BINS, FALSE_ALARM_RATES, FORMAT, KEPT_SHARES
from onefold.bench.rows import ROWS, Row
from onefold.bench.sets import PERTURBED, load_id_set, load_ood_sets
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.detectors.base import Detector
from onefold.detectors.members import MemberDetector

TIMED = 10_000  # images whose scoring is timed
WARM_UP = 64  # images that are scored before

Curve = list[float]


def evaluate(unit: Unit) -> dict[str, Any]:
    """Return the content of a unit's file: figures, curves, cost and origin."""
    device, row = pick_device("auto"), ROWS[unit.row]
    images, ood_sets = load_id_set(unit.id_set, unit.data_dir, unit.preset), load_ood_sets(unit)
    assert images.y_test is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short preset does not converge, and the figures show how good it is
        fit = row.build(unit, row.augment)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        detector = fit()
        fit_seconds = time.perf_counter() - started
        timed = row.images(images.x_test[:TIMED])
        detector.score(timed[:WARM_UP])
        started = time.perf_counter()
        detector.score(timed)
        score_seconds = time.perf_counter() - started
        id_scores = all_scores(detector, row.images(images.x_test))
        ood_scores = {name: all_scores(detector, row.images(x)) for name, x in ood_sets.items()}
        correct = _predict(unit, row, detector, images.x_test) == images.y_test
    default, default_ood = row.default, {name: scores[row.default] for name, scores in ood_scores.items()}
    return {
        "format": FORMAT,
        "unit": str(unit),
        **provenance(device),
        "settings": {**unit.preset.settings(), "method": row.name, "title": row.title, "ours": row.ours},
        "data": {
            "id": set_name(unit.id_set),
            "train": len(images.x_train),
            "test": len(images.x_test),
            "ood": {name: len(x) for name, x in ood_sets.items()},
        },
        "accuracy": float(np.mean(correct)),
        "default": default,
        "scores": {
            kind: {name: compute_metrics(scores, by_kind[kind]) for name, by_kind in ood_scores.items()}
            for kind, scores in id_scores.items()
        },
        "curves": {
            "roc": {name: roc_curve(id_scores[default], scores) for name, scores in default_ood.items()},
            "histogram": score_histogram(id_scores[default], default_ood),
            "rejection": rejection_curve(id_scores[default], correct),
        },
        "cost": {
            "fit_s": fit_seconds,
            "score_us": 1e6 * score_seconds / len(timed),
            "parameters": detector.state.parameters,
            "peak_mb": _peak_bytes(device) / 2**20,
        },
    }


def all_scores(detector: Detector, x: np.ndarray) -> dict[str, NDArray[np.float64]]:
    """Return every score that the detector has, by name."""
    if isinstance(detector, MemberDetector):
        return {name: values for name, values in detector.disagreements(x).items() if name != "predicted"}
    return detector.outputs(x)


def _predict(unit: Unit, row: Row, detector: Detector, x: np.ndarray) -> NDArray[Any]:
    """Return the classes that the detector predicts, or the separate classifier if it predicts none."""
    if isinstance(detector, MemberDetector):
        return detector.predict(x)
    return predict_classes(load_or_train_classifier(unit, row.augment), x)


def compute_metrics(id_scores: NDArray[Any], ood_scores: NDArray[Any]) -> dict[str, float]:
    """Return all metrics in per cent; precision-recall at equal class weight, and plain beside it."""
    pair = (id_scores, ood_scores)
    return {
        "auroc": 100 * metrics.auroc(*pair),
        "aupr_in": 100 * metrics.aupr_in(*pair),
        "aupr_out": 100 * metrics.aupr_out(*pair),
        "aupr_in_plain": 100 * metrics.aupr_in(*pair, balanced=False),
        "aupr_out_plain": 100 * metrics.aupr_out(*pair, balanced=False),
        "fpr95": 100 * metrics.fpr95(*pair),
    }


def mean_over_sets(figures: Mapping[str, Mapping[str, float]], metric: str) -> tuple[float, float]:
    """Return the means of a metric: over other sets and the unclipped perturbed one (the paper's), and others alone."""
    others = [values[metric] for name, values in figures.items() if name not in PERTURBED]
    return float(np.mean([*others, figures[PERTURBED[0]][metric]])), float(np.mean(others))


def roc_curve(id_scores: NDArray[Any], ood_scores: NDArray[Any]) -> Curve:
    """Return the share of OOD inputs above the threshold for each of `FALSE_ALARM_RATES`."""
    thresholds = np.quantile(id_scores, 1 - np.array(FALSE_ALARM_RATES), method="higher")
    return [
        round(float(np.mean(ood_scores > threshold)) if rate < 1 else 1.0, 5)
        for threshold, rate in zip(thresholds, FALSE_ALARM_RATES, strict=True)
    ]


def score_histogram(id_scores: NDArray[Any], ood_scores: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return counts of scores in bins of equal width; scores beyond the outer percentiles are in the outer bins."""
    groups = {"familiar": id_scores, **ood_scores}
    low, high = np.quantile(np.concatenate(list(groups.values())), [0.002, 0.998])
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    counts = {
        name: np.histogram(values.clip(edges[0], edges[-1]), edges)[0].tolist() for name, values in groups.items()
    }
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts}


def rejection_curve(id_scores: NDArray[Any], correct: Bool[np.ndarray, " n"]) -> Curve:
    """Return the accuracy on each of `KEPT_SHARES` of the ID test set, the images with the smallest scores."""
    order = np.argsort(id_scores, kind="stable")
    return [round(float(np.mean(correct[order[: max(1, round(kept * len(order)))]])), 5) for kept in KEPT_SHARES]


def _peak_bytes(device: torch.device) -> int:
    """Return the peak of GPU memory since the fit began, or that of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
