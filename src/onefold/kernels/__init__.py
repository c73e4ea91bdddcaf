"""Similarities between inputs: the labels that CSD distils, and the terms of the exact answers."""

from onefold.kernels.closed_form import InfiniteMLP, infinite
from onefold.kernels.features import Features, from_model, last_layer
from onefold.kernels.tangent import EmpiricalNTK, empirical_ntk

__all__ = ["EmpiricalNTK", "Features", "InfiniteMLP", "empirical_ntk", "from_model", "infinite", "last_layer"]
