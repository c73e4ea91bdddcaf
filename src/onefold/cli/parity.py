"""Comparison of an exported file with its detector, on a user's data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from onefold.core.batches import named
from onefold.detectors.base import Detector
from onefold.errors import InputError
from onefold.inputs import ImageFolder, Source, TableFile, open_source
from onefold.inputs.tables import to_numbers, to_texts
from onefold.serve import ExportedModel, Results

MARGIN = 1e-3  # of the threshold: decisions about scores that are closer to it may differ


@dataclass(frozen=True)
class Parity:
    """Agreement of an exported file with its detector.

    Args:
        inputs: Number of inputs.
        different: Decisions that differ.
        at_threshold: Those of them whose score is within 10⁻³ of the threshold, relative to it.
        largest: Largest difference of two scores, relative to the median size of the scores.
    """

    inputs: int
    different: int
    at_threshold: int
    largest: float

    @property
    def ok(self) -> bool:
        """True if decisions differ at the threshold only."""
        return self.different == self.at_threshold

    def __str__(self) -> str:
        decisions = f"{self.inputs - self.different:,} of {self.inputs:,} decisions agree"
        beside = f", {self.at_threshold:,} differ within {MARGIN:g} of the threshold" if self.at_threshold else ""
        others = self.different - self.at_threshold
        wrong = f", {others:,} differ elsewhere" if others else ""
        return f"{decisions}{beside}{wrong}; scores differ by at most {self.largest:.1e} of their median size"


def compare(detector: Detector, path: Path, data: str) -> Parity:
    """Return the agreement of an exported file with its detector.

    Args:
        detector: Calibrated detector.
        path: File that it was exported to.
        data: Path of data of the kind that it was fitted on.

    Raises:
        InputError: The detector is not calibrated.
    """
    if detector.alarm is None:
        raise InputError("the detector has no threshold to compare decisions by", hint="Calibrate it first.")
    source = open_source(data, form=detector.reader.form, name=data)
    results = list(_exported(detector, path, source))
    exported = np.concatenate([np.asarray(result.score, np.float64) for result in results])
    decisions = np.concatenate([np.asarray(result.is_ood) for result in results])
    scores, threshold = detector.score(source), detector.threshold
    different = decisions != detector.alarm.exceeds(scores)
    near = np.abs(scores - threshold) <= MARGIN * abs(threshold)
    largest = float(np.abs(exported - scores).max() / max(np.median(np.abs(scores)), np.finfo(np.float64).tiny))
    return Parity(len(scores), int(different.sum()), int((different & near).sum()), largest)


def _exported(detector: Detector, path: Path, source: Source) -> Iterator[Results]:
    """Yield the results of the exported file."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        for raw in detector.reader.batches(source):
            yield Results(*(values.numpy() for values in program(raw)))
        return
    model = ExportedModel(path)
    if model.kind == "image" and isinstance(source, ImageFolder):
        for name in source.names:
            yield model.score_image(source.root / name)
    elif model.kind == "image":
        for raw in detector.reader.batches(source):
            yield from (model.run({"x": pixels}) for pixels in _as_pixels(detector, raw))
    elif model.kind == "columns":
        for columns in _raw_columns(source):
            yield model.run(_feeds(model, columns))
    else:
        for raw in detector.reader.batches(source):
            yield model.run({name: values.numpy() for name, values in named(raw).items()})


def _as_pixels(detector: Detector, raw: Any) -> NDArray[np.uint8]:
    """Return images [N, H, W, 3] of a detector that was fitted on arrays of grey or colour images in uint8."""
    planes = raw.movedim(-1, 1) if detector.reader.channels_last else raw.reshape(-1, *detector.reader.sample_shape)
    return planes.expand(-1, 3, -1, -1).movedim(1, -1).contiguous().numpy()


def _raw_columns(source: Source) -> Iterator[Mapping[str, Any]]:
    if not isinstance(source, TableFile):
        raise InputError("must be a table in a file", argument="check")
    yield from source.chunks


def _feeds(model: ExportedModel, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the inputs of an exported model for rows as they are in a file."""
    feeds: dict[str, np.ndarray] = {}
    for column in model.layout["columns"]:
        values = columns[column["name"]]
        if column["kind"] == "number":
            feeds[column["input"]] = to_numbers(values)
        else:
            feeds[column["input"]] = np.array([text or "" for text in to_texts(values)], object)
    return feeds
