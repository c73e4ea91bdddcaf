"""Users' trained models, from files that torch.export.save wrote."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefold.errors import InputError, OnefoldError
from onefold.inputs import Picture, Source, form_of
from onefold.inputs.reader import Prepare, Reader
from onefold.types import Model


def load_program(path: Path) -> Model:
    """Return the exported model in a file. The file can contain code, so load only files that the user names."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    import torch.export  # loads slowly

    export_logger = logging.getLogger("torch.export")
    level = export_logger.level
    export_logger.setLevel(logging.CRITICAL)  # torch logs a page about every unreadable file
    try:
        net = torch.export.load(path)
    except Exception as error:  # any error means that the file is unreadable
        raise InputError(f"{path}: not a model that torch.export.save wrote ({type(error).__name__})") from None
    finally:
        export_logger.setLevel(level)
    sizes = [shape[0] for shape in _input_shapes(net) if len(shape)]
    if any(isinstance(size, int) for size in sizes):
        raise InputError(
            f"{path}: takes batches of {sizes[0]} only: export it with a free batch size, "
            'torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))'
        )
    return net


def _input_shapes(net: Model) -> list[Sequence[Any]]:
    """Return the shapes of a model's inputs; a dynamic size is a symbol."""
    inputs = set(net.graph_signature.user_inputs)
    return [node.meta["val"].shape for node in net.graph.nodes if node.name in inputs and "val" in node.meta]


def picture_for(net: Model) -> Picture | None:
    """Return the size of the images that a model takes, or None if it takes images of any size or other data."""
    shapes = [shape[1:] for shape in _input_shapes(net) if len(shape) == 4]
    if len(shapes) != 1 or not all(isinstance(size, int) for size in shapes[0]) or shapes[0][0] not in (1, 3):
        return None
    channels, height, width = shapes[0]
    return Picture(height, width, channels)


def check_model_accepts_data(path: Path, kernel: Any, source: Source, name: str) -> None:
    """Raise InputError if a model does not accept the first samples of a source."""
    first = next(source.batches(2))
    reader = Reader.infer(first, form_of(source), as_given=True)
    batch = Prepare(reader)(reader.check(first, name))
    try:
        kernel.encode(batch)
    except OnefoldError:
        raise
    except Exception as error:  # a user's model may fail in any way
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        shape = tuple(batch.shape[1:])
        raise InputError(f"{path}: cannot take samples of shape {shape} from {name} ({reason})") from None
