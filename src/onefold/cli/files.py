"""Files of a command: detectors to load, data with progress, outputs to check, and lists of unreadable images."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from onefold.core import storage
from onefold.core.progress import track_progress
from onefold.core.storage import write_bytes
from onefold.detectors.base import Detector
from onefold.detectors.load import load
from onefold.errors import InputError, renamed_argument
from onefold.inputs import ImageFolder, IndexedSource, Source
from onefold.inputs.split import track
from onefold.kernels import ModelFeatures, from_model, from_pretrained
from onefold.nn.programs import load_program


def load_detector(path: Path, model: Path | None, device: str = "auto") -> Detector:
    """Load a detector, with the model that it was fitted on if there is one."""
    if model is None or is_program_file(model):
        return load(path, model=None if model is None else load_program(model), device=device)
    return load(path, model=from_pretrained(model.as_posix()), device=device)


def open_kernel(model: Path, layer: str | None) -> ModelFeatures:
    """Return the kernel of --model: of an exported program, or of a pretrained encoder by its name or folder."""
    if is_program_file(model):
        return from_model(load_program(model), layer)
    if layer is not None:
        raise InputError("a layer belongs to a .pt2 file", argument="layer", hint="Leave it out.")
    with renamed_argument("name", "model"):
        return from_pretrained(model.as_posix())


def is_program_file(model: Path) -> bool:
    """Return True for a file, or the name of one, that torch.export.save wrote."""
    return model.suffix == ".pt2" or model.is_file()


def check_outputs(outputs: Sequence[Path], inputs: Sequence[str | Path | None]) -> None:
    """Create the folders of the outputs; raise InputError if one cannot be written or is an input of the command."""
    used = {Path(path).resolve() for path in inputs if path is not None}
    for path in outputs:
        if path.is_dir():
            raise InputError(f"{path}: is a folder", hint="Name a file.")
        if path.resolve() in used:
            raise InputError(f"{path}: is read and written by this command", hint="Write to another file.")
        used.add(path.resolve())
        folder = storage.resolve_output(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{path}: its folder is a file", hint="Name another folder.") from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"{folder}: cannot be written to", hint="Change its permissions or name another folder.")


def max_count(source: Source) -> int | None:
    """Return the largest possible number of samples; None if all samples must be read to count them."""
    if isinstance(source, ImageFolder):
        return len(source.files)
    return len(source) if isinstance(source, IndexedSource) else None


def with_progress(source: Source, label: str) -> Source:
    """Return the source with a progress bar for each pass."""
    return track(source, partial(track_progress, total=max_count(source), label=label))


def write_skipped(sources: Sequence[Source], out: Path) -> list[str]:
    """List unreadable images in a file beside the output; return a line for the user if there are any."""
    folders = [source for source in sources if isinstance(source, ImageFolder)]
    lines = [f"{str(folder.path / name)!r}: {why}\n" for folder in folders for name, why in folder.skipped.items()]
    path = out.with_name(out.name + ".skipped.txt")
    if not lines:
        path.unlink(missing_ok=True)  # the list of an earlier run
        return []
    write_bytes(path, "".join(lines).encode("utf-8", "backslashreplace"))
    images = "1 image is" if len(lines) == 1 else f"{len(lines)} images are"
    return [f"{images} unreadable; listed in {path}"]
