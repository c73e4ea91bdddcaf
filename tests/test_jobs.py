"""The commands fit, score, diagnose and export: their files, their errors, and what a stopped command leaves."""

import csv
import errno
import io
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import onefold
from onefold import cli
from onefold.core import runtime, storage
from onefold.errors import OnefoldWarning, warn
from onefold.inputs import images as image_folder
from onefold.report import score_page, score_table, thumbnails

QUICK = ("--steps", "4", "--device", "cpu")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Done(NamedTuple):
    status: int | str | None
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def onefold_(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process."""

    def run(*arguments: str | Path) -> Done:
        try:
            status: int | str | None = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Fits here and in other processes are compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same 120 images in every form, and a table of 130 rows."""
    home, rng = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    x = np.clip(120 + 30 * rng.normal(size=(120, 1, 1, 3)) + 20 * rng.normal(size=(120, 8, 8, 3)), 0, 255)
    x = x.astype(np.uint8)
    np.save(home / "images.npy", x)
    np.save(home / "floats.npy", x[..., 0].astype(np.float32) / 100 - 1)
    np.savez(home / "arrays.npz", vectors=rng.normal(size=(120, 5)), others=rng.normal(size=(120, 3)))
    (home / "images").mkdir()
    for i, image in enumerate(x):
        Image.fromarray(image).save(home / "images" / f"{i:03d}.png")
    write_table(home / "table.csv", rows(130, rng))
    return home


def rows(count: int, rng: np.random.Generator) -> dict[str, list[Any]]:
    towns = rng.choice(["Ulm", "Bonn, am Rhein"], count).tolist()
    return {"age": rng.normal(40, 9, count).round(1).tolist(), "town": towns, "x": rng.normal(size=count).tolist()}


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


@pytest.fixture(scope="module")
def fitted(home: Path) -> Path:
    """A detector of the image folder."""
    assert cli.main(["fit", str(home / "images"), "-o", str(home / "images.onefold"), *QUICK]) == 0
    return home / "images.onefold"


def read_scores(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="") as file:
        header, *body = csv.reader(file)
    columns = dict(zip(header, zip(*body, strict=True), strict=True))
    return {name: np.array(column, str if name == "name" else float) for name, column in columns.items()}


def page_data(path: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert match
    return json.loads(match[1])


def one_line(done: Done, *words: str) -> None:
    """Refused: status 2, one line that holds these words, nothing else."""
    assert done.status == 2, done
    assert done.out == ""
    assert re.fullmatch(r"onefold: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err, done.err


# What is written


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ("images", "csd"),
        ("images.npy", "knn"),
        ("floats.npy", "rnd"),
        ("arrays.npz::vectors", "gp"),
        ("arrays.npz::vectors", "csd"),
        ("table.csv", "csd"),
        ("table.csv", "knn"),
    ],
)
def test_the_files_have_the_scores_of_the_library(
    data: str, method: str, home: Path, tmp_path: Path, onefold_: Cli
) -> None:
    file, source = tmp_path / "m.onefold", home / data
    steps = ("--steps", "4") if method in ("csd", "rnd") else ()
    done = onefold_("fit", source, "-o", file, "--method", method, *steps, "--seed", "3", "--fpr", "0.1")
    assert done.status == 0, done.err
    detector = onefold.load(file)
    assert (type(detector).__name__.lower() == method) or method == "gp"
    assert detector.seed == 3
    assert detector.alarm is not None
    count = 130 if "table" in data else 120
    calibrated = len(detector.alarm.scores)
    assert abs(calibrated - count / 5) <= (12 if "table" in data else 0)
    assert f"fitted on {count - calibrated} samples, calibrated on {calibrated}" in done.out
    assert onefold_("score", file, source, "-o", tmp_path / "s.csv", "--report", tmp_path / "p.html").status == 0
    assert onefold_("score", file, source, "-o", tmp_path / "s.parquet").status == 0
    expected = detector.score(str(source))
    table = read_scores(tmp_path / "s.csv")
    np.testing.assert_array_equal(table["score"], expected)
    np.testing.assert_array_equal(table["pvalue"], detector.pvalue(str(source)))
    np.testing.assert_array_equal(table["is_ood"], (expected > detector.threshold).astype(float))
    names = sorted(f"{i:03d}.png" for i in range(120)) if data == "images" else [str(i) for i in range(count)]
    assert table["name"].tolist() == names
    same_as_parquet(tmp_path / "s.parquet", table)
    page = page_data(tmp_path / "p.html")
    assert page["names"] == names
    np.testing.assert_allclose(page["scores"], expected, rtol=1e-15)
    assert (page["pictures"] is not None) == ("images" in data or "floats" in data)
    assert (page["columns"] == ["age", "town", "x"]) == ("table" in data)
    assert {path.name for path in tmp_path.iterdir()} == {"m.onefold", "s.csv", "s.parquet", "p.html"}


def same_as_parquet(path: Path, table: dict[str, np.ndarray]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    read = parquet.read_table(path).to_pydict()
    assert list(read) == list(table)
    for name, column in table.items():
        np.testing.assert_array_equal(np.array(read[name]).astype(column.dtype), column)
    assert parquet.read_schema(path).field("is_ood").type == "bool"


def test_a_parquet_table_is_scored_as_the_csv_it_was_made_of(home: Path, tmp_path: Path, onefold_: Cli) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with (home / "table.csv").open(newline="") as file:
        header, *body = csv.reader(file)
    columns = dict(zip(header, zip(*body, strict=True), strict=True))
    typed = {name: list(c) if name == "town" else [float(v) for v in c] for name, c in columns.items()}
    parquet.write_table(pyarrow.table(typed), tmp_path / "t.parquet")
    for data, name in ((home / "table.csv", "a"), (tmp_path / "t.parquet", "b")):
        assert onefold_("fit", data, "-o", tmp_path / f"{name}.onefold", *QUICK).status == 0
        assert onefold_("score", tmp_path / "a.onefold", data, "-o", tmp_path / f"{name}.csv").status == 0
    assert (tmp_path / "a.onefold").read_bytes() == (tmp_path / "b.onefold").read_bytes()
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_calibration_data_and_contexts_are_read_as_the_data(home: Path, tmp_path: Path, onefold_: Cli) -> None:
    """Other tables have other means and other folders other sizes: they must be read by the columns and to the size of
    the data."""
    write_table(tmp_path / "held.csv", rows(40, np.random.default_rng(5)))
    (tmp_path / "held").mkdir()
    for i in range(30):
        Image.new("RGB", (20, 11), (i, 2 * i, 100)).save(tmp_path / "held" / f"{i}.jpg")
    (tmp_path / "held" / "torn.jpg").write_bytes(b"\xff\xd8")
    for data, held in ((home / "table.csv", tmp_path / "held.csv"), (home / "images", tmp_path / "held")):
        file = tmp_path / "m.onefold"
        done = onefold_("fit", data, "-o", file, *QUICK, "--calibrate", held, "--context", held)
        assert done.status == 0, done.err
        detector = onefold.load(file)
        assert detector.alarm is not None
        np.testing.assert_array_equal(detector.alarm.scores, np.sort(detector.score(str(held))))
        plain = tmp_path / "plain.onefold"
        assert onefold_("fit", data, "-o", plain, *QUICK, "--calibrate", held).status == 0
        assert np.abs(onefold.load(plain).score(str(data)) - detector.score(str(data))).max() > 0
    named = (tmp_path / "m.onefold.skipped.txt").read_text()
    assert [line.partition(": ")[0] for line in named.splitlines()] == [repr(str(tmp_path / "held" / "torn.jpg"))] * 2


def test_the_exit_status_of_diagnose_is_its_result(fitted: Path, home: Path, onefold_: Cli) -> None:
    done = onefold_("diagnose", fitted)
    assert done.status == 1
    assert re.search(r"^WARN  convergence", done.out, re.MULTILINE)
    assert "likeness" not in done.out
    assert "likeness" in onefold_("diagnose", fitted, "--data", home / "images").out
    one_line(onefold_("diagnose", fitted, "--data", home / "table.csv"), str(home / "table.csv"), "a table, but")


@pytest.mark.parametrize(("method", "features"), [("gp", ""), ("knn", ", and the features of 130 training samples")])
def test_fit_and_diagnose_print_what_the_file_holds(
    method: str, features: str, home: Path, tmp_path: Path, onefold_: Cli
) -> None:
    """Of each of the 130 rows three numbers in float64, a word being one."""
    files, lines = [tmp_path / "with.onefold", tmp_path / "without.onefold"], []
    for file, options in zip(files, ((), ("--no-samples",)), strict=True):
        arguments = ("--method", method, "--device", "cpu", "--calibrate", home / "table.csv", *options)
        done = onefold_("fit", home / "table.csv", "-o", file, *arguments)
        assert done.status == 0, done.err
        diagnosis = onefold_("diagnose", file)
        lines.append(next(line for line in done.out.splitlines() if "the file holds" in line))
        assert f"info  samples: {lines[-1]}" in diagnosis.out
    raw = "130 raw training samples (3.0 KiB; --no-samples leaves them out)"
    assert lines == [f"the file holds {raw}{features}", f"the file holds no raw training samples{features}"]
    whole, bare = (onefold.load(file) for file in files)
    assert bare.remembered is None
    assert len(whole.remembered) == 130  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(bare.score(str(home / "table.csv")), whole.score(str(home / "table.csv")))
    done = onefold_("score", files[1], home / "table.csv", "-o", tmp_path / "s.csv", "--report", tmp_path / "p.html")
    assert done.status == 0, done.err


def test_an_exported_detector_gives_the_scores_of_the_table(fitted: Path, home: Path, onefold_: Cli) -> None:
    assert onefold_("export", fitted, home / "m.pt2").status == 0
    raw = torch.from_numpy(images(home))
    scores, _, alarms = torch.export.load(home / "m.pt2").module()(raw)
    detector = onefold.load(fitted)
    np.testing.assert_allclose(scores.numpy(), detector.score(raw), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(alarms.numpy(), detector.is_ood(raw))
    one_line(onefold_("export", fitted, home / "m.txt"), "m.txt", ".onnx or .pt2")
    one_line(onefold_("export", fitted, fitted), "is read and written")


def images(home: Path) -> np.ndarray:
    paths = sorted((home / "images").glob("*.png"))
    return np.stack([np.moveaxis(np.asarray(Image.open(path)), 2, 0) for path in paths])


def test_help_of_every_verb(onefold_: Cli) -> None:
    for verb, words in {
        "fit": ("DATA", "-o FILE", "--context DATA", "--model NET.pt2", "--calibrate DATA", "--fpr", "--no-samples"),
        "score": ("DETECTOR DATA", ".csv or .parquet", "--report PAGE.html", "--model NET.pt2"),
        "diagnose": ("DETECTOR", "--data DATA", "--model NET.pt2"),
        "export": ("DETECTOR FILE", ".onnx or .pt2"),
    }.items():
        done = onefold_(verb, "--help")
        assert done.status == 0
        assert "None" not in done.out
        for word in words:
            assert word in done.out, f"{verb}: {word}"


def test_names_are_quoted_and_many_rows_are_quick(tmp_path: Path) -> None:
    odd = ['a "b", c', "=1+1", "caf\u00e9", "half\ud83d", "new\nline\rand\x1b[2J"]
    names, scores = odd + ["plain"] * 199_995, np.linspace(-1, 1, 200_000) / 3
    started = time.process_time()
    score_table.write_table(tmp_path / "s.csv", {"name": names, "score": scores, "is_ood": scores > 0})
    assert time.process_time() - started < 5
    table = read_scores(tmp_path / "s.csv")
    assert table["name"][:5].tolist() == [*odd[:3], "half\\ud83d", r"new\u000aline\u000dand\u001b[2J"]
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 200_001, "a row is a line"
    np.testing.assert_array_equal(table["score"], scores)
    np.testing.assert_array_equal(table["is_ood"], scores > 0)


# Trained models of the user


@pytest.fixture(scope="module")
def net(home: Path) -> Path:
    """A small CNN for images of 12 × 12, as a user would export it; and the same for batches of 2 only."""
    torch.manual_seed(0)
    first, x = nn.Conv2d(3, 6, 3, 2), torch.zeros(2, 3, 12, 12)
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(150, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    free = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=free), home / "net.pt2")
    torch.export.save(torch.export.export(model, (x,)), home / "stiff.pt2")
    with torch.no_grad():
        first.weight.neg_()
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=free), home / "other.pt2")
    return home / "net.pt2"


@pytest.mark.parametrize(("method", "layer"), [("csd", ()), ("knn", ("--layer", "1"))])
def test_detectors_on_a_trained_model(
    method: str, layer: tuple[str, ...], net: Path, home: Path, tmp_path: Path, onefold_: Cli
) -> None:
    """Images of a folder are brought to the model's size; every later command needs the model, and the right one."""
    file, steps = tmp_path / "m.onefold", QUICK if method == "csd" else ()
    done = onefold_("fit", home / "images", "-o", file, "--method", method, "--model", net, *layer, *steps)
    assert done.status == 0, done.err
    out = tmp_path / "s.csv"
    assert onefold_("score", file, home / "images", "-o", out, "--model", net, "--report", tmp_path / "p").status == 0
    model = torch.export.load(net)
    detector = onefold.load(file, model=model)
    assert detector.reader.sample_shape == (3, 12, 12)
    np.testing.assert_array_equal(read_scores(out)["score"], detector.score(str(home / "images")))
    assert page_data(tmp_path / "p")["nearest"] is not None
    assert onefold_("diagnose", file, "--model", net).status in (0, 1)
    assert onefold_("export", file, tmp_path / "m.pt2", "--model", net).status == 0
    before = out.read_bytes()
    for verb in (("score", file, home / "images", "-o", out), ("diagnose", file), ("export", file, tmp_path / "n.pt2")):
        one_line(onefold_(*verb), "--model: ", "that is not in the file")
        one_line(onefold_(*verb, "--model", home / "other.pt2"), "m.onefold", "not the one")
    assert out.read_bytes() == before
    assert not (tmp_path / "n.pt2").exists()


def test_models_that_cannot_be_used(net: Path, fitted: Path, home: Path, tmp_path: Path, onefold_: Cli) -> None:
    fit = ("fit", home / "images", "-o", tmp_path / "m.onefold", *QUICK)
    one_line(onefold_(*fit, "--model", tmp_path / "none.pt2"), "none.pt2 does not exist")
    one_line(onefold_(*fit, "--model", home / "images.npy"), "images.npy: not a model that torch.export.save wrote")
    one_line(onefold_(*fit, "--model", home / "stiff.pt2"), "batches of 2 only", "dynamic_shapes")
    one_line(onefold_(*fit, "--model", net, "--layer", "9"), "no layer '9'", "did you mean")
    one_line(onefold_(*fit, "--model", net, "--method", "rnd"), "rnd cannot use a model", "csd, gp, local-gp, knn")
    one_line(onefold_(*fit, "--layer", "1"), "--layer: ", "Name the model with --model")
    vectors = str(home / "arrays.npz::vectors")
    done = onefold_("fit", vectors, "-o", tmp_path / "m.onefold", "--model", net)
    one_line(done, "net.pt2: cannot take samples of shape (5,)", vectors)
    one_line(
        onefold_("score", fitted, home / "images", "--model", net, "-o", tmp_path / "s.csv"),
        "--model: ",
        "was not fitted on a model",
    )
    assert list(tmp_path.iterdir()) == []


# Bad input


def test_options_that_do_not_go_together_are_refused_before_the_data_is_read(tmp_path: Path, onefold_: Cli) -> None:
    nowhere = ("fit", tmp_path / "nowhere.npy", "-o", tmp_path / "m.onefold")
    one_line(onefold_(*nowhere, "--method", "gp", "--steps", "5"), "--steps: gp is fitted without training")
    one_line(onefold_(*nowhere, "--method", "knn", "--context", "x.npy"), "--context: only csd uses it")
    one_line(onefold_(*nowhere, "--fpr", "2"), "--fpr: must be a number in (0, 1), not 2.0")
    one_line(onefold_(*nowhere, "--steps", "0"), "--steps: must be an integer of at least 1, not 0")
    one_line(onefold_(*nowhere, "--seed", "-1"), "--seed: must be an integer")
    one_line(onefold_(*nowhere, "--device", "abacus"), "--device: 'abacus' is unknown")
    one_line(onefold_(*nowhere), "nowhere.npy: does not exist")
    assert list(tmp_path.iterdir()) == []


def bomb(path: Path) -> None:
    """A PNG of a few bytes whose header asks for 90,000 × 90,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 90_000, 90_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def test_images_that_cannot_be_read_are_skipped_counted_and_named(
    fitted: Path, home: Path, tmp_path: Path, onefold_: Cli
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i in range(110):
        (folder / f"{i:03d}.png").write_bytes((home / "images" / f"{i:03d}.png").read_bytes())
    bomb(folder / "050b.png")
    (folder / "000a\n.png").write_bytes(b"no image")
    done = onefold_("fit", folder, "-o", tmp_path / "m.onefold", *QUICK)
    assert done.status == 0
    assert f"2 images are unreadable; listed in {tmp_path / 'm.onefold.skipped.txt'}" in done.out
    out = tmp_path / "s.csv"
    done = onefold_("score", tmp_path / "m.onefold", folder, "-o", out)
    assert "110 scored" in done.out
    assert "2 images are unreadable" in done.out
    assert read_scores(out)["name"].tolist() == [f"{i:03d}.png" for i in range(110)]
    named = Path(f"{out}.skipped.txt").read_text().splitlines()
    assert named[0].startswith(repr(str(folder / "000a\n.png")) + ": not an image")
    assert named[1].startswith(repr(str(folder / "050b.png")) + ": more than 64,000,000 pixels")
    assert onefold_("score", fitted, home / "images", "-o", out).status == 0
    assert not Path(f"{out}.skipped.txt").exists(), "a list of another run's images would be wrong now"


def test_folders_without_images_are_refused(tmp_path: Path, onefold_: Cli) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    bomb(tmp_path / "broken" / "a.png")
    (tmp_path / "broken" / "b.jpg").write_bytes(b"nothing")
    out = ("-o", tmp_path / "m.onefold")
    one_line(onefold_("fit", tmp_path / "empty", *out), ": no images")
    one_line(onefold_("fit", tmp_path / "broken", *out), "none of its 2 images can be read", "more than 64,000,000")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "broken"}


def test_escape_sequences_in_names_do_not_reach_the_terminal(
    fitted: Path, home: Path, tmp_path: Path, onefold_: Cli
) -> None:
    nasty = "\x1b[31m\x9b2J\r\n"
    folder = tmp_path / f"f{nasty}"
    folder.mkdir()
    (folder / f"a{nasty}.png").write_bytes(b"no image")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr(f"b{nasty}.npy", b"")
        archive.writestr("c.npy", b"")
    (tmp_path / "t.csv").write_text("age,town\n1,Ulm\n2\n")
    (tmp_path / "t.csv").rename(tmp_path / f"t{nasty}.csv")
    escaped = r"\u001b[31m\u009b2J\u000d\u000a"
    for data, words in {
        folder: f"none of its 1 images can be read (a{escaped}.png",
        tmp_path / "a.npz": f"found: b{escaped}, c",
        tmp_path / f"t{nasty}.csv": f"t{escaped}.csv, line 3",
        tmp_path / f"n{nasty}.csv": f"n{escaped}.csv: does not exist",
    }.items():
        done = onefold_("fit", data, "-o", tmp_path / "m.onefold", *QUICK)
        one_line(done, words)
        assert done.err[:-1].isprintable()
    (folder / "b.png").write_bytes((home / "images" / "000.png").read_bytes())
    done = onefold_("score", fitted, folder, "-o", tmp_path / f"s{nasty}.csv")
    assert f"1 scored: {tmp_path}/s{escaped}.csv\n" in done.out
    assert f"listed in {tmp_path}/s{escaped}.csv.skipped.txt\n" in done.out
    done = onefold_("score", fitted, folder, "-o", folder / "b.png" / f"x{nasty}" / "s.csv")
    one_line(done, "its folder is a file")
    with pytest.raises(onefold.OnefoldError) as caught:
        onefold.load(tmp_path / f"m{nasty}.onefold")
    assert f"m{escaped}.onefold" in str(caught.value)
    with pytest.warns(OnefoldWarning, match=re.escape(f"x{escaped}")):
        warn(f"x{nasty}")


def test_tables_of_other_columns_are_refused(home: Path, tmp_path: Path, onefold_: Cli) -> None:
    file, out = tmp_path / "t.onefold", tmp_path / "s.csv"
    assert onefold_("fit", home / "table.csv", "-o", file, *QUICK).status == 0
    out.write_text("mine")
    columns = rows(9, np.random.default_rng(1))
    other: Path = tmp_path / "other.csv"
    bad = {
        "no column 'town'": {name: column for name, column in columns.items() if name != "town"},
        "unknown columns: 'shoe'": {**columns, "shoe": [43] * 9},
        "column 'age', row 3: 'old' is not a finite number": {**columns, "age": [1, 2, "old", *range(6)]},
    }
    for words, table in bad.items():
        write_table(other, table)
        one_line(onefold_("score", file, other, "-o", out), words)
    other.write_text("age,town,x\n1,Ulm\n")
    one_line(onefold_("score", file, other, "-o", out), "other.csv, line 2: 2 fields, the header has 3")
    other.write_text("age,town,x\n")
    one_line(onefold_("score", file, other, "-o", out), "other.csv: no rows")
    one_line(onefold_("score", file, home / "images.npy", "-o", out), "fitted on a table", "images.npy")
    assert out.read_text() == "mine"


def test_arrays_of_another_shape_are_refused_by_name(home: Path, tmp_path: Path, onefold_: Cli) -> None:
    file = tmp_path / "v.onefold"
    assert onefold_("fit", f"{home}/arrays.npz::vectors", "-o", file, *QUICK).status == 0
    done = onefold_("score", file, f"{home}/arrays.npz::others", "-o", tmp_path / "s.csv")
    one_line(done, "arrays.npz::others: samples of shape (3,)", "(5,)")
    one_line(onefold_("score", file, f"{home}/arrays.npz", "-o", tmp_path / "s.csv"), "several arrays", "::KEY")
    one_line(onefold_("score", file, f"{home}/arrays.npz::no", "-o", tmp_path / "s.csv"), "no array 'no'")


def test_series_are_not_taken_for_images(tmp_path: Path, onefold_: Cli) -> None:
    x, file = np.random.default_rng(0).normal(size=(120, 9, 6)).astype(np.float32), tmp_path / "s.onefold"
    np.save(tmp_path / "series.npy", x)
    done = onefold_("fit", tmp_path / "series.npy", "-o", file, *QUICK)
    one_line(done, "series.npy: samples of shape (9, 6) could be grey images or time series", "x[:, None]")
    np.save(tmp_path / "series.npy", x.reshape(len(x), -1))
    assert onefold_("fit", tmp_path / "series.npy", "-o", file, *QUICK).status == 0
    assert onefold.load(file).reader.sample_shape == (54,)


def test_too_little_data_is_refused_before_the_training(home: Path, tmp_path: Path, onefold_: Cli) -> None:
    for data, count in ((home / "images", 24), (home / "table.csv", None)):
        done = onefold_("fit", data, "-o", tmp_path / "m.onefold", *QUICK, "--fpr", "0.01")
        one_line(done, f"a fifth of {data} is", "--fpr 0.01 needs 99", "--calibrate")
        if count is not None:
            assert f"is {count} samples" in done.err
    one_line(
        onefold_(
            "fit", home / "images.npy", "-o", tmp_path / "m.onefold", "--calibrate", home / "images", "--fpr", ".001"
        ),
        f"{home / 'images'} has 120 samples",
        "needs 999",
    )
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_to(
    fitted: Path, home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = home / "images"
    one_line(onefold_("score", fitted, images, "-o", tmp_path / "s.txt"), "s.txt", ".csv or .parquet")
    one_line(onefold_("score", fitted, images, "-o", tmp_path / "s.CSV.gz"), ".csv or .parquet")
    one_line(onefold_("fit", images, "-o", tmp_path), "is a folder. Name a file.")
    table, before = home / "table.csv", (home / "table.csv").read_bytes()
    one_line(onefold_("score", fitted, table, "-o", table), "read and written by this command")
    one_line(onefold_("fit", table, "-o", table), "read and written by this command")
    page = ("--report", tmp_path / "s.csv")
    one_line(onefold_("score", fitted, images, "-o", tmp_path / "s.csv", *page), "read and written by this command")
    assert table.read_bytes() == before
    (tmp_path / "file").write_text("mine")
    one_line(onefold_("fit", images, "-o", tmp_path / "file" / "m.onefold"), "its folder is a file")
    monkeypatch.setattr(os, "access", lambda *_: False)
    one_line(onefold_("fit", images, "-o", tmp_path / "m.onefold"), f"{tmp_path}: cannot be written to")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_that_are_no_detectors(fitted: Path, home: Path, tmp_path: Path, onefold_: Cli) -> None:
    content = bytearray(fitted.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "bent.onefold").write_bytes(content)
    (tmp_path / "short.onefold").write_bytes(content[: len(content) // 3])
    for name in ("bent.onefold", "short.onefold"):
        for verb in (("score",), ("diagnose",), ("export",)):
            rest = {
                "score": (home / "images", "-o", tmp_path / "s.csv"),
                "diagnose": (),
                "export": (tmp_path / "m.pt2",),
            }
            one_line(onefold_(*verb, tmp_path / name, *rest[verb[0]]), name, "damaged")
    one_line(onefold_("diagnose", tmp_path / "none.onefold"), "none.onefold", "No such file")
    one_line(onefold_("diagnose", home / "images.npy"), "images.npy", "damaged, or not a file of onefold")


# A full disk


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_nothing(
    fitted: Path, home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page, exported = tmp_path / "s.csv", tmp_path / "p.html", tmp_path / "m.pt2"
    for path in (out, page, exported):
        path.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        done = onefold_("score", fitted, home / "images", "-o", out, "--report", page)
        one_line(done, f"{out}: No space left on device", "Free some space")
        one_line(onefold_("export", fitted, exported), f"{exported}: No space left on device")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("s.csv", "p.html", "m.pt2"), "mine"
    )


def test_a_fit_that_cannot_write_its_result_resumes_at_its_end(
    home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fit = tmp_path / "m.onefold", ("fit", home / "images.npy", "-o", tmp_path / "m.onefold", *QUICK)
    file.write_text("the old one")
    fsync = os.fsync

    def full_for_the_result(descriptor: int) -> None:
        if ".part" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            fsync(descriptor)
        else:
            full()

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full_for_the_result)
        one_line(onefold_(*fit), f"{file}: No space left on device")
    assert file.read_text() == "the old one"
    assert {path.name for path in tmp_path.iterdir()} == {"m.onefold", "m.onefold.part"}
    _, header = storage.load(tmp_path / "m.onefold.part", "training checkpoint")
    assert header["step"] == 4
    assert onefold_(*fit).status == 0
    assert {path.name for path in tmp_path.iterdir()} == {"m.onefold"}
    assert onefold_("fit", home / "images.npy", "-o", tmp_path / "again.onefold", *QUICK).status == 0
    assert file.read_bytes() == (tmp_path / "again.onefold").read_bytes()


def test_a_file_that_grows_too_large_for_the_system(home: Path, tmp_path: Path) -> None:
    """The system's own refusal, in a process of its own: the state of the training does not fit."""
    command = [sys.executable, "-m", "onefold.cli", "fit", home / "images.npy", "-o", tmp_path / "m.onefold", *QUICK]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, preexec_fn=limit)
    one_line(Done(done.returncode, done.stdout, done.stderr), "m.onefold.part: File too large", "Free some space")
    assert list(tmp_path.iterdir()) == []


# Stopped fits

KILLED = """
import os, signal, sys
from onefold.core import storage
from onefold.nn import train
from onefold.cli import main
train.save_checkpoints.__defaults__ = (0.0,)  # a state after every step
count, fsync = 0, os.fsync
def dying(descriptor):
    global count
    count += 1
    if count == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = dying
main(sys.argv[1:])
"""


@pytest.mark.parametrize("method", ["csd", "rnd"])
def test_a_killed_fit_resumes_to_the_same_detector(method: str, home: Path, tmp_path: Path, onefold_: Cli) -> None:
    """Killed in the midst of writing its fourth state: the third is whole, and leads to the same file, bit by bit."""
    arguments = ["fit", str(home / "table.csv"), "--method", method, "--steps", "6", "--device", "cpu", "-o"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments, tmp_path / "m.onefold"], env=ENVIRONMENT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    part = tmp_path / "m.onefold.part"
    assert not (tmp_path / "m.onefold").exists()
    _, header = storage.load(part, "training checkpoint")
    assert header["step"] == 2
    done = onefold_(*arguments, tmp_path / "m.onefold")
    assert done.status == 0, done.err
    assert not part.exists()
    assert onefold_(*arguments, tmp_path / "whole.onefold").status == 0
    assert (tmp_path / "m.onefold").read_bytes() == (tmp_path / "whole.onefold").read_bytes()


def test_a_state_of_another_run_is_never_used_or_lost(home: Path, tmp_path: Path, onefold_: Cli) -> None:
    part, fit = tmp_path / "m.onefold.part", ("fit", home / "images.npy", "-o", tmp_path / "m.onefold", "--steps", "4")
    interrupted = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, fit)], env=ENVIRONMENT, check=False, capture_output=True
    )
    assert interrupted.returncode == -signal.SIGKILL
    before = part.read_bytes()
    one_line(onefold_(*fit, "--seed", "1"), "m.onefold.part", "other data or settings", "Delete it")
    other = ("fit", home / "floats.npy", *fit[2:])
    one_line(onefold_(*other), "m.onefold.part", "other data or settings", "Delete it")
    assert part.read_bytes() == before
    closed = onefold_("fit", home / "images.npy", "-o", tmp_path / "m.onefold", "--method", "gp")
    assert closed.status == 0, "a method without states has no business with this one"
    assert part.read_bytes() == before
    part.write_bytes(before[:1000])
    one_line(onefold_(*fit), "m.onefold.part", "damaged", "Delete the file to start again")


def test_control_c_leaves_a_state_and_no_broken_file(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onefold.cli", "fit", home / "table.csv", "-o", tmp_path / "m.onefold"]
    process = subprocess.Popen(
        [*command, "--steps", "1000000"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    part = tmp_path / "m.onefold.part"
    waited = time.monotonic()
    while not part.exists():
        assert process.poll() is None
        assert time.monotonic() - waited < 600
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out == ""
    assert (
        err
        == f"onefold: stopped. Run the same command again to resume from {part}, or delete that file to start again.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m.onefold.part"]


def test_control_c_while_scoring_leaves_what_was_there(
    fitted: Path, home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "s.csv"
    out.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", interrupt)
        done = onefold_("score", fitted, home / "images", "-o", out)
    assert done == Done(130, "", "onefold: stopped\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"s.csv": "mine"}


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_every_phase(
    home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, phases = (
        home / "images",
        tmp_path / "m.onefold",
        ("looking at images", "reading", "CSD", "calibrating"),
    )
    assert onefold_("fit", folder, "-o", tmp_path / "quiet.onefold", *QUICK).err == ""
    monkeypatch.setattr(sys, "stderr", fit := Terminal())
    assert onefold_("fit", folder, "-o", file, *QUICK).status == 0
    assert all(phase in fit.getvalue() for phase in phases)
    assert file.read_bytes() == (tmp_path / "quiet.onefold").read_bytes()
    monkeypatch.setattr(sys, "stderr", score := Terminal())
    assert onefold_("score", file, folder, "-o", tmp_path / "s.csv").status == 0
    assert "scoring" in score.getvalue()
    assert "120/120" in score.getvalue()


def test_freed_memory_is_given_back_while_a_job_runs() -> None:
    """Many small blocks, every hundredth of which stays: the holes between them are given back."""
    if runtime.malloc_trim() is None:
        pytest.skip("not glibc")
    with runtime.trim_memory():
        blocks = [bytearray(50_000) for _ in range(4000)]
        time.sleep(1)
        high = runtime.resident()
        blocks[:] = blocks[::100]
        grown = np.ones(2**23)  # growth, which makes it look
        until = time.monotonic() + 60
        while (freed := high + grown.nbytes - runtime.resident()) < 100e6 and time.monotonic() < until:
            time.sleep(0.1)
    assert freed > 100e6


# Pages of much data


def test_a_page_shows_the_least_familiar_of_many(home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: Any) -> None:
    monkeypatch.setattr(score_page, "MAX_INPUTS", 50)
    for data in ("images", "images.npy", "floats.npy", "table.csv"):
        file, page = tmp_path / "m.onefold", tmp_path / "p.html"
        assert onefold_("fit", home / data, "-o", file, *QUICK).status == 0
        assert onefold_("score", file, home / data, "-o", tmp_path / "s.csv", "--report", page).status == 0
        table, content = read_scores(tmp_path / "s.csv"), page_data(page)
        strangest = np.sort(np.argsort(-table["score"], kind="stable")[:50])
        assert content["names"] == table["name"][strangest].tolist()
        assert f"the page shows the 50 least familiar of {len(table['score'])}" in page.read_text()
        detector = onefold.load(file)
        if data == "table.csv":
            with (home / data).open(newline="") as csv_file:
                cells = list(csv.reader(csv_file))[1:]
            assert [row[1] for row in content["values"]] == [cells[i][1] for i in strangest]
        else:
            nearest = detector.neighbours(str(home / data), score_page.NEAREST)
            assert content["nearest"] == nearest[strangest].tolist()


def test_every_image_is_decoded_once(home: Path, tmp_path: Path, onefold_: Cli, monkeypatch: Any) -> None:
    file, page = tmp_path / "m.onefold", tmp_path / "p.html"
    assert onefold_("fit", home / "images", "-o", file, *QUICK).status == 0
    decoded: list[Path] = []

    def counted(path: Path, *arguments: Any) -> Any:
        decoded.append(path)
        return decode(path, *arguments)

    decode = image_folder.decode
    monkeypatch.setattr(image_folder, "decode", counted)
    assert onefold_("score", file, home / "images", "-o", tmp_path / "s.csv", "--report", page).status == 0
    assert sorted(path.name for path in decoded) == sorted(path.name for path in (home / "images").rglob("*.png"))
    assert (
        page_data(page)["nearest"] == onefold.load(file).neighbours(str(home / "images"), score_page.NEAREST).tolist()
    )


def test_wide_tables_have_fewer_rows_on_a_page(tmp_path: Path, onefold_: Cli, monkeypatch: Any) -> None:
    monkeypatch.setattr(score_page, "MAX_CELLS", 40 * 110)
    rng, file = np.random.default_rng(0), tmp_path / "m.onefold"
    write_table(tmp_path / "wide.csv", {f"c{i}": rng.normal(size=130).tolist() for i in range(40)})
    assert onefold_("fit", tmp_path / "wide.csv", "-o", file, "--method", "knn").status == 0
    page = ("--report", tmp_path / "p.html")
    assert onefold_("score", file, tmp_path / "wide.csv", "-o", tmp_path / "s.csv", *page).status == 0
    content = page_data(tmp_path / "p.html")
    assert len(content["values"]) == 110
    assert len(content["values"][0]) == 40


@pytest.mark.parametrize("data", ["images.npy", "floats.npy"])
def test_pictures_are_the_images_themselves(data: str, home: Path, tmp_path: Path, onefold_: Cli) -> None:
    file = tmp_path / "m.onefold"
    assert onefold_("fit", home / data, "-o", file, *QUICK).status == 0
    reader = onefold.load(file).reader
    raw = torch.from_numpy(np.lib.format.open_memmap(home / data, "c"))
    pictures = thumbnails.thumbnails(reader, raw)
    if data == "images.npy":
        np.testing.assert_array_equal(pictures, raw.numpy())
    else:
        grey = (raw.numpy() - reader.low) / (reader.high - reader.low)
        np.testing.assert_allclose(pictures, np.clip(255 * grey, 0, 255), atol=0.51)
    assert thumbnails.thumbnails(reader, raw, side=4).shape[1:3] == (4, 4)


# Memory

PEAK = """
import resource, sys
import onefold.inputs.samples
from onefold.cli import main
onefold.inputs.samples.CPU_BUDGET = 8 * 2**20
peaks = []
for data in sys.argv[2:]:
    fit = ["fit", data, "-o", sys.argv[1] + "/m.onefold", "--steps", "2", "--device", "cpu"]
    assert main(fit) == 0
    assert main(["score", sys.argv[1] + "/m.onefold", data, "-o", sys.argv[1] + "/s.csv"]) == 0
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print("peaks", *peaks)
"""


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """Data of 16 MB, then of 128 MB: of the difference, only the features of samples and their scores may be kept."""
    rng = np.random.default_rng(0)
    for name, count in (("small.npy", 1000), ("large.npy", 8000)):
        out = np.lib.format.open_memmap(tmp_path / name, "w+", np.float32, (count, 4096))
        for start in range(0, count, 500):
            out[start : start + 500] = rng.normal(size=(500, 4096))
        del out
    command = [sys.executable, "-c", PEAK, tmp_path, tmp_path / "small.npy", tmp_path / "large.npy"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split("peaks")[1].split())
    assert large - small < 60e6


@pytest.mark.slow
def test_two_gigabytes_of_images_in_one_of_memory(tmp_path: Path) -> None:
    big, count, rng = tmp_path / "big.npy", 174_763, np.random.default_rng(0)
    patterns = rng.integers(0, 200, (64, 8, 8, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    with big.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (count, 64, 64, 3)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, 1024):
            shade = rng.integers(0, 55, (min(1024, count - start), 1, 1, 1), dtype=np.uint8)
            file.write((patterns[rng.integers(0, 64, len(shade))] + shade).tobytes())
    assert big.stat().st_size > 2 * 2**30
    fit = ["fit", big, "-o", tmp_path / "m.onefold", "--method", "csd", "--steps", "30", "--device", "cpu"]
    score = ["score", tmp_path / "m.onefold", big, "-o", tmp_path / "s.csv", "--report", tmp_path / "p.html"]
    try:
        for arguments in (fit, score):
            peak, seconds = peak_of([sys.executable, "-m", "onefold.cli", *map(str, arguments)])
            print(f"{arguments[0]}: {peak / 1e6:.0f} MB, {seconds:.0f} s")
            assert peak < 1e9
    finally:
        big.unlink()
    assert len(read_scores(tmp_path / "s.csv")["score"]) == count


def peak_of(command: list[str]) -> tuple[float, float]:
    """The most memory that a command held, in bytes, and its seconds."""
    wrapper = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", wrapper, *command], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return 1024.0 * int(done.stdout.split("peak")[1]), time.monotonic() - started
