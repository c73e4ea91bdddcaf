"""Atomic files of bytes and of JSON, and locks; this module does not import torch."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onefold.core.runtime import human
from onefold.errors import FileError, InputError

MOST_LEVELS, MOST_DIGITS = 32, 1000  # nesting of lists and objects in a JSON file, and digits of an integer


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader, or a crash, sees the old content or the new, never a part.

    A symbolic link is followed, and the mode of an existing file is kept. Devices, pipes and sockets are refused.
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
    except FileExistsError:  # the parent folder is a file
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    except OSError as error:  # name the user's path: the error has the temporary name, or none if the disk is full
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def resolve_output(path: Path) -> Path:
    """Return the target of `path` after symbolic links; refuse one that a regular file cannot replace."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # `path` is new, or a link to a new file
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: not a regular file (a device, a pipe or a socket). Choose another output path.")
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def file_lock(lock: Path, otherwise: Exception) -> Iterator[None]:
    """Hold a lock file for one process at a time; raise `otherwise` if another process holds it.

    The system releases the lock when the process ends. Without support for locks, nothing is locked.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise otherwise from None
        except (ImportError, OSError):  # Windows, or a network file system without locks
            pass
        yield


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path, largest: int) -> Any:
    """Return the content of a JSON file of at most `largest` bytes, 32 levels and integers of 1,000 digits."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise FileError(f"{path}: cannot be read (not a file)")
        with path.open("rb") as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > largest:
        raise FileError(f"{path}: is damaged: it has more than {human(largest)}")
    try:
        parsed = json.loads(content.decode(), parse_int=_parse_short)
        if _is_deeper(parsed, MOST_LEVELS):
            raise RecursionError
    except ValueError as error:
        raise FileError(f"{path}: is cut short or damaged: {error}") from None
    except RecursionError:
        raise FileError(f"{path}: is damaged: it has more than {MOST_LEVELS} levels") from None
    return parsed


def _is_deeper(content: Any, levels: int) -> bool:
    """Return True if JSON content has more than `levels` levels of lists and objects."""
    level = [content]
    for _ in range(levels + 1):
        nodes = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [child for node in nodes for child in node]
    return bool(level)


def _parse_short(text: str) -> int:
    """Return the integer; refuse one of more than 1,000 digits, whose conversion would take long."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer of more than {MOST_DIGITS:,} digits")
    return int(text)
