"""Detectors, one module per method: fit on in-distribution data, then score any data. A bigger score is more uncertain.

The classes are imported on first use, so that a part of this package does not load the rest.
"""

from typing import TYPE_CHECKING, Any

from onefold.detectors.registry import METHODS, MethodInfo

if TYPE_CHECKING:
    from onefold.detectors.csd import CSD
    from onefold.detectors.energy import Energy
    from onefold.detectors.ensemble import DeepEnsemble
    from onefold.detectors.knn import KNN
    from onefold.detectors.laplace import Laplace
    from onefold.detectors.last_layer_gp import LastLayerGP
    from onefold.detectors.local_gp import LocalGP
    from onefold.detectors.mc_dropout import MCDropout
    from onefold.detectors.rnd import RND
    from onefold.detectors.sgmcmc import SGMCMC

__all__ = [
    "CSD",
    "KNN",
    "METHODS",
    "RND",
    "SGMCMC",
    "DeepEnsemble",
    "Energy",
    "Laplace",
    "LastLayerGP",
    "LocalGP",
    "MCDropout",
    "MethodInfo",
]


def __getattr__(name: str) -> Any:
    """Import a detector class on first use."""
    if name in METHODS:
        return METHODS[name].detector_class
    raise AttributeError(f"module 'onefold.detectors' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
