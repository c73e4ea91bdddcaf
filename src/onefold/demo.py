"""The demo: which inputs a small classifier of digits should not be trusted with, from training to an exported file."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from onefold import metrics
from onefold.core.progress import show_spinner
from onefold.core.provenance import provenance
from onefold.data import digits, letters, perturb
from onefold.detectors import CSD
from onefold.kernels import from_model
from onefold.types import Scores

FPR = 0.05
CONFIDENT = 0.9  # predictions with at least this probability are called confident
CALIBRATION = 250  # of the 500 digits that the classifier was not trained on
STEPS, BATCH, LR = 600, 64, 1e-3  # of the classifier

Images = Float32[np.ndarray, "n 1 h w"]


class DemoData(NamedTuple):
    """Digits to train, calibrate and test on, and the unfamiliar sets by name."""

    x_train: Images
    y_train: Int64[np.ndarray, " n"]
    x_calibration: Images
    x_test: Images
    y_test: Int64[np.ndarray, " m"]
    unfamiliar: dict[str, Images]


@dataclass(frozen=True)
class Answers:
    """What classifier, detector and exported file say about the images of one set.

    Args:
        predicted: Class that the classifier predicts.
        confidence: Its probability.
        scores: Scores of the detector.
        pvalues: p-values of the detector.
        flagged: Alarms of the detector.
        same_alarms: Number of images for which the exported file gives the same alarm.
    """

    predicted: NDArray[np.int64]
    confidence: Float[np.ndarray, " n"]
    scores: Scores
    pvalues: Scores
    flagged: NDArray[np.bool_]
    same_alarms: int

    @property
    def confident(self) -> float:
        """Share of predictions with a probability of at least 0.9."""
        return float((self.confidence >= CONFIDENT).mean())


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo.

    Args:
        accuracy: Accuracy of the classifier on the test digits.
        threshold: Calibrated threshold of the detector.
        digits: Answers on the test digits.
        unfamiliar: Answers on each unfamiliar set.
        seconds: Seconds of each part.
        device: Device of the detector.
    """

    accuracy: float
    threshold: float
    digits: Answers
    unfamiliar: dict[str, Answers]
    seconds: dict[str, float]
    device: torch.device

    def auroc(self, name: str) -> float:
        """Return the AUROC of the detector's scores on an unfamiliar set."""
        return metrics.auroc(self.digits.scores, self.unfamiliar[name].scores)

    def auroc_of_confidence(self, name: str) -> float:
        """Return the AUROC on an unfamiliar set if low confidence of the classifier is the score."""
        return metrics.auroc(-self.digits.confidence, -self.unfamiliar[name].confidence)


def demo_data(seed: int = 0) -> DemoData:
    """Return the data of the demo; it needs no download."""
    familiar = digits(seed)
    count = len(familiar.x_test)
    unfamiliar = {
        "letters": letters(count, seed),
        "perturbed digits": perturb(familiar.x_test, seed),
        "perturbed, clipped": perturb(familiar.x_test, seed, clip=True),
        "noise": np.random.default_rng(seed).random((count, 8, 8), dtype=np.float32),
    }
    x_test = familiar.x_test[:, None]
    return DemoData(
        familiar.x_train[:, None],
        familiar.y_train,
        x_test[:CALIBRATION],
        x_test[CALIBRATION:],
        familiar.y_test[CALIBRATION:],
        {name: images[:, None].astype(np.float32) for name, images in unfamiliar.items()},
    )


def train_classifier(data: DemoData, seed: int = 0, steps: int = STEPS) -> nn.Module:
    """Return a small convolutional classifier of the digits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # torch's own initialisation takes no generator
        net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    generator = Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(net.parameters(), LR)
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[index]), y[index]).backward()
        optimiser.step()
    return net.eval()


def run_demo(data: DemoData, out: Path, seed: int = 0, say: Callable[[str], None] = print) -> DemoResult:
    """Train a classifier, fit and calibrate a detector on it, export it, and compare the answers.

    Args:
        data: Data of `demo_data`.
        out: Folder for the detector's file and the exported file.
        seed: Seed of the classifier and the detector.
        say: Called with one line after each part.
    """
    seconds: dict[str, float] = {}

    def timed(part: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        with show_spinner(part):
            value = action()
        seconds[part] = time.perf_counter() - started
        return value

    net = timed("training a classifier", lambda: train_classifier(data, seed))
    accuracy = float((_probabilities(net, data.x_test).argmax(1).numpy() == data.y_test).mean())
    say(f"classifier: {accuracy:.1%} of {len(data.y_test)} test digits are right")
    detector = CSD(kernel=from_model(net), seed=seed)
    timed("fitting a detector on it", lambda: detector.fit(data.x_train, progress=False))
    detector.calibrate(data.x_calibration, FPR)
    detector.save(out / "digits.onefold")
    count = len(data.x_train)
    say(f"detector: fitted on {count:,} digits, calibrated on {CALIBRATION} others for {FPR:.0%} false alarms")
    timed("exporting the detector", lambda: detector.export(out / "digits.pt2"))
    exported = _load_exported(out / "digits.pt2")
    sets = {"digits": data.x_test, **data.unfamiliar}
    answers = timed("scoring", lambda: {name: _answer(net, detector, exported, x) for name, x in sets.items()})
    return DemoResult(accuracy, detector.threshold, answers.pop("digits"), answers, seconds, detector.device)


def summary(result: DemoResult, data: DemoData, seed: int) -> dict[str, Any]:
    """Return the content of the result file."""
    sets = {"digits": result.digits, **result.unfamiliar}
    return {
        **provenance(result.device),
        "seed": seed,
        "data": "scikit-learn digits (8 × 8) against letters from matplotlib's fonts, perturbed digits and noise",
        "train": len(data.x_train),
        "calibration": len(data.x_calibration),
        "fpr": FPR,
        "threshold": result.threshold,
        "accuracy": result.accuracy,
        "sets": {
            name: {
                "images": len(answers.scores),
                "confident": answers.confident,
                "flagged": float(answers.flagged.mean()),
                "same_alarms_exported": answers.same_alarms,
                **(
                    {"auroc": result.auroc(name), "auroc_of_confidence": result.auroc_of_confidence(name)}
                    if name in result.unfamiliar
                    else {}
                ),
            }
            for name, answers in sets.items()
        },
        "recipe": {"classifier": {"steps": STEPS, "batch": BATCH, "lr": LR}, "detector": asdict(CSD().recipe)},
        "seconds": result.seconds,
    }


def _answer(net: nn.Module, detector: CSD, exported: Callable[[Tensor], Any], x: Images) -> Answers:
    confidence, predicted = _probabilities(net, x).max(1)
    scores, pvalues, flagged = detector.score(x), detector.pvalue(x), detector.is_ood(x)
    _, _, alarms = exported(torch.from_numpy(x))
    same_alarms = int((alarms.numpy() == flagged).sum())
    return Answers(predicted.numpy(), confidence.numpy(), scores, pvalues, flagged, same_alarms)


@torch.no_grad()
def _probabilities(net: nn.Module, x: Images) -> Float[Tensor, "n classes"]:
    return net(torch.from_numpy(x)).softmax(1)


def _load_exported(path: Path) -> Callable[[Tensor], Any]:
    """Return the exported detector, read without onefold: a function to scores, p-values and alarms."""
    import torch.export  # loads slowly

    return torch.export.load(path).module()
