"""Embedded image sets, public image sets that can be downloaded, the paper's perturbations, and texts of files."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.data.digits import Digits, digits
    from onefold.data.download import fetch
    from onefold.data.glyphs import letters
    from onefold.data.perturb import perturb
    from onefold.data.sets import ImageSet, data_dir, read_set
    from onefold.data.texts import read_texts

__all__ = ["Digits", "ImageSet", "data_dir", "digits", "fetch", "letters", "perturb", "read_set", "read_texts"]

_MODULES = {
    "Digits": "digits",
    "ImageSet": "sets",
    "data_dir": "sets",
    "digits": "digits",
    "fetch": "download",
    "letters": "glyphs",
    "perturb": "perturb",
    "read_set": "sets",
    "read_texts": "texts",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that the command line starts fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'onefold.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onefold.data.{_MODULES[name]}"), name)


class _Package(ModuleType):
    """Module in which the name `digits` stays the function when the submodule `digits` is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_shadow = isinstance(value, ModuleType) and _MODULES.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_shadow else value)


sys.modules[__name__].__class__ = _Package
