"""Data sets that come with the installation, public ones to fetch, and the perturbations of the paper."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.data.digits import Digits, digits
    from onefold.data.fetch import fetch
    from onefold.data.glyphs import letters
    from onefold.data.perturb import perturb
    from onefold.data.sets import ImageSet, data_dir, read_set

__all__ = ["Digits", "ImageSet", "data_dir", "digits", "fetch", "letters", "perturb", "read_set"]

_HOMES = {
    "Digits": "digits",
    "ImageSet": "sets",
    "data_dir": "sets",
    "digits": "digits",
    "fetch": "fetch",
    "letters": "glyphs",
    "perturb": "perturb",
    "read_set": "sets",
}


def __getattr__(name: str) -> Any:
    """NumPy and all that is built on it load on first use, so that the command line stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onefold.data.{_HOMES[name]}"), name)


class _Package(ModuleType):
    """Importing the module `digits` would put it in the place of the function `digits`: the function stays."""

    def __setattr__(self, name: str, value: Any) -> None:
        shadows = isinstance(value, ModuleType) and _HOMES.get(name) == name
        super().__setattr__(name, getattr(value, name) if shadows else value)


sys.modules[__name__].__class__ = _Package
