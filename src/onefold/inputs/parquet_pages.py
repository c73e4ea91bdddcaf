"""Headers of the pages of a Parquet file, with the inflated size of each page.

pyarrow inflates pages of any size, and the totals in the file's footer may be false. Therefore the page headers are
read first. If a page inflates to more than its header states, pyarrow raises an error.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

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
