"""Sources for tables: CSV and Parquet files read within bounded memory, data frames and Arrow tables."""

import csv
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOBase, TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from torch import Tensor

from onefold.core.runtime import available, human, require
from onefold.errors import InputError, MissingExtraError, OnefoldError
from onefold.inputs.source import check_index, regroup, split_range
from onefold.inputs.tables import MOST_COLUMNS, Chunk, Table, shorten, to_number

DELIMITERS = (",", ";", "\t", "|")
SNIFFED_LINES = 20
LONGEST_LINE = 2**24
MOST_ROWS = 8192
MOST_CELLS = 2**21
MOST_CHARACTERS = 2**25


class CsvRows:
    """Rows of a CSV or TSV file whose first row names the columns; can be iterated repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            sample = list(itertools.islice(read_lines(file, str(path)), SNIFFED_LINES + 1))
        self._delimiter = detect_delimiter(sample, "\t" if path.suffix.lower() == ".tsv" else ",")
        with self._open() as file:
            _, header = next(self._rows(file), (0, []))
        self.columns = check_header(header, str(path))

    def __iter__(self) -> Iterator[Chunk]:
        most = max(1, min(MOST_ROWS, MOST_CELLS // len(self.columns)))
        rows: list[list[str]] = []
        characters = 0
        with self._open() as file:
            for line, row in itertools.islice(self._rows(file), 1, None):
                check_width(row, self.columns, f"{self.path}, line {line}")
                rows.append(row)
                characters += sum(map(len, row))
                if len(rows) == most or characters > MOST_CHARACTERS:
                    yield to_chunk(self.columns, rows)
                    rows, characters = [], 0
        if rows:
            yield to_chunk(self.columns, rows)

    def _open(self) -> TextIOWrapper:
        try:
            return self.path.open(encoding="utf-8-sig", newline="")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}). Check its permissions.") from None

    def _rows(self, file: TextIOBase) -> Iterator[tuple[int, list[str]]]:
        return parse_rows(read_lines(file, str(self.path)), self._delimiter, str(self.path))


def to_chunk(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Chunk:
    """Return rows as values per column."""
    return dict(zip(columns, zip(*rows, strict=True), strict=True))


def check_width(row: Sequence[Any], columns: Sequence[str], name: str) -> None:
    """Raise InputError unless a row has one field for each column."""
    if len(row) != len(columns):
        raise InputError(f"{name}: {len(row)} fields, the header has {len(columns)}. Correct the line.")


def parse_rows(lines: Iterable[str], delimiter: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield every row that is not blank, with the number of its last line."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{name}, line {reader.line_num}: not CSV ({error}). Correct the line.") from None


def read_lines(file: TextIOBase, name: str) -> Iterator[str]:
    """Yield the lines of a text file; refuse lines that are no text or very long."""
    for number in itertools.count(1):
        try:
            line = file.readline(LONGEST_LINE)
        except UnicodeDecodeError:
            raise InputError(f"{name}, about line {number}: not UTF-8 text. Save it as UTF-8.") from None
        if not line:
            return
        if "\0" in line:
            raise InputError(f"{name}, line {number}: NUL byte, not a text file. Save it as UTF-8 text.")
        if len(line) == LONGEST_LINE and line[-1] not in "\r\n":
            raise InputError(f"{name}, line {number}: longer than {LONGEST_LINE:,} characters. Check the line endings.")
        yield line


def detect_delimiter(lines: Sequence[str], fallback: str) -> str:
    """Return the delimiter that splits the first lines into equally many fields, more than one."""
    best, best_score = fallback, (False, 1)
    for delimiter in (fallback, *DELIMITERS):
        try:
            rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
        except csv.Error:
            continue
        if len(lines) > SNIFFED_LINES:
            rows = rows[:-1]  # the last row may be incomplete
        widths = {len(row) for row in rows}
        score = (len(widths) == 1, len(rows[0]) if rows else 0)
        if score[1] > 1 and score > best_score:
            best, best_score = delimiter, score
    return best


def check_header(header: list[str], path: str) -> tuple[str, ...]:
    """Return the names of the columns; refuse empty and repeated names, and rows of numbers."""
    names = tuple(name.strip() for name in header)
    if not names:
        raise InputError(f"{path}: empty. Begin the file with a row of column names.")
    if len(names) > MOST_COLUMNS:
        raise InputError(f"{path}: too many columns ({len(names):,}). Use at most {MOST_COLUMNS:,}.")
    if "" in names:
        raise InputError(
            f"{path}: column {names.index('') + 1} has no name. Name it or drop it (pandas: to_csv(index=False))."
        )
    commonest, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise InputError(f"{path}: {count} columns of the name {commonest!r}. Give every column its own name.")
    if all(map(_is_number, names)) and names != tuple(map(str, range(len(names)))):
        raise InputError(f"{path}: the first row holds numbers. Begin the file with a row of column names.")
    return names


def _is_number(text: str) -> bool:
    try:
        to_number(text)
    except ValueError:
        return False
    return True


DICTIONARY = 2  # the type of a page; 0 and 3 hold data
DEEPEST = 8  # structs within structs
BOOLEANS, BYTE, INTEGERS, I32, DOUBLE, BINARY, STRUCT = (1, 2), 3, (4, 5, 6), 5, 7, 8, 12


class Page(NamedTuple):
    """Inflated size and number of values of a page."""

    is_dictionary: bool
    size: int
    values: int


def read_pages(file: IO[bytes], start: int, length: int) -> Iterator[Page]:
    """Yield the pages of a column chunk of `length` bytes; raise ValueError if a header is damaged."""
    offset = start
    while offset < start + length:
        file.seek(offset)
        header = _read_struct(file)
        inflated, packed = (_check_size(header.get(field)) for field in (2, 3))
        data_header = next((header[field] for field in (5, 7, 8) if isinstance(header.get(field), dict)), {})
        values = data_header.get(1)
        yield Page(header.get(1) == DICTIONARY, inflated, values if isinstance(values, int) and values > 0 else 1)
        offset = file.tell() + packed


def _check_size(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError("a page header has no size")
    return value


def _read_struct(file: IO[bytes], depth: int = 0) -> dict[int, Any]:
    """Return the 32-bit integers and structs of a struct in Thrift's compact protocol by field; skip other types."""
    if depth > DEEPEST:
        raise ValueError("a page header is nested too deeply")
    fields: dict[int, Any] = {}
    field = 0
    while byte := _read_byte(file):
        field = field + (byte >> 4) if byte >> 4 else _read_integer(file)
        value = _read_value(file, byte & 15, depth)
        if byte & 15 in (I32, STRUCT):
            fields[field] = value
    return fields


def _read_value(file: IO[bytes], kind: int, depth: int) -> Any:
    if kind in BOOLEANS:
        return None
    if kind in INTEGERS:
        return _read_integer(file)
    if kind == STRUCT:
        return _read_struct(file, depth + 1)
    if kind == BINARY:
        return file.seek(_read_varint(file), 1)
    if kind in (BYTE, DOUBLE):
        return file.seek(1 if kind == BYTE else 8, 1)
    raise ValueError("a page header has a field of an unknown type")  # page headers have no lists or maps


def _read_integer(file: IO[bytes]) -> int:
    """Read a signed integer in zigzag encoding."""
    number = _read_varint(file)
    return (number >> 1) ^ -(number & 1)


def _read_varint(file: IO[bytes]) -> int:
    number = 0
    for shift in range(0, 70, 7):
        byte = _read_byte(file)
        number |= (byte & 127) << shift
        if byte < 128:
            return number
    raise ValueError("a page header has an unterminated integer")


def _read_byte(file: IO[bytes]) -> int:
    byte = file.read(1)
    if not byte:
        raise ValueError("the file ends within a page header")
    return byte[0]


MOST_ROWS = 8192
MOST_CELLS = 2**21
MOST_BYTES = 2**25  # of text in a chunk
USUAL_PAGES, USUAL_RATIO = 2**26, 64  # total bytes of the largest page per column; their ratio to bytes on disk
COPIES = 3  # that pyarrow makes of a page
READ_AT_ONCE = 2**16  # bytes of a column


class ParquetRows:
    """Rows of a Parquet file; can be iterated repeatedly.

    Args:
        path: File.
        text: Column of whole texts; only it is read. Texts of other columns are shortened, as they are categories.
    """

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path, self._text = path, text
        with self._open() as file:
            schema = self._wrap_errors(lambda: file.schema_arrow)
            self.columns: tuple[str, ...] = tuple(schema.names)
            self._check(schema)
            self._texts = [column.path for column in _leaf_columns(file) if column.physical_type == "BYTE_ARRAY"]
            row_bytes = self._wrap_errors(lambda: self._check_sizes(file.metadata))
        self._rows = max(1, min(MOST_ROWS, MOST_CELLS // len(self.columns), int(MOST_BYTES / max(1, row_bytes))))

    def __iter__(self) -> Iterator[Chunk]:
        names = self.columns if self._text not in self.columns else (self._text,)
        dictionaries = self._texts if names == self.columns else []
        with self._open(read_dictionary=dictionaries, buffer_size=READ_AT_ONCE) as file:
            batches = file.iter_batches(batch_size=self._rows, columns=list(names), use_threads=False)
            while (batch := self._wrap_errors(lambda: next(batches, None))) is not None:
                yield self._wrap_errors(
                    lambda batch=batch: {name: arrow_to_numpy(batch.column(i)) for i, name in enumerate(names)}
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


TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".parquet"})


class TableFile:
    """CSV, TSV or Parquet file as rows of codes (see Table.encode), read in chunks."""

    def __init__(self, path: Path, table: Table | None = None) -> None:
        self.path = path
        self._rows: Iterable[Chunk] = ParquetRows(path) if path.suffix.lower() == ".parquet" else CsvRows(path)
        self.table = table or Table.infer(self._rows, str(path))

    @property
    def chunks(self) -> Iterable[Chunk]:
        """The rows of the file before they are encoded."""
        return self._rows

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
