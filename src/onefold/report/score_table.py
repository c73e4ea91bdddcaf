"""Scores as a .csv or .parquet file."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onefold.core.storage import write_bytes
from onefold.errors import InputError, visible
from onefold.inputs.table_files import import_parquet

CHUNK = 65536  # rows converted to text at once


def check_table(path: Path) -> None:
    """Raise InputError for a suffix that `write_table` does not support, before the scores are computed."""
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"{path.name}: unknown suffix. Scores are written as .csv or .parquet.")
    if path.suffix == ".parquet":
        import_parquet()


def write_table(path: Path, columns: dict[str, Any]) -> None:
    """Write columns of equal length atomically. The column `name` is written as the page shows it."""
    columns = {**columns, "name": [visible(name) for name in columns["name"]]}
    write_bytes(path, _parquet(columns) if path.suffix == ".parquet" else b"".join(_csv(columns)))


def _csv(columns: dict[str, Any]) -> Iterator[bytes]:
    """Yield the file in chunks; floating-point numbers have all their digits."""
    yield (",".join(columns) + "\n").encode()
    for start in range(0, len(columns["name"]), CHUNK):
        parts = [column[start : start + CHUNK] for column in columns.values()]
        values = [_texts(part) if isinstance(part, np.ndarray) else part for part in parts]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(zip(*values, strict=True))
        yield text.getvalue().encode()


def _texts(values: np.ndarray) -> list[str]:
    return list(map(repr, values.tolist() if values.dtype.kind == "f" else values.astype(int).tolist()))


def _parquet(columns: dict[str, Any]) -> bytes:
    parquet = import_parquet()
    import pyarrow

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()
