"""Parquet files as chunks of rows, by way of pyarrow."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.errors import InputError
from onefold.memory import available, require
from onefold.sources.tables import MOST_COLUMNS
from onefold.sources.values import Chunk

MOST_ROWS = 8192
MOST_CELLS = 2**21


class ParquetRows:
    """The rows of a Parquet file, again at every iteration."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            schema = self._try(lambda: file.schema_arrow)
            self.columns: tuple[str, ...] = tuple(schema.names)
            self._check(schema)
            meta = file.metadata
            largest = max((meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)), default=0)
        way_out = "write it with smaller row groups"
        require(largest, available(torch.device("cpu")), what=f"reading a row group of {path}", way_out=way_out)

    def __iter__(self) -> Iterator[Chunk]:
        rows = max(1, min(MOST_ROWS, MOST_CELLS // len(self.columns)))
        with self._open() as file:
            batches = file.iter_batches(batch_size=rows, use_threads=False)
            while (batch := self._try(lambda: next(batches, None))) is not None:
                yield self._try(
                    lambda batch=batch: {name: _values(batch.column(i)) for i, name in enumerate(self.columns)}
                )

    def _open(self) -> Any:
        try:
            from pyarrow import parquet
        except ImportError:
            raise InputError('Parquet files need pyarrow: pip install "onefold[tables]"') from None
        return self._try(lambda: parquet.ParquetFile(self.path))

    def _try(self, action: Any) -> Any:
        """Whatever pyarrow says of a damaged file, in one line."""
        import pyarrow

        try:
            return action()
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InputError(f"{self.path}: is damaged, or not a Parquet file ({first})") from None

    def _check(self, schema: Any) -> None:
        from pyarrow import types

        if not self.columns:
            raise InputError(f"{self.path}: has no columns")
        if len(self.columns) > MOST_COLUMNS:
            raise InputError(f"{self.path}: has {len(self.columns):,} columns, at most {MOST_COLUMNS:,} are understood")
        commonest, count = Counter(self.columns).most_common(1)[0]
        if count > 1:
            raise InputError(f"{self.path}: has {count} columns of the name {commonest!r}")
        for field in schema:
            if types.is_nested(field.type):
                raise InputError(f"{self.path}: column {field.name!r} is nested ({field.type}): flatten or drop it")


def _values(column: Any) -> np.ndarray:
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    return column.to_numpy(zero_copy_only=False)
