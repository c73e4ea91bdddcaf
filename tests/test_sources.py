"""Every kind of input becomes the same raw samples; files of strangers are read with suspicion and in pieces."""

import contextlib
import datetime
import io
import json
import math
import os
import struct
import sys
import threading
import tracemalloc
import warnings
import zipfile
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from onefold.core.schema import from_json, to_json
from onefold.errors import InputError, MissingExtraError, NotEnoughMemoryError, OnefoldWarning
from onefold.inputs import (
    FAR,
    ArraySource,
    Column,
    DatasetSource,
    ImageFolder,
    IndexedSource,
    LoaderSource,
    NamedSource,
    NpyFile,
    Picture,
    Source,
    StreamSource,
    Table,
    TableEncoder,
    TableFile,
    TableFrame,
    arrays,
    form_of,
    images,
    open_source,
    table_files,
)
from onefold.inputs.reader import Reader
from onefold.inputs.source import regroup
from onefold.inputs.tables import MOST_COUNTED, CategoryCounts
from onefold.types import Batch


def rows_of(source: Source, size: int) -> Tensor:
    batches = list(source.batches(size))
    assert all(isinstance(batch, Tensor) for batch in batches)
    return torch.cat([batch for batch in batches if isinstance(batch, Tensor)])


def check_indexed(source: Source, count: int) -> None:
    """Batches of any size, twice, and `take` in any order all show the same samples."""
    assert isinstance(source, IndexedSource)
    assert len(source) == count
    whole = rows_of(source, count)
    assert torch.equal(whole, rows_of(source, 3))
    assert [len(batch) for batch in source.batches(3)] == [3] * (count // 3) + [count % 3] * (count % 3 > 0)
    index = np.array([count - 1, 0, 0, 1])
    assert torch.equal(as_one(source.take(index)), whole[torch.from_numpy(index)])
    for wrong in ([-1], [count], []):
        with pytest.raises(IndexError):
            source.take(np.array(wrong, np.int64))
    with pytest.raises(InputError, match="batch size"):
        next(source.batches(0))


def as_one(batch: Batch) -> Tensor:
    assert isinstance(batch, Tensor)
    return batch


def refused(x: Any, match: str, **given: Any) -> None:
    """Opening or reading `x` fails with one line."""
    with pytest.raises(InputError, match=match) as caught:
        for _ in open_source(x, **given).batches(4):
            pass
    assert "\n" not in str(caught.value)


# ---- arrays, dicts, data sets


@pytest.mark.parametrize(
    "x",
    [
        np.arange(14, dtype=np.uint8).reshape(7, 2),
        np.arange(14).reshape(7, 2),
        torch.arange(14.0).reshape(7, 2),
        [[2.0 * i, 1] for i in range(7)],
        np.arange(7 * 4, dtype=np.float32).reshape(7, 2, 2).transpose(0, 2, 1),
    ],
)
def test_arrays(x: Any) -> None:
    source = open_source(x)
    assert isinstance(source, ArraySource)
    check_indexed(source, 7)
    assert np.array_equal(rows_of(source, 7), np.asarray(x))
    assert rows_of(source, 7).dtype == torch.as_tensor(np.asarray(x)).dtype, "nothing is scaled"
    assert form_of(source) is None
    assert open_source(source) is source


def test_named_arrays() -> None:
    x = {
        "ids": np.arange(10, dtype=np.uint32).reshape(5, 2),
        "mask": torch.ones(5, 2, dtype=torch.bool),
        "values": np.linspace(0, 1, 5),
    }
    source = open_source(x)
    assert isinstance(source, NamedSource)
    assert len(source) == 5
    parts = list(source.batches(2))
    assert [len(part["ids"]) for part in parts] == [2, 2, 1]
    taken = source.take(np.array([4, 0]))
    assert {key: value.dtype for key, value in taken.items()} == {
        "ids": torch.int64, "mask": torch.bool, "values": torch.float32,
    }  # fmt: skip
    assert taken["ids"].tolist() == [[8, 9], [0, 1]]
    assert torch.equal(torch.cat([part["values"] for part in parts]), torch.linspace(0, 1, 5))
    refused({}, "empty dict")
    refused({1: [1.0]}, "key 1")
    refused({"a": [1.0], "b": [1.0, 2.0]}, "different numbers")
    refused({"a": np.array([2**63], np.uint64)}, "fit int64")
    refused({"a": ["text"]}, "dtype <U4 is not supported. Pass numbers")


class Items(Dataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Stream(IterableDataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def test_data_sets() -> None:
    x = torch.randn(7, 3)
    for items in (list(x), [(row, i) for i, row in enumerate(x)], [[row.numpy(), 0.5] for row in x]):
        source = open_source(Items(items))
        assert isinstance(source, DatasetSource)
        check_indexed(source, 7)
        assert torch.equal(rows_of(source, 2), x)
    assert DatasetSource(Items(list(x))).labels() is None
    whole = DatasetSource(TensorDataset(x, torch.arange(7, dtype=torch.int32))).labels()
    assert whole is not None
    assert whole.dtype == torch.int64
    assert whole.tolist() == list(range(7))
    half = DatasetSource(Items([(0.0, 1), (0.0, 0.5)])).labels()
    assert half is not None
    assert half.tolist() == [1, 0.5]
    check_indexed(open_source(Items([1, 2, 3, 4])), 4)
    named = open_source(Items([{"ids": [i, 2], "size": np.uint16(3)} for i in range(3)]))
    assert isinstance(named, DatasetSource)
    batch = named.take(np.array([2, 0]))
    assert isinstance(batch, dict)
    assert batch["ids"].tolist() == [[2, 2], [0, 2]]
    assert batch["size"].tolist() == [3, 3]
    assert batch["size"].dtype == torch.int64


def test_data_sets_of_images() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    colour = open_source(Items([(Image.fromarray(pixels), 0)]))
    assert torch.equal(rows_of(colour, 1), torch.from_numpy(pixels).permute(2, 0, 1)[None])
    grey = open_source(Items([Image.fromarray(pixels[:, :, 0])]))
    assert rows_of(grey, 1).tolist() == [[pixels[:, :, 0].tolist()]]
    assert rows_of(open_source(Items([Image.new("LA", (1, 1), (200, 0))])), 1).tolist() == [[[[0]]]]


def test_data_sets_that_cannot_be_used() -> None:
    refused(Items([]), "empty Items")
    refused(Items([b"bytes"]), "type bytes")
    refused(Items([()]), "empty tuple")
    refused(Items([torch.zeros(2), torch.zeros(3)]), "different shapes")
    refused(Items([{"a": 1}, {"b": 1}]), "mixes items")
    refused(Items([{"a": 1}, 2]), "mixes items")
    refused(Dataset(), "without a length")
    refused((i for i in range(3)), "generator")
    refused(b"bytes", "x: a bytes is not supported")
    refused(Stream([]), "no items")
    refused(DataLoader(Stream([])), "no batches")


def test_loaders_keep_their_batches_and_their_order() -> None:
    x = torch.arange(10.0)[:, None]
    loader = DataLoader(TensorDataset(x, x), batch_size=4)
    source = open_source(loader)
    assert isinstance(source, LoaderSource)
    assert not isinstance(source, IndexedSource)
    assert [len(as_one(batch)) for batch in source.batches(1000)] == [4, 4, 2]
    assert torch.equal(rows_of(source, 1), x)
    shuffled = DataLoader(TensorDataset(x), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    again = DataLoader(TensorDataset(x), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    given_by_loader = torch.cat([batch[0] for batch in again])
    assert not torch.equal(given_by_loader, x)
    assert torch.equal(rows_of(open_source(shuffled), 4), given_by_loader)
    named = list(open_source(DataLoader(Items([{"a": 1}, {"a": 2}]), batch_size=2)).batches(9))
    assert [batch["a"].tolist() for batch in named if isinstance(batch, dict)] == [[1, 2]]
    stream = open_source(Stream([(row, 1) for row in x]))
    assert isinstance(stream, StreamSource)
    assert [len(as_one(batch)) for batch in stream.batches(4)] == [4, 4, 2]
    assert torch.equal(rows_of(stream, 3), x)


# ---- NumPy's files


@pytest.mark.parametrize("dtype", ["u1", "<f4", ">f8", "<i8", "?", "<u2", "<f2"])
def test_npy_files(tmp_path: Path, dtype: str) -> None:
    x = (np.arange(7 * 6) % 2 if dtype == "?" else np.arange(7 * 6)).reshape(7, 2, 3).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    source = open_source(str(tmp_path / "x.npy"))
    assert isinstance(source, NpyFile)
    assert source.sample_shape == (2, 3)
    check_indexed(source, 7)
    assert np.array_equal(rows_of(source, 4), x)
    assert torch.equal(rows_of(source, 4), rows_of(open_source(x), 4)), "as if it had been in memory"


def test_npy_files_are_read_in_pieces(tmp_path: Path) -> None:
    rows = np.arange(4000, dtype=np.float32).repeat(1000).reshape(4000, 1000)  # 16 MB
    np.save(tmp_path / "x.npy", rows)
    source = NpyFile(tmp_path / "x.npy")
    tracemalloc.start()
    try:
        assert [float(batch[0, 0]) for batch in source.batches(50)] == list(range(0, 4000, 50))
        source.take(np.array([3999, 0]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 50 * 4000 <= peak < 1_000_000


def test_npy_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"

    def save(x: np.ndarray) -> bytes:
        file = io.BytesIO()
        np.save(file, x, allow_pickle=True)
        return file.getvalue()

    good = save(np.zeros((3, 2)))
    for content, match in [
        (save(np.array([{"a": 1}, None])), "dtype object is not supported"),
        (save(np.array(["text"])), "dtype <U4 is not supported"),
        (save(np.zeros(2, [("a", "f4")])), "Save numbers or booleans"),
        (save(np.zeros((0, 2))), "empty"),
        (save(np.array(1.0)), "empty"),
        (save(np.asfortranarray(np.zeros((3, 2)))), "Fortran order"),
        (good[:-1], r"needs 176 bytes, it has 175"),
        (good + b"\0", "it has 177"),
        (good.replace(b"(3, 2)", b"(9, 9)"), "damaged, shape"),
        (good.replace(b"(3, 2)", b"(-3,2)"), "empty"),
        (good.replace(b"(3, 2)", b"((((((")[:128], "damaged"),
        (b"\x93NUMPY\x03\x00" + good[8:], "damaged"),
        (b"", "damaged"),
        (b"PK\x03\x04", "damaged"),
    ]:
        path.write_bytes(content)
        refused(path, match)
    path.write_bytes(good)
    source = NpyFile(path)
    path.write_bytes(good[:-9])
    with pytest.raises(InputError, match="shorter"):
        source.take(np.array([2]))
    path.write_bytes(good)
    monkeypatch.setattr(arrays, "available", lambda _: 47)
    with pytest.raises(NotEnoughMemoryError, match="3 samples"):
        next(source.batches(3))
    assert len(next(source.batches(2))) == 2


def test_npz_files(tmp_path: Path) -> None:
    path, x = tmp_path / "x.npz", np.arange(6.0).reshape(3, 2)
    np.savez(path, a=x)
    check_indexed(open_source(path), 3)
    np.savez_compressed(path, a=x + 1, b=np.asfortranarray(x))
    refused(path, r"several arrays \(found: a, b\)")
    refused(f"{path}::c", "no array 'c'")
    assert np.array_equal(rows_of(open_source(f"{path}::b"), 3), x)
    np.savez(path, a=x, x_train=x + 5)
    assert np.array_equal(rows_of(open_source(path), 3), x + 5)
    np.savez(path, a=x, x_train=x, x=x + 5)
    assert np.array_equal(rows_of(open_source(path), 3), x + 5)
    np.savez(path, a=np.array([None]))
    refused(path, "dtype object is not supported")
    path.write_bytes(b"PK\x03\x04 damaged")
    refused(path, "damaged")


def test_npz_bombs(tmp_path: Path) -> None:
    """A member that says more than it holds, and a small file that would not fit the memory."""
    path = tmp_path / "x.npz"
    header = io.BytesIO()
    shape = (2**40,)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(100))
    refused(path, "needs 1099511627904 bytes, it has 228")
    content = bytearray(path.read_bytes())
    lie = struct.pack("<L", 2**32 - 2)
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):  # the uncompressed size, in both places
        start = content.index(signature) + offset
        content[start : start + 4] = lie
    path.write_bytes(content)
    refused(path, "claims 4,294,967,294 bytes, compressed to 228")
    np.savez_compressed(path, x=np.zeros(2**20, np.uint8))
    assert path.stat().st_size < 5000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "available", lambda _: 2**20 - 1)
        with pytest.raises(NotEnoughMemoryError, match="read row by row"):
            open_source(path)


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.csv", "does not exist")
    (tmp_path / "x.docx").write_bytes(b"")
    refused(tmp_path / "x.docx", "this kind of file is not supported. Pass an array")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "folder: no images")
    os.mkfifo(tmp_path / "x.csv")
    refused(tmp_path / "x.csv", "this kind of file is not supported")


# ---- images


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large, and would decode (black) if it were let."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def write_grey(path: Path, level: int, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, level).save(path)


def test_image_folders(tmp_path: Path) -> None:
    for i, name in enumerate(["b.png", "a/z.PNG", "a.bmp", "c/d/e.gif", "f.tiff", "g.webp", "h.pgm"]):
        write_grey(tmp_path / name, 30 * i)
    write_grey(tmp_path / ".hidden.png", 1)
    write_grey(tmp_path / ".git" / "x.png", 1)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "inside.png").symlink_to(tmp_path / "b.png")
    outside = tmp_path.parent / "outside.png"
    write_grey(outside, 1)
    (tmp_path / "out.png").symlink_to(outside)
    (tmp_path / "loop").symlink_to(tmp_path)
    source = open_source(tmp_path, form=Picture(4, 6, 1))
    assert isinstance(source, ImageFolder)
    assert source.files == ["a.bmp", "a/z.PNG", "b.png", "c/d/e.gif", "f.tiff", "g.webp", "h.pgm", "inside.png"]
    check_indexed(source, 8)
    assert rows_of(source, 3).dtype == torch.uint8
    assert rows_of(source, 3).shape == (8, 1, 4, 6)
    assert rows_of(source, 3)[:, 0, 0, 0].tolist() == [60, 30, 0, 90, 120, 150, 180, 0]
    assert source.names == source.files
    assert source.skipped == {}
    alone = open_source(tmp_path / "a.bmp")
    assert form_of(alone) == Picture(4, 6, 1)
    assert rows_of(alone, 2).unique().tolist() == [60]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([("L", (6, 4)), ("1", (6, 4)), ("I;16", (6, 4)), ("LA", (6, 4))], Picture(4, 6, 1)),
        ([("L", (6, 4)), ("RGB", (6, 4))], Picture(4, 6, 3)),
        ([("L", (6, 4)), ("L", (4, 6))], Picture(64, 64, 1)),
        ([("P", (129, 4))], Picture(64, 64, 3)),
        ([("RGBA", (128, 4))], Picture(4, 128, 3)),
    ],
)
def test_pictures_are_chosen_by_a_look(tmp_path: Path, made: list[tuple[str, tuple[int, int]]], expected: Any) -> None:
    for i, (mode, size) in enumerate(made):
        Image.new(mode, size).save(tmp_path / f"{i}.png")
    (tmp_path / "bad.png").write_bytes(bomb(10**4, 10**4))
    assert ImageFolder(tmp_path).picture == expected


def decoded(path: Path, picture: Picture) -> np.ndarray:
    return ImageFolder(path, picture).take(np.array([0]))[0].numpy()


def test_images_cover_the_picture_and_are_cropped(tmp_path: Path) -> None:
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = (255, 128, 0)
    Image.fromarray(wide).save(tmp_path / "x.png")
    middle = decoded(tmp_path / "x.png", Picture(10, 10, 3))
    assert (middle == np.array([255, 128, 0])[:, None, None]).all()
    assert decoded(tmp_path / "x.png", Picture(20, 80, 3)).shape == (3, 20, 80)
    checks = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(checks).save(tmp_path / "y.png")
    small = decoded(tmp_path / "y.png", Picture(8, 8, 1))
    assert abs(small.astype(int) - 127).max() <= 2, "scaled down with a filter, not by dropping pixels"


def test_large_jpegs_are_decoded_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (1600, 1600), (10, 200, 30)).save(tmp_path / "x.jpg")
    sizes = []
    load = Image.Image.load
    monkeypatch.setattr(Image.Image, "load", lambda self: (sizes.append(self.size), load(self))[1])
    pixels = decoded(tmp_path / "x.jpg", Picture(32, 32, 3))
    assert max(sizes) == (200, 200)
    assert abs(pixels.mean((1, 2)) - (10, 200, 30)).max() < 3


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    upright = np.kron(np.array([[0, 80], [160, 240], [40, 200]], np.uint8), np.ones((16, 16), np.uint8))
    undo = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}[orientation]
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.T,
        6: np.rot90(upright, -1), 7: upright[::-1, ::-1].T, 8: np.rot90(upright),
    }[undo]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(np.ascontiguousarray(stored)).convert("RGB").save(path, exif=exif, quality=100)
    source = ImageFolder(path)
    assert source.picture == Picture(48, 32, 3)
    assert abs(rows_of(source, 1)[0, 0].numpy().astype(int) - upright).max() <= 3


def test_modes_become_bytes(tmp_path: Path) -> None:
    grey, colour = Picture(1, 2, 1), Picture(1, 2, 3)
    for dtype, name in ((np.uint16, "x.png"), (np.int32, "x.pgm"), (np.int32, "y.tif")):
        Image.fromarray(np.array([[0, 65535]], dtype)).save(tmp_path / name)
        assert decoded(tmp_path / name, grey).tolist() == [[[0, 255]]]
    Image.fromarray(np.array([[257 * 77, 257 * 200]], np.uint16)).save(tmp_path / "x.tif")
    assert decoded(tmp_path / "x.tif", colour).tolist() == [[[77, 200]]] * 3
    for values, expected in ([0.0, 1.0], [0, 255]), ([3.0, 999.0], [3, 255]):
        Image.fromarray(np.array([values], np.float32)).save(tmp_path / "x.tif")
        assert decoded(tmp_path / "x.tif", grey).tolist() == [[expected]]
    clear = Image.new("RGBA", (2, 1), (200, 100, 50, 255))
    clear.putpixel((1, 0), (200, 100, 50, 0))
    clear.save(tmp_path / "x.png")
    assert decoded(tmp_path / "x.png", colour)[:, 0].T.tolist() == [[200, 100, 50], [0, 0, 0]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([9, 8, 7, 50, 60, 70])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "x.png")
    assert decoded(tmp_path / "x.png", colour)[:, 0].T.tolist() == [[9, 8, 7], [50, 60, 70]]
    palette.save(tmp_path / "x.png", transparency=bytes([0, 255]))
    assert decoded(tmp_path / "x.png", colour)[:, 0].T.tolist() == [[0, 0, 0], [50, 60, 70]]
    Image.new("CMYK", (2, 1), (0, 255, 255, 0)).save(tmp_path / "x.tif")
    assert decoded(tmp_path / "x.tif", colour)[:, 0].T.tolist() == [[255, 0, 0]] * 2
    frames = [Image.new("RGB", (2, 1), (level, level, level)) for level in (10, 200)]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert decoded(tmp_path / "x.gif", grey).tolist() == [[[10, 10]]]


def test_unreadable_images_are_skipped_with_a_reason(tmp_path: Path) -> None:
    write_grey(tmp_path / "b.png", 5)
    write_grey(tmp_path / "z.png", 6)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8))
    noise.save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-800])
    (tmp_path / "bomb.png").write_bytes(bomb(8001, 8000))
    (tmp_path / "larger.png").write_bytes(bomb(10_000, 10_000))  # Pillow would warn
    (tmp_path / "largest.png").write_bytes(bomb(100_000, 100_000))  # Pillow would refuse
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.gif").touch()
    Image.fromarray(np.array([[np.nan, 1]], np.float32)).save(tmp_path / "nan.tif")
    source = ImageFolder(tmp_path)
    assert len(source) == 2
    assert source.names == ["b.png", "z.png"]
    assert source.take(np.array([1, 0]))[:, 0, 0, 0].tolist() == [6, 5]
    assert list(source.skipped) == [name for name in source.files if name not in source.names]
    for name in ("bomb.png", "larger.png", "largest.png"):
        assert source.skipped[name] == "more than 64,000,000 pixels"
    assert "truncated" in source.skipped["cut.jpg"]
    assert source.skipped["text.jpg"] == source.skipped["empty.gif"] == "not an image, or damaged"
    assert not any(str(tmp_path) in why for why in source.skipped.values())
    (tmp_path / "z.png").write_bytes(b"gone")
    with pytest.raises(InputError, match=r"z\.png: could be read before"):
        source.take(np.array([1]))
    for name in source.names:
        (tmp_path / name).unlink()
    refused(tmp_path, r"none of its 7 images can be read \(bomb\.png: more than")


def test_bombs_are_never_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb.png").write_bytes(bomb(8001, 8000))
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    refused(tmp_path, "more than 64,000,000 pixels")


def test_pillow_is_quiet_and_filters_stay_as_they_were(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), (9, 9, 9))
    broken = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x0f\x01\x02\0\xff\xff\0\0\x1a\0\0\0"
    image.save(tmp_path / "x.jpg", exif=broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Image.open(tmp_path / "x.jpg").getexif()
        assert caught, "Pillow warns of this file"
    before = list(warnings.filters)
    source = ImageFolder(tmp_path)
    assert len(rows_of(source, 1)) == 1
    assert source.skipped == {}
    batches = source.batches(1)
    next(batches)
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert list(warnings.filters) == before


def test_folders_are_decoded_little_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(60):
        write_grey(tmp_path / f"{i:02}.png", i)
    begun: list[str] = []
    lock = threading.Lock()
    decode = images.decode

    def counted(path: Path, picture: Picture) -> np.ndarray:
        with lock:
            begun.append(path.name)
        return decode(path, picture)

    monkeypatch.setattr(images, "decode", counted)
    source = ImageFolder(tmp_path)
    assert begun == []
    used = 0
    for batch in source.batches(4):
        used += len(batch)
        assert len(begun) <= used + images.AHEAD
    assert sorted(begun) == source.files
    assert len(begun) == used == 60
    with contextlib.closing(source.batches(1)) as batches:  # pyright: ignore[reportArgumentType]
        next(batches)
    assert len(begun) <= 60 + 1 + images.AHEAD, "an iteration that is given up stops decoding"


# ---- tables

ROWS = {
    "size": ["1", "3", "", "5", "3"],
    "colour": ["red", "blue", "red", "NA", " red "],
    "whole": [True, False, True, True, False],
}


def test_columns_are_learned() -> None:
    table = Table.infer([{name: values[:2] for name, values in ROWS.items()}, {n: v[2:] for n, v in ROWS.items()}])
    size, colour, whole = table.columns
    assert (size.name, size.kind, size.centre, size.missing) == ("size", "number", 3, True)
    assert math.isclose(size.scale, math.sqrt(2))
    assert (colour.categories, colour.frequencies, colour.missing) == (("red", "blue"), (0.75, 0.25), True)
    assert math.isclose(whole.centre, 0.6)
    assert (whole.kind, whole.missing) == ("number", False)
    later = {"whole": [1, 0, None], "colour": ["blue", "green", None], "size": ["-2e1", 7, Decimal("1.5")]}
    expected = [[-20, 1, 1], [7, -1, 0], [1.5, math.nan, math.nan]]
    assert np.array_equal(table.encode(later), expected, equal_nan=True)
    out = table.deviation(table.encode(later))
    assert np.allclose(out[:, 0], [23 / math.sqrt(2), 4 / math.sqrt(2), 1.5 / math.sqrt(2)])
    assert np.allclose(out[:, 1], [-math.log10(0.25), 10, 0])
    assert out[2, 2] == 10, "no value was missing in training"


def test_rows_that_do_not_fit_are_refused_by_name() -> None:
    table = Table.infer([ROWS])
    for change, match in [
        ({"size": ["1", "x", "3", "4", "5"]}, "column 'size', row 12: 'x' is not a finite number"),
        ({"size": ["1", "2", "3", "inf", "5"]}, "column 'size', row 14: 'inf'"),
        ({"size": ["1_0"] * 5}, "column 'size', row 11: '1_0'"),
        ({"colour": [["a"]] * 5}, "'colour': nested values"),
        ({"more": [1] * 5, "other": [1] * 5}, "unknown columns: 'more', 'other'"),
        ({"size": ["1"]}, "different lengths"),
    ]:
        with pytest.raises(InputError, match=match):
            table.encode(ROWS | change, first_row=11)
    with pytest.raises(InputError, match="no column 'colour', 'size'"):
        table.encode({"whole": [1]})


def test_columns_of_no_use_are_left_out_with_a_warning() -> None:
    rows = {
        "id": [f"customer {i}" for i in range(200)],
        "nothing": ["", None] * 100,
        "letter": list("ab") * 100,
    }
    with pytest.warns(
        OnefoldWarning,
        match=r"the table: columns not used: 'id' \(nearly every value is different\); 'nothing' \(no values\)",
    ):
        table = Table.infer([rows])
    assert table.ignored == ("id", "nothing")
    assert [column.name for column in table.columns] == ["letter"]
    assert table.encode({"letter": ["b"]}).tolist() == table.encode({"letter": ["b"], "id": ["x"]}).tolist() == [[1]]
    with pytest.raises(InputError, match=r"no usable column \('id'"):
        Table.infer([{"id": rows["id"]}])
    for values in (["inf", "1"], [1.0, math.inf], [10**400, 1], ["1e999"]):
        with pytest.raises(InputError, match="column 'x': infinite values"):
            Table.infer([{"x": values}])
    with pytest.raises(InputError, match="too large to be scaled"):
        Table.infer([{"x": [1e300, -1e300]}])
    with pytest.raises(InputError, match="nested values"):
        Table.infer([{"x": [{"a": 1}]}])
    for nothing in ([], [{}], [{"x": []}]):
        with pytest.raises(InputError, match=r"^the table: no rows\. Pass at least one\.$"):
            Table.infer(nothing)


def test_paths_of_images_in_a_column_are_warned_of_by_name(tmp_path: Path) -> None:
    few, many = [f"photos/{i % 8}.JPG" for i in range(600)], [f"{i % 150}.png" for i in range(600)]
    others = {"kind": ["jpg", "png"] * 300, "logo": ["", "a.png", "none", "none"] * 150, "n": list(range(600))}
    with pytest.warns(OnefoldWarning, match=r"^the table: column 'photo', 'again': paths of images .* drop the column"):
        table = Table.infer([{"photo": few, "again": many, **others}])
    assert [column.kind for column in table.columns] == ["category"] * 4 + ["number"]
    (tmp_path / "x.csv").write_text("photo,n\n" + "\n".join(f"{text},1" for text in few))
    with pytest.warns(OnefoldWarning, match=r"/x\.csv: column 'photo': "):
        form = form_of(open_source(tmp_path / "x.csv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Table.infer([others])
        open_source(tmp_path / "x.csv", form=form)


def test_only_the_most_frequent_categories_are_told_apart() -> None:
    values = [f"{i:03}" for i in range(100) for _ in range(4 if i in (7, 99) else 2)]
    (column,) = Table.infer([{"x": [f"c{value}" for value in values]}]).columns
    assert column.categories[:3] == ("c007", "c099", "c000"), "by frequency, then by name"
    assert len(column.categories) == 64
    assert math.isclose(column.unlisted_share, 1 - (8 + 62 * 2) / 204)
    table = Table((column,))
    assert table.encode({"x": ["c098", "c099"]}).tolist() == [[-1], [1]]
    assert TableEncoder(table)(torch.tensor([[-1.0]]).double())[0, 64] == 1, "it was lit in training"
    assert np.allclose(table.deviation(np.array([[-1.0]])), -math.log10(column.unlisted_share))


def test_counting_is_bounded_and_still_right() -> None:
    tally = CategoryCounts()
    distinct = 5 * MOST_COUNTED
    for start in range(0, distinct, 4096):
        tally.add([f"v{i}" for i in range(start, start + 4096)] + ["usual"] * 100 + ["rarer"] * 50)
        assert len(tally._counts) <= MOST_COUNTED
        assert len(tally._hashes) <= MOST_COUNTED
    assert [text for text, _ in tally.most_common(2)] == ["usual", "rarer"]
    assert tally.most_common(2)[0][1] == distinct // 4096 * 100
    assert abs(tally.distinct / distinct - 1) < 0.05
    assert tally.is_identifier
    for _ in range(2):
        for start in range(0, distinct, 4096):
            tally.add([f"v{i}" for i in range(start, start + 4096)])
    assert not tally.is_identifier, "each value came three times"


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), min_size=1, max_size=6), st.integers(-3, 3))
def test_moments_do_not_depend_on_the_chunks(parts: list[list[float]], power: int) -> None:
    values = [value * 10.0**power + 1.7e9 for part in parts for value in part]
    if not values:
        return
    (column,) = Table.infer(iter({"x": [v * 10.0**power + 1.7e9 for v in part]} for part in parts)).columns
    assert math.isclose(column.centre, float(np.mean(values)), rel_tol=1e-12)
    if len(set(values)) == 1:
        assert (column.centre, column.scale) == (values[0], 1)
    else:
        assert math.isclose(column.scale, float(np.std(values)), rel_tol=1e-6, abs_tol=1e-6)


cells = st.one_of(st.none(), st.floats(-1e9, 1e9).map(repr), st.sampled_from(["red", "green", "blue"]), st.integers())


@given(st.lists(cells.filter(lambda v: abs(v) < 2**53 if isinstance(v, int) else True), min_size=1, max_size=40))
def test_codes_hold_the_values(values: list[Any]) -> None:
    if all(value is None for value in values):
        return
    table = Table.infer([{"x": values}])
    (column,) = table.columns
    for value, code in zip(values, table.encode({"x": values})[:, 0], strict=True):
        if value is None:
            assert math.isnan(code)
        elif column.kind == "number":
            assert code == float(value)
        else:
            assert column.categories[int(code)] == str(value)
    assert from_json(Table, json.loads(json.dumps(to_json(table)))) == table


def test_tables_become_floats() -> None:
    table = Table.infer([ROWS])
    encoder = TableEncoder(table)
    z = [(v - 3) / math.sqrt(2) for v in (1, 3)]
    w = math.sqrt(0.24)
    codes = torch.tensor([[1, 0, 1], [3, 1, 0], [math.nan, -1, 1], [1e300, math.nan, math.nan]]).double()
    codes[3, 0] = 1e300
    expected = [  # size, whole | red, blue, never seen | missing size, colour, whole
        [z[0], 0.4 / w, 1, 0, 0, 0, 0, 0],
        [z[1], -0.6 / w, 0, 1, 0, 0, 0, 0],
        [0, 0.4 / w, 0, 0, FAR, 1, 0, 0],
        [1e6, 0, 0, 0, 0, 0, 1, FAR],
    ]
    assert encoder.width == 8
    assert encoder(codes).dtype == torch.float32
    assert torch.allclose(encoder(codes), torch.tensor(expected))
    seconds = Table((Column("t", "number", centre=1.7e9, scale=1.0),))
    assert TableEncoder(seconds)(torch.tensor([[1.7e9 + 1]], dtype=torch.float64))[0, 0] == 1, "in float64"


@pytest.mark.parametrize("names", [["size", "colour"], ["size"], ["colour"]])
def test_the_encoder_can_be_exported(names: list[str]) -> None:
    table = Table.infer([{name: ROWS[name] for name in names}])
    encoder = TableEncoder(table)
    codes = torch.from_numpy(table.encode({"size": ["2", ""] * 3, "colour": ["red", "new"] * 3}
                                         if len(names) == 2 else {names[0]: ROWS[names[0]]}))  # fmt: skip
    batch = torch.export.Dim("batch", min=1, max=10**6)
    program = torch.export.export(encoder, (codes,), dynamic_shapes=({0: batch},))
    for count in (1, 3, 5):
        assert torch.equal(program.module()(codes[:count]), encoder(codes[:count]))


def rows_of_csv(path: Path, text: str | bytes) -> Tensor:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    source = open_source(path)
    assert isinstance(source, TableFile)
    return rows_of(source, 2)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_files(tmp_path: Path, delimiter: str, end: str) -> None:
    lines = ["a,b b,c", '1,"x, y",-1', "2,,n/a", "", '3,"z ""q"", y",0.5']
    text = end.join(lines[0:1] + lines[1:])
    if delimiter != ",":
        text = text.replace(", y", "; y" if delimiter != ";" else ": y").replace(",", delimiter)
    rows = rows_of_csv(tmp_path / "x.csv", b"\xef\xbb\xbf" + text.encode())
    nan = math.nan
    assert np.array_equal(rows, [[1, 0, -1], [2, nan, nan], [3, 1, 0.5]], equal_nan=True)
    assert form_of(open_source(tmp_path / "x.csv")).columns[1].name == "b b"  # pyright: ignore


def test_csv_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.csv").write_text("n,t\n" + "\n".join(f"{i},{'odd' if i % 2 else 'even'}" for i in range(1000)))
    whole = rows_of(open_source(tmp_path / "x.csv"), 1000)
    monkeypatch.setattr(table_files, "MOST_ROWS", 7)
    source = TableFile(tmp_path / "x.csv")
    assert source.table == form_of(open_source(tmp_path / "x.csv"))
    assert torch.equal(rows_of(source, 10), whole)
    assert [len(batch) for batch in source.batches(300)] == [300, 300, 300, 100]
    monkeypatch.setattr(table_files, "MOST_CHARACTERS", 20)
    assert torch.equal(rows_of(TableFile(tmp_path / "x.csv"), 10), whole)
    text = (tmp_path / "x.csv").read_text().replace("\n800,", "\nmany,")
    (tmp_path / "x.csv").write_text(text)
    refused(tmp_path / "x.csv", "column 'n', row 801: 'many'", form=source.table)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("a,b\n", r"/x\.csv: no rows\. Pass at least one\.$"),
        ("a\nNA\n\n", r"/x\.csv: no usable column \('a' \(no values\)\)\. Pass"),
        ("1.5,2\n3,4\n", "first row holds numbers"),
        ("a,b,a\n1,2,3\n", "2 columns of the name 'a'"),
        (",a\n0,1\n", "column 1 has no name"),
        ("a,b\n1,2\n\n3\n", "line 4: 1 fields, the header has 2"),
        ("a,b\n1,2\n3,4,5\n", "line 3: 3 fields"),
        ("a,b\n1,\0\n", "line 2: NUL byte"),
        (b"a,b\n1,\xff\n", "not UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), "not UTF-8"),
        ('a,b\n1,"never closed\n', "line 2: not CSV"),
        ('a,b\n1,"x"y\n', "line 2: not CSV"),
        ("a,b\n1," + "x" * 140_000, "line 2: not CSV .*field limit"),
        (",".join(f"c{i}" for i in range(100_001)), r"too many columns \(100,001\)"),
    ],
)
def test_csv_files_that_cannot_be_used(tmp_path: Path, text: str | bytes, match: str) -> None:
    with pytest.raises(InputError, match=match):
        rows_of_csv(tmp_path / "x.csv", text)


def test_csv_lines_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "LONGEST_LINE", 1000)
    with pytest.raises(InputError, match="line 2: longer than 1,000"):
        rows_of_csv(tmp_path / "x.csv", "a,b\n" + "1," * 10_000)
    assert rows_of_csv(tmp_path / "x.tsv", "a\n1\n").tolist() == [[1]], "one column needs no delimiter"
    assert rows_of_csv(tmp_path / "y.csv", "0,1\n5,6\n").tolist() == [[5, 6]], "names that pandas gives"


def test_parquet_files(tmp_path: Path) -> None:
    day = datetime.date(1970, 1, 2)
    moment = datetime.datetime(1970, 1, 1, 0, 1)
    table = pa.table(
        {
            "n": pa.array([1, None, 3], pa.int32()),
            "f": pa.array(np.array([0.5, 1, 2], np.float16)),
            "yes": pa.array([True, None, False]),
            "cost": pa.array([Decimal("1.25"), None, Decimal("2.50")]),
            "day": pa.array([day, None, day]),
            "at": pa.array([moment, None, moment], pa.timestamp("ms", "UTC")),
            "clock": pa.array([datetime.time(1), None, datetime.time(0, 0, 1)]),
            "span": pa.array([datetime.timedelta(hours=1), None, datetime.timedelta(0)]),
            "name": pa.array(["b", None, "a"]),
            "kind": pa.array(["u", None, "u"]).dictionary_encode(),
            "raw": pa.array([b"p", None, b"p"]),
        }
    )
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    source = open_source(tmp_path / "x.parquet")
    nan = math.nan
    expected = [
        [1, 0.5, 1, 1.25, 86400, 60, 3600, 3600, 1, 0, 0],
        [nan, 1, nan, nan, nan, nan, nan, nan, nan, nan, nan],
        [3, 2, 0, 2.5, 86400, 60, 1, 0, 0, 0, 0],
    ]
    for size in (1, 3):
        assert np.array_equal(rows_of(source, size), expected, equal_nan=True)
    frame = table.to_pandas()
    check_frame = rows_of(open_source(frame, form=form_of(source)), 2)
    assert np.array_equal(check_frame, expected, equal_nan=True), "a frame is read as its file is"


def test_parquet_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"a": [[1, 2]]}), path)
    refused(path, "column 'a' is nested")
    parquet.write_table(pa.Table.from_arrays([pa.array([1])] * 2, ["a", "a"]), path)
    refused(path, "2 columns of the name 'a'")
    parquet.write_table(pa.table({"a": list(range(1000))}), path)
    content = path.read_bytes()
    path.write_bytes(content[:-50])
    refused(path, "damaged")
    path.write_bytes(content[:4] + bytes(1000) + content[1004:])
    refused(path, "damaged")
    for groups in (0, 1):
        with parquet.ParquetWriter(path, pa.schema({"a": pa.int64()})) as writer:
            for _ in range(groups):
                writer.write_table(pa.table({"a": pa.array([], pa.int64())}))
        refused(path, r"/x\.parquet: no rows\. Pass at least one\.$")
    path.write_bytes(content)
    monkeypatch.setattr("onefold.inputs.table_files.available", lambda _: 100)
    with pytest.raises(NotEnoughMemoryError, match="smaller row groups"):
        open_source(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onefold\[tables\]'"):
        open_source(path)


def test_data_frames() -> None:
    frame = pd.DataFrame(
        {
            "n": pd.array([1, None, 3, 4], "Int64"),
            "x": [0.5, math.nan, 1, 2],
            "t": pd.Categorical(["u", "v", None, "u"]),
            7: pd.to_datetime(["1970-01-01 00:00:05", None, None, "1970-01-02 00:00:00"]),
        },
        index=[5, 5, 6, 7],
    )
    source = open_source(frame)
    assert isinstance(source, TableFrame)
    nan = math.nan
    expected = [[1, 0.5, 0, 5], [nan, nan, 1, nan], [3, 1, nan, nan], [4, 2, 0, 86400]]
    assert np.array_equal(rows_of(source, 3), expected, equal_nan=True)
    assert np.array_equal(as_one(source.take(np.array([3, 0, 0]))), [expected[i] for i in (3, 0, 0)])
    turned = open_source(frame[[7, "t", "x", "n"]], form=source.table)
    assert np.array_equal(rows_of(turned, 4), expected, equal_nan=True), "the order of the columns is free"
    check_indexed(open_source(pd.DataFrame({"a": range(7)})), 7)
    refused(frame[["n"]], "no column '7', 't', 'x'", form=source.table)
    refused(frame.iloc[:0], "x: empty")
    refused(pd.DataFrame([[1, 2]], columns=["a", "a"]), "2 columns of the name 'a'")


def test_arrow_tables_are_read_as_data_frames() -> None:
    day = datetime.date(1970, 1, 2)
    table = pa.table(
        {
            "n": pa.array([1, None, 3, 4, 5], pa.int32()),
            "x": np.array([0.5, 1, 2, math.nan, 4]),
            "yes": [True, None, False, True, True],
            "day": [day, None, day, day, None],
            "t": ["u", "v", None, "u", "w"],
            "raw": pa.array(["u", "v", None, "u", "w"], pa.string_view()),
            "kind": pa.array(["p", "q", None, "p", "p"]).dictionary_encode(),
        }
    )
    other = pa.array(["q", "r", "p"]).dictionary_encode()  # with a dictionary of its own
    pieces = pa.concat_tables([table.slice(1, 2), table, table.slice(2, 3).set_column(6, "kind", other)])
    with pytest.warns(OnefoldWarning, match="^x: columns not used: 'empty'"):
        source = open_source(pieces.append_column("empty", pa.nulls(10)))
    assert isinstance(source, TableFrame)
    frame = pieces.to_pandas()
    expected = open_source(frame)
    assert isinstance(expected, TableFrame)
    assert source.table.columns == expected.table.columns
    assert np.array_equal(rows_of(source, 3), rows_of(expected, 10), equal_nan=True)
    index = np.array([9, 0, 1, 2, 2, 7])
    assert np.array_equal(as_one(source.take(index)), rows_of(expected, 10)[index], equal_nan=True)
    turned = pieces.select(["t", "kind", "raw", "n", "day", "x", "yes"])
    for later in (turned, turned.to_pandas(), turned.combine_chunks().to_batches()[0]):
        rows = rows_of(open_source(later, form=source.table), 4)
        assert np.array_equal(rows, rows_of(expected, 10), equal_nan=True), "the order of the columns is free"
    refused(table.select(["x"]), "no column 'day', 'kind', 'n'", form=source.table)
    refused(table.slice(0, 0), r"x: empty \(shape \(0, 7\)\)")
    refused(pa.table({"a": [[1, 2]]}), "'a': nested values")
    refused(pa.Table.from_arrays([pa.array([1])] * 2, ["a", "a"]), "2 columns of the name 'a'")
    numbers = open_source(pa.table({"b": [1.0, 2], "a": [3, 4]}))
    assert isinstance(numbers, TableFrame)
    assert [column.name for column in numbers.table.columns] == ["b", "a"]


class LikePolars:
    """A frame without iloc: rows by an array of numbers, as polars gives them."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.data = columns
        self.columns = list(columns)
        self.shape = (len(next(iter(columns.values()))), len(columns))

    def __len__(self) -> int:
        return self.shape[0]

    def to_numpy(self) -> np.ndarray:
        return next(iter(self.data.values()))

    def __getitem__(self, key: Any) -> "LikePolars":
        if isinstance(key, str):
            return LikePolars({key: self.data[key]})
        return LikePolars({name: values[key] for name, values in self.data.items()})


def test_frames_without_pandas() -> None:
    check_indexed(open_source(LikePolars({"a": np.arange(5.0), "b": np.array(list("xyxyx"), object)})), 5)


# ---- forms


def test_forms_bind_later_data(tmp_path: Path) -> None:
    write_grey(tmp_path / "x.png", 5)
    (tmp_path / "x.csv").write_text("a\n1\n2\n")
    table = Table((Column("a", "number"),))
    refused(tmp_path / "x.png", "is fitted on a table", form=table)
    refused(np.zeros((2, 1)), "is fitted on a table", form=table)
    refused(tmp_path / "x.csv", "fitted on images", form=Picture(4, 4, 1))
    refused(ImageFolder(tmp_path), "another form", form=Picture(5, 4, 1))
    assert rows_of(open_source(np.zeros((2, 1, 4, 4)), form=Picture(4, 4, 1)), 2).shape == (2, 1, 4, 4)
    assert rows_of(open_source(tmp_path, form=Picture(5, 9, 3)), 1).shape == (1, 3, 5, 9)


NUMBER = to_json(Table((Column("a", "number"),)))
CATEGORY = to_json(Table((Column("a", "category", ("u", "v"), frequencies=(0.75, 0.25)),)))


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"height": 8, "width": 8},
        {"height": 8, "width": 8, "channels": 3, "more": 1},
        {"height": 0, "width": 8, "channels": 3},
        {"height": 8, "width": 4097, "channels": 3},
        {"height": 8, "width": 8, "channels": 2},
        {"height": 8.0, "width": 8, "channels": 3},
        {"height": True, "width": 8, "channels": 3},
        NUMBER | {"columns": []},
        NUMBER | {"columns": NUMBER["columns"] * 2},
        NUMBER | {"columns": NUMBER["columns"] * 100_001},
        NUMBER | {"columns": ["a"]},
        NUMBER | {"ignored": ["a"]},
        NUMBER | {"ignored": "b"},
        *(
            base | {"columns": [base["columns"][0] | change]}
            for base, change in [
                (NUMBER, {"scale": 0.0}),
                (NUMBER, {"scale": math.inf}),
                (NUMBER, {"centre": math.nan}),
                (NUMBER, {"centre": "1"}),
                (NUMBER, {"missing": 1}),
                (NUMBER, {"name": None}),
                (NUMBER, {"kind": "date"}),
                (NUMBER, {"categories": ["u"], "frequencies": [1.0]}),
                (NUMBER, {"extra": 1}),
                (CATEGORY, {"categories": ["u"]}),
                (CATEGORY, {"categories": ["u", "u"]}),
                (CATEGORY, {"categories": [], "frequencies": []}),
                (CATEGORY, {"frequencies": [0.75, 0.5]}),
                (CATEGORY, {"frequencies": [1.0, 0.0]}),
                (CATEGORY, {"categories": [str(i) for i in range(65)], "frequencies": [0.01] * 65}),
            ]
        ),
    ],
)
def test_forms_are_read_with_suspicion(content: Any) -> None:
    reader = to_json(Reader("vectors", {"x": (1,)}, {"x": "float32"}))
    for good in (NUMBER, CATEGORY):
        table = reader | {"kind": "table", "dtypes": {"x": "float64"}, "form": good}
        assert Reader.from_json(table).to_json() == table
    picture = {"height": 4096, "width": 1, "channels": 1}
    images = reader | {"kind": "images", "shapes": {"x": [1, 4096, 1]}, "dtypes": {"x": "uint8"}, "form": picture}
    assert Reader.from_json(images).to_json() == images
    for base in (table, images):
        with pytest.raises(InputError, match=r"^(reader|table|column|picture)"):
            Reader.from_json(base | {"form": content})


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_rows_are_regrouped(lengths: list[int], size: int) -> None:
    rows = np.arange(2.0 * sum(lengths)).reshape(-1, 2)
    parts = np.split(rows, np.cumsum(lengths)[:-1]) if lengths else []
    groups = list(regroup(parts, size))
    assert [len(group) for group in groups[:-1]] == [size] * (len(groups) - 1)
    assert all(0 < len(group) <= size for group in groups)
    assert np.array_equal(np.concatenate([np.empty((0, 2)), *groups]), rows)
