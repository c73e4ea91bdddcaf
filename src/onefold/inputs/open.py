"""Opening of all supported kinds of data as sources."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from onefold.core.arguments import check_path
from onefold.decode import Picture
from onefold.errors import InputError
from onefold.inputs.arrays import ArraySource, NamedSource, NpyFile, open_npz
from onefold.inputs.datasets import DatasetSource, LoaderSource, StreamSource
from onefold.inputs.images import SUFFIXES, ImageFolder
from onefold.inputs.lines import LineStream
from onefold.inputs.source import Source
from onefold.inputs.split import RandomStreamSubset, StreamSubset, Subset
from onefold.inputs.table_files import TABLE_SUFFIXES, TableFile, TableFrame, as_arrow
from onefold.inputs.tables import Table
from onefold.inputs.text import TEXT_SUFFIXES, Text, TextSource, open_text_file, open_text_frame, texts_of

Form: TypeAlias = Picture | Table | Text
"""Size of the images, columns of the table, or column of the texts that a detector was fitted on."""

SUPPORTED = (
    "an array, a tensor, lists of numbers or texts, a dict of arrays, a data frame, an Arrow table, a torch Dataset or "
    "DataLoader, or a path to a folder of images, an image, a .npy, .npz, .csv, .tsv, .parquet, .txt or .jsonl file"
)


def open_source(x: Any, *, form: Form | None = None, name: str = "x") -> Source:
    """Return a source of the samples in `x`.

    `form` is the form of a fitted detector's data, or that its encoder takes: images are resized to it, tables are read
    by its columns, and texts from its column.
    `name` stands for `x` in error messages.
    """
    source = _open_path(x, form) if isinstance(x, str | os.PathLike) else _open_object(x, form, name)
    _check_form(source, form, name)
    return source


def form_of(source: Source) -> Form | None:
    """Return the form by which later data is read in the same way; None for plain arrays."""
    if isinstance(source, Subset | RandomStreamSubset | StreamSubset):
        return form_of(source.source)
    if isinstance(source, ImageFolder):
        return source.picture
    if isinstance(source, TableFile | TableFrame | LineStream):
        return source.table
    return source.form if isinstance(source, TextSource) else None


def _open_object(x: Any, form: Form | None, name: str) -> Source:
    if isinstance(x, Source):
        return x
    if hasattr(x, "toarray"):  # SciPy and compatible types, some without length and items
        raise InputError(f"a sparse {type(x).__name__} is not supported", argument=name, hint=f"Pass {name}.toarray().")
    if as_arrow(x) is not None or (hasattr(x, "columns") and hasattr(x, "to_numpy")):
        return _open_frame(x, form, name)
    if not isinstance(x, Tensor | DataLoader) and (texts := texts_of(x)) is not None:
        return TextSource(texts, name=name)
    if isinstance(x, Tensor | np.ndarray | list | tuple) or hasattr(x, "__array__"):
        return ArraySource(x, name)
    if isinstance(x, Mapping):
        return NamedSource(x, name)
    return _open_dataset(x, name)


def _open_frame(x: Any, form: Form | None, name: str) -> Source:
    if isinstance(form, Text):
        return open_text_frame(x, form.column, name)
    return TableFrame(x, form if isinstance(form, Table) else None, name)


def _open_dataset(x: Any, name: str) -> Source:
    if isinstance(x, DataLoader):
        return LoaderSource(x, name)
    if isinstance(x, IterableDataset):
        return StreamSource(x, name)
    if isinstance(x, Dataset) and not hasattr(x, "__len__"):
        raise InputError(
            f"a {type(x).__name__} without a length is not supported", argument=name, hint="Define __len__."
        )
    if hasattr(x, "__len__") and hasattr(x, "__getitem__") and not isinstance(x, bytes | bytearray):
        return DatasetSource(x, name)
    raise InputError(f"a {type(x).__name__} is not supported", argument=name, hint=f"Pass {SUPPORTED}.")


def _open_path(x: str | os.PathLike[str], form: Form | None) -> Source:
    check_path(x)
    text, _, key = os.fspath(x).partition("::")
    path = Path(text) if text.lower().endswith(".npz") and key else Path(x)
    if not path.exists():
        hint = "Pass texts as a list, or check the path." if isinstance(form, Text) else "Check the path."
        raise InputError(f"{path}: does not exist. {hint}")
    suffix = path.suffix.lower()
    if path.is_file() and isinstance(form, Text) and suffix in TEXT_SUFFIXES | TABLE_SUFFIXES:
        return open_text_file(path, form.column)
    if path.is_file() and suffix in TEXT_SUFFIXES:
        needed = "an encoder of texts" if form is None else f"{KINDS[type(form)]}, as in the fit"
        raise InputError(f"{path}: holds texts, which need an encoder. Pass {needed}.")
    if path.is_dir() or (path.is_file() and suffix in SUFFIXES):
        return ImageFolder(path, form if isinstance(form, Picture) else None)
    if path.is_file() and suffix == ".npy":
        return NpyFile(path)
    if path.is_file() and suffix == ".npz":
        return open_npz(path, key or None)
    if path.is_file() and suffix in TABLE_SUFFIXES:
        return TableFile(path, form if isinstance(form, Table) else None)
    raise InputError(f"{path}: this kind of file is not supported. Pass {SUPPORTED}.")


KINDS = {Picture: "images", Table: "a table", Text: "texts"}


def _check_form(source: Source, form: Form | None, name: str) -> None:
    """Refuse a source of another form than the detector's; arrays of pixels are checked by `Reader.check`."""
    source_form = form_of(source)
    if form is None or (source_form is None and isinstance(form, Picture)):
        return
    if type(source_form) is not type(form):
        expected = KINDS[type(form)]
        actual = f"not {expected}" if source_form is None else KINDS[type(source_form)]
        raise InputError(
            f"{actual}, but the detector is fitted on {expected}",
            argument=name,
            hint="Pass the same columns." if isinstance(form, Table) else f"Pass {expected}.",
        )
    if source_form != form and not isinstance(form, Text):
        raise InputError(
            "opened in another form than the detector's data",
            argument=name,
            hint="Pass the path or the original object.",
        )
