"""Sources for tables: CSV and Parquet files, pandas and polars data frames, Arrow tables."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from torch import Tensor

from onefold.errors import InputError
from onefold.inputs.cells import Chunk
from onefold.inputs.csv_rows import MOST_CELLS, MOST_ROWS, CsvRows
from onefold.inputs.parquet_rows import ParquetRows, arrow_to_numpy
from onefold.inputs.source import check_index, regroup, split_range
from onefold.inputs.tables import Table

TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".parquet"})


class TableFile:
    """CSV, TSV or Parquet file as rows of codes (see Table.encode), read in chunks."""

    def __init__(self, path: Path, table: Table | None = None) -> None:
        self.path = path
        self._rows: Iterable[Chunk] = ParquetRows(path) if path.suffix.lower() == ".parquet" else CsvRows(path)
        self.table = table or Table.infer(self._rows, str(path))

    def batches(self, size: int) -> Iterator[Float64[Tensor, "n c"]]:
        empty = True
        for part in regroup(self._codes(), size):
            empty = False
            yield torch.from_numpy(part)
        if empty:
            raise InputError(f"{self.path}: no rows. Pass at least one.")

    def _codes(self) -> Iterator[NDArray[np.float64]]:
        row = 1
        for chunk in self._rows:
            codes = self.table.encode(chunk, row)
            yield codes
            row += len(codes)


def as_arrow(x: Any) -> Any:
    """Return an Arrow table or record batch as a table, else None; pyarrow need not be installed."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None or not isinstance(x, pyarrow.Table | pyarrow.RecordBatch):
        return None
    return x if isinstance(x, pyarrow.Table) else pyarrow.Table.from_batches([x])


class TableFrame:
    """Data frame of pandas or polars, or an Arrow table, as rows of codes (see Table.encode)."""

    def __init__(self, frame: Any, table: Table | None = None, name: str = "x") -> None:
        self.frame, self._arrow = frame, as_arrow(frame)
        self._labels = list(frame.columns if self._arrow is None else self._arrow.column_names)
        self.names = [str(label) for label in self._labels]
        if not self._labels or not len(frame):
            raise InputError(f"empty (shape {frame.shape})", argument=name, hint="Pass at least one row and column.")
        commonest, count = Counter(self.names).most_common(1)[0]
        if count > 1:
            raise InputError(
                f"{count} columns of the name {commonest!r}", argument=name, hint="Give every column its own name."
            )
        self.table = table or Table.infer(_FrameRows(self), name)

    def __len__(self) -> int:
        return len(self.frame)

    def batches(self, size: int) -> Iterator[Float64[Tensor, "n c"]]:
        for index in split_range(len(self), size):
            yield torch.from_numpy(self.table.encode(self.chunk(index), int(index[0]) + 1))

    def take(self, index: NDArray[np.int64]) -> Float64[Tensor, "n c"]:
        check_index(index, len(self))
        return torch.from_numpy(self.table.encode(self.chunk(index)))

    def chunk(self, index: NDArray[np.int64]) -> Chunk:
        """Return the rows at these indices as values per column."""
        if self._arrow is not None:
            return _arrow_chunk(self._arrow, index)
        part = self.frame.iloc[index] if hasattr(self.frame, "iloc") else self.frame[index]
        return {name: part[label].to_numpy() for name, label in zip(self.names, self._labels, strict=True)}


def _arrow_chunk(table: Any, index: NDArray[np.int64]) -> Chunk:
    """Return rows of an Arrow table. Runs are sliced: `take` copies whole chunks and does not support all types."""
    import pyarrow

    runs = np.split(index, np.flatnonzero(np.diff(index) != 1) + 1)
    part = pyarrow.concat_tables([table.slice(int(run[0]), len(run)) for run in runs])
    return {name: arrow_to_numpy(part[name].combine_chunks()) for name in table.column_names}


class _FrameRows:
    """Rows of a frame in chunks; can be iterated repeatedly."""

    def __init__(self, source: TableFrame) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Chunk]:
        most = max(1, min(MOST_ROWS, MOST_CELLS // len(self._source.names)))
        for index in split_range(len(self._source), most):
            yield self._source.chunk(index)
