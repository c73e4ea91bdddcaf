"""Parquet files as chunks of rows, read by pyarrow within bounded memory."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from onefold.core.memory import available, human, require
from onefold.errors import InputError, MissingExtraError, OnefoldError
from onefold.inputs.cells import Chunk, shorten
from onefold.inputs.parquet_pages import read_pages
from onefold.inputs.tables import MOST_COLUMNS

MOST_ROWS = 8192
MOST_CELLS = 2**21
MOST_BYTES = 2**25  # of text in a chunk
USUAL_PAGES, USUAL_RATIO = 2**26, 64  # total bytes of the largest page per column; their ratio to bytes on disk
COPIES = 3  # that pyarrow makes of a page
READ_AT_ONCE = 2**16  # bytes of a column


class ParquetRows:
    """Rows of a Parquet file; can be iterated repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            schema = self._wrap_errors(lambda: file.schema_arrow)
            self.columns: tuple[str, ...] = tuple(schema.names)
            self._check(schema)
            self._texts = [column.path for column in _leaf_columns(file) if column.physical_type == "BYTE_ARRAY"]
            row_bytes = self._wrap_errors(lambda: self._check_sizes(file.metadata))
        self._rows = max(1, min(MOST_ROWS, MOST_CELLS // len(self.columns), int(MOST_BYTES / max(1, row_bytes))))

    def __iter__(self) -> Iterator[Chunk]:
        with self._open(read_dictionary=self._texts, buffer_size=READ_AT_ONCE) as file:
            batches = file.iter_batches(batch_size=self._rows, use_threads=False)
            while (batch := self._wrap_errors(lambda: next(batches, None))) is not None:
                yield self._wrap_errors(
                    lambda batch=batch: {name: arrow_to_numpy(batch.column(i)) for i, name in enumerate(self.columns)}
                )

    def _open(self, **options: Any) -> Any:
        parquet = import_parquet()
        return self._wrap_errors(lambda: parquet.ParquetFile(self.path, **options))

    def _wrap_errors(self, action: Any) -> Any:
        """Call `action`; re-raise errors of pyarrow as one-line InputErrors."""
        import pyarrow

        try:
            return action()
        except OnefoldError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")
            raise InputError(f"{self.path}: damaged, or not a Parquet file ({reason}). Write it again.") from None

    def _check(self, schema: Any) -> None:
        from pyarrow import types

        if not self.columns:
            raise InputError(f"{self.path}: no columns. Write at least one.")
        if len(self.columns) > MOST_COLUMNS:
            raise InputError(f"{self.path}: too many columns ({len(self.columns):,}). Use at most {MOST_COLUMNS:,}.")
        commonest, count = Counter(self.columns).most_common(1)[0]
        if count > 1:
            raise InputError(f"{self.path}: {count} columns of the name {commonest!r}. Give every column its own name.")
        for field in schema:
            if types.is_nested(field.type):
                raise InputError(f"{self.path}: column {field.name!r} is nested ({field.type}). Flatten or drop it.")

    def _check_sizes(self, metadata: Any) -> float:
        """Return the largest average bytes per row; raise InputError if the pages are too large to inflate.

        Reading a row group holds one whole page and the dictionary of every column in memory.
        """
        widest = 0.0
        with self.path.open("rb") as file:
            for i in range(metadata.num_row_groups):
                group = metadata.row_group(i)
                held, row_bytes, packed = 0, 0.0, 0
                for chunk in map(group.column, range(group.num_columns)):
                    page_bytes, value_bytes = _measure_chunk(file, chunk)
                    held += page_bytes
                    packed += chunk.total_compressed_size
                    row_bytes += value_bytes
                if held > max(USUAL_PAGES, USUAL_RATIO * packed):
                    raise InputError(
                        f"{self.path}: has pages of {human(held)}, packed into {human(packed)}. Write it with smaller "
                        "pages, or with less compression."
                    )
                way_out = "write it with smaller row groups"
                limit = available(torch.device("cpu"))
                require(COPIES * held, limit, what=f"reading a row group of {self.path}", way_out=way_out)
                widest = max(widest, row_bytes)
        fixed = sum(metadata.schema.column(i).length for i in range(metadata.num_columns))
        return widest + fixed


def import_parquet() -> Any:
    """Return the module pyarrow.parquet, or raise an error that names the extra."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("Parquet files need pyarrow: pip install 'onefold[tables]'") from None
    return parquet


def _leaf_columns(file: Any) -> list[Any]:
    """Return the leaf columns of a file, with those of nested columns."""
    return [file.metadata.schema.column(i) for i in range(file.metadata.num_columns)]


def _measure_chunk(file: IO[bytes], chunk: Any) -> tuple[int, float]:
    """Return the bytes of a chunk's largest page and dictionary, and the largest average bytes of a text."""
    offsets = (chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else 0)
    start = min(offset for offset in offsets if offset > 0)  # a chunk without rows has no data page
    dictionary, largest, widest = 0, 0, 0.0
    for page in read_pages(file, start, chunk.total_compressed_size):
        if page.is_dictionary:
            dictionary = max(dictionary, page.size)
        else:
            largest, widest = max(largest, page.size), max(widest, page.size / page.values)
    return dictionary + largest, widest if chunk.physical_type == "BYTE_ARRAY" else 0.0


def arrow_to_numpy(column: Any) -> np.ndarray:
    """Return the values of an Arrow array; equal texts of a dictionary array share one object."""
    if not hasattr(column, "dictionary"):
        return column.to_numpy(zero_copy_only=False)
    indices = column.indices.fill_null(len(column.dictionary)).to_numpy(zero_copy_only=False)
    used, inverse = np.unique(indices, return_inverse=True)
    entries = column.dictionary.take(used[used < len(column.dictionary)]).to_pylist()
    values = np.empty(len(used), object)
    values[: len(entries)] = [shorten(entry) for entry in entries]
    return values[inverse]
