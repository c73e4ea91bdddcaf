"""Export of fitted detectors to ONNX and to `torch.export`, for use without onefold."""

import copy
import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from onefold.core.schema import to_json
from onefold.core.storage import write_bytes
from onefold.detectors.alarm import Alarm
from onefold.detectors.raw_inputs import Front, Inputs, image_front, input_names, table_front, takes_image
from onefold.errors import InputError, MissingExtraError
from onefold.inputs import Table
from onefold.inputs.reader import DTYPES, Prepare, Reader

SUFFIXES = (".onnx", ".pt2")
QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class ExportedDetector(nn.Module):
    """The exported model: samples to scores, and to p-values and alarms if the detector is calibrated."""

    limits: Float64[Tensor, " m"]
    u: Float64[Tensor, ""]

    def __init__(self, reader: Reader, scorer: nn.Module, alarm: Alarm | None) -> None:
        super().__init__()
        self.prepare, self.scorer, self.alarm = Prepare(reader), scorer, alarm
        if alarm is not None:
            limits = torch.from_numpy(alarm.pvalue_limits)
            self.register_buffer("u", torch.tensor(alarm.u, dtype=torch.float64))  # the exporter rounds other constants
            size = 2 ** len(limits).bit_length()  # more than len(limits), and a power of two
            self.register_buffer("limits", torch.cat([limits, limits.new_full((size - len(limits),), torch.inf)]))

    def forward(self, x: Any, threshold: Tensor | None = None) -> tuple[Tensor, ...]:
        score = self.scorer(self.prepare(x))
        if self.alarm is None:
            return (score,)
        limit = self.alarm.threshold if threshold is None else threshold
        return score, self.pvalues(score.double()), ~(score.double() <= limit)  # True for NaN: a broken sensor

    def pvalues(self, scores: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """Return the p-values of `Alarm.pvalues`; the smallest one for NaN."""
        assert self.alarm is not None
        n = len(self.alarm.scores)
        position = torch.zeros_like(scores, dtype=torch.int64)  # binary search for the number of limits below the score
        step = len(self.limits) // 2
        while step:
            below = ~(self.limits[position + (step - 1)] >= scores)
            position = torch.where(below, position + step, position)
            step //= 2
        return (n - position.clamp(max=n).double() + self.u) / (n + 1)


def export(
    path: Path, reader: Reader, scorer: nn.Module, alarm: Alarm | None, about: dict[str, Any], inputs: Inputs
) -> None:
    """Write an exported detector atomically; the suffix of `path` decides the format.

    Args:
        path: File to write, .onnx or .pt2.
        reader: Layout of the raw data.
        scorer: Module from prepared samples to scores.
        alarm: Calibration, or None.
        about: Entries of the metadata.
        inputs: What the model takes; see `ExportMixin.export`.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path.name}: unknown suffix. Export a detector as .onnx or .pt2.")
    if reader.kind == "text":
        raise InputError(f"{path.name}: a detector of texts cannot be exported. Load it with onefold.load instead.")
    if path.suffix == ".onnx":
        _require_onnx()
    front, layout = choose_front(reader, inputs, path.suffix)
    module = ExportedDetector(reader, copy.deepcopy(scorer), alarm).cpu().eval()
    notes = json.dumps({**about, **_describe_alarm(alarm), "input": layout})
    exporter_logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = exporter_logger.level
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's advice does not concern the user's code
        exporter_logger.setLevel(logging.ERROR)
        try:
            content = _pt2(module, reader, notes) if path.suffix == ".pt2" else _onnx(module, reader, notes, front)
        except Exception as error:  # a user's model may fail to export in any way
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            reason = next((line for line in lines if line.startswith("<class")), lines[0]).strip()
            raise InputError(f"{path.name}: the model inside this detector cannot be exported ({reason})") from None
        finally:
            exporter_logger.setLevel(level)
    write_bytes(path, content)


def choose_front(reader: Reader, inputs: Inputs, suffix: str) -> tuple[Front | None, dict[str, Any]]:
    """Return the nodes before the batched model, or None, and the description of the input for the metadata.

    A text detector would have a kind of its own here: its model takes what follows the tokenizer.
    """
    if inputs not in ("auto", "image", "batch"):
        raise InputError(f"must be 'auto', 'image' or 'batch', not {inputs!r}", argument="inputs")
    if suffix == ".onnx" and takes_image(reader, inputs):
        channels, height, width = reader.sample_shape
        return image_front(reader), {"kind": "image", "height": height, "width": width, "channels": channels}
    if inputs == "image":
        raise InputError("a .pt2 file takes batches", argument="inputs", hint="Export to .onnx.")
    shapes = {key: ["batch", *shape] for key, shape in reader.shapes.items()}
    arrays = {"shapes": shapes, "dtypes": reader.dtypes}
    if not isinstance(reader.form, Table):
        return None, {"kind": "arrays", **arrays}
    if suffix == ".pt2" or inputs == "batch":
        return None, {"kind": "codes", **arrays, "table": to_json(reader.form)}
    names = input_names(reader.form)
    columns = [{"input": name, "name": column.name, "kind": column.kind} for name, column in names.items()]
    return table_front(reader, names), {"kind": "columns", "columns": columns, "ignored": list(reader.form.ignored)}


def describe_inputs(reader: Reader, inputs: Inputs, suffix: str) -> str:
    """Return one sentence about what an exported model takes, for its card."""
    layout = choose_front(reader, inputs, suffix)[1]
    match layout["kind"]:
        case "image":
            return "The input `x` is one image, uint8 [height, width, 3] in RGB, of any size."
        case "columns":
            return (
                "Each column of the table is an input: numbers as float64 (NaN if missing), categories as text (empty)."
            )
        case "codes":
            return "The input `x` is a float64 matrix of codes, with the columns in the order of the fit."
    shapes = (f"`{name}` {shape} in {layout['dtypes'][name]}" for name, shape in layout["shapes"].items())
    return f"The inputs are {', '.join(shapes)}."


def _describe_alarm(alarm: Alarm | None) -> dict[str, Any]:
    """Return the entries of the metadata about the calibration; `quantiles` are of its scores, for histograms."""
    if alarm is None:
        return {"fpr": None, "threshold": None, "calibration": None, "quantiles": None}
    quantiles = np.unique(np.quantile(alarm.scores, QUANTILES)).tolist()
    calibration = to_json(alarm.calibration)
    return {"fpr": alarm.fpr, "threshold": alarm.threshold, "calibration": calibration, "quantiles": quantiles}


def _pt2(module: ExportedDetector, reader: Reader, notes: str) -> bytes:
    program = torch.export.export(module, _example(reader), dynamic_shapes=_dynamic_shapes(reader))
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"onefold.json": notes})
    return buffer.getvalue()


def _onnx(module: ExportedDetector, reader: Reader, notes: str, front: Front | None) -> bytes:
    calibrated = module.alarm is not None
    threshold = {"threshold": torch.zeros((), dtype=torch.float64)} if calibrated else {}
    program = torch.onnx.export(
        module,
        kwargs={"x": _example(reader)[0], **threshold},  # a dict as the last of args would be taken for keywords
        dynamo=True,
        dynamic_shapes={**_dynamic_shapes(reader), **dict.fromkeys(threshold)},
        external_data=False,
        input_names=[*reader.shapes, *threshold],
        output_names=["score", "pvalue", "is_ood"] if calibrated else ["score"],
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props["onefold"] = notes
    model = program.model_proto
    if module.alarm is not None:  # an input with an initial value may be omitted
        model.graph.initializer.append(_scalar("threshold", module.alarm.threshold))
    if front is not None:
        front.prepend_to(model)
    return model.SerializeToString()


def _scalar(name: str, value: float) -> Any:
    import onnx

    return onnx.helper.make_tensor(name, onnx.TensorProto.DOUBLE, [], [value])


def _example(reader: Reader) -> tuple[Any]:
    """Return two samples of zeros; the exporter reads their shapes only."""
    zeros = {key: torch.zeros(2, *shape, dtype=DTYPES[reader.dtypes[key]]) for key, shape in reader.shapes.items()}
    return (zeros if reader.kind == "named" else zeros["x"],)


def _dynamic_shapes(reader: Reader) -> dict[str, Any]:
    batch = torch.export.Dim("batch")
    axes = {key: {0: batch} for key in reader.shapes}
    return {"x": axes if reader.kind == "named" else axes["x"]}


def _require_onnx() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise MissingExtraError('.onnx: onnx or onnxscript is not installed. Run pip install "onefold[onnx]".')
