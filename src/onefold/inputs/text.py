"""Texts as samples: lists, text files, JSON lines, columns of tables. A batch is their UTF-8 bytes, padded with 0."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.runtime import available, require
from onefold.errors import InputError
from onefold.inputs.source import check_index, split_range
from onefold.inputs.table_files import CsvRows, ParquetRows, as_arrow, read_lines
from onefold.inputs.tables import to_number

LONGEST_TEXT = 2**13  # bytes; longer texts are cut, as encoders read no more than a few hundred tokens
TEXT_SUFFIXES = frozenset({".txt", ".jsonl"})
EXAMINED_ROWS = 200  # whose values decide whether a column holds texts
TEXT_LENGTH = 20  # mean characters of a value, above which an error suggests its column
COPIES = 4  # of a file that is read: lines, texts and bytes


@dataclass(frozen=True)
class Text:
    """The column of tables and of JSON lines that holds the texts; None for lists and lines of text."""

    column: str | None = None

    def __post_init__(self) -> None:
        if self.column == "":
            raise InputError("must be the name of a column, not ''", argument="text")


class TextSource:
    """Texts in memory, as UTF-8 bytes one after another.

    Args:
        texts: The texts.
        column: Column that they come from, or None.
        name: Name of the texts in error messages.

    Raises:
        InputError: There are none, one is empty or not a text.
    """

    def __init__(self, texts: Iterable[Any], column: str | None = None, name: str = "x") -> None:
        self.form = Text(column)
        parts = [_to_bytes(text, i, name) for i, text in enumerate(texts)]
        if not parts:
            raise InputError("no texts", argument=name, hint="Pass at least one.")
        if empty := [i for i, part in enumerate(parts) if not part.strip()]:
            count = "1 text is" if len(empty) == 1 else f"{len(empty):,} texts are"
            raise InputError(f"{count} empty (row {empty[0] + 1})", argument=name, hint="Drop or replace empty texts.")
        self._offsets = np.cumsum([0, *map(len, parts)])
        self._bytes = np.frombuffer(b"".join(parts), np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def batches(self, size: int) -> Iterator[UInt8[Tensor, "n length"]]:
        for index in split_range(len(self), size):
            yield self.take(index)

    def take(self, index: NDArray[np.int64]) -> UInt8[Tensor, "n length"]:
        check_index(index, len(self))
        starts, ends = self._offsets[index], self._offsets[index + 1]
        rows = np.zeros((len(index), (ends - starts).max()), np.uint8)
        for row, start, end in zip(rows, starts, ends, strict=True):
            row[: end - start] = self._bytes[start:end]
        return torch.from_numpy(rows)


def decode_texts(batch: UInt8[Tensor, "n length"]) -> list[str]:
    """Return the texts of a batch; bytes that are not UTF-8 become �."""
    rows = batch.cpu().numpy()
    return [row.tobytes().rstrip(b"\0").decode("utf-8", "replace") for row in rows]


def pack_texts(batch: UInt8[Tensor, "n length"]) -> tuple[UInt8[Tensor, " total"], Int64[Tensor, " n"]]:
    """Return the bytes of all texts one after another, and their lengths: the form of texts in files."""
    rows = [row.tobytes().rstrip(b"\0") for row in batch.cpu().numpy()]
    content = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return content, torch.tensor([len(row) for row in rows])


def unpack_texts(content: Tensor, lengths: Tensor) -> UInt8[Tensor, "n length"]:
    """Return the batch that `pack_texts` packed; raise ValueError for bytes that it could not have written."""
    if content.dtype != torch.uint8 or lengths.dtype != torch.int64 or content.ndim != 1 or lengths.ndim != 1:
        raise ValueError("texts: wrong types")
    if not len(lengths) or not 1 <= int(lengths.min()) <= int(lengths.max()) <= LONGEST_TEXT:
        raise ValueError("texts: impossible lengths")
    if int(lengths.sum()) != len(content):
        raise ValueError("texts: lengths and bytes differ")
    rows = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.uint8)
    rows[torch.arange(rows.shape[1]) < lengths[:, None]] = content
    if not rows.gather(1, lengths[:, None] - 1).all():
        raise ValueError("texts: a text ends in a zero byte")
    return rows


def texts_of(x: Any) -> list[Any] | None:
    """Return a list, an array or a column of texts as a list, or None if `x` holds something else.

    Single values may be missing; `TextSource` refuses them.
    """
    if isinstance(x, np.ndarray | np.generic) or hasattr(x, "__array__"):
        if not _may_hold_texts(x):
            return None
        x = np.asarray(x, object).tolist()
    elif not isinstance(x, list | tuple) and hasattr(x, "__getitem__") and hasattr(x, "__len__") and len(x):
        x = list(x) if not isinstance(x, dict) and isinstance(_first(x), str) else None
    return list(x) if isinstance(x, list | tuple) and len(x) and isinstance(_first_text(x), str) else None


def open_text_file(path: Path, column: str | None) -> TextSource:
    """Return the texts of a file: lines of .txt, strings or a column of .jsonl, a column of a table."""
    require(COPIES * path.stat().st_size, available(torch.device("cpu")), what=f"reading {path}", way_out="split it")
    suffix, name = path.suffix.lower(), str(path)
    if suffix == ".txt":
        with _open(path) as file:
            return TextSource((line.rstrip("\r\n") for line in read_lines(file, name)), name=name)
    if suffix == ".jsonl":
        with _open(path) as file:
            return _json_texts(list(_json_rows(read_lines(file, name), path)), column, name)
    rows = ParquetRows(path, column) if suffix == ".parquet" else CsvRows(path)
    column = _choose_column(rows.columns, column, rows, name)
    values = [value for chunk in rows for value in chunk[column]]
    return _column_texts(values, column, name, rows.columns)


def open_text_frame(frame: Any, column: str | None, name: str) -> TextSource:
    """Return the texts in a column of a data frame or an Arrow table."""
    arrow = as_arrow(frame)
    columns = tuple(map(str, frame.columns if arrow is None else arrow.column_names))
    if column is None and len(columns) == 1:
        column = columns[0]
    if column is None or column not in columns:
        raise _no_column(column, columns, name)
    if arrow is not None:
        return _column_texts(arrow[column].to_pylist(), column, name, columns)
    label = list(frame.columns)[columns.index(column)]
    return _column_texts(frame[label].to_numpy().tolist(), column, name, columns)


def _choose_column(columns: Sequence[str], column: str | None, rows: Iterable[Any], name: str) -> str:
    """Return the column of the texts: the only one of a table by default."""
    if column is None and len(columns) == 1:
        return columns[0]
    if column is None or column not in columns:
        chunk = next(iter(rows), {})
        likely = [key for key, values in chunk.items() if _looks_like_texts(values)]
        raise _no_column(column, likely or columns, name)
    return column


def _no_column(column: str | None, columns: Sequence[str], name: str) -> InputError:
    shown = ", ".join(map(repr, columns[:10]))
    problem = "a table, and no column of it is named" if column is None else f"has no column {column!r}"
    return InputError(f"{name}: {problem}", argument="text", hint=f"Name the column of the texts, such as {shown}.")


def _column_texts(values: Sequence[Any], column: str, name: str, columns: Sequence[str]) -> TextSource:
    """Return the texts of a column; raise InputError if it holds numbers."""
    few = [value for value in values[:EXAMINED_ROWS] if value is not None]
    if few and sum(map(_is_number, few)) > len(few) / 2:
        others = ", ".join(repr(other) for other in columns if other != column) or "none"
        raise InputError(
            f"{name}: column {column!r} holds numbers",
            argument="text",
            hint=f"Name the column of the texts; the other columns are {others}.",
        )
    return TextSource(values, column, f"{name}, column {column!r}")


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{path}, line {number}: not JSON. Write one string or object in each line.") from None
        if not isinstance(row, str | dict):
            raise InputError(f"{path}, line {number}: neither a string nor an object. Write one in each line.")
        yield row


def _json_texts(rows: list[Any], column: str | None, name: str) -> TextSource:
    if all(isinstance(row, str) for row in rows):
        return TextSource(rows, name=name)
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{name}: mixes strings and objects. Write the same in each line.")
    columns = tuple(dict.fromkeys(key for row in rows[:EXAMINED_ROWS] for key in row))
    first: dict[str, Any] = {key: [row.get(key) for row in rows[:EXAMINED_ROWS]] for key in columns}
    column = _choose_column(columns, column, [first], name)
    return _column_texts([row.get(column) for row in rows], column, name, columns)


def _to_bytes(text: Any, row: int, name: str) -> bytes:
    """Return a text as at most LONGEST_TEXT bytes of whole characters, without NUL, which ends texts in a batch."""
    if not isinstance(text, str):
        missing = text is None or text != text  # NaN
        problem = "is missing" if missing else f"is a {type(text).__name__}, not a text"
        raise InputError(f"row {row + 1} {problem}", argument=name, hint="Drop or replace it.")
    encoded = text.replace("\0", " ").encode("utf-8", "replace")
    if len(encoded) <= LONGEST_TEXT:
        return encoded
    return encoded[:LONGEST_TEXT].decode("utf-8", "ignore").encode()


def _may_hold_texts(x: Any) -> bool:
    """Return True for an array, or a column of a data frame, that can hold texts."""
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    if isinstance(x, np.ndarray):
        return x.ndim == 1 and kind in ("U", "O", "T")
    one_column = getattr(x, "ndim", 1) == 1 and not hasattr(x, "columns") and not isinstance(x, Tensor)
    return one_column and kind not in ("b", "i", "u", "f", "c", "M", "m")


def _first(x: Any) -> Any:
    try:
        return x[0]
    except Exception:  # the items of a user's object may fail in any way
        return None


def _first_text(x: Sequence[Any]) -> Any:
    """Return the first value that is not missing."""
    return next((value for value in x if value is not None), None)


def _looks_like_texts(values: Any) -> bool:
    few = [value for value in list(values[:EXAMINED_ROWS]) if isinstance(value, str)]
    return bool(few) and sum(map(len, few)) >= TEXT_LENGTH * len(few)


def _is_number(value: Any) -> bool:
    try:
        return to_number(value) == to_number(value)
    except (TypeError, ValueError):
        return False


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from None
