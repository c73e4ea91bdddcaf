"""Ranking metrics for strange against familiar inputs, thin over scikit-learn. Bigger score = stranger."""

import numpy as np
from numpy.typing import NDArray

from onefold.errors import InputError
from onefold.types import ArrayLike


def auroc(familiar: ArrayLike, strange: ArrayLike) -> float:
    """Probability that a strange input scores above a familiar one, ties counted half."""
    from sklearn.metrics import roc_auc_score  # takes a second to load

    scores, labels = _joined(familiar, strange)
    return float(roc_auc_score(labels, scores))


def aupr_out(familiar: ArrayLike, strange: ArrayLike, *, balanced: bool = True) -> float:
    """Area under precision-recall with the strange inputs as positives; `balanced` gives both classes equal weight."""
    from sklearn.metrics import average_precision_score

    scores, labels = _joined(familiar, strange)
    return float(average_precision_score(labels, scores, sample_weight=_weights(labels) if balanced else None))


def aupr_in(familiar: ArrayLike, strange: ArrayLike, *, balanced: bool = True) -> float:
    """Area under precision-recall with the familiar inputs as positives."""
    from sklearn.metrics import average_precision_score

    scores, labels = _joined(familiar, strange)
    return float(average_precision_score(1 - labels, -scores, sample_weight=_weights(labels) if balanced else None))


def fpr95(familiar: ArrayLike, strange: ArrayLike) -> float:
    """Share of strange inputs that pass as familiar at the threshold that 95 % of the familiar ones pass."""
    scores, labels = _joined(familiar, strange)
    known = np.sort(scores[labels == 0])
    threshold = known[int(np.ceil(0.95 * len(known))) - 1]
    return float(np.mean(scores[labels == 1] <= threshold))


def accuracy(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Share of labels predicted right."""
    found, true = np.asarray(predicted), np.asarray(labels)
    if found.shape != true.shape:
        raise InputError(f"predictions have shape {found.shape}, labels {true.shape}")
    return float(np.mean(found == true))


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's: Pearson's correlation of the ranks, ties sharing their mean rank; NaN if one side is constant."""
    values = [np.asarray(side, dtype=np.float64).ravel() for side in (a, b)]
    if len(values[0]) != len(values[1]) or not all(np.isfinite(side).all() for side in values):
        raise InputError("a rank correlation needs two finite sets of scores of the same length")
    left, right = (_ranks(side) for side in values)
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def _joined(familiar: ArrayLike, strange: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    groups = [np.asarray(group, dtype=np.float64).ravel() for group in (familiar, strange)]
    if not all(len(group) for group in groups):
        raise InputError("ranking needs at least one familiar and one strange score")
    scores = np.concatenate(groups)
    if not np.isfinite(scores).all():
        raise InputError("scores hold NaN or infinity: they cannot be ranked")
    return scores, np.repeat([0, 1], [len(group) for group in groups])


def _weights(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return (1 / np.bincount(labels))[labels]
