"""Image sets: idx files and their damages, every layout, downloads from servers that fail in every way, archives."""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import threading
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import loadmat, savemat

import onefold.data
from onefold import cli
from onefold.cli import data as command
from onefold.data import ImageSet, catalogue, data_dir, download, fetch, read_set, sets
from onefold.data.catalogue import CATALOGUE, IDX_FILES, CatalogueEntry, Mirror, idx_set
from onefold.data.download import ProgressCallback, RetryPolicy, ignore_progress
from onefold.data.formats import cifar10, idx, notmnist
from onefold.data.formats.cifar10 import read_cifar10
from onefold.data.formats.matlab import read_mat
from onefold.data.formats.notmnist import read_letters
from onefold.data.formats.svhn import read_svhn
from onefold.errors import FileError, InputError, OnefoldWarning

SHARED = Path(__file__).parent.parent.parent / "shared" / "datasets"
QUICK = RetryPolicy(timeout=20, tries=3, pause=0.001)
HASTY = RetryPolicy(timeout=1.0, tries=3, pause=0.001)  # where a server says nothing
KEYS = ("x_train", "y_train", "x_test", "y_test")


def encode(array: np.ndarray) -> bytes:
    """idx, by the definition: two zeros, 8 for bytes, the number of dimensions, each of them, the bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def made_up(train: int = 40, test: int = 20, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x_train": rng.integers(0, 256, (train, 28, 28), np.uint8),
        "y_train": rng.permutation(np.arange(train) % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (test, 28, 28), np.uint8),
        "y_test": rng.permutation(np.arange(test) % 10).astype(np.uint8),
    }


def assert_holds(found: ImageSet, arrays: dict[str, np.ndarray]) -> None:
    for key, array in arrays.items():
        np.testing.assert_array_equal(getattr(found, key), array)


def refusal(error: Exception, *words: object) -> None:
    """One line that has these words in it."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1000
    for word in words:
        assert str(word) in text


# idx


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_exactly(tmp_path: Path, packed: bool) -> None:
    arrays = made_up(5, 3)
    wrap: Callable[[bytes], bytes] = gzip.compress if packed else bytes
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(wrap(encode(arrays["x_train"])))
    labels.write_bytes(wrap(encode(arrays["y_train"])))
    np.testing.assert_array_equal(idx.read_images(images), arrays["x_train"])
    np.testing.assert_array_equal(idx.read_labels(labels), arrays["y_train"])
    with pytest.raises(FileError, match="not an idx file of images") as caught:
        idx.read_images(labels)
    refusal(caught.value, labels, "00 00 08 01")
    small = tmp_path / "small"
    small.write_bytes(wrap(encode(np.zeros((2, 27, 5)))))
    assert idx.read_images(small).shape == (2, 27, 5)


@given(st.data())
def test_damaged_idx_files_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut, lengthened or changed anywhere: refused by name, or read as before; of plain files pixels may differ."""
    images = made_up(3, 1)["x_train"]
    packed = data.draw(st.booleans())
    content = gzip.compress(encode(images)) if packed else encode(images)
    near = st.one_of(
        st.integers(0, 24), st.integers(0, len(content) - 1), st.integers(len(content) - 12, len(content) - 1)
    )
    at = data.draw(near)
    junk = data.draw(st.binary(min_size=1, max_size=40))
    match data.draw(st.sampled_from(["cut", "longer", "inserted", "changed"])):
        case "cut":
            damaged = content[:at]
        case "longer":
            damaged = content + junk
        case "inserted":
            damaged = content[:at] + junk + content[at:]
        case _:
            damaged = (content[:at] + junk + content[at + len(junk) :])[: len(content)]
    path = tmp_path_factory.getbasetemp() / "damaged.idx"
    path.write_bytes(damaged)
    try:
        found = idx.read_images(path)
    except FileError as error:
        refusal(error, f"{path}: ")
        return
    if packed:
        np.testing.assert_array_equal(found, images)
    else:
        assert encode(found) == damaged


def test_an_idx_header_cannot_ask_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    promises = {
        (2**32 - 1,) * 3: "at most 1.0 GiB",
        (2**31, 28, 28): "at most 1.0 GiB",
        (2**20, 28, 28): "822,083,584 bytes",
        (2, 28, 28): "1,568 bytes",
    }
    for wrap in (bytes, gzip.compress):
        for shape, words in promises.items():
            path.write_bytes(wrap(struct.pack(">HBB3I", 0, 8, 3, *shape) + bytes(784)))
            tracemalloc.start()
            with pytest.raises(FileError) as caught:
                idx.read_images(path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            refusal(caught.value, f"{path}: ", *([words] if wrap is bytes or shape[0] > 2 else ["784 of 1,568"]))
            assert peak < 2**21
    path.write_bytes(struct.pack(">HBB3I", 0, 8, 3, 0, 28, 28))
    with pytest.raises(FileError, match=re.escape("no images, its shape is (0, 28, 28)")):
        idx.read_images(path)


def test_a_gzip_bomb_stays_packed(tmp_path: Path) -> None:
    """One image and 64 million zeros after it: no more than a buffer of them is inflated."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(encode(np.ones((1, 28, 28))) + bytes(2**26)))
    tracemalloc.start()
    with pytest.raises(FileError, match="continues after the 784 bytes"):
        idx.read_images(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    path.write_bytes(gzip.compress(encode(np.ones((1, 28, 28)))) + gzip.compress(b"", 1) * 20_000)
    with pytest.raises(FileError, match="claims 784 bytes and it has 400"):
        idx.read_images(path)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "not a file"), (tmp_path, "not a file"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(FileError, match=re.escape(f"{path}: cannot be read ({why})")):
            idx.read_labels(path)


# sets


def lay_out(folder: Path, layout: str, arrays: dict[str, np.ndarray], name: str = "kmnist") -> None:
    if layout == "npz":
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)
        return
    (folder / name).mkdir(parents=True)
    for key in KEYS:
        if layout == "kmnist npz":
            np.savez_compressed(folder / name / sets.KMNIST_FILES[key], arrays[key])
        elif layout == "idx":
            (folder / name / IDX_FILES[key]).write_bytes(encode(arrays[key]))
        else:
            (folder / name / f"{IDX_FILES[key]}.gz").write_bytes(gzip.compress(encode(arrays[key])))


@pytest.mark.parametrize("layout", ["npz", "idx", "idx.gz", "kmnist npz"])
def test_every_layout_gives_the_same_set(tmp_path: Path, layout: str) -> None:
    arrays = made_up()
    lay_out(tmp_path, layout, arrays)
    found = read_set("kmnist", tmp_path)
    assert_holds(found, arrays)
    assert found.name == "kmnist"
    assert found.x_train.dtype == np.uint8
    assert found.y_train is not None
    assert found.y_train.dtype == np.int64
    assert list(sets.list_sets(tmp_path)) == ["kmnist"]
    path = tmp_path / ("kmnist.npz" if layout == "npz" else "kmnist")
    assert_holds(read_set(f"mine={path}", tmp_path / "nowhere"), arrays)


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    lay_out(tmp_path, "npz", made_up(), "kmnist_10k")
    with pytest.raises(InputError) as caught:
        read_set("mnist", tmp_path)
    assert str(caught.value) == (
        f"'mnist': no such set in {tmp_path} (it has kmnist_10k). Download it: onefold data fetch mnist "
        f"--data-dir {tmp_path}"
    )
    with pytest.raises(InputError) as caught:
        read_set("cifar", tmp_path / "nowhere")
    refusal(caught.value, "'cifar'", "it has no sets", "mnist, fashion_mnist, kmnist, notmnist", "cifar=path/to")
    for name in ("../kmnist_10k", "", "a/b", ".hidden", "x\ny", "/etc/passwd", "ä", "=x.npz"):
        with pytest.raises(InputError, match="not a name of a set"):
            read_set(name, tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_set(f"mine={tmp_path / 'none.npz'}", tmp_path)


def test_half_a_set_is_not_a_set(tmp_path: Path) -> None:
    lay_out(tmp_path, "idx.gz", made_up())
    (tmp_path / "kmnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert sets.list_sets(tmp_path) == {}
    with pytest.raises(FileError) as caught:
        read_set("kmnist", tmp_path)
    hint = f"Download the rest: onefold data fetch kmnist --data-dir {tmp_path}"
    assert str(caught.value) == f"{tmp_path / 'kmnist'}: t10k-labels-idx1-ubyte.gz missing. {hint}"


def test_ones_own_set_may_lack_labels_and_be_of_fractions(tmp_path: Path) -> None:
    arrays = made_up(6, 5)
    images = {key: arrays[key] / 255 for key in ("x_train", "x_test")}
    path = tmp_path / "some file.npz"
    np.savez(path, allow_pickle=False, **images)
    found = read_set(f"mine={path}", tmp_path / "nowhere")
    assert (found.name, found.y_train, found.y_test) == ("mine", None, None)
    assert found.x_train.dtype == np.float32
    np.testing.assert_array_equal(found.x_test, (arrays["x_test"] / 255).astype(np.float32))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("x_train", np.zeros((4, 32, 32), np.uint8), "images have different shapes, (32, 32) and (28, 28)"),
        ("x_train", np.zeros((4, 2, 28, 28), np.uint8), "x_train: shape (4, 2, 28, 28) is not supported"),
        ("x_train", np.zeros((4, 1025, 1), np.uint8), "at most 1024 pixels a side"),
        ("x_test", np.zeros((3, 28), np.uint8), "x_test: shape (3, 28) is not supported"),
        ("x_test", np.zeros((3, 28, 28), np.int64), "x_test: dtype int64 is not supported. Save bytes from 0"),
        ("x_test", np.full((3, 28, 28), 255.0), "x_test: values from 255 to 255. Floats must lie between 0 and 1"),
        ("x_test", np.full((3, 28, 28), np.nan), "x_test: values from nan to nan"),
        ("x_test", np.full((3, 28, 28), -0.1, np.float16), "from -0.0999756 to"),
        ("y_train", np.arange(5), "y_train: shape (5,), but there are 4 images"),
        ("y_train", np.zeros((4, 1), np.int64), "y_train: shape (4, 1)"),
        ("y_train", np.array([0, 1, 2, -1]), "y_train: labels from -1 to 2"),
        ("y_train", np.array([0, 1, 2, 10**12]), "to 1e+12. They must be 0 to 999"),
        ("y_train", np.array([0, 1, 2, 0.5]), "y_train: dtype float64 with fractions"),
        ("y_test", np.array([0, 1, 4]), "label 4 in y_test, but none above 3 in y_train"),
        ("y_test", None, "only y_train"),
        ("x_test", None, "no x_test (it has x_train, y_test, y_train)"),
    ],
)  # fmt: skip
def test_arrays_that_make_no_set_are_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    arrays: dict[str, Any] = {
        "x_train": np.zeros((4, 28, 28), np.uint8), "y_train": np.arange(4),
        "x_test": np.zeros((3, 28, 28), np.uint8), "y_test": np.arange(3),
    }  # fmt: skip
    arrays[key] = value
    path = tmp_path / "mine.npz"
    np.savez(path, allow_pickle=False, **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(FileError) as caught:
        read_set("mine", tmp_path)
    refusal(caught.value, f"{path}: ", words)


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    lay_out(tmp_path, "npz", made_up(), "mine")
    path = tmp_path / "mine.npz"
    content = path.read_bytes()
    middle = content[: len(content) // 3] + b"x" * 50 + content[len(content) // 3 + 50 :]
    for damaged in (content[:-30], b"", b"PK" + bytes(100), middle):
        path.write_bytes(damaged)
        with pytest.raises((FileError, InputError)) as caught:
            read_set("mine", tmp_path)
        refusal(caught.value, path)


def test_folders_of_images_are_a_set(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for name, grey in (("cat", 40), ("ant", 200)):
            (tmp_path / "pets" / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (56, 56), grey + i).save(tmp_path / "pets" / part / name / f"{i}.png")
    found = read_set("pets", tmp_path)
    assert found.x_train.shape == (6, 56, 56)
    np.testing.assert_array_equal(found.x_train[:, 3, 4], [200, 201, 202, 40, 41, 42])
    assert found.y_train is not None
    assert found.y_test is not None
    assert found.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.y_test.tolist() == [0, 0, 1, 1]
    assert list(sets.list_sets(tmp_path)) == ["pets"]
    Image.new("L", (28, 28), 7).save(tmp_path / "pets" / "test" / "loose.png")
    assert read_set(f"pets={tmp_path / 'pets'}", tmp_path).y_test is None
    (tmp_path / "pets" / "test" / "loose.png").unlink()
    broken = tmp_path / "pets" / "train" / "ant" / "broken.png"
    broken.write_bytes(b"no picture")
    with pytest.warns(OnefoldWarning, match=r"train: skipped 1 unreadable images, such as 'ant/broken\.png'"):
        assert len(read_set("pets", tmp_path).x_train) == 6
    broken.unlink()
    (tmp_path / "pets" / "test" / "cat").rename(tmp_path / "pets" / "test" / "dog")
    with pytest.raises(InputError, match="class 'dog' is in test only"):
        read_set("pets", tmp_path)
    with pytest.raises(InputError, match="neither idx files nor folders train and test"):
        read_set(f"pets={tmp_path / 'pets' / 'train'}", tmp_path)


def test_the_folder_is_the_given_one_or_the_environments_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEFOLD_DATA", str(tmp_path / "environment"))
    assert data_dir(tmp_path) == tmp_path
    assert data_dir() == tmp_path / "environment"
    monkeypatch.setenv("ONEFOLD_DATA", "~/sets")
    assert data_dir() == Path.home() / "sets"
    monkeypatch.delenv("ONEFOLD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_dir().name == "onefold"
    if sys.platform == "linux":
        assert data_dir() == tmp_path / "cache" / "onefold"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/datasets beside the repository")
def test_the_shared_sets_are_what_they_say() -> None:
    """Means and counts as published; MNIST's idx files, made from the .npz, have their well-known checksums."""
    sizes = {
        "mnist": (60_000, 10_000), "fashion_mnist": (60_000, 10_000),
        "kmnist_10k": (9_000, 1_000), "notmnist_22k": (18_643, 3_000),
    }  # fmt: skip
    means = {"mnist": 0.1307, "fashion_mnist": 0.2860}
    for name, size in sizes.items():
        found = read_set(name, SHARED)
        assert (len(found.x_train), len(found.x_test)) == size
        assert found.y_train is not None
        assert set(found.y_train) == set(range(10))
        if name in means:
            assert found.x_train.mean() / 255 == pytest.approx(means[name], abs=5e-5)
        if name == "mnist":
            assert hashlib.md5(encode(found.x_train)).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"
            assert hashlib.md5(encode(found.y_train)).hexdigest() == "a25bea736e30d166cdddb491f175f624"


def test_names_stay_functions_whatever_is_imported_first() -> None:
    code = "import onefold.data.perturb; from onefold.data import perturb; print(callable(perturb))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert set(onefold.data.__all__) == set(onefold.data._MODULES)
    assert all(
        callable(getattr(onefold.data, name)) for name in ("ImageSet", "data_dir", "fetch", "perturb", "read_set")
    )
    with pytest.raises(AttributeError, match=re.escape("module 'onefold.data' has no attribute 'nothing'")):
        _ = onefold.data.nothing  # pyright: ignore[reportAttributeAccessIssue]


# downloads


class Web:
    """A server on this machine. The first part of an address says how it behaves, the last which file is meant."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.over = threading.Event()
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _, behaviour, name = self.path.split("/")
                web.asked.append((f"{behaviour}/{name}", self.headers.get("Range")))
                self.close_connection = True
                with contextlib.suppress(OSError):  # whoever asked has gone
                    web.answer(self, behaviour, web.files[name])

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                del format, args

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def at(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{behaviour}/"

    def answer(self, handler: BaseHTTPRequestHandler, behaviour: str, content: bytes) -> None:
        status, sent, headers = self.content(handler.headers.get("Range"), behaviour, content)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if behaviour == "hangs":
            self.over.wait(60)
        handler.end_headers()
        handler.wfile.write(sent)
        handler.wfile.flush()
        if behaviour == "stalls":
            self.over.wait(60)
        while behaviour == "endless" and not self.over.is_set():
            handler.wfile.write(bytes(2**16))

    def content(self, wanted: str | None, behaviour: str, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        size = len(content)
        status, sent, headers = 200, content, {"Content-Length": f"{size}"}
        if wanted and behaviour in ("good", "cut", "cut_once", "stalls", "other_part"):
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) * (behaviour != "other_part")
            status, sent = (206, content[start:]) if start < size else (416, b"")
            headers = {"Content-Length": f"{len(sent)}", "Content-Range": f"bytes {start}-{size - 1}/{size}"}
        earlier = sum(path.startswith(f"{behaviour}/") for path, _ in self.asked) - 1
        match behaviour:
            case "cut" | "cut_whole" | "stalls":
                sent = sent[: len(sent) // 2]
            case "cut_once" if not earlier:
                sent = sent[: size // 2]
            case "wrong":
                sent = bytes(size)
            case "endless":
                headers = {}
            case "says_gzip":
                headers["Content-Encoding"] = "gzip"
            case "404" | "500":
                return int(behaviour), b"", {"Content-Length": "0"}
            case "busy_twice" if earlier < 2:
                return 503, b"", {"Content-Length": "0"}
        return status, sent, headers


@pytest.fixture(scope="module")
def server() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


@pytest.fixture
def web(server: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.asked.clear()
    server.files = {f"{IDX_FILES[key]}.gz": gzip.compress(encode(array)) for key, array in ARRAYS.items()}
    return server


ARRAYS = made_up(200, 60)
FIRST = "train-images-idx3-ubyte.gz"


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def digits_from(web: Web, *behaviours: str) -> dict[str, CatalogueEntry]:
    sums = [md5(web.files[f"{name}.gz"]) for name in IDX_FILES.values()]
    return {"mnist": idx_set("made up", tuple(map(web.at, behaviours)), (sums[0], sums[1], sums[2], sums[3]))}


def bring(web: Web, folder: Path, *behaviours: str, watch: ProgressCallback = ignore_progress) -> Path:
    """The first file of the set alone, from mirrors that behave like this."""
    mirrors = tuple(Mirror(web.at(behaviour) + FIRST, md5(web.files[FIRST])) for behaviour in behaviours)
    retries = HASTY if {"hangs", "stalls"} & set(behaviours) else QUICK
    return download.download(mirrors, folder, watch, retries)


def test_a_set_is_fetched_once_and_read(web: Web, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    note = fetch("mnist", tmp_path, lambda *news: seen.append(news), retries=QUICK, catalogue=digits_from(web, "good"))
    assert note.startswith(f"mnist: 4 files in {tmp_path / 'mnist'} (")
    assert_holds(read_set("mnist", tmp_path), ARRAYS)
    assert [path for path, _ in web.asked] == [f"good/{name}.gz" for name in IDX_FILES.values()]
    assert {name for name, _, _ in seen} == set(web.files)
    assert all(done <= len(web.files[name]) == total for name, done, total in seen)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted([".mnist.lock", *web.files])
    fetch("mnist", tmp_path, retries=QUICK, catalogue=digits_from(web, "404"))
    assert len(web.asked) == 4, "nothing is asked for again"
    damaged = tmp_path / "mnist" / FIRST
    damaged.write_bytes(b"mine")
    with pytest.raises(FileError):
        fetch("mnist", tmp_path, retries=QUICK, catalogue=digits_from(web, "404"))
    assert damaged.read_bytes() == b"mine", "replaced by something better or not at all"
    fetch("mnist", tmp_path, retries=QUICK, catalogue=digits_from(web, "good"))
    assert_holds(read_set("mnist", tmp_path), ARRAYS)


@pytest.mark.parametrize(
    ("behaviour", "times"),
    [("404", 1), ("500", 3), ("hangs", 3), ("wrong", 1), ("cut_whole", 3), ("stalls", 3), ("cut", 3)],
)
def test_the_next_mirror_is_asked_when_one_fails(web: Web, tmp_path: Path, behaviour: str, times: int) -> None:
    """What will not change is asked for once, what may pass as often as retries allows."""
    path = bring(web, tmp_path, behaviour, "good")
    assert path.read_bytes() == web.files[FIRST]
    assert [path.partition("/")[0] for path, _ in web.asked] == [behaviour] * times + ["good"]
    assert [path.name for path in tmp_path.iterdir()] == [FIRST]


def test_pauses_double(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    assert bring(web, tmp_path, "busy_twice").read_bytes() == web.files[FIRST]
    assert pauses == [0.001, 0.002]


def test_what_broke_off_goes_on_where_it_stopped(web: Web, tmp_path: Path) -> None:
    size = len(web.files[FIRST])
    assert bring(web, tmp_path, "cut_once").read_bytes() == web.files[FIRST]
    assert [wanted for _, wanted in web.asked] == [None, f"bytes={size // 2}-"]
    part = tmp_path / "x.part"
    with pytest.raises(Exception, match="connection lost after 3 of 10 bytes"):
        download._Downloader(part, ignore_progress, 1.0)._copy(iter([b"abc"]), 0, 10)
    assert part.read_bytes() == b"abc"


def test_a_server_without_ranges_is_asked_for_all(web: Web, tmp_path: Path) -> None:
    (tmp_path / f"{FIRST}.part").write_bytes(web.files[FIRST][:1000])
    assert bring(web, tmp_path, "says_gzip").read_bytes() == web.files[FIRST], "nor is it unpacked on its way"
    assert [wanted for _, wanted in web.asked] == ["bytes=1000-"]


@pytest.mark.parametrize("behaviour", ["good", "other_part"])
@pytest.mark.parametrize("left", [b"poison" * 100, b"far too long" * 100_000])
def test_a_part_of_something_else_does_no_harm(web: Web, tmp_path: Path, behaviour: str, left: bytes) -> None:
    """It spoils the checksum, or there is no more after it: it is thrown away, and the same mirror asked again."""
    (tmp_path / f"{FIRST}.part").write_bytes(left)
    seen: list[int] = []
    path = bring(web, tmp_path, behaviour, watch=lambda _, done, __: seen.append(done))
    assert path.read_bytes() == web.files[FIRST]
    assert [wanted for _, wanted in web.asked] == [f"bytes={len(left)}-", None]
    assert max(seen) == path.stat().st_size, "another part than was asked for is not appended"


def test_the_last_word_names_every_mirror(web: Web, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        bring(web, tmp_path, "404", "500", "wrong", "hangs", "cut_whole")
    words = (
        f"{FIRST}: download failed (127.0.0.1: HTTP 404 Not Found; 127.0.0.1: HTTP 500 Internal Server Error "
        "(3 tries); 127.0.0.1: wrong checksum; 127.0.0.1: no answer (3 tries); "
        "127.0.0.1: connection lost"
    )
    refusal(caught.value, words, f"put the file into {tmp_path} by hand")
    half = web.files[FIRST][: len(web.files[FIRST]) // 2]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {f"{FIRST}.part": half}
    dead = Mirror(f"http://127.0.0.1:1/{FIRST}", "0" * 32)
    with pytest.raises(FileError, match=re.escape("127.0.0.1: no connection (3 tries)")):
        download.download((dead,), tmp_path / "other", ignore_progress, QUICK)


def test_an_endless_answer_is_cut_off(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MOST_BYTES", 2**20)
    with pytest.raises(FileError, match=re.escape("sends more than 1.0 MiB")):
        bring(web, tmp_path, "endless")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_fetch_leaves_a_part_and_goes_on(web: Web, tmp_path: Path) -> None:
    web.files[FIRST] = gzip.compress(encode(ARRAYS["x_train"]), 0) + gzip.compress(b"", 0)
    mirrors = (Mirror(web.at("good") + FIRST, md5(web.files[FIRST])),)

    def stop(what: str, done: int, total: int | None) -> None:
        del what, total
        if done >= 2**16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.download(mirrors, tmp_path, stop, QUICK)
    assert [path.name for path in tmp_path.iterdir()] == [f"{FIRST}.part"]
    have = (tmp_path / f"{FIRST}.part").stat().st_size
    assert have == 2**16
    assert download.download(mirrors, tmp_path, ignore_progress, QUICK).read_bytes() == web.files[FIRST]
    assert web.asked[-1][1] == f"bytes={have}-"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_named_and_not_taken_for_the_network(web: Web, tmp_path: Path) -> None:
    part = tmp_path / f"{FIRST}.part"
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        bring(web, tmp_path, "good")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(part))
    assert len(web.asked) == 1


def test_two_processes_do_not_fetch_the_same_set(web: Web, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / ".mnist.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileError, match=re.escape("another process is downloading mnist. Wait for it")):
            fetch("mnist", tmp_path, retries=QUICK, catalogue=digits_from(web, "good"))
    assert web.asked == []


def test_the_catalogue_is_complete() -> None:
    assert list(CATALOGUE) == ["mnist", "fashion_mnist", "kmnist", "notmnist", "notmnist_large", "cifar10", "svhn"]
    mirrors = [mirror for known in CATALOGUE.values() for file in known.files for mirror in file]
    assert all(re.fullmatch(r"https?://[\w.-]+/.+\.(gz|zip|mat)", mirror.url) for mirror in mirrors)
    assert all(re.fullmatch(r"[0-9a-f]{32}", mirror.md5) for mirror in mirrors)
    assert len({mirror.md5 for mirror in mirrors}) == 3 * 4 + 2 * 2 + 1 + 2
    for name in ("mnist", "fashion_mnist", "kmnist"):
        assert [file[0].file for file in CATALOGUE[name].files] == [f"{stem}.gz" for stem in IDX_FILES.values()]
    assert [mirror.file for mirror in CATALOGUE["notmnist"].files[0]] == ["notMNIST_small.zip", "notMNIST_small.tar.gz"]
    with pytest.raises(InputError, match=re.escape("'cifar': not a set that can be downloaded. Choose from mnist, ")):
        fetch("cifar", Path("nowhere"))


# NotMNIST


def png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def letter(label: int, i: int) -> np.ndarray:
    """An image that tells its class and number."""
    pixels = np.random.default_rng([label, i]).integers(0, 256, (28, 28), np.uint8)
    pixels[0, :2] = label, i
    return pixels


def members(count: int = 15) -> dict[str, bytes]:
    """Images of every class, some of which are damaged, too large, hidden, twice there, or in two classes."""
    files = {f"notMNIST_small/{c}/{i}.png": png(letter(k, i)) for k, c in enumerate("ABCDEFGHIJ") for i in range(count)}
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 60_000, 60_000, 8, 0, 0, 0, 0) + bytes(99)
    return files | {
        "notMNIST_small/A/damaged.png": b"",
        "notMNIST_small/B/cut.png": png(letter(1, 0))[:200],
        "notMNIST_small/C/bomb.png": bomb,
        "notMNIST_small/D/wide.png": png(np.zeros((28, 29), np.uint8)),
        "notMNIST_small/E/long.png": png(letter(4, 0)) + bytes(2**16),
        "../../../F/evil.png": png(letter(5, 100)),
        "notMNIST_small/G/again.png": png(letter(6, 3)),
        "notMNIST_small/H/of another class.png": png(letter(0, 0)),
        "notMNIST_small/K/unknown.png": png(letter(0, 0)),
        "notMNIST_small/A/.hidden.png": b"x",
        "notMNIST_small/A/notes.txt": b"x",
        "notMNIST_small/readme.png": b"x",
    }


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def tarred(files: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in reversed(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in others:
            archive.addfile(info)
    return content.getvalue()


def letters_from(web: Web, *mirrors: str) -> dict[str, CatalogueEntry]:
    """Zip and tar.gz by turns, from mirrors that behave like this."""
    names = ("notMNIST_small.zip", "notMNIST_small.tar.gz")
    found = tuple(Mirror(web.at(how) + name, md5(web.files[name])) for how, name in zip(mirrors, names, strict=False))
    return {"notmnist": CatalogueEntry("made up", (found,), "notmnist")}


def test_both_archives_become_the_same_set(web: Web, tmp_path: Path) -> None:
    web.files = {"notMNIST_small.zip": zipped(members()), "notMNIST_small.tar.gz": tarred(members())}
    notes = {}
    for how, mirrors in {"zip": ("good",), "tar": ("404", "good")}.items():
        notes[how] = fetch("notmnist", tmp_path / how, retries=QUICK, catalogue=letters_from(web, *mirrors))
    target = tmp_path / "zip" / "notmnist.npz"
    assert target.read_bytes() == (tmp_path / "tar" / "notmnist.npz").read_bytes(), "the order of an archive is nothing"
    assert f"notmnist: 130 train and 20 test images in {target} (" in notes["zip"]
    assert "dropped from notMNIST_small.zip: 5 unreadable files, 1 repeated images, 2 in two classes" in notes["zip"]
    assert sorted(path.name for path in (tmp_path / "zip").iterdir()) == [".notmnist.lock", "notmnist.npz"]
    found = read_set("notmnist", tmp_path / "zip")
    for x, y in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        assert y is not None
        for pixels, label in zip(x, y, strict=True):
            np.testing.assert_array_equal(pixels, letter(label, pixels[0, 1]))
    assert np.bincount(found.y_test, minlength=10).tolist() == [2] * 10, "a seventh of each class"  # pyright: ignore
    everything = {x.tobytes() for x in (*found.x_train, *found.x_test)}
    assert len(everything) == 150
    assert letter(5, 100).tobytes() in everything, "its path is nothing but a class"
    assert letter(0, 0).tobytes() not in everything
    asked = len(web.asked)
    assert fetch("notmnist", tmp_path / "zip", catalogue=letters_from(web, "404")).startswith("notmnist: already in")
    assert len(web.asked) == asked


def test_an_archive_put_there_by_hand_will_do(web: Web, tmp_path: Path) -> None:
    web.files = {"notMNIST_small.zip": zipped(members()), "notMNIST_small.tar.gz": tarred(members())}
    (tmp_path / "notmnist").mkdir()
    (tmp_path / "notmnist" / "notMNIST_small.tar.gz").write_bytes(web.files["notMNIST_small.tar.gz"])
    fetch("notmnist", tmp_path, retries=QUICK, catalogue=letters_from(web, "404", "404"))
    assert web.asked == []
    assert len(read_set("notmnist", tmp_path).x_test) == 20
    with pytest.raises(FileError, match=re.escape("notMNIST_small.zip or notMNIST_small.tar.gz: download failed")):
        fetch("notmnist", tmp_path / "other", retries=QUICK, catalogue=letters_from(web, "404", "404"))


def test_hostile_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, pipe = tarfile.TarInfo("x/A/link.png"), tarfile.TarInfo("x/B/pipe.png")
    link.type, link.linkname, pipe.type = tarfile.SYMTYPE, "/etc/passwd", tarfile.FIFOTYPE
    tar, archive = tmp_path / "x.tar.gz", tmp_path / "x.zip"
    tar.write_bytes(tarred(members(), link, pipe))
    assert read_letters(tar, ignore_progress).unreadable == 7
    for path, whole in ((tar, tar.read_bytes()), (archive, zipped(members()))):
        for damaged in (
            whole[: len(whole) // 2],
            b"",
            b"nothing of the kind" * 99,
            whole[:999] + bytes(999) + whole[1998:],
        ):
            path.write_bytes(damaged)
            with contextlib.suppress(FileError):  # a few images lost, or everything
                assert read_letters(path, ignore_progress).unreadable > 5
        for damaged in (whole[: len(whole) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(FileError) as caught:
                read_letters(path, ignore_progress)
            refusal(caught.value, f"{path}: damaged, or not an archive")
    without = {name: data for name, data in members().items() if "/C/" not in name and "/J/" not in name}
    archive.write_bytes(zipped(without))
    with pytest.raises(FileError, match="no readable images of C, J"):
        read_letters(archive, ignore_progress)
    tar.write_bytes(tarred({"x/A/0.png": bytes(2**24)}))
    monkeypatch.setattr(notmnist, "MOST_INFLATED", 2**20)
    with pytest.raises(FileError, match="inflates to more than 1,048,576 bytes"):
        read_letters(tar, ignore_progress)
    monkeypatch.setattr(notmnist, "MOST_IMAGES", 100)
    archive.write_bytes(zipped(members()))
    with pytest.raises(FileError, match="more than 100 images"):
        read_letters(archive, ignore_progress)


# colour sets


def colour_set(train: int = 40, test: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x_train": rng.integers(0, 256, (train, 3, 32, 32), np.uint8),
        "y_train": rng.permutation(np.arange(train) % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (test, 3, 32, 32), np.uint8),
        "y_test": rng.permutation(np.arange(test) % 10).astype(np.uint8),
    }


def cifar_members(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """The layout of cifar-10-binary.tar.gz: records of a label byte and the red, green and blue planes."""

    def records(x: np.ndarray, y: np.ndarray) -> bytes:
        return b"".join(bytes([label]) + image.tobytes() for image, label in zip(x, y, strict=True))

    parts = zip(np.split(arrays["x_train"], 5), np.split(arrays["y_train"], 5), strict=True)
    files = {f"cifar-10-batches-bin/data_batch_{i}.bin": records(x, y) for i, (x, y) in enumerate(parts, 1)}
    files["cifar-10-batches-bin/test_batch.bin"] = records(arrays["x_test"], arrays["y_test"])
    return {"cifar-10-batches-bin/batches.meta.txt": b"airplane\n", **dict(reversed(files.items()))}


def write_svhn(path: Path, x: np.ndarray, y: np.ndarray, *, compress: bool = True, **others: Any) -> None:
    """The layout of train_32x32.mat: X [32, 32, 3, N], and y [N, 1] with 10 for the digit 0."""
    labels = np.where(y == 0, 10, y).astype(others.pop("dtype", np.uint8))[:, None]
    savemat(path, {**others, "X": x.transpose(2, 3, 1, 0), "y": labels}, do_compression=compress)


def test_cifar_10_is_fetched_and_read(web: Web, tmp_path: Path) -> None:
    arrays = colour_set()
    web.files["cifar-10-binary.tar.gz"] = content = tarred(cifar_members(arrays))
    mirror = Mirror(web.at("good") + "cifar-10-binary.tar.gz", md5(content))
    entries = {"cifar10": CatalogueEntry("made up", ((mirror,),), "cifar10")}
    note = fetch("cifar10", tmp_path, retries=QUICK, catalogue=entries)
    assert note.startswith(f"cifar10: 40 train and 7 test images in {tmp_path / 'cifar10.npz'} (")
    images = read_set("cifar10", tmp_path)
    assert_holds(images, arrays)
    assert (images.shape, images.channels, images.classes) == ((3, 32, 32), 3, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cifar10.lock", "cifar10.npz"]
    assert [file[0].file for file in CATALOGUE["cifar10"].files] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x/data_batch_3.bin": b""}, "data_batch_3.bin has 0 bytes, not records of 3,073"),
        ({"x/data_batch_3.bin": bytes(3074)}, "data_batch_3.bin has 3,074 bytes"),
        ({"x/data_batch_3.bin": bytes(10_001 * 3073)}, "data_batch_3.bin has 30,733,073 bytes"),
        ({"x/test_batch.bin": bytes([10]) + bytes(3072)}, "label 10 in the test set. Labels are 0 to 9."),
        ({"x/test_batch.bin": None}, "test_batch.bin is missing. Use the binary version"),
        ({"y/test_batch.bin": bytes(3073)}, "contains test_batch.bin twice"),
    ],
)
def test_archives_that_are_not_cifar_10_are_refused(
    tmp_path: Path, change: dict[str, bytes | None], words: str
) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    files = {f"x/{name.rpartition('/')[2]}": content for name, content in cifar_members(colour_set()).items()} | change
    path.write_bytes(tarred({name: content for name, content in files.items() if content is not None}))
    with pytest.raises(FileError) as caught:
        read_cifar10(path)
    refusal(caught.value, f"{path}: ", words)


def test_damaged_and_hostile_cifar_10_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    whole = tarred(cifar_members(colour_set()))
    for damaged in (b"", b"no archive" * 99, whole[: len(whole) // 2], whole[:999] + bytes(99) + whole[1098:]):
        path.write_bytes(damaged)
        with pytest.raises(FileError) as caught:
            read_cifar10(path)
        refusal(caught.value, f"{path}: ")
    link = tarfile.TarInfo("x/test_batch.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path.write_bytes(tarred({}, link))
    with pytest.raises(FileError, match="has 0 bytes"):
        read_cifar10(path)
    path.write_bytes(tarred({"x/other.bin": bytes(2**22)}))
    monkeypatch.setattr(cifar10, "MOST_INFLATED", 2**20)
    with pytest.raises(FileError, match="inflates to more than 1,048,576 bytes"):
        read_cifar10(path)


@pytest.mark.parametrize("compress", [False, True])
def test_svhn_is_fetched_and_read(web: Web, tmp_path: Path, compress: bool) -> None:
    arrays = colour_set(23, 5)
    mirrors = []
    for part in ("train", "test"):
        path = tmp_path / f"{part}_32x32.mat"
        write_svhn(path, arrays[f"x_{part}"], arrays[f"y_{part}"], compress=compress)
        web.files[path.name] = path.read_bytes()
        mirrors.append((Mirror(web.at("good") + path.name, md5(web.files[path.name])),))
    folder = tmp_path / "sets"
    note = fetch("svhn", folder, retries=QUICK, catalogue={"svhn": CatalogueEntry("made up", tuple(mirrors), "svhn")})
    assert note.startswith("svhn: 23 train and 5 test images")
    images = read_set("svhn", folder)
    assert_holds(images, arrays)
    assert (images.shape, images.channels) == ((3, 32, 32), 3)
    assert [file[0].file for file in CATALOGUE["svhn"].files] == ["train_32x32.mat", "test_32x32.mat"]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64, np.int64])
def test_matlab_arrays_are_read_as_scipy_reads_them(tmp_path: Path, dtype: Any, compress: bool) -> None:
    path = tmp_path / "x.mat"
    rng = np.random.default_rng(0)
    arrays = {f"a{i}": (100 * rng.random(shape)).astype(dtype) for i, shape in enumerate([(1, 1), (3, 5), (2, 3, 4)])}
    savemat(path, arrays, do_compression=compress)
    expected = loadmat(path)
    for name, array in read_mat(path, tuple(arrays)).items():
        np.testing.assert_array_equal(array, expected[name])
        np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((4, 3, 32, 32), np.uint8), np.array([1, 2, 3, 11]), "labels from 1 to 11. They must be integers"),
        (np.zeros((4, 3, 32, 32), np.uint8), np.array([1, 2, 3]), "y has shape (3, 1), not one label for each of 4"),
        (np.zeros((4, 1, 32, 32), np.uint8), np.arange(4), "X has shape (32, 32, 1, 4) and dtype uint8"),
        (np.zeros((4, 3, 32, 32)), np.arange(4), "X has shape (32, 32, 3, 4) and dtype float64"),
    ],
)
def test_matlab_files_that_are_not_svhn_are_refused(tmp_path: Path, x: np.ndarray, y: np.ndarray, words: str) -> None:
    path = tmp_path / "x.mat"
    write_svhn(path, x, y)
    with pytest.raises(FileError) as caught:
        read_svhn((path, path))
    refusal(caught.value, f"{path}: ", words)


def test_other_matlab_contents_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    for content in (
        {"X": np.array(["text"])},
        {"X": np.array([1j])},
        {"X": {"a": 1}},
        {"X": np.array([[1], "a"], object)},
    ):
        savemat(path, content)
        with pytest.raises(FileError, match=re.escape(f"{path}: holds an array that is not of real numbers")):
            read_mat(path, ("X",))
    savemat(path, {"Y": np.ones(3)})
    with pytest.raises(FileError, match="has no array 'X'"):
        read_mat(path, ("X",))
    savemat(path, {"X": np.ones(3)}, format="4")
    with pytest.raises(FileError, match="not a MATLAB 5 file"):
        read_mat(path, ("X",))
    with pytest.raises(FileError, match="No such file"):
        read_mat(tmp_path / "none.mat", ("X",))


@given(st.data())
def test_damaged_matlab_files_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.mat"
    x = np.random.default_rng(0).integers(0, 4, (2, 3, 5), np.uint8)
    packed = data.draw(st.booleans())
    savemat(path, {"X": x, "y": np.ones((5, 1))}, do_compression=packed)
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=20))
    damaged = data.draw(st.sampled_from([content[:at], content[:at] + junk + content[at + len(junk) :]]))
    path.write_bytes(damaged)
    try:
        arrays = read_mat(path, ("X", "y"))
    except FileError as error:
        refusal(error, f"{path}: ")
        return
    if packed:
        np.testing.assert_array_equal(arrays["X"], x)
    assert arrays["X"].nbytes <= 8 * len(content)


def matrix(shape: tuple[int, ...], length: int, content: bytes) -> bytes:
    """A matrix X of bytes, by the definition of the format, whose header claims this shape and length."""
    axes = struct.pack(f"<{len(shape)}i", *shape)
    parts = struct.pack("<IIII", 6, 8, 9, 0) + struct.pack("<II", 5, len(axes)) + axes + bytes(-len(axes) % 8)
    return parts + struct.pack("<HH4s", 1, 1, b"X") + struct.pack("<II", 2, length) + content


def element(content: bytes, *, packed: bool) -> bytes:
    inner = struct.pack("<II", 14, len(content)) + content
    return struct.pack("<II", 15, len(deflated := zlib.compress(inner))) + deflated if packed else inner


@pytest.mark.parametrize("packed", [False, True])
def test_a_matlab_header_cannot_ask_for_memory(tmp_path: Path, packed: bool) -> None:
    """Shapes that the file cannot hold, and an element that inflates to more than its array."""
    path = tmp_path / "bomb.mat"
    start = bytes(124) + b"\x00\x01IM"
    path.write_bytes(start + element(matrix((2, 4), 8, b"12345678"), packed=packed))
    np.testing.assert_array_equal(read_mat(path, ("X",))["X"], np.frombuffer(b"12345678", np.uint8).reshape(4, 2).T)
    bombs = [
        matrix((2**15, 2**15, 3), 3 * 2**30, b"1"),
        matrix((2**14, 2**15), 2**29, bytes(8)),
        matrix((-1, -8), 8, bytes(8)),
        matrix((0, 4), 0, b""),
        matrix((1,) * 5, 1, bytes(8)),
        matrix((2, 4), 8, bytes(8 if not packed else 2**26)) + bytes(8),
        matrix((2, 4), 9, bytes(16)),
    ]
    for bomb in bombs:
        path.write_bytes(start + element(bomb, packed=packed))
        tracemalloc.start()
        with pytest.raises(FileError) as caught:
            read_mat(path, ("X",))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        refusal(caught.value, f"{path}: ")
        assert peak < 2**21
    path.write_bytes(start + struct.pack("<II", 14, 2**31) + bytes(100))
    with pytest.raises(FileError, match="damaged"):
        read_mat(path, ("X",))


def test_colour_images_may_have_their_channels_last(tmp_path: Path) -> None:
    arrays = colour_set(6, 5)
    last = {key: np.moveaxis(value, 1, -1) if value.ndim == 4 else value for key, value in arrays.items()}
    np.savez(tmp_path / "mine.npz", allow_pickle=False, **last)
    assert_holds(read_set("mine", tmp_path), arrays)
    grey = {key: value[:, :1] if value.ndim == 4 else value for key, value in arrays.items()}
    np.savez(tmp_path / "grey.npz", allow_pickle=False, **grey)
    images = read_set("grey", tmp_path)
    assert (images.shape, images.channels) == ((32, 32), 1)
    np.testing.assert_array_equal(images.x_test, arrays["x_test"][:, 0])


def test_colour_folders_are_read_in_colour(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for i, colour in enumerate([(255, 0, 10), (0, 200, 20)]):
            folder = tmp_path / "pets" / part / f"class {i}"
            folder.mkdir(parents=True)
            Image.new("RGB", (9, 12), colour).save(folder / "0.png")
    images = read_set("pets", tmp_path)
    assert images.shape == (3, 12, 9)
    np.testing.assert_array_equal(images.x_test[:, :, 5, 5], [(255, 0, 10), (0, 200, 20)])


# the command line


def test_the_command_line_fetches_and_lists(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEFOLD_DATA", str(tmp_path))
    monkeypatch.setattr(catalogue, "CATALOGUE", {**CATALOGUE, **digits_from(web, "good")})
    assert cli.main(["data", "fetch", "mnist"]) == 0
    assert capsys.readouterr().out.startswith(f"mnist: 4 files in {tmp_path / 'mnist'}")
    lay_out(tmp_path, "npz", made_up(), "mine")
    assert cli.main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Image sets in {tmp_path}\n")
    assert re.search(rf"^  mnist +{sum(map(len, web.files.values())) / 1024:.1f} KiB  made up$", out, re.MULTILINE)
    assert re.search(r"^  kmnist +absent  Japanese cursive, 60,000 / 10,000$", out, re.MULTILINE)
    assert re.search(r"^  mine +\d+\.\d KiB  added by hand$", out, re.MULTILINE)
    assert out.endswith(
        "\nDownload more with: onefold data fetch fashion_mnist kmnist notmnist notmnist_large cifar10 svhn\n"
    )
    assert cli.main(["data", "list", "--data-dir", str(tmp_path / "empty")]) == 0
    assert f"svhn --data-dir {tmp_path / 'empty'}\n" in capsys.readouterr().out
    asked = len(web.asked)
    names = ", ".join(CATALOGUE)
    for arguments, message in (
        (["mnist", "cifar"], f"'cifar' is not in the catalogue. Use {names}."),
        ([], f"no set is named. Name some of {names}."),
    ):
        assert cli.main(["data", "fetch", *arguments]) == 2
        assert capsys.readouterr().err == f"onefold: {message}\n"
    assert len(web.asked) == asked


def test_a_person_who_watches_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with command.progress_bar("mnist") as watch:
        watch("train-images", 50, 200)
        watch("reading", 7, None)
    assert "train-images" in sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "25%" in sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
