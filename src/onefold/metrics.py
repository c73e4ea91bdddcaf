"""Ranking metrics for the scores of familiar and unfamiliar inputs. A bigger score means more uncertain."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onefold.errors import InputError
from onefold.types import ArrayLike

__all__ = [
    "RiskCoverage", "accuracy", "aupr_in", "aupr_out", "auroc", "fpr95", "rank_correlation", "risk_coverage",
]  # fmt: skip


class RiskCoverage(NamedTuple):
    """Risk–coverage curve of a predictor that abstains where its scores are largest.

    Attributes:
        coverage: Share of the samples that are predicted, 1/N, 2/N, … 1 [N].
        risk: Mean loss of the predicted samples at each coverage [N].
        area: Mean of the risks, the area under the curve (AURC). Smaller is better.
    """

    coverage: NDArray[np.float64]
    risk: NDArray[np.float64]
    area: float


def auroc(familiar: ArrayLike, unfamiliar: ArrayLike) -> float:
    """Return the probability that an unfamiliar input scores above a familiar one; ties count half.

    Args:
        familiar: Scores of familiar (in-distribution) inputs.
        unfamiliar: Scores of unfamiliar (out-of-distribution) inputs.

    Returns:
        Area under the ROC curve, from 0 to 1; 0.5 is chance.

    Raises:
        InputError: If a group has no scores, or a score is NaN or infinite.
    """
    from sklearn.metrics import roc_auc_score  # takes a second to load

    scores, labels = _join_groups(familiar, unfamiliar)
    return float(roc_auc_score(labels, scores))


def aupr_out(familiar: ArrayLike, unfamiliar: ArrayLike, *, balanced: bool = True) -> float:
    """Return the area under the precision-recall curve with the unfamiliar inputs as positives.

    Args:
        familiar: Scores of familiar (in-distribution) inputs.
        unfamiliar: Scores of unfamiliar (out-of-distribution) inputs.
        balanced: Weight both groups equally, so that the result does not depend on their sizes.

    Returns:
        Average precision, from 0 to 1.

    Raises:
        InputError: If a group has no scores, or a score is NaN or infinite.
    """
    from sklearn.metrics import average_precision_score

    scores, labels = _join_groups(familiar, unfamiliar)
    return float(
        average_precision_score(labels, scores, sample_weight=_class_balanced_weights(labels) if balanced else None)
    )


def aupr_in(familiar: ArrayLike, unfamiliar: ArrayLike, *, balanced: bool = True) -> float:
    """Return the area under the precision-recall curve with the familiar inputs as positives.

    Args:
        familiar: Scores of familiar (in-distribution) inputs.
        unfamiliar: Scores of unfamiliar (out-of-distribution) inputs.
        balanced: Weight both groups equally, so that the result does not depend on their sizes.

    Returns:
        Average precision, from 0 to 1.

    Raises:
        InputError: If a group has no scores, or a score is NaN or infinite.
    """
    from sklearn.metrics import average_precision_score

    scores, labels = _join_groups(familiar, unfamiliar)
    return float(
        average_precision_score(
            1 - labels, -scores, sample_weight=_class_balanced_weights(labels) if balanced else None
        )
    )


def fpr95(familiar: ArrayLike, unfamiliar: ArrayLike) -> float:
    """Return the share of unfamiliar inputs accepted at the threshold that accepts 95 % of the familiar ones.

    Args:
        familiar: Scores of familiar (in-distribution) inputs.
        unfamiliar: Scores of unfamiliar (out-of-distribution) inputs.

    Returns:
        False-positive rate with familiar inputs as positives, from 0 (best) to 1.

    Raises:
        InputError: If a group has no scores, or a score is NaN or infinite.
    """
    scores, labels = _join_groups(familiar, unfamiliar)
    ordered = np.sort(scores[labels == 0])
    threshold = ordered[int(np.ceil(0.95 * len(ordered))) - 1]
    return float(np.mean(scores[labels == 1] <= threshold))


def accuracy(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Return the share of labels that are predicted correctly.

    Args:
        predicted: Predicted labels.
        labels: True labels, of the same shape.

    Returns:
        Share from 0 to 1.

    Raises:
        InputError: If the shapes differ.
    """
    predictions, truth = np.asarray(predicted), np.asarray(labels)
    if predictions.shape != truth.shape:
        raise InputError(
            f"predicted: shape {predictions.shape} does not match the labels' {truth.shape}. "
            "Pass one prediction for each label."
        )
    return float(np.mean(predictions == truth))


def risk_coverage(scores: ArrayLike, losses: ArrayLike) -> RiskCoverage:
    """Return the mean loss of the samples with the smallest scores, for every number of samples.

    It tells whether scores find wrong predictions: with losses 0 and 1, risk is the error rate among the predictions
    that are kept. Samples of equal scores count as if drawn in random order, so constant scores give a constant risk.

    Args:
        scores: Scores of samples, such as of a test set.
        losses: Losses of the predictions for the same samples, such as `predicted != labels`.

    Returns:
        Coverages, risks and the area under the curve.

    Raises:
        InputError: If there are no scores, the lengths differ, or a value is NaN or infinite.
    """
    values, costs = (np.asarray(part, dtype=np.float64).ravel() for part in (scores, losses))
    if len(values) != len(costs):
        raise InputError(
            f"losses: {len(costs)} values do not match the {len(values)} scores. Pass one loss for each score."
        )
    if not len(values):
        raise InputError("scores: empty. Pass at least one score.")
    if not (np.isfinite(values).all() and np.isfinite(costs).all()):
        raise InputError("scores: NaN or infinity in the scores or losses. Pass finite values.")
    _, groups, counts = np.unique(values, return_inverse=True, return_counts=True)
    means = np.bincount(groups, costs) / counts
    kept = np.arange(1, len(values) + 1)
    risk = np.cumsum(np.repeat(means, counts)) / kept
    return RiskCoverage(kept / len(values), risk, float(risk.mean()))


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's rank correlation: Pearson's correlation of the ranks, where ties share their mean rank.

    Args:
        a: Scores.
        b: Scores of the same samples, same length.

    Returns:
        Correlation from −1 to 1; NaN if `a` or `b` is constant.

    Raises:
        InputError: If the lengths differ, or a score is NaN or infinite.
    """
    values = [np.asarray(scores, dtype=np.float64).ravel() for scores in (a, b)]
    if len(values[0]) != len(values[1]):
        raise InputError(
            f"scores: the two sets have different lengths ({len(values[0])} and {len(values[1])}). "
            "Pass scores of the same samples."
        )
    if not all(np.isfinite(scores).all() for scores in values):
        raise InputError("scores: NaN or infinity cannot be ranked. Pass finite scores.")
    left, right = (_ranks(scores) for scores in values)
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 0, ties at their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def _join_groups(familiar: ArrayLike, unfamiliar: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return all scores, and labels that are 1 for unfamiliar inputs."""
    groups = [np.asarray(group, dtype=np.float64).ravel() for group in (familiar, unfamiliar)]
    if not all(len(group) for group in groups):
        raise InputError("scores: one group is empty. Pass at least one familiar and one unfamiliar score.")
    scores = np.concatenate(groups)
    if not np.isfinite(scores).all():
        raise InputError("scores: NaN or infinity cannot be ranked. Pass finite scores.")
    return scores, np.repeat([0, 1], [len(group) for group in groups])


def _class_balanced_weights(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return weights that give both classes the same total."""
    return (1 / np.bincount(labels))[labels]
