"""One file from the internet: mirrors in turn, tries with pauses, resumed where it stopped, whole or not at all."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from onefold.core.memory import human
from onefold.data.catalogue import Mirror
from onefold.errors import FileError

MOST_BYTES = 2**30  # of one file; the largest that is known has 250 million
CHUNK = 2**16
BUSY = (408, 429)  # like 5xx, worth another try

Watch: TypeAlias = Callable[[str, int, int | None], None]
"""Told what is going on, how much of it is done, and of how much, where that is known."""


def unwatched(what: str, done: int, total: int | None) -> None:
    """Nobody looks."""
    del what, done, total


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server that says nothing, how often to ask it, and how long to pause before the second
    time; each pause is twice the one before."""

    timeout: float = 30.0
    tries: int = 4
    pause: float = 1.0


class _RefusedError(Exception):
    """A mirror that has not got the file, and will not have it in a minute."""


class _BrokenOffError(Exception):
    """Something that another try may mend."""


def download(mirrors: tuple[Mirror, ...], folder: Path, watch: Watch, patience: Patience) -> Path:
    """The file, from `folder` if it is there and matches its checksum, else from the first mirror that gives it."""
    import pooch

    for mirror in mirrors:
        path = folder / mirror.file
        if path.is_file() and pooch.file_hash(str(path), alg="md5") == mirror.md5:
            return path
    reasons: list[str] = []
    for mirror in mirrors:
        reason = _ask(mirror, folder, watch, patience)
        if reason is None:
            return folder / mirror.file
        reasons.append(f"{mirror.host}: {reason}")
    names = " or ".join(dict.fromkeys(mirror.file for mirror in mirrors))
    raise FileError(
        f"{names} could not be downloaded ({'; '.join(reasons)}): give the same command again later, or put the file "
        f"into {folder} by hand"
    )


def _ask(mirror: Mirror, folder: Path, watch: Watch, patience: Patience) -> str | None:
    """Why this mirror did not give the file; None once it has."""
    import pooch
    import requests
    import urllib3

    part = folder / f"{mirror.file}.part"
    reason = "not asked"
    for attempt in range(patience.tries):
        if attempt:
            time.sleep(patience.pause * 2 ** (attempt - 1))
        resumed = _size(part) > 0
        try:
            with _quiet():
                getter: Any = _Getter(part, watch, patience.timeout)
                pooch.retrieve(
                    mirror.url, known_hash=f"md5:{mirror.md5}", fname=mirror.file, path=folder, downloader=getter
                )
            return None
        except _RefusedError as error:
            return str(error)
        except _BrokenOffError as error:
            reason = str(error)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            reason = _in_words(error)
        except ValueError:  # pooch's word for another checksum; it has deleted the file
            reason = "what it sent does not match the checksum"
            if not resumed:  # it would send the same again
                return reason
    return f"{reason} ({patience.tries} tries)"


class _Getter:
    """A downloader for pooch that goes on from a .part file, and leaves it there when it is interrupted."""

    def __init__(self, part: Path, watch: Watch, timeout: float) -> None:
        self._part, self._watch, self._timeout = part, watch, timeout

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        del pooch
        import requests

        have = _size(self._part)
        # identity: a server that unpacks or packs .gz files on their way would spoil the checksum
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=self._timeout) as response:
            resumes = self._check(response, have)
            total = _number(response.headers.get("Content-Length"))
            start = have if resumes else 0
            self._copy(
                response.raw.stream(CHUNK, decode_content=False), start, None if total is None else start + total
            )
        self._part.replace(output_file)

    def _check(self, response: Any, have: int) -> bool:
        """Whether the answer goes on where the .part file ends; an error if it is no answer."""
        status = response.status_code
        if status == 206 and have and response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            return True
        if status == 200:
            return False
        if have and status in (206, 416):  # another part than was asked for, or there is no more: begin again
            self._part.unlink()
            raise _BrokenOffError(f"it cannot go on after {have:,} bytes")
        error = _BrokenOffError if status >= 500 or status in BUSY else _RefusedError
        raise error(f"HTTP {status} {response.reason or ''}".strip()[:100])

    def _copy(self, chunks: Iterator[bytes], done: int, total: int | None) -> None:
        name = self._part.name.removesuffix(".part")
        try:
            with self._part.open("r+b" if done else "wb") as file:
                file.seek(done)
                for chunk in chunks:
                    done += len(chunk)
                    if max(done, total or 0) > MOST_BYTES:
                        raise _RefusedError(f"it sends more than {human(MOST_BYTES)}")
                    file.write(chunk)
                    self._watch(name, done, total)
                file.flush()
                os.fsync(file.fileno())
        except _RefusedError:
            self._part.unlink()
            raise
        except OSError as error:  # the disk's, which gives no name; the network's are urllib3's own
            raise OSError(error.errno, error.strerror or str(error), str(self._part)) from error
        if total is not None and done < total:  # older versions of urllib3 do not notice
            raise _BrokenOffError(f"it broke off after {done:,} of {total:,} bytes")


def _in_words(error: Exception) -> str:
    import requests
    import urllib3

    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return "it does not answer"
    if isinstance(error, urllib3.exceptions.IncompleteRead | urllib3.exceptions.ProtocolError):
        return "it broke off"
    return "no connection to it"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep pooch from announcing every attempt."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
