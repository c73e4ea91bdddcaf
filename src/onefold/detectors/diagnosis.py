"""Diagnosis of a detector: reasons to trust it or not."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onefold.errors import DiagnosisWarning, warn
from onefold.metrics import auroc
from onefold.types import Scores


@dataclass(frozen=True)
class Finding:
    """One result of a diagnosis.

    Args:
        name: Name of the check.
        value: Measured number.
        ok: True if the check passed; None for information only.
        message: What the number means, as one sentence.
    """

    name: str
    value: float
    ok: bool | None
    message: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a detector; as text, one line each.

    Args:
        findings: Results of the checks.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return all(finding.ok is not False for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def __str__(self) -> str:
        marks = {True: "ok  ", False: "WARN", None: "info"}
        return "\n".join(f"{marks[f.ok]}  {f.name}: {f.message}" for f in self.findings)

    def warn(self) -> None:
        """Warn about every check that failed."""
        for finding in self.findings:
            if finding.ok is False:
                warn(f"{finding.name}: {finding.message}", DiagnosisWarning)


FLAT = 0.02  # relative spread of scores below which they rank nothing
CONVERGED = 0.6  # share of the labels' variance that the regression must explain
NOTHING = 0.1  # share below which longer training does not help
NEAR_ZERO = 0.25  # of the mean dissimilarity of two train samples


def signal(values: Scores) -> Finding:
    """Check that scores are not constant."""
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    spread = float((high - low) / max(abs(middle), 1e-12))
    good = spread > FLAT
    text = f"scores of familiar and of scrambled samples spread over {spread:.0%} of their median"
    return Finding("signal", spread, good, text if good else f"{text}: they are flat, and rank nothing; train longer")


def convergence(explained: float) -> Finding:
    """Check that the regression fits the kernel on pairs of training samples."""
    good = explained >= CONVERGED
    text = f"the regression explains {max(explained, 0):.0%} of the kernel's variance over train pairs"
    advice = ": it has not converged; train longer, with smaller batches or another learning rate"
    if explained < NOTHING:
        advice = (
            ": it has not converged, or cannot learn these similarities; train longer, or use LocalGP or LastLayerGP"
        )
    return Finding("convergence", explained, good, text if good else text + advice)


def familiarity(train: Scores, dissimilarity: float) -> Finding:
    """Check that the variance of training samples is near zero."""
    share = float(np.median(train)) / max(dissimilarity, 1e-12)
    good = share <= NEAR_ZERO
    text = f"the relative variance of train samples is {share:.1%} of their mean dissimilarity"
    return Finding("familiarity", share, good, text if good else f"{text}: it should be near zero; train longer")


def likeness(reference: Scores, what: str, tolerance: float, held_out: Scores) -> Finding:
    """Check that held-out samples have scores like the reference; equal distributions give an AUROC of ½."""
    value = auroc(reference, held_out)
    error = math.sqrt((len(reference) + len(held_out) + 1) / (12 * len(reference) * len(held_out)))
    good = value < 0.5 + max(tolerance, 4 * error)
    text = f"held-out samples look stranger than {what} with probability {value:.2f}"
    advice = ": they seem to come from elsewhere, and alarms will be rarer or more frequent than asked"
    return Finding("likeness", value, good, text if good else text + advice)


def agreement(value: float) -> Finding:
    """Report the rank correlation with the closed form in the same features."""
    return Finding("agreement", value, None, f"rank correlation {value:.2f} with LastLayerGP in the same features")


def logits_used(confidence: float, classes: int | None) -> Finding:
    """Report whether the score uses the logits of the user's model, and the mean of its largest probability."""
    use = "are not used" if classes is None else f"count as those of these data's {classes} classes"
    text = f"the model's logits {use}; mean largest probability on the train data {confidence:.2f}"
    return Finding("logits", confidence, None, text)
