"""Kernels, similarities between inputs: the labels that CSD distils, and the terms of the exact posteriors."""

from onefold.kernels.embedding import ModelOutputs
from onefold.kernels.empirical import EmpiricalNTK, empirical_ntk
from onefold.kernels.infinite import InfiniteMLP, KernelPair, infinite
from onefold.kernels.last_layer import Features, last_layer
from onefold.kernels.model import ModelFeatures, from_model, logits
from onefold.kernels.pretrained import from_pretrained

__all__ = [
    "EmpiricalNTK",
    "Features",
    "InfiniteMLP",
    "KernelPair",
    "ModelFeatures",
    "ModelOutputs",
    "empirical_ntk",
    "from_model",
    "from_pretrained",
    "infinite",
    "last_layer",
    "logits",
]
