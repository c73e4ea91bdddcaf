"""How much would an infinite ensemble of your network disagree here? One model, one forward pass."""

import importlib
from typing import TYPE_CHECKING, Any

from onefold.errors import OnefoldError

if TYPE_CHECKING:
    from onefold import exact, kernels
    from onefold.detectors import CSD, KNN, RND, SGMCMC, DeepEnsemble, Energy, Laplace, LastLayerGP, MCDropout
    from onefold.detectors.load import load

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
    "MCDropout",
    "OnefoldError",
    "__version__",
    "exact",
    "kernels",
    "load",
]

_MODULES = {"data", "distil", "exact", "kernels", "metrics", "nn", "rl"}


def __getattr__(name: str) -> Any:
    """torch and all that is built on it load on first use: `import onefold` and `onefold --help` stay quick."""
    if name in _MODULES:
        return importlib.import_module(f"onefold.{name}")
    if name == "load":
        return importlib.import_module("onefold.detectors.load").load
    if name in __all__:
        return getattr(importlib.import_module("onefold.detectors"), name)
    raise AttributeError(f"module 'onefold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
