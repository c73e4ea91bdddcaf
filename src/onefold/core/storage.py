"""Atomic files: tensors in safetensors with a JSON header, and JSON; no pickle anywhere."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from onefold.core.files import file_lock, read_json, resolve_output, write_bytes, write_json
from onefold.core.runtime import available, human, require
from onefold.errors import FileError, InputError

__all__ = [
    "check_like", "file_lock", "fingerprint", "load", "plain", "read_json", "resolve_output", "same", "save",
    "under_prefix", "with_prefix", "write_bytes", "write_json",
]  # fmt: skip

FORMAT = 1
LARGEST_HEADER = 32 * 2**20  # bytes; a table with 100,000 numeric columns needs 19 million
MOST_ENTRIES = 2**21  # entries of lists and objects in a header; that table needs a million
MOST_TENSORS = 2**15
LARGEST_INTEGER = 2**128  # the state of a random generator is the largest integer in any header
DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool}
)


def save(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write named tensors and a JSON header to a file of this kind."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        content = plain(header)
        metadata = {"format": FORMAT, "kind": kind, "sha256": _digest(copies, content), "header": content}
        encoded = to_safetensors(copies, metadata={"onefold": json.dumps(metadata)})
        _parse_metadata(encoded)
    except ValueError as error:  # refuse now what `load` would refuse later
        raise InputError(f"{path}: cannot be saved, {error}") from None
    write_bytes(path, encoded)


def load(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header that `save` wrote; refuse files of another kind or damaged ones."""
    content = _read(path)
    try:
        metadata = _parse_metadata(content)
        _check_version(metadata["format"], path)
        file_kind, digest, header = metadata["kind"], metadata["sha256"], metadata["header"]
        tensors = parse_safetensors(content)
        intact = digest == _digest(tensors, header)
    except FileError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, AssertionError):
        raise _damaged_error(path) from None  # RuntimeError: JSON nested too deeply, or a shape that overflows
    if not intact:
        raise FileError(f"{path}: damaged, its content does not match its checksum")
    if not isinstance(header, dict) or not all(map(_is_supported, tensors.values())):
        raise _damaged_error(path)
    if file_kind != kind:
        printable = isinstance(file_kind, str) and file_kind.isprintable() and len(file_kind) < 40
        shown = file_kind if printable else "unknown"
        raise FileError(f"{path}: is of kind {shown!r}, and {kind!r} was expected")
    return tensors, header


def plain(content: Any) -> Any:
    """Return `content` as JSON would: tuples as lists, NumPy numbers as Python's. NaN and infinity are refused."""
    return json.loads(json.dumps(content, allow_nan=False, default=lambda value: value.item()))


def same(a: Any, b: Any) -> bool:
    """Return True if two pieces of JSON are equal, types included: 1 is neither 1.0 nor true."""
    first, second = (json.dumps(content, sort_keys=True) for content in (a, b))
    return first == second


def check_like(content: Any, example: Any) -> None:
    """Raise FileError if JSON from a file differs from `example` in keys or types; values may differ.

    A float in the example accepts an integer, None accepts a number or None. The entries of a list must match the first
    entry of the example's list.
    """
    match example:
        case dict():
            matches = isinstance(content, dict) and content.keys() == example.keys()
            parts = [(content[key], example[key]) for key in example] if matches else []
        case list():
            matches = isinstance(content, list)
            parts = [(entry, example[0]) for entry in content] if matches and example else []
        case _:
            types = {float: (float, int), type(None): (float, int, type(None))}.get(type(example), (type(example),))
            matches, parts = type(content) in types, []  # not isinstance: True is an int
    if not matches:
        raise FileError("damaged, or made by another version: its header has other keys or types")
    for part, example_part in parts:
        check_like(part, example_part)


def with_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with `prefix` and a dot before every name."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names start with `prefix` and a dot, without it: the inverse of `with_prefix`."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def fingerprint(*parts: Any) -> str:
    """Return a hash of settings (JSON values) and tensors; it is equal if and only if all parts are equal."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            text = f"{part.dtype}{tuple(part.shape)}"
            content = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        else:
            text, content = "json", json.dumps(part, sort_keys=True, default=repr).encode()
        digest.update(f"{text}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _digest(tensors: Mapping[str, Tensor], header: Any) -> str:
    """Return the checksum of a file's tensors and header, which may be of any type in an untrusted file."""
    names = sorted(tensors)
    return fingerprint(dict(header), names, *(tensors[name] for name in names))


def _read(path: Path) -> bytes:
    """Return the bytes of a regular file that fits into memory twice and whose header length is plausible."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise FileError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, LARGEST_HEADER):
                raise _damaged_error(path)
            way_out = "use a machine with more memory"
            require(2 * size, available(torch.device("cpu")), what=f"reading {path}", way_out=way_out)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None


def _parse_metadata(content: bytes) -> Any:
    """Return the metadata that `save` wrote; raise ValueError if it is too large or has numbers out of bounds."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    entries = sum(map(header.count, (b"[", b"{", b",")))
    if length > LARGEST_HEADER or entries > MOST_ENTRIES:
        most = f"{human(LARGEST_HEADER)} and {MOST_ENTRIES:,} entries"
        raise ValueError(f"its header has {human(length)} and {entries:,} entries, files have at most {most}")
    outer = json.loads(header)
    if len(outer) > MOST_TENSORS:
        raise ValueError(f"it has {len(outer):,} tensors, files have at most {MOST_TENSORS:,}")
    text = outer["__metadata__"]["onefold"]
    return json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite, parse_int=_parse_bounded)


def _parse_finite(text: str) -> float:
    """Return the float; refuse NaN and infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _parse_bounded(text: str) -> int:
    """Return the integer; refuse one beyond ±2¹²⁸."""
    value = int(text)
    if abs(value) > LARGEST_INTEGER:
        raise ValueError("too large a number")
    return value


def _check_version(version: Any, path: Path) -> None:
    """Raise FileError for a file that a newer version of onefold wrote."""
    if type(version) is not int or not 0 < version < 10**6:
        raise _damaged_error(path)
    if version > FORMAT:
        raise FileError(
            f"{path}: has format {version}, this version of onefold reads format {FORMAT}. A newer onefold wrote it; "
            "upgrade with pip install --upgrade onefold."
        )


def _is_supported(tensor: Tensor) -> bool:
    """Return True for a dtype that `save` writes. A boolean that is neither 0 nor 1 would be undefined behaviour."""
    return tensor.dtype in DTYPES and (tensor.dtype != torch.bool or not (tensor.view(torch.uint8) > 1).any())


def _damaged_error(path: Path) -> FileError:
    """Return the error for a file that cannot be parsed."""
    return FileError(f"{path}: damaged, or not a file of onefold")
