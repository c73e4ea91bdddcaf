"""Similarities between inputs: the labels that CSD distils, and the terms of the exact answers."""

from onefold.kernels.closed_form import InfiniteMLP, infinite
from onefold.kernels.features import Features, ModelFeatures, from_model, last_layer, logits
from onefold.kernels.tangent import EmpiricalNTK, empirical_ntk

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
