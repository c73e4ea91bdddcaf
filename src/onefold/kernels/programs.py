"""Trained models of the user's own, from files that torch.export.save wrote."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefold.errors import InputError, OnefoldError
from onefold.inputs import Picture, Source, form_of
from onefold.inputs.reader import Prepare, Reader
from onefold.types import Model


def program(path: Path) -> Model:
    """A user's own exported model; such a file can hold code, so it is only read when it is named."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    import torch.export  # takes long to load

    chatter = logging.getLogger("torch.export")
    level = chatter.level
    chatter.setLevel(logging.CRITICAL)  # torch logs a page about every file that it cannot read
    try:
        found = torch.export.load(path)
    except Exception as error:  # whatever is wrong with it
        raise InputError(f"{path}: not a model that torch.export.save wrote ({type(error).__name__})") from None
    finally:
        chatter.setLevel(level)
    sizes = [shape[0] for shape in _input_shapes(found) if len(shape)]
    if any(isinstance(size, int) for size in sizes):
        raise InputError(
            f"{path}: takes batches of {sizes[0]} only: export it with a free batch size, "
            'torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))'
        )
    return found


def _input_shapes(net: Model) -> list[Sequence[Any]]:
    """The shapes of what a model takes; a size that is free is a symbol."""
    inputs = set(net.graph_signature.user_inputs)
    return [node.meta["val"].shape for node in net.graph.nodes if node.name in inputs and "val" in node.meta]


def picture_for(net: Model) -> Picture | None:
    """The size that images of a folder are brought to for a model, if it takes images of one size."""
    shapes = [shape[1:] for shape in _input_shapes(net) if len(shape) == 4]
    if len(shapes) != 1 or not all(isinstance(size, int) for size in shapes[0]) or shapes[0][0] not in (1, 3):
        return None
    channels, height, width = shapes[0]
    return Picture(height, width, channels)


def check_takes(path: Path, kernel: Any, source: Source, name: str) -> None:
    """A model must take the data, which is better known before all of it is read."""
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
