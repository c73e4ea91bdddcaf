"""The layout of the train data, by which later data is read and checked."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from onefold.core.batches import batch_slices, map_batch, named
from onefold.core.schema import from_json, to_json
from onefold.errors import InputError, warn
from onefold.inputs import Form, LoaderSource, Picture, Table, Text, open_source
from onefold.inputs.tables import TableEncoder
from onefold.inputs.text import LONGEST_TEXT
from onefold.types import ArrayLike, Batch

Kind: TypeAlias = Literal["vectors", "images", "table", "text", "named", "as given"]

CHANNEL_COUNTS = (1, 3, 4)
BATCH_BYTES = 32 * 2**20  # of raw samples read at once
DTYPES = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "bool": torch.bool,
}
LARGEST = torch.finfo(torch.float32).max
MOST_NUMBERS = 2**40  # in a sample; a larger shape in a file is an attack
MOST_SAMPLES = 1024  # scored at once
TEXTS = "texts need an encoder"
TEXTS_HINT = 'Pass kernel=kernels.from_pretrained("wordllama") or another encoder of texts.'


@dataclass(frozen=True)
class Reader:
    """Layout of the train data: kind, shapes, dtypes and value range.

    Vectors [N, D] are not changed. Images [N, H, W], [N, C, H, W] or [N, H, W, C] become [N, C, H, W]; uint8 becomes
    [0, 1]. [N, H, W] that could be time series is refused. Tables become vectors. Texts are bytes [N, length], padded
    to the longest text of a batch. A user's model (`as_given`) receives everything except uint8 images unchanged,
    integers as integers. `low` and `high` are the range of the train values, to which augmentations clip.
    """

    kind: Kind
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    low: float = 0.0
    high: float = 1.0
    form: Form | None = None

    @classmethod
    def infer(cls, raw: Batch, form: Form | None, *, as_given: bool = False, name: str = "x") -> "Reader":
        """Return the reader for raw samples; set `low` and `high` by `with_range`."""
        if isinstance(raw, Mapping):
            if not as_given:
                raise InputError(
                    "a dict needs a model",
                    argument=name,
                    hint="Pass kernel=kernels.from_model(model) with one that accepts it.",
                )
            shapes = {key: tuple(t.shape[1:]) for key, t in raw.items()}
            return cls("named", shapes, {key: _name_dtype(t, as_given=True) for key, t in raw.items()})
        assert isinstance(raw, Tensor)
        shape = {"x": tuple(raw.shape[1:])}
        if isinstance(form, Table):
            if as_given and any(column.kind != "number" or column.missing for column in form.columns):
                raise InputError(
                    "a table with texts or missing values is not supported with a model",
                    argument=name,
                    hint="Encode it first.",
                )
            kind, dtype = ("as given", "float32") if as_given else ("table", "float64")
            return cls(kind, shape, {"x": dtype}, form=form)
        if isinstance(form, Text):
            if not as_given:
                raise InputError(TEXTS, argument=name, hint=TEXTS_HINT)
            return cls("text", {"x": (LONGEST_TEXT,)}, {"x": "uint8"}, form=form)
        if as_given and raw.dtype != torch.uint8 and raw.ndim > 1:
            return cls("as given", shape, {"x": _name_dtype(raw, as_given=True)})
        _check_axes(raw, name)
        if not as_given:
            _check_are_images(raw, name)
        return cls("vectors" if raw.ndim == 2 else "images", shape, {"x": _name_dtype(raw)}, form=form)

    def with_range(self, low: float, high: float) -> "Reader":
        """Return a copy with the range of the train values; uint8 keeps 0 … 1."""
        return self if self.dtypes.get("x") == "uint8" else replace(self, low=low, high=high)

    def batches(
        self,
        x: ArrayLike,
        name: str = "x",
        size: int | None = None,
        device: torch.device | None = None,
        *,
        ordered: bool = False,
    ) -> Iterator[Batch]:
        """Yield raw, checked batches of later data on `device`. `ordered` warns if a DataLoader changes the order."""
        source = open_source(x, form=self.form, name=name)
        if ordered and isinstance(source, LoaderSource) and not source.keeps_order:
            warn(
                f"{name}: the DataLoader shuffles or has a custom sampler, so results are not in the order of its "
                "dataset. Pass the dataset itself, or a DataLoader with shuffle=False and no sampler."
            )
        most = self.batch_size if size is None else size
        for batch in source.batches(most):
            for raw in batch_slices(batch, most):
                yield self.check(raw, name, device)

    def check(self, raw: Batch, name: str = "x", device: torch.device | None = None) -> Batch:
        """Return the batch in the dtypes of the train data; raise InputError if keys, shapes or dtypes differ."""
        if (self.kind == "named") != isinstance(raw, Mapping):
            actual, expected = ("a dict", "an array") if isinstance(raw, Mapping) else ("an array", "a dict")
            raise InputError(
                f"{actual}, but the model was fitted on {expected}", argument=name, hint=f"Pass {expected}."
            )
        tensors = named(raw)
        if set(tensors) != set(self.shapes):
            raise InputError(
                f"keys {sorted(tensors)}, but the model was fitted on {sorted(self.shapes)}",
                argument=name,
                hint="Pass those.",
            )
        checked = {key: self._check_tensor(key, tensors[key], name, device) for key in self.shapes}
        return checked if self.kind == "named" else checked["x"]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of a prepared sample: (D,) for vectors, (C, H, W) for images."""
        shape = self.shapes["x"]
        if self.kind == "table" and isinstance(self.form, Table):
            return (TableEncoder(self.form).width,)
        if self.kind != "images":
            return shape
        if len(shape) == 2:
            return (1, *shape)
        return (shape[2], *shape[:2]) if self.channels_last else shape

    @property
    def has_pictures(self) -> bool:
        """Whether prepared samples can be augmented as images."""
        shape = self.shapes.get("x", ())
        floats = self.kind == "as given" and self.dtypes["x"] == "float32"
        return self.kind == "images" or (floats and len(shape) == 3 and shape[0] in CHANNEL_COUNTS)

    @property
    def may_be_pictures(self) -> bool:
        """Whether samples can be augmented as images on request: numbers with two or three axes."""
        return self.has_pictures or (
            self.kind == "as given" and len(self.shapes["x"]) == 2 and self.dtypes["x"] == "float32"
        )

    @property
    def channels_last(self) -> bool:
        shape = self.shapes["x"]
        return len(shape) == 3 and shape[0] not in CHANNEL_COUNTS and shape[2] in CHANNEL_COUNTS

    @property
    def batch_size(self) -> int:
        """Samples to read at once; bounds the memory of large samples and of their activations."""
        numbers = sum(max(1, torch.Size(shape).numel()) for shape in self.shapes.values())
        return max(16, min(MOST_SAMPLES, BATCH_BYTES // (32 * numbers)))

    def random(self, count: int) -> Batch | None:
        """Return uniform raw samples within the range of the train data; None for integers, texts or large samples."""
        total = sum(math.prod(shape) for shape in self.shapes.values())
        if self.kind == "text" or "int64" in self.dtypes.values() or total > BATCH_BYTES // (8 * count):
            return None
        generator = Generator().manual_seed(0)

        def draw(shape: tuple[int, ...], dtype: str) -> Tensor:
            uniform = torch.rand(count, *shape, generator=generator, dtype=torch.float64)
            if dtype in ("uint8", "bool"):
                return (uniform * (256 if dtype == "uint8" else 2)).floor().to(DTYPES[dtype])
            return (self.low + (self.high - self.low) * uniform).to(DTYPES[dtype])

        drawn = {key: draw(shape, self.dtypes[key]) for key, shape in self.shapes.items()}
        return drawn if self.kind == "named" else drawn["x"]

    def to_json(self) -> dict[str, Any]:
        """Return the reader as JSON content."""
        return to_json(self)

    @classmethod
    def from_json(cls, content: Any) -> "Reader":
        """Return the reader that `to_json` wrote; raise InputError for any other content."""
        reader = from_json(cls, content, "reader")
        if not reader._is_consistent():
            raise InputError("reader: shapes, dtypes, range and form do not match. Use an undamaged file.")
        return reader

    def _is_consistent(self) -> bool:
        """Return True if `infer` could have returned this reader; it may come from an untrusted file."""
        if not self.shapes or self.shapes.keys() != self.dtypes.keys():
            return False
        for shape in self.shapes.values():
            if len(shape) > 64 or min(shape, default=1) < 1 or math.prod(shape) > MOST_NUMBERS:
                return False
        if not -LARGEST <= self.low <= self.high <= LARGEST or not set(self.dtypes.values()) <= DTYPES.keys():
            return False
        if self.kind == "named":
            return self.form is None
        shape, dtype = self.shapes.get("x"), self.dtypes.get("x")
        if shape is None or dtype is None or len(self.shapes) != 1:
            return False
        return self._is_consistent_array(shape, dtype)

    def _is_consistent_array(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Return True if the samples, of one array, have a shape and a type of their kind."""
        if self.kind == "text":
            return isinstance(self.form, Text) and shape == (LONGEST_TEXT,) and dtype == "uint8"
        if self.kind == "table":
            return isinstance(self.form, Table) and shape == (len(self.form.columns),) and dtype == "float64"
        if self.kind == "as given":
            table = isinstance(self.form, Table) and shape == (len(self.form.columns),) and dtype == "float32"
            return table or (self.form is None and dtype in ("float32", "int64", "bool"))
        if isinstance(self.form, Picture):
            picture = (self.form.channels, self.form.height, self.form.width)
            return self.kind == "images" and shape == picture and dtype == "uint8"
        axes = (1,) if self.kind == "vectors" else (2, 3)
        return self.form is None and len(shape) in axes and dtype in ("uint8", "float32")

    def _check_tensor(self, key: str, tensor: Tensor, name: str, device: torch.device | None) -> Tensor:
        label = name if key == "x" else f"{name}[{key!r}]"
        shape, dtype = self.shapes[key], self.dtypes[key]
        if self.kind == "text":
            return self._check_texts(tensor, label, device)
        if tuple(tensor.shape[1:]) != shape:
            raise InputError(
                f"samples of shape {tuple(tensor.shape[1:])}, but the model was fitted on {shape}",
                argument=label,
                hint="Pass samples of that shape.",
            )
        if (tensor.dtype == torch.uint8) != (dtype == "uint8"):
            expected, actual = (
                ("uint8", str(tensor.dtype).removeprefix("torch.")) if dtype == "uint8" else ("other", "uint8")
            )
            raise InputError(
                f"dtype {actual}, but the model was fitted on {expected} data",
                argument=label,
                hint="Bring both to the same scale.",
            )
        if dtype in ("int64", "bool") and tensor.is_floating_point():
            raise InputError("floats, but the model was fitted on integers", argument=label, hint="Pass integers.")
        tensor = tensor.to(device, DTYPES[dtype])  # moved first: a GPU checks for NaN much faster
        if self.kind != "table" and not torch.isfinite(tensor).all():
            raise InputError(
                "values are NaN, infinite, or too large for float32", argument=label, hint="Remove or replace them."
            )
        return tensor

    def _check_texts(self, tensor: Tensor, label: str, device: torch.device | None) -> Tensor:
        if tensor.dtype != torch.uint8 or tensor.ndim != 2 or not 0 < tensor.shape[1] <= LONGEST_TEXT:
            raise InputError("not texts, but the detector was fitted on texts", argument=label, hint="Pass texts.")
        return tensor.to(device)


class Prepare(nn.Module):
    """Conversion of raw samples to network inputs: vectors, images [N, C, H, W], or what a user's model takes."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        table = reader.form if reader.kind == "table" else None
        self.encoder = TableEncoder(table) if isinstance(table, Table) else None

    def forward(self, raw: Any) -> Any:
        if self.encoder is not None:
            return self.encoder(raw)
        if self.reader.kind == "text":
            return raw
        values = map_batch(_scale_pixels, raw)
        if self.reader.kind != "images" or not isinstance(values, Tensor):
            return values
        if self.reader.channels_last:
            values = values.movedim(-1, 1)
        return values.reshape(-1, *self.reader.sample_shape).contiguous()


def _scale_pixels(t: Tensor) -> Tensor:
    return t.float() / 255 if t.dtype == torch.uint8 else t


def _name_dtype(tensor: Tensor, *, as_given: bool = False) -> str:
    if tensor.dtype == torch.uint8:
        return "uint8"
    if as_given and tensor.dtype == torch.bool:
        return "bool"
    return "int64" if as_given and not tensor.is_floating_point() else "float32"


def _check_axes(raw: Tensor, name: str) -> None:
    if raw.ndim not in (2, 3, 4):
        raise InputError(
            f"samples of shape {tuple(raw.shape[1:])} are not supported",
            argument=name,
            hint="Pass vectors [N, D], images [N, H, W], [N, C, H, W] or [N, H, W, C], or a model that "
            "accepts the samples: kernel=kernels.from_model(model).",
        )
    if raw.ndim == 4 and raw.shape[3] < raw.shape[1] and not {raw.shape[1], raw.shape[3]} & set(CHANNEL_COUNTS):
        raise InputError(
            f"samples of shape {tuple(raw.shape[1:])} have no axis of 1, 3 or 4 channels",
            argument=name,
            hint="If the last axis is channels, move it to the front of each sample: numpy.moveaxis(x, -1, 1).",
        )


def _check_are_images(raw: Tensor, name: str) -> None:
    """Refuse [N, A, B] that could be time series.

    Grey images have A = B, or are uint8 and no side is a number of channels.
    """
    if raw.ndim != 3 or raw.shape[1] == raw.shape[2]:
        return
    if raw.dtype != torch.uint8 or set(raw.shape[1:]) & set(CHANNEL_COUNTS):
        raise InputError(
            f"samples of shape {tuple(raw.shape[1:])} could be grey images or time series",
            argument=name,
            hint="For images add an axis of channels, x[:, None]; for series make each sample a vector,"
            " x.reshape(len(x), -1).",
        )


__all__ = ["Picture", "Prepare", "Reader"]
