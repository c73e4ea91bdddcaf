"""Export of fitted detectors to ONNX and to `torch.export`, for use without onefold."""

import copy
import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.core.schema import to_json
from onefold.core.storage import write_bytes
from onefold.errors import InputError, MissingExtraError
from onefold.inputs import Table
from onefold.inputs.reader import DTYPES, Prepare, Reader


class ExportedDetector(nn.Module):
    """The exported model: raw samples to scores, and to alarms if there is a threshold."""

    def __init__(self, reader: Reader, scorer: nn.Module, threshold: float | None) -> None:
        super().__init__()
        self.prepare, self.scorer, self.threshold = Prepare(reader), scorer, threshold

    def forward(self, x: Any) -> tuple[Tensor, ...]:
        score = self.scorer(self.prepare(x))
        if self.threshold is None:
            return (score,)
        return score, ~(score.double() <= self.threshold)  # True for NaN: a broken sensor raises an alarm


def export(path: Path, reader: Reader, scorer: nn.Module, threshold: float | None, about: dict[str, Any]) -> None:
    """Write an exported detector atomically; the suffix of `path` decides the format.

    Args:
        path: File to write, .onnx or .pt2.
        reader: Layout of the raw data.
        scorer: Module from prepared samples to scores.
        threshold: Threshold of the alarm, or None.
        about: Entries of the metadata.
    """
    if path.suffix not in (".onnx", ".pt2"):
        raise InputError(f"{path.name}: unknown suffix. Export a detector as .onnx or .pt2.")
    if path.suffix == ".onnx":
        _require_onnx()
    module = ExportedDetector(reader, copy.deepcopy(scorer), threshold).cpu().eval()
    notes = json.dumps({**about, "threshold": threshold, "input": _describe_input(reader)})
    exporter_logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = exporter_logger.level
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's advice does not concern the user's code
        exporter_logger.setLevel(logging.ERROR)
        try:
            content = (_onnx if path.suffix == ".onnx" else _pt2)(module, reader, notes)
        except Exception as error:  # a user's model may fail to export in any way
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            reason = next((line for line in lines if line.startswith("<class")), lines[0]).strip()
            raise InputError(f"{path.name}: the model inside this detector cannot be exported ({reason})") from None
        finally:
            exporter_logger.setLevel(level)
    write_bytes(path, content)


def _pt2(module: ExportedDetector, reader: Reader, notes: str) -> bytes:
    program = torch.export.export(module, _example(reader), dynamic_shapes=_dynamic_shapes(reader))
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"onefold.json": notes})
    return buffer.getvalue()


def _onnx(module: ExportedDetector, reader: Reader, notes: str) -> bytes:
    outputs = ["score"] if module.threshold is None else ["score", "is_ood"]
    program = torch.onnx.export(
        module,
        kwargs={"x": _example(reader)[0]},  # a dict as the last of args would be taken for keywords
        dynamo=True,
        dynamic_shapes={"x": _dynamic_shapes(reader)[0]},
        external_data=False,
        input_names=list(reader.shapes),
        output_names=outputs,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props["onefold"] = notes
    return program.model_proto.SerializeToString()


def _example(reader: Reader) -> tuple[Any]:
    """Return two samples of zeros; the exporter reads their shapes only."""
    zeros = {key: torch.zeros(2, *shape, dtype=DTYPES[reader.dtypes[key]]) for key, shape in reader.shapes.items()}
    return (zeros if reader.kind == "named" else zeros["x"],)


def _dynamic_shapes(reader: Reader) -> tuple[Any]:
    batch = torch.export.Dim("batch")
    axes = {key: {0: batch} for key in reader.shapes}
    return (axes if reader.kind == "named" else axes["x"],)


def _describe_input(reader: Reader) -> dict[str, Any]:
    """Return shapes and types of the input, and for tables how columns become numbers."""
    shapes = {key: ["batch", *shape] for key, shape in reader.shapes.items()}
    table = to_json(reader.form) if isinstance(reader.form, Table) else None
    return {"shapes": shapes, "dtypes": reader.dtypes, "table": table}


def _require_onnx() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise MissingExtraError('.onnx: onnx or onnxscript is not installed. Run pip install "onefold[onnx]".')
