"""Small files of unknown origin never take much memory, whatever they claim and however well they are compressed."""

import gzip
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

LARGEST_FILE = 4 * 2**20
MOST_MEMORY = 200 * 2**20  # bytes beyond what the imports take
MEASURE = """
import json, resource, sys
from pathlib import Path
from onefold.errors import OnefoldError
{setup}
unit = 1 if sys.platform == "darwin" else 1024
before, answers = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {{}}
for path in map(Path, sys.argv[1:]):
    try:
        answers[path.name] = str({read})
    except (OnefoldError, MemoryError) as error:
        answers[path.name] = f"{{type(error).__name__}}: {{error}}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    if grown > {most}:
        sys.exit(f"{{path.name}}: {{grown / 2**20:,.0f}} MiB")
print(json.dumps(answers))
"""
OPEN = "from onefold.sources import open_source"


def answers(paths: Sequence[Path], setup: str, read: str) -> dict[str, str]:
    """What reading each file answers, in a process of its own whose memory is measured."""
    assert max(path.stat().st_size for path in paths) < LARGEST_FILE
    code = MEASURE.format(setup=setup, read=read, most=MOST_MEMORY)
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def npy_header(version: int, length: int, text: bytes) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text


def shape(*sizes: int, dtype: str = "|u1") -> bytes:
    text = repr({"descr": dtype, "fortran_order": False, "shape": sizes}).encode()
    return npy_header(1, len(text), text)


def write_zip(
    path: Path,
    pieces: Iterator[bytes],
    method: int = zipfile.ZIP_DEFLATED,
    claim: int | None = None,
    name: str = "x.npy",
) -> None:
    """An archive of one member; `claim` replaces its inflated size."""
    info = zipfile.ZipInfo(name)
    info.compress_type = method
    with zipfile.ZipFile(path, "w") as archive, archive.open(info, "w", force_zip64=True) as member:
        for piece in pieces:
            member.write(piece)
    if claim is not None:
        content = bytearray(path.read_bytes())
        start = content.rindex(b"PK\x01\x02") + 24
        content[start : start + 4] = struct.pack("<I", claim)
        path.write_bytes(content)


def zeros(head: bytes, size: int) -> Iterator[bytes]:
    yield head
    for _ in range(0, size, 2**22):
        yield bytes(2**22)


def test_small_npz_files_take_little_memory(tmp_path: Path) -> None:
    huge = 2**31 - 2**22
    write_zip(tmp_path / "header_2.npz", zeros(npy_header(2, 2**28, b" "), 2**28))
    write_zip(tmp_path / "header_3.npz", zeros(npy_header(3, 2**28, b" "), 2**22))
    for name, method in (("bzip2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA)):
        write_zip(tmp_path / f"{name}.npz", zeros(shape(1000), 2**28), method, claim=len(shape(1000)) + 1000)
    write_zip(tmp_path / "claim.npz", iter([shape(huge)]), claim=len(shape(huge)) + huge)
    write_zip(tmp_path / "ends.npz", zeros(shape(huge), 2**22), claim=len(shape(huge)) + huge)
    write_zip(tmp_path / "more.npz", zeros(shape(1000), 2**28), claim=len(shape(1000)) + 1000)
    (tmp_path / "header.npy").write_bytes(npy_header(2, huge, b" " * 2**20))
    (tmp_path / "axes.npy").write_bytes(shape(*[1] * 65) + b"0")
    (tmp_path / "digits.npy").write_bytes(shape(10**4000, 10**4000))
    found = answers(sorted(tmp_path.iterdir()), OPEN, "next(open_source(path).batches(2)).shape")
    assert len(found) == 10
    for name, answer in found.items():
        assert answer.startswith("InputError: "), (name, answer)
        assert "\n" not in answer
    assert "compression method 14 is not supported. Save it with deflate" in found["lzma.npz"]
    assert "claims 2,143,289" in found["claim.npz"]


def test_small_archives_take_little_memory(tmp_path: Path) -> None:
    """Headers of a .tar that are read at once, and members of a .zip that are longer than they claim."""
    for name, kind in (("pax", tarfile.XHDTYPE), ("long", tarfile.GNUTYPE_LONGNAME)):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, 2**28
        with gzip.open(tmp_path / f"{name}.tar.gz", "wb", compresslevel=1) as file:
            file.writelines(zeros(info.tobuf(), 2**28))
    write_zip(tmp_path / "x.zip", zeros(b"", 2**28), claim=1000, name="A/1.png")
    setup = "from onefold.data.notmnist import read_letters"
    found = answers(sorted(tmp_path.iterdir()), setup, "read_letters(path, lambda *_: None)")
    assert len(found) == 3
    for name, answer in found.items():
        assert answer.startswith("FileError: "), (name, answer)
        assert "is damaged, or not an archive" in answer
