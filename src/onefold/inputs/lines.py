"""Rows of a text stream that is read once, such as standard input: CSV with a header, or JSON lines."""

import itertools
import json
from collections.abc import Iterator
from io import TextIOBase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onefold.errors import InputError
from onefold.inputs.source import check_batch_size
from onefold.inputs.table_files import check_header, check_width, detect_delimiter, parse_rows, read_lines, to_chunk
from onefold.inputs.tables import Chunk, NotANumberError, Table, to_numbers


class LineStream:
    """Rows of a text stream in batches, as codes of a table, or as vectors without a table. It can be read once.

    The first line decides the format: a JSON object of values by column, a JSON array of numbers, or the header of CSV.

    Args:
        file: Text stream.
        table: Columns of the table that the detector was fitted on; None for vectors.
        name: Name of the stream in error messages.
    """

    def __init__(self, file: TextIOBase, table: Table | None, name: str) -> None:
        self._file, self.table, self._name = file, table, name

    def batches(self, size: int) -> Iterator[Tensor]:
        check_batch_size(size)
        rows, row = self._rows(), 1
        columns = next(rows, ())
        while part := list(itertools.islice(rows, size)):
            yield torch.from_numpy(self._encode(to_chunk(columns, part), row))
            row += len(part)
        if row == 1:
            raise InputError(f"{self._name}: no rows. Pass at least one.")

    def _encode(self, chunk: Chunk, first_row: int) -> np.ndarray:
        if self.table is not None:
            return self.table.encode(chunk, first_row)
        vectors = []
        for column, values in chunk.items():
            try:
                vectors.append(to_numbers(values).astype(np.float32))
            except NotANumberError as error:
                row = first_row + error.position
                raise InputError(f"{self._name}, row {row}: column {column!r} is not a number. Correct it.") from None
        return np.stack(vectors, axis=1)

    def _rows(self) -> Iterator[Any]:
        """Yield the names of the columns, then the values of each row in their order."""
        lines = read_lines(self._file, self._name)
        first = next(lines, "")
        if not first:
            return iter(())
        lines = itertools.chain([first], lines)
        return self._json_rows(lines) if first.lstrip()[:1] in ("{", "[") else self._csv_rows(first, lines)

    def _csv_rows(self, first: str, lines: Iterator[str]) -> Iterator[Any]:
        rows = parse_rows(lines, detect_delimiter([first], ","), self._name)
        columns = check_header(next(rows, (0, []))[1], self._name)
        yield columns
        for line, row in rows:
            check_width(row, columns, f"{self._name}, line {line}")
            yield row

    def _json_rows(self, lines: Iterator[str]) -> Iterator[Any]:
        columns: tuple[str, ...] | None = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = self._parse(line, number)
            if columns is None:
                columns = tuple(row)
                yield columns
            if row.keys() != set(columns):
                odd = sorted(row.keys() ^ set(columns))
                raise InputError(
                    f"{self._name}, line {number}: other columns than line 1 ({', '.join(map(repr, odd[:10]))}). "
                    "Write every column in each line, and null for a missing value."
                )
            yield [row[column] for column in columns]

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, list):
            row = {str(i): value for i, value in enumerate(row)}
        if not isinstance(row, dict) or not row:
            raise InputError(
                f"{self._name}, line {number}: not JSON of one row. Write an object of values by column, or an array."
            )
        for column, value in row.items():
            if isinstance(value, dict | list):
                raise InputError(
                    f"{self._name}, line {number}: column {column!r} has nested values. Flatten or drop it."
                )
        return row
