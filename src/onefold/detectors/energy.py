"""The energy of a classifier's logits (Liu et al., 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from onefold.core.arguments import check_number
from onefold.core.batches import check_seed, pick_device
from onefold.detectors._random_features import FeatureMap
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.diagnosis import Diagnosis
from onefold.detectors.state import DetectorState
from onefold.errors import InputError
from onefold.inputs.reader import Reader
from onefold.inputs.samples import read_train_data
from onefold.kernels import ModelFeatures, logits
from onefold.types import ArrayLike, Model


class EnergyScorer(nn.Module):
    """−T log Σ_k exp(logit_k / T)."""

    def __init__(self, kernel: ModelFeatures, temperature: float) -> None:
        super().__init__()
        self.temperature, self.map = temperature, FeatureMap(None, kernel)

    def forward(self, x: Any) -> Tensor:
        return -self.temperature * torch.logsumexp(self.map.encode(x) / self.temperature, dim=1)


class Energy(Detector, ExportMixin):
    """−T log Σ exp(logit / T) of a trained classifier: small where any class is likely. Nothing is trained."""

    def __init__(
        self,
        kernel: Model | ModelFeatures,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.kernel = self.logits = kernel if isinstance(kernel, ModelFeatures) else logits(kernel)
        self.temperature = check_number(temperature, "temperature")
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    def fit(self, x: ArrayLike) -> "Energy":
        """Learn the form of the data; the classifier is there already."""
        learned = read_train_data(x, self.device, self.seed, as_given=True)
        classes = self.logits.encode(learned.samples[torch.arange(2, device=self.device)]).shape[1]
        if classes < 2:
            raise InputError(f"the model has {classes} output: energy is for classifiers of at least 2 classes")
        scorer = EnergyScorer(self.logits, self.temperature).eval()
        self._state = DetectorState(
            reader=learned.reader, prepare=learned.prepare, scorer=scorer, reservoir=learned.reservoir
        )
        self._alarm = None
        Diagnosis(tuple(self._checks(self._state))).warn()
        return self

    def _settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed}

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        del reader, about, weights
        return EnergyScorer(self.logits, self.temperature)
