"""Safe reading of untrusted zip archives: members are checked before they are inflated."""

import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from onefold.errors import InputError

ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError)
LARGEST_RATIO = 1032  # deflate cannot compress more than this
SLACK = 2**10  # bytes for the headers of deflate blocks


@contextmanager
def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> Iterator[IO[bytes]]:
    """Open a member for reading; read to its end, where its CRC is checked.

    Raise InputError for sizes that the archive cannot hold, and for compression methods other than "stored" and
    "deflated", which Python inflates without a limit.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{name}: compression method {member.compress_type} is not supported. Save it with deflate.")
    ratio = 1 if member.compress_type == zipfile.ZIP_STORED else LARGEST_RATIO
    archive_bytes = Path(str(archive.filename)).stat().st_size
    if member.compress_size > archive_bytes or member.file_size > ratio * member.compress_size + SLACK:
        raise InputError(
            f"{name}: damaged, it claims {member.file_size:,} bytes, compressed to {member.compress_size:,}, in a "
            f"file of {archive_bytes:,}. Save it again."
        )
    with archive.open(member) as file:
        yield file
