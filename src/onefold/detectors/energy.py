"""Energy of a classifier's logits (Liu et al., 2020)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onefold.core.arguments import check_number
from onefold.core.batches import check_seed, pick_device
from onefold.detectors.base import Detector, ExportMixin
from onefold.detectors.build import Spec
from onefold.detectors.state import DetectorState
from onefold.errors import InputError
from onefold.inputs.samples import read_train_data
from onefold.kernels import ModelFeatures, logits
from onefold.kernels.feature_maps import EncoderFeatures
from onefold.types import ArrayLike, Model


@dataclass(frozen=True, kw_only=True)
class EnergySpec(Spec):
    """Settings of `Energy`."""

    temperature: float


class EnergyScorer(nn.Module):
    """−T log Σ_k exp(logit_k / T)."""

    def __init__(self, kernel: ModelFeatures, temperature: float) -> None:
        super().__init__()
        self.temperature, self.map = temperature, EncoderFeatures(kernel)

    def forward(self, x: Any) -> Tensor:
        return -self.temperature * torch.logsumexp(self.map.encode(x) / self.temperature, dim=1)


class Energy(Detector, ExportMixin):
    """Energy −T log Σ exp(logit / T) of a trained classifier: small if any class is likely. Nothing is trained.

    Args:
        kernel: The classifier, or kernels.logits(classifier).
        temperature: Temperature T.
        seed: Seed of the calibration.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range, or `kernel` is not a model.
    """

    spec_class = EnergySpec
    kernel_class = ModelFeatures

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
        """Read the layout of the data; the classifier is already trained.

        Args:
            x: In-distribution data, as the classifier takes it.

        Returns:
            This detector.

        Raises:
            InputError: The data cannot be used, or the model has fewer than 2 outputs.
        """
        data = read_train_data(x, self.device, self.seed, as_given=True)
        classes = self.logits.encode(data.samples[torch.arange(2, device=self.device)]).shape[1]
        if classes < 2:
            raise InputError(f"the model has {classes} output. Pass a classifier of at least 2 classes.")
        spec = EnergySpec(**self.settings)
        self._set_state(DetectorState.from_data(data, self.build(spec).eval(), spec, self.device))
        return self

    def build(self, spec: EnergySpec, *, meta: bool = False) -> EnergyScorer:
        """Return the scorer, which has no weights of its own."""
        del meta
        return EnergyScorer(self.logits, spec.temperature)
