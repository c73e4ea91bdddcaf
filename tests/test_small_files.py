"""Small files of unknown origin never take much memory, whatever they claim and however well they are compressed."""

import contextlib
import gzip
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from onefold.errors import InputError
from onefold.inputs import open_source
from onefold.inputs.table_files import read_pages

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
OPEN = "from onefold.inputs import open_source"


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
    setup = "from onefold.data.formats.notmnist import read_letters"
    found = answers(sorted(tmp_path.iterdir()), setup, "read_letters(path, lambda *_: None)")
    assert len(found) == 3
    for name, answer in found.items():
        assert answer.startswith("FileError: "), (name, answer)
        assert "damaged, or not an archive" in answer


def test_small_parquet_files_take_little_memory(tmp_path: Path) -> None:
    text, long = "x" * 2**20, "y" * 2**27
    one = pa.array(np.zeros(500, np.int32))
    repeated = pa.DictionaryArray.from_arrays(one, pa.array([text]))
    of_bytes = pa.DictionaryArray.from_arrays(one, pa.array([text.encode()], pa.binary(2**20)))
    plain: Any = {"use_dictionary": False, "write_statistics": False}
    usual = pa.array(["a", None, "b"] * 200)

    def write(name: str, column: pa.Array, codec: str = "zstd", **options: Any) -> None:
        table = pa.table({"a": column, "b": usual[: len(column)]})
        parquet.write_table(table, tmp_path / name, compression=codec, store_schema=False, **options)

    write("usual.parquet", usual)
    write("text.parquet", repeated)
    write("bytes.parquet", of_bytes.dictionary_decode(), dictionary_pagesize_limit=2**22)
    write("page.parquet", pa.array([long]), "brotli", **plain)
    write("pages.parquet", repeated.dictionary_decode(), data_page_size=1000, write_batch_size=1, **plain)
    write("dictionary.parquet", pa.array([long]), "brotli", write_statistics=False)
    setup = f"{OPEN}; list(open_source({str(tmp_path / 'usual.parquet')!r}).batches(9)); import pyarrow.parquet"
    found = answers(sorted(tmp_path.iterdir()), setup, "sum(len(part) for part in open_source(path).batches(9))")
    assert found.pop("usual.parquet") == "600"
    assert [found.pop(f"{name}.parquet") for name in ("text", "bytes", "pages")] == ["500"] * 3
    assert len(found) == 2
    for answer in found.values():
        assert re.search(r"InputError: .*: has pages of 128\.\d MiB, packed into .* with smaller pages", answer)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_pages_of_parquet_files_have_the_sizes_of_the_footer(tmp_path: Path, version: str, codec: str) -> None:
    path = tmp_path / "x.parquet"
    words = pa.array([f"{i} " * (i % 7) if i % 5 else None for i in range(3000)])
    table = pa.table({"n": np.arange(3000) / 7, "few": pa.array(["u", "v", None] * 1000), "many": words})
    parquet.write_table(table, path, compression=codec, data_page_version=version, data_page_size=500)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    with path.open("rb") as file:
        for chunk in map(group.column, range(3)):
            start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
            found = list(read_pages(file, start, chunk.total_compressed_size))
            assert [page.is_dictionary for page in found] == [True] + [False] * (len(found) - 1)
            assert sum(page.values for page in found if not page.is_dictionary) == 3000
            headers = chunk.total_uncompressed_size - sum(page.size for page in found)
            assert 0 < headers < 100 * len(found)
    content = path.read_bytes()
    rows = open_source(path)
    for place in range(4, 150, 13):  # the first page and its header
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        with contextlib.suppress(InputError):
            for batch in open_source(path).batches(1000):
                assert len(batch) == 1000
    path.write_bytes(content)
    assert sum(len(batch) for batch in rows.batches(700)) == 3000
