"""Downloads of public image sets: several mirrors, retries, resumed parts, and checksums."""

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from onefold.core.runtime import human
from onefold.core.storage import file_lock, write_bytes
from onefold.data.catalogue import CATALOGUE, CatalogueEntry, Mirror
from onefold.errors import FileError, InputError

MOST_BYTES = 2**30  # of one file; the largest in the catalogue has 250 million
CHUNK = 2**16
RETRIED = (408, 429)  # HTTP statuses that are worth another try, like 5xx

ProgressCallback: TypeAlias = Callable[[str, int, int | None], None]
"""Called with a description, the amount done, and the total amount or None."""


def ignore_progress(what: str, done: int, total: int | None) -> None:
    """Do nothing."""
    del what, done, total


@dataclass(frozen=True)
class RetryPolicy:
    """Seconds to wait for a silent server, tries per mirror, and seconds before the second try; each pause doubles."""

    timeout: float = 30.0
    tries: int = 4
    pause: float = 1.0


DEFAULT_RETRIES = RetryPolicy()


class _PermanentError(Exception):
    """Error of a mirror that does not have the file; another try would fail too."""


class _TransientError(Exception):
    """Error that another try may avoid."""


def fetch(
    name: str,
    folder: Path,
    progress: ProgressCallback = ignore_progress,
    *,
    retries: RetryPolicy = DEFAULT_RETRIES,
    catalogue: Mapping[str, CatalogueEntry] = CATALOGUE,
) -> str:
    """Download an image set of the catalogue into a folder, unless it is there.

    An interrupted download resumes where it stopped. Files in folder/NAME that match their checksums are not downloaded
    again, so a file may also be put there by hand. Archives are converted to folder/NAME.npz and then deleted.

    Args:
        name: Name of the set, such as "mnist" or "cifar10".
        folder: Folder of the image sets; see `data_dir`.
        progress: Called with the name of a file, the bytes done, and the total bytes or None.
        retries: Timeout, tries per mirror, and pauses.
        catalogue: Entries by name.

    Returns:
        One line that describes the files.

    Raises:
        InputError: If the catalogue has no such set.
        FileError: If no mirror delivers a file with the right checksum, a file is damaged, or another process is
            downloading the set.
    """
    entry = catalogue.get(name)
    if entry is None:
        raise InputError(f"{name!r}: not a set that can be downloaded. Choose from {', '.join(catalogue)}.")
    converted = folder / f"{name}.npz"
    if converted.is_file():
        return f"{name}: already in {converted} ({human(converted.stat().st_size)})"
    busy = FileError(f"{folder}: another process is downloading {name}. Wait for it.")
    with file_lock(folder / f".{name}.lock", busy):
        paths = [download(mirrors, folder / name, progress, retries) for mirrors in entry.files]
        if entry.format != "idx":
            return _convert(name, entry, paths, converted, progress)
    size = human(sum(path.stat().st_size for path in paths))
    return f"{name}: {len(paths)} files in {folder / name} ({size}), checksums match"


def _convert(name: str, entry: CatalogueEntry, paths: Sequence[Path], target: Path, progress: ProgressCallback) -> str:
    """Convert downloaded files to an .npz file, delete them, and return a line that describes the result."""
    arrays, note = _read_arrays(entry, paths, progress)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_bytes(target, content.getvalue())
    for path in paths:
        path.unlink()
    with contextlib.suppress(OSError):  # not empty
        paths[0].parent.rmdir()
    counts = f"{len(arrays['y_train']):,} train and {len(arrays['y_test']):,} test images"
    return f"{name}: {counts} in {target} ({human(target.stat().st_size)}){note}"


def _read_arrays(
    entry: CatalogueEntry, paths: Sequence[Path], progress: ProgressCallback
) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays of downloaded files and a remark on what was dropped."""
    if entry.format == "cifar10":
        from onefold.data.formats.cifar10 import read_cifar10

        return read_cifar10(paths[0]), ""
    if entry.format == "svhn":
        from onefold.data.formats.svhn import read_svhn

        return read_svhn(paths), ""
    from onefold.data.formats.notmnist import read_letters

    letters = read_letters(paths[0], progress)
    note = (
        f"; dropped from {paths[0].name}: {letters.unreadable:,} unreadable files, {letters.repeated:,} repeated "
        f"images, {letters.ambiguous:,} in two classes"
    )
    return letters.arrays(), note


def download(mirrors: Sequence[Mirror], folder: Path, progress: ProgressCallback, retries: RetryPolicy) -> Path:
    """Return the path of a file in `folder`; download it from the first mirror that works unless it is there."""
    import pooch

    for mirror in mirrors:
        path = folder / mirror.file
        if path.is_file() and pooch.file_hash(str(path), alg="md5") == mirror.md5:
            return path
    reasons: list[str] = []
    for mirror in mirrors:
        reason = _try_mirror(mirror, folder, progress, retries)
        if reason is None:
            return folder / mirror.file
        reasons.append(f"{mirror.host}: {reason}")
    names = " or ".join(dict.fromkeys(mirror.file for mirror in mirrors))
    raise FileError(
        f"{names}: download failed ({'; '.join(reasons)}). Run the same command again later, or put the file into "
        f"{folder} by hand."
    )


def _try_mirror(mirror: Mirror, folder: Path, progress: ProgressCallback, retries: RetryPolicy) -> str | None:
    """Download from one mirror; return None on success, else the reason of the failure."""
    import pooch
    import requests
    import urllib3

    part = folder / f"{mirror.file}.part"
    reason = "no try"
    for attempt in range(retries.tries):
        if attempt:
            time.sleep(retries.pause * 2 ** (attempt - 1))
        resumed = _size(part) > 0
        try:
            with _quiet():
                downloader: Any = _Downloader(part, progress, retries.timeout)
                pooch.retrieve(
                    mirror.url, known_hash=f"md5:{mirror.md5}", fname=mirror.file, path=folder, downloader=downloader
                )
            return None
        except _PermanentError as error:
            return str(error)
        except _TransientError as error:
            reason = str(error)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            reason = _describe(error)
        except ValueError:  # pooch raises it for a wrong checksum, after it has deleted the file
            reason = "wrong checksum"
            if not resumed:  # the server would send the same again
                return reason
    return f"{reason} ({retries.tries} tries)"


class _Downloader:
    """Downloader for pooch that resumes from a .part file, and keeps it when it is interrupted."""

    def __init__(self, part: Path, progress: ProgressCallback, timeout: float) -> None:
        self._part, self._progress, self._timeout = part, progress, timeout

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        del pooch
        import requests

        have = _size(self._part)
        # identity: a server that compresses or inflates .gz files would change the checksum
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
        """Return True if the response resumes where the .part file ends; raise an error for a failed request."""
        status = response.status_code
        if status == 206 and have and response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            return True
        if status == 200:
            return False
        if have and status in (206, 416):  # a part that was not requested, or no more bytes: start again
            self._part.unlink()
            raise _TransientError(f"cannot resume after {have:,} bytes")
        error = _TransientError if status >= 500 or status in RETRIED else _PermanentError
        raise error(f"HTTP {status} {response.reason or ''}".strip()[:100])

    def _copy(self, chunks: Iterator[bytes], done: int, total: int | None) -> None:
        name = self._part.name.removesuffix(".part")
        try:
            with self._part.open("r+b" if done else "wb") as file:
                file.seek(done)
                for chunk in chunks:
                    done += len(chunk)
                    if max(done, total or 0) > MOST_BYTES:
                        raise _PermanentError(f"sends more than {human(MOST_BYTES)}")
                    file.write(chunk)
                    self._progress(name, done, total)
                file.flush()
                os.fsync(file.fileno())
        except _PermanentError:
            self._part.unlink()
            raise
        except OSError as error:  # of the disk, without a file name; urllib3 has its own errors for the network
            raise OSError(error.errno, error.strerror or str(error), str(self._part)) from error
        if total is not None and done < total:  # older versions of urllib3 do not notice
            raise _TransientError(f"connection lost after {done:,} of {total:,} bytes")


def _describe(error: Exception) -> str:
    """Return a network error in a few words."""
    import requests
    import urllib3

    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return "no answer"
    if isinstance(error, urllib3.exceptions.IncompleteRead | urllib3.exceptions.ProtocolError):
        return "connection lost"
    return "no connection"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages of pooch on every try."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
