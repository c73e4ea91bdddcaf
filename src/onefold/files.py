"""Reading a detector back from its file."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from onefold import store
from onefold.detector import KIND, Detector
from onefold.errors import FileError, InputError
from onefold.inputs import pick_device
from onefold.kernels import from_model, logits
from onefold.methods import METHODS
from onefold.types import Kernel


def load(
    path: str | Path, *, model: nn.Module | ExportedProgram | Kernel | None = None, device: str = "auto"
) -> Detector:
    """The detector that `save` wrote, with its threshold and its memory.

    One that looks through a model of the user's own needs it again: model=net, or the kernel made of it. A file that is
    damaged, foreign or of a newer version is refused, and so is another model than that of the fit.
    """
    path = Path(path)
    pick_device(device)
    tensors, header = store.load(path, KIND)
    kernel = _kernel(header.get("kernel"), model, path)
    try:
        return METHODS[header["method"]]._restored(tensors, header, kernel, device)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except Exception as error:  # a file of a stranger can be wrong in any way; whatever it was, it is refused by name
        raise FileError(f"{path}: damaged, or made by another version ({type(error).__name__})") from None


def _kernel(settings: Any, model: nn.Module | ExportedProgram | Kernel | None, path: Path) -> Kernel | None:
    """The kernel of the fit, made again from the model that was handed in."""
    if settings is None:
        if model is not None:
            raise InputError(f"{path}: was not fitted on a model, so it needs none")
        return None
    if model is None:
        raise InputError(f"{path}: was fitted on a model that is not in the file: load(path, model=…)")
    if not isinstance(model, nn.Module | ExportedProgram):
        return model
    try:
        return logits(model) if settings.pop("outputs", False) else from_model(model, **settings)
    except (TypeError, AttributeError):
        raise FileError(f"{path}: damaged, its kernel has settings that no kernel has") from None
