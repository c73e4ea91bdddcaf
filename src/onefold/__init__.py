"""Uncertainty of neural networks: the variance of an infinite ensemble from one model in one forward pass."""

import importlib
from typing import TYPE_CHECKING, Any

from onefold.errors import OnefoldError

if TYPE_CHECKING:
    from onefold import data, distil, exact, kernels, metrics, rl, sklearn
    from onefold.detectors import CSD, KNN, RND, SGMCMC, DeepEnsemble, Energy, Laplace, LastLayerGP, LocalGP, MCDropout
    from onefold.detectors.choose import choose_detector
    from onefold.detectors.load import load
    from onefold.monitor import Monitor

__version__ = "0.1.0.dev0"

__all__ = [
    "CSD",
    "KNN",
    "RND",
    "SGMCMC",
    "DeepEnsemble",
    "Energy",
    "Laplace",
    "LastLayerGP",
    "LocalGP",
    "MCDropout",
    "Monitor",
    "OnefoldError",
    "__version__",
    "choose_detector",
    "data",
    "distil",
    "exact",
    "kernels",
    "load",
    "metrics",
    "rl",
    "sklearn",
]

_MODULES = {"data", "distil", "exact", "kernels", "metrics", "nn", "rl", "sklearn"}
_FUNCTIONS = {
    "Monitor": "onefold.monitor",
    "choose_detector": "onefold.detectors.choose",
    "load": "onefold.detectors.load",
}


def __getattr__(name: str) -> Any:
    """Import a module or class on first use, so that `import onefold` does not load torch."""
    if name in _MODULES:
        return importlib.import_module(f"onefold.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return getattr(importlib.import_module("onefold.detectors"), name)
    raise AttributeError(f"module 'onefold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
