"""An exported detector in ONNX Runtime: checks rows and images, and returns scores, p-values and alarms."""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, UInt8

from onefold.decode import Picture, decode_pixels, describe_error, ignore_pillow_warnings
from onefold.errors import FileError, InputError, MissingExtraError

LONGEST_TEXT = 256  # characters of a category; the detector was fitted on texts cut to this length
LARGEST = float(np.finfo(np.float32).max)
QUIET = 3  # errors only: ONNX Runtime warns about the optional input `threshold`
KINDS = ("image", "columns", "arrays", "codes")


@dataclass(frozen=True)
class Results:
    """Results of several inputs, in their order.

    Args:
        score: Scores; a bigger score is more uncertain, and NaN is an alarm.
        pvalue: p-values, or None if the detector is not calibrated.
        is_ood: Whether the input raises an alarm, or None if the detector is not calibrated.
    """

    score: Float[np.ndarray, " n"]
    pvalue: Float64[np.ndarray, " n"] | None = None
    is_ood: Bool[np.ndarray, " n"] | None = None


class ExportedModel:
    """A detector that `onefold export` wrote as ONNX file; it needs neither torch nor the detector's file.

    Args:
        path: The .onnx file.
        threads: Threads of ONNX Runtime; by default one per core.

    Raises:
        FileError: The file cannot be read, or onefold did not write it.
        MissingExtraError: ONNX Runtime is not installed.
    """

    def __init__(self, path: str | Path, threads: int = 0) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise MissingExtraError('onnxruntime is not installed. Run pip install "onefold[serve]".')
        import onnxruntime

        self.path = Path(path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = QUIET, threads
        if not self.path.is_file():
            raise FileError(f"{path}: no such file. Write it with onefold export.")
        try:
            self.session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            self.metadata: dict[str, Any] = json.loads(self.session.get_modelmeta().custom_metadata_map["onefold"])
            self.layout: dict[str, Any] = self.metadata["input"]
            if self.layout["kind"] not in KINDS:
                raise ValueError
        except Exception:  # ONNX Runtime raises classes of its own, and a foreign file may hold anything
            raise FileError(f"{path}: damaged, or not an exported detector. Write it with onefold export.") from None

    @property
    def kind(self) -> str:
        """What the model takes: "image", "columns" of a table, "arrays", or "codes" of a table."""
        return self.layout["kind"]

    @property
    def calibrated(self) -> bool:
        """Whether the model has p-values and alarms."""
        return self.metadata["threshold"] is not None

    def run(self, feeds: Mapping[str, np.ndarray]) -> Results:
        """Return the results of the model's own inputs, without checks.

        Args:
            feeds: Arrays by the names of the inputs.

        Returns:
            The results.

        Raises:
            InputError: The model cannot process these values.
        """
        try:
            return Results(*self.session.run(None, dict(feeds)))
        except Exception as error:  # ONNX Runtime raises classes of its own
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InputError(f"the model cannot process these values ({reason})") from None

    def score_image(self, file: Path | BytesIO) -> Results:
        """Return the results of one image file.

        Args:
            file: The file, or its content; it may come from anybody.

        Returns:
            Results of one input.

        Raises:
            InputError: The model takes no images, or the file cannot be decoded.
        """
        return self.run({"x": self.decode(file)})

    def decode(self, file: Path | BytesIO) -> UInt8[np.ndarray, "h w 3"]:
        """Return the pixels of an image file as the model takes them.

        Args:
            file: The file, or its content.

        Returns:
            Pixels [H, W, 3].

        Raises:
            InputError: The model takes no images, or the file cannot be decoded.
        """
        if self.kind != "image":
            raise InputError("this model does not take images", hint="Send rows as JSON.")
        picture = Picture(self.layout["height"], self.layout["width"], self.layout["channels"])
        try:
            with ignore_pillow_warnings():
                return decode_pixels(file, picture)
        except Exception as error:  # untrusted files fail in many ways
            raise InputError(f"cannot be decoded ({describe_error(error)})", argument="image") from None

    def score_rows(self, rows: Sequence[Any]) -> Results:
        """Return the results of rows that were parsed from JSON.

        Args:
            rows: For a table one object per row, from column names to values; None is a missing value.
                Else one list of numbers per row, or an object of lists if the model has several inputs.

        Returns:
            One result per row.

        Raises:
            InputError: The model takes images, or a row has other columns, shapes or types.
        """
        if self.kind == "image":
            raise InputError("this model takes an image", hint="Send the image file.")
        if not isinstance(rows, list | tuple) or not rows:
            raise InputError("must be a list of at least one row", argument="rows")
        if self.kind == "columns":
            return self.run(self._columns(rows))
        shapes = self.layout["shapes"]
        if set(shapes) == {"x"}:
            return self.run({"x": self._array("x", rows)})
        for position, row in enumerate(rows):
            if not isinstance(row, Mapping) or set(row) != set(shapes):
                names = ", ".join(map(repr, shapes))
                raise InputError(f"row {position} must be an object with {names}", argument="rows")
        return self.run({name: self._array(name, [row[name] for row in rows]) for name in shapes})

    def _columns(self, rows: Sequence[Any]) -> dict[str, np.ndarray]:
        columns = self.layout["columns"]
        names = {column["name"] for column in columns} | set(self.layout["ignored"])
        for position, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise InputError(f"row {position} must be an object of columns", argument="rows")
            if extra := [name for name in row if name not in names]:
                raise InputError(f"row {position} has an unknown column ({extra[0]!r})", argument="rows")
            if absent := [column["name"] for column in columns if column["name"] not in row]:
                raise InputError(f"row {position} has no column {absent[0]!r}", argument="rows")
        feeds: dict[str, np.ndarray] = {}
        for column in columns:
            name, number = column["name"], column["kind"] == "number"
            convert, dtype = (_to_number, np.float64) if number else (_to_text, object)
            values = [convert(row[name], name, position) for position, row in enumerate(rows)]
            feeds[column["input"]] = np.array(values, dtype)
        return feeds

    def _array(self, name: str, values: Sequence[Any]) -> np.ndarray:
        """Return lists of numbers in the shape and dtype of an input."""
        shape, dtype = tuple(self.layout["shapes"][name][1:]), np.dtype(self.layout["dtypes"][name])
        missing, kinds, what = self.kind == "codes", "iuf", "numbers"
        if dtype.kind == "b":
            kinds, what = "b", "booleans"
        try:
            array = np.array(values)
            if missing and array.dtype == object:
                array = np.array([[math.nan if value is None else value for value in row] for row in values])
        except (TypeError, ValueError, OverflowError):
            array = np.array(None)
        if array.shape != (len(values), *shape) or array.dtype.kind not in kinds:
            raise InputError(f"each row needs {what} of shape {list(shape)}", argument=name)
        if dtype.kind in "iu" and array.dtype.kind == "f":
            raise InputError("must be integers", argument=name)
        if dtype == np.uint8 and (array.min() < 0 or array.max() > 255):
            raise InputError("must be integers from 0 to 255", argument=name)
        if dtype.kind == "f" and not missing and not (np.abs(array) <= LARGEST).all():
            raise InputError("values are NaN, infinite, or too large for float32", argument=name)
        return array.astype(dtype)


def _to_number(value: Any, column: str, position: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float | np.number | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isinf(number):
            return number
    raise InputError(f"column {column!r}, row {position}: must be a finite number or null", argument="rows")


def _to_text(value: Any, column: str, position: int) -> str:
    """Return a category as the detector was fitted on it; a missing one is empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # missing values turn integer columns into floats
    if isinstance(value, str | bool | int | float | np.number | np.bool_):
        text = str(value).strip()[:LONGEST_TEXT]
        return text.encode(errors="replace").decode()  # a lone surrogate is in no category
    raise InputError(f"column {column!r}, row {position}: must be text or null", argument="rows")
