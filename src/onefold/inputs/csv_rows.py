"""CSV files as chunks of rows, read line by line within limits."""

import csv
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from onefold.errors import InputError
from onefold.inputs.cells import Chunk, to_number
from onefold.inputs.tables import MOST_COLUMNS

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
            sample = list(itertools.islice(self._lines(file), SNIFFED_LINES + 1))
        self._delimiter = _detect_delimiter(sample, "\t" if path.suffix.lower() == ".tsv" else ",")
        with self._open() as file:
            _, header = next(self._rows(file), (0, []))
        self.columns = _check_header(header, path)

    def __iter__(self) -> Iterator[Chunk]:
        most = max(1, min(MOST_ROWS, MOST_CELLS // len(self.columns)))
        rows: list[list[str]] = []
        characters = 0
        with self._open() as file:
            for line, row in itertools.islice(self._rows(file), 1, None):
                if len(row) != len(self.columns):
                    raise InputError(
                        f"{self.path}, line {line}: {len(row)} fields, the header has "
                        f"{len(self.columns)}. Correct the line."
                    )
                rows.append(row)
                characters += sum(map(len, row))
                if len(rows) == most or characters > MOST_CHARACTERS:
                    yield self._chunk(rows)
                    rows, characters = [], 0
        if rows:
            yield self._chunk(rows)

    def _chunk(self, rows: list[list[str]]) -> Chunk:
        return dict(zip(self.columns, zip(*rows, strict=True), strict=True))

    def _open(self) -> TextIO:
        try:
            return self.path.open(encoding="utf-8-sig", newline="")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}). Check its permissions.") from None

    def _rows(self, file: TextIO) -> Iterator[tuple[int, list[str]]]:
        """Yield every row that is not blank, with the number of its last line."""
        reader = csv.reader(self._lines(file), delimiter=self._delimiter, strict=True)
        try:
            for row in reader:
                if row:
                    yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{self.path}, line {reader.line_num}: not CSV ({error}). Correct the line.") from None

    def _lines(self, file: TextIO) -> Iterator[str]:
        for number in itertools.count(1):
            try:
                line = file.readline(LONGEST_LINE)
            except UnicodeDecodeError:
                raise InputError(f"{self.path}, about line {number}: not UTF-8 text. Save it as UTF-8.") from None
            if not line:
                return
            if "\0" in line:
                raise InputError(f"{self.path}, line {number}: NUL byte, not a text file. Save it as UTF-8 text.")
            if len(line) == LONGEST_LINE and line[-1] not in "\r\n":
                raise InputError(
                    f"{self.path}, line {number}: longer than {LONGEST_LINE:,} characters. Check the line endings."
                )
            yield line


def _detect_delimiter(lines: Sequence[str], fallback: str) -> str:
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


def _check_header(header: list[str], path: Path) -> tuple[str, ...]:
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
