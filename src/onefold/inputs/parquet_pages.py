"""The headers of a Parquet file's pages, which say how large each page is once it is inflated.

pyarrow inflates a page whatever its size, and the totals in the file's footer need not be true. So the headers are read
first; a page that inflates to more than its header says is an error of pyarrow's.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

DICTIONARY = 2  # the type of a page; 0 and 3 hold data
DEEPEST = 8  # structs within structs
BOOLEANS, BYTE, INTEGERS, I32, DOUBLE, BINARY, STRUCT = (1, 2), 3, (4, 5, 6), 5, 7, 8, 12


class Page(NamedTuple):
    """A page's size when inflated, and how many values it has."""

    is_dictionary: bool
    size: int
    values: int


def pages(file: IO[bytes], start: int, length: int) -> Iterator[Page]:
    """The pages of a column chunk that takes so many bytes; a ValueError if their headers are damaged."""
    place = start
    while place < start + length:
        file.seek(place)
        header = _struct(file)
        inflated, packed = (_size(header.get(field)) for field in (2, 3))
        about = next((header[field] for field in (5, 7, 8) if isinstance(header.get(field), dict)), {})
        values = about.get(1)
        yield Page(header.get(1) == DICTIONARY, inflated, values if isinstance(values, int) and values > 0 else 1)
        place = file.tell() + packed


def _size(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError("the header of a page has no size")
    return value


def _struct(file: IO[bytes], depth: int = 0) -> dict[int, Any]:
    """The 32-bit integers and the structs of a struct in Thrift's compact protocol, by field; the rest is passed."""
    if depth > DEEPEST:
        raise ValueError("the header of a page is nested too deeply")
    fields: dict[int, Any] = {}
    field = 0
    while byte := _byte(file):
        field = field + (byte >> 4) if byte >> 4 else _integer(file)
        value = _value(file, byte & 15, depth)
        if byte & 15 in (I32, STRUCT):
            fields[field] = value
    return fields


def _value(file: IO[bytes], kind: int, depth: int) -> Any:
    if kind in BOOLEANS:
        return None
    if kind in INTEGERS:
        return _integer(file)
    if kind == STRUCT:
        return _struct(file, depth + 1)
    if kind == BINARY:
        return file.seek(_varint(file), 1)
    if kind in (BYTE, DOUBLE):
        return file.seek(1 if kind == BYTE else 8, 1)
    raise ValueError("the header of a page has a field of an unknown type")  # no page has lists or maps


def _integer(file: IO[bytes]) -> int:
    """A signed integer, in zigzag order."""
    number = _varint(file)
    return (number >> 1) ^ -(number & 1)


def _varint(file: IO[bytes]) -> int:
    number = 0
    for shift in range(0, 70, 7):
        byte = _byte(file)
        number |= (byte & 127) << shift
        if byte < 128:
            return number
    raise ValueError("the header of a page has an integer without an end")


def _byte(file: IO[bytes]) -> int:
    byte = file.read(1)
    if not byte:
        raise ValueError("the file ends within the header of a page")
    return byte[0]
