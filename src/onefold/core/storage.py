"""Files: written whole or not at all; tensors in safetensors with a JSON header; no pickle anywhere."""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from onefold.core.memory import available, human, require
from onefold.errors import FileError, InputError

FORMAT = 1
LARGEST_HEADER = 32 * 2**20  # bytes: that of a table with 100,000 columns of numbers has 19 million
MOST_ENTRIES = 2**21  # of lists and objects in it: that table's has a million
MOST_TENSORS = 2**15
LARGEST_INTEGER = 2**128  # the state of a random generator is the largest that any header holds
MOST_LEVELS, MOST_DIGITS = 32, 1000  # of lists and objects in a JSON file, and of an integer
DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool}
)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader or a crash sees the old content or the new, never a part.

    Replace what a symbolic link points to, and keep the mode of a file that exists. Refuse devices, pipes and sockets.
    """
    target = resolve_output(path)
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        temporary.touch(0o666 if mode is None else 0o600, exist_ok=False)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(target)
    except FileExistsError:  # what should be its folder is a file
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    except OSError as error:  # nobody knows the temporary name, and a full disk gives no name at all
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def resolve_output(path: Path) -> Path:
    """Return the file that `path` leads to through symbolic links; refuse what cannot be replaced by a regular file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # `path` is new, or a link to a file that is
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: not a regular file (a device, a pipe or a socket). Choose another output path.")
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def alone(lock: Path, otherwise: Exception) -> Iterator[None]:
    """Let one process at a time in here, the next one hears `otherwise`. The lock goes with its process, however that
    ends; where the system has no locks, hope."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise otherwise from None
        except (ImportError, OSError):  # Windows; a network's file system
            pass
        yield


def write_json(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path, largest: int) -> Any:
    """Read a JSON file of at most `largest` bytes, 32 levels and integers of 1,000 digits; refuse others by name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise FileError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > largest:
        raise FileError(f"{path}: is damaged: it has more than {human(largest)}")
    try:
        parsed = json.loads(content.decode(), parse_int=_short)
        if _is_deeper(parsed, MOST_LEVELS):
            raise RecursionError
    except ValueError as error:
        raise FileError(f"{path}: is cut short or damaged: {error}") from None
    except RecursionError:
        raise FileError(f"{path}: is damaged: it has more than {MOST_LEVELS} levels") from None
    return parsed


def _is_deeper(content: Any, levels: int) -> bool:
    """Return whether JSON has more levels of lists and objects than that."""
    level = [content]
    for _ in range(levels + 1):
        parts = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [part for some in parts for part in some]
    return bool(level)


def save(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write named tensors and a JSON header of a given kind."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        content = plain(header)
        about = {"format": FORMAT, "kind": kind, "sha256": _digest(own, content), "header": content}
        encoded = to_safetensors(own, metadata={"onefold": json.dumps(about)})
        _about(encoded)
    except ValueError as error:  # better now than when it is needed
        raise InputError(f"{path}: cannot be saved, {error}") from None
    write_bytes(path, encoded)


def load(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save` wrote; refuse anything else by name."""
    content = _read(path)
    try:
        about = _about(content)
        _check_version(about["format"], path)
        found, digest, header = about["kind"], about["sha256"], about["header"]
        tensors = parse_safetensors(content)
        intact = digest == _digest(tensors, header)
    except FileError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, AssertionError):
        raise _damaged(path) from None  # RuntimeError: JSON nested too deeply, or a shape that overflows
    if not intact:
        raise FileError(f"{path}: damaged, its content does not match its checksum")
    if not isinstance(header, dict) or not all(map(_is_plain, tensors.values())):
        raise _damaged(path)
    if found != kind:
        shown = found if isinstance(found, str) and found.isprintable() and len(found) < 40 else "unknown"
        raise FileError(f"{path}: is of kind {shown!r}, and {kind!r} was expected")
    return tensors, header


def plain(content: Any) -> Any:
    """What comes back of `content` from JSON: tuples as lists, NumPy's numbers as plain ones; nothing that is NaN."""
    return json.loads(json.dumps(content, allow_nan=False, default=lambda value: value.item()))


def same(a: Any, b: Any) -> bool:
    """Whether two pieces of JSON are equal, down to the types: 1 is neither 1.0 nor true."""
    first, second = (json.dumps(content, sort_keys=True) for content in (a, b))
    return first == second


def check_like(content: Any, like: Any) -> None:
    """Refuse JSON from a file that is not of the form of `like`: the same keys, the same types, whatever the values.

    Where `like` has a float, a whole number will do; where it has None, a number or None; a list there has entries like
    its first.
    """
    match like:
        case dict():
            fits = isinstance(content, dict) and content.keys() == like.keys()
            parts = [(content[key], like[key]) for key in like] if fits else []
        case list():
            fits = isinstance(content, list)
            parts = [(entry, like[0]) for entry in content] if fits and like else []
        case _:
            wanted = {float: (float, int), type(None): (float, int, type(None))}.get(type(like), (type(like),))
            fits, parts = type(content) in wanted, []  # not isinstance: True is an int
    if not fits:
        raise FileError("damaged, or made by another version: its header has another form")
    for entry, form in parts:
        check_like(entry, form)


def fingerprint(*parts: Any) -> str:
    """A hash of settings (anything JSON can hold) and tensors: equal if and only if all parts are equal."""
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


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    names = sorted(tensors)
    return fingerprint(dict(header), names, *(tensors[name] for name in names))


def _read(path: Path) -> bytes:
    """All of a plain file that begins with a header of sane length and fits into memory twice."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise FileError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, LARGEST_HEADER):
                raise _damaged(path)
            way_out = "use a machine with more"
            require(2 * size, available(torch.device("cpu")), what=f"reading {path}", way_out=way_out)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None


def _about(content: bytes) -> Any:
    """What `save` put beside the tensors; a ValueError if it is too much to be read, or has numbers out of bounds."""
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
    return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_bounded)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _bounded(text: str) -> int:
    value = int(text)
    if abs(value) > LARGEST_INTEGER:
        raise ValueError("too large a number")
    return value


def _short(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer of more than {MOST_DIGITS:,} digits")
    return int(text)


def _check_version(version: Any, path: Path) -> None:
    if type(version) is not int or not 0 < version < 10**6:
        raise _damaged(path)
    if version > FORMAT:
        raise FileError(
            f"{path}: has format {version}, this version of onefold reads format {FORMAT}: a newer onefold wrote it, "
            "upgrade with pip install --upgrade onefold"
        )


def _is_plain(tensor: Tensor) -> bool:
    """Of a type that is ever written; a boolean that is neither 0 nor 1 would be undefined behaviour."""
    return tensor.dtype in DTYPES and (tensor.dtype != torch.bool or not (tensor.view(torch.uint8) > 1).any())


def _damaged(path: Path) -> FileError:
    return FileError(f"{path}: damaged, or not a file of onefold")
