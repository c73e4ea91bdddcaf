"""Similarities between inputs: the labels that CSD distils, and the terms of the exact answers."""

from onefold.kernels.empirical import EmpiricalNTK, empirical_ntk
from onefold.kernels.feature_maps import Features, ModelFeatures, from_model, last_layer, logits
from onefold.kernels.infinite_width import InfiniteMLP, infinite

__all__ = [
    "EmpiricalNTK",
    "Features",
    "InfiniteMLP",
    "ModelFeatures",
    "empirical_ntk",
    "from_model",
    "infinite",
    "last_layer",
    "logits",
]
