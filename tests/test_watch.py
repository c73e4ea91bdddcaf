"""`onefold watch`: lines, exit status, resuming, rows from standard input, and the page."""

import io
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opener
from PIL import Image

import onefold
from onefold import cli
from onefold.inputs import Column, Table
from onefold.monitor import Evidence, Monitor
from onefold.report.watch_page import LISTED_INPUTS, MOST_POINTS, WatchRecord, column_shifts, format_power, render

HEADER = "length,weight,colour"


def table_rows(count: int, seed: int, shift: float = 0.0) -> list[str]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        odd = rng.random() < shift
        colour = "black" if odd else rng.choice(["red", "green", "blue"], p=[0.2, 0.3, 0.5])
        rows.append(f"{rng.normal(10, 2) + 9 * odd:.3f},{rng.normal(70, 9):.3f},{colour}")
    return rows


def as_json(rows: list[str]) -> list[str]:
    """Return CSV rows as JSON objects, with the columns in another order."""
    objects = []
    for row in rows:
        length, weight, colour = row.split(",")
        objects.append(json.dumps({"colour": colour, "weight": float(weight), "length": float(length)}))
    return objects


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of a table, familiar and changed data."""
    folder = tmp_path_factory.mktemp("watch")
    for name, rows in {
        "train": table_rows(900, 0), "held_out": table_rows(300, 1), "today": table_rows(350, 2),
        "changed": table_rows(350, 3, 0.3),
    }.items():  # fmt: skip
        (folder / f"{name}.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    detector = onefold.LastLayerGP(width=128, device="cpu").fit(folder / "train.csv")
    detector.save(folder / "bare.onefold")
    detector.calibrate(folder / "held_out.csv").save(folder / "m.onefold")
    np.save(folder / "vectors.npy", np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32))
    vectors = onefold.KNN(device="cpu").fit(folder / "vectors.npy")
    vectors.calibrate(np.random.default_rng(1).normal(size=(100, 3)).astype(np.float32)).save(folder / "v.onefold")
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def feed(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    content = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# --- lines, status and state ------------------------------------------------------------------------------------------


def test_each_batch_is_a_line_of_the_monitors_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    detector = onefold.load("m.onefold", device="cpu")
    for name, status in (("today", 0), ("changed", 3)):
        assert cli.main(["watch", "m.onefold", f"{name}.csv"]) == status
        monitor, scores = Monitor(detector), detector.score(f"{name}.csv")
        parts = (scores[:100], scores[100:200], scores[200:300], scores[300:])
        expected = [asdict(monitor.update_scores(part)) for part in parts]
        assert lines(capsys) == expected
        assert (expected[-1]["crossed_at"] is None) == (status == 0)
        assert [line["inputs"] for line in expected] == [100, 200, 300, 350]


def test_stop_ends_at_the_batch_that_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "m.onefold", "changed.csv", "--stop", "--batch", "10"]) == 3
    printed = lines(capsys)
    crossed_at = printed[-1]["crossed_at"]
    assert printed[-1]["inputs"] == 10 * math.ceil(crossed_at / 10)
    assert all(line["crossed_at"] is None for line in printed[:-1])


def test_a_resumed_watch_equals_one_that_was_not_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (Path("changed.csv").read_text()).splitlines()[1:]
    for name, part in (("one", rows[:130]), ("two", rows[130:])):
        (tmp_path / f"{name}.csv").write_text("\n".join([HEADER, *part]))
    state = ["--state", str(tmp_path / "state.json")]
    for name in ("one", "two"):
        cli.main(["watch", "m.onefold", str(tmp_path / f"{name}.csv"), *state])
    resumed = lines(capsys)[-1]
    assert cli.main(["watch", "m.onefold", "changed.csv", "--state", str(tmp_path / "whole.json")]) == 3
    assert lines(capsys)[-1] == resumed
    assert (tmp_path / "state.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert cli.main(["watch", "m.onefold", "today.csv", "--alpha", "0.1", *state]) == 2
    assert "state.json: is of a monitor with alpha=0.001" in capsys.readouterr().err


def test_what_cannot_be_watched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["bare.onefold", "today.csv"], "no threshold: call calibrate"),
        (["m.onefold", "absent.csv"], "absent.csv: does not exist"),
        (["m.onefold", "vectors.npy"], "vectors.npy: not a table"),
        (["m.onefold", "today.csv", "--alpha", "2"], "--alpha: must be a number in (0, 1)"),
        (["m.onefold", "today.csv", "--batch", "0"], "--batch: must be an integer of at least 1"),
        (["m.onefold", "today.csv", "--report", "today.csv"], "today.csv: is read and written"),
        (["m.onefold", "today.csv", "--state", "m.onefold"], "m.onefold: is read and written"),
        (["m.onefold", "today.csv", "--state", "held_out.csv"], "held_out.csv: is cut short or damaged"),
    ):
        assert cli.main(["watch", *arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# --- standard input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "json", "bom", "semicolons", "blank lines"])
def test_standard_input_is_read_like_a_file(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("changed.csv").read_text()
    rows = text.splitlines()[1:]
    assert cli.main(["watch", "m.onefold", "changed.csv"]) == 3
    expected = lines(capsys)
    texts = {
        "csv": text, "json": "\n".join(as_json(rows)), "bom": "\ufeff" + text.replace("\n", "\r\n"),
        "semicolons": text.replace(",", ";"), "blank lines": "\n\n".join(["", *as_json(rows), ""]).lstrip(),
    }  # fmt: skip
    feed(monkeypatch, texts[kind])
    assert cli.main(["watch", "m.onefold", "-"]) == 3
    assert lines(capsys) == expected


def test_missing_values_of_json_are_null(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    feed(monkeypatch, f"{HEADER}\n,70,red\n10,,NA\n")
    assert cli.main(["watch", "m.onefold", "-"]) in (0, 3)
    expected = lines(capsys)
    feed(monkeypatch, '{"length":null,"weight":70,"colour":"red"}\n{"length":10,"weight":null,"colour":null}\n')
    assert cli.main(["watch", "m.onefold", "-"]) in (0, 3)
    assert lines(capsys) == expected


def test_vectors_are_arrays_or_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.load("vectors.npy").tolist()
    assert cli.main(["watch", "v.onefold", "vectors.npy"]) in (0, 3)
    expected = lines(capsys)
    for text in (
        "\n".join(map(json.dumps, x)),
        "\n".join(["a,b,c", *(",".join(map(repr, row)) for row in x)]),
    ):
        feed(monkeypatch, text)
        assert cli.main(["watch", "v.onefold", "-"]) in (0, 3)
        assert lines(capsys) == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1,2", "standard input, line 102: 2 fields, the header has 3"),
        ("a,70,red", "column 'length', row 101: 'a' is not a finite number"),
        ("inf,70,red", "column 'length', row 101: 'inf' is not a finite number"),
        ('"1', "standard input, line 102: not CSV"),
        ("\0,1,2", "standard input, line 102: NUL byte"),
    ],
)
def test_bad_rows_end_the_watch_after_the_good_batches(
    bad: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, page = tmp_path / "s.json", tmp_path / "p.html"
    feed(monkeypatch, "\n".join([HEADER, *table_rows(100, 5), bad]))
    assert cli.main(["watch", "m.onefold", "-", "--state", str(state), "--report", str(page)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    (line,) = map(json.loads, captured.out.splitlines())
    assert line["inputs"] == json.loads(state.read_text())["inputs"] == 100
    assert "100" in page.read_text()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"length": 1, "weight": 2}', r"line 101: other columns than line 1 ('colour')"),
        ('{"length": 1, "weight": 2, "colour": "red", "mass": 3}', "line 101: other columns than line 1 ('mass')"),
        ("[1, 2, 3]", "line 101: other columns than line 1 ("),
        ('{"length": 1', "line 101: not JSON of one row"),
        ("17", "line 101: not JSON of one row"),
        ("[" * 10**5, "line 101: not JSON of one row"),
        ('{"length": [1], "weight": 2, "colour": "red"}', "line 101: column 'length' has nested values"),
        ('{"length": "ten", "weight": 2, "colour": "red"}', "column 'length', row 101: 'ten' is not a finite number"),
    ],
)
def test_bad_json_is_refused(
    bad: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, "\n".join([*as_json(table_rows(100, 5)), bad]))
    assert cli.main(["watch", "m.onefold", "-"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("detector", "text", "message"),
    [
        ("m", "", "standard input: no rows"),
        ("m", f"{HEADER}\n", "standard input: no rows"),
        ("m", "length,weight\n1,2\n", "other columns than in the fit (no column 'colour')"),
        ("m", "1,2,red\n1,2,red\n", "other columns than in the fit"),
        ("m", "1,2,3\n", "standard input: the first row holds numbers"),
        ("m", b"length,weight,colour\n1,2,\xff\n", "not UTF-8 text"),
        ("v", "[1, 2]\n", "standard input: samples of shape (2,), but the model was fitted on (3,)"),
        ("v", "a,b,c\n1,2,x\n", "standard input, row 1: column 'c' is not a number"),
        ("v", "[1, 2, null]\n", "standard input: values are NaN"),
    ],
)
def test_bad_streams_are_refused(
    detector: str,
    text: str | bytes,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    feed(monkeypatch, text)
    assert cli.main(["watch", f"{detector}.onefold", "-"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_pipes_that_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"'{sys.executable}' -m onefold.cli watch m.onefold"
    closed = subprocess.run(["bash", "-c", f"{command} - <&-"], capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stdout) == (2, "")
    assert closed.stderr == "onefold: standard input: closed. Pipe rows into the command.\n"
    state = tmp_path / "s.json"
    script = f"set -o pipefail; {command} changed.csv --batch 1 --state {state} | head -2"
    head = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert head.returncode == 141
    assert [json.loads(line)["inputs"] for line in head.stdout.splitlines()] == [1, 2]
    assert json.loads(state.read_text())["inputs"] >= 2
    assert head.stderr == ""
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["watch", "m.onefold", "-"]) == 2


# --- the page ---------------------------------------------------------------------------------------------------------


def test_shifts_by_hand() -> None:
    """Standard deviations, shares of categories, and missing values."""
    ones = np.ones(100)
    table = Table(
        (
            Column("moved", "number"), Column("constant", "number"), Column("same", "number"),
            Column("kind", "category", ("a", "b"), frequencies=(0.8, 0.2)), Column("gone", "number"),
        )
    )  # fmt: skip
    familiar = np.stack(
        [np.tile([-1.0, 1.0], 50), ones, np.arange(100.0), np.repeat([0.0, 1.0], [80, 20]), np.arange(100.0)], axis=1
    )
    stream = familiar[:, :].copy()
    stream[:, 0] += 3  # of a standard deviation of 1
    stream[:, 1] = 2
    stream[:50, 3] = -1.0  # half of the stream has a value that is not listed, which was none of 100
    stream[:90, 4] = np.nan
    shifts = {shift.column: shift for shift in column_shifts(table, familiar, stream)}
    assert [shift.column for shift in column_shifts(table, familiar, stream)][:2] == ["constant", "gone"]
    assert shifts["moved"].spreads == pytest.approx(3)
    assert (shifts["moved"].familiar, shifts["moved"].stream) == ("-1", "2")
    assert shifts["constant"].spreads == math.inf
    assert (shifts["same"].spreads, shifts["same"].statistic) == (0, "share missing")
    rare = 0.5 / 100
    assert shifts["kind"].statistic == "share of other values"
    assert shifts["kind"].spreads == pytest.approx(0.5 / math.sqrt(rare * (1 - rare)))
    assert shifts["gone"].spreads == pytest.approx(0.9 / math.sqrt(rare * (1 - rare)))
    assert (shifts["gone"].familiar, shifts["gone"].stream) == ("0.0%", "90.0%")


def test_shifts_name_the_quantile_that_moved_most() -> None:
    familiar = np.random.default_rng(0).normal(size=(4000, 1))
    (shift,) = column_shifts(None, familiar, np.where(familiar > 1.2, familiar + 2, familiar))
    assert (shift.column, shift.statistic) == ("0", "95% quantile")
    assert shift.spreads == pytest.approx(2 / familiar.std(), rel=1e-6)


@pytest.mark.parametrize(
    ("log10", "text"), [(0.0, "1"), (2.5, "316"), (3.5, "3,162"), (14.2, "10¹⁴"), (-2.0, "0.01"), (-700.4, "10⁻⁷⁰⁰")]
)
def test_betting_scores_are_shown_as_powers(log10: float, text: str) -> None:
    assert format_power(log10) == text


def test_a_long_stream_is_drawn_in_bounded_memory() -> None:
    detector: Any = onefold.load("v.onefold", device="cpu")
    raw = next(detector.reader.batches(np.zeros((1, 3), np.float32)))
    start = Evidence(0, 0, 0.0, 0.0, 3.3, None)
    record = WatchRecord(detector, start)
    for i in range(3 * MOST_POINTS):
        record.add(raw, np.array([float(i % 50)]), Evidence(i + 1, 0, 0.0, 0.0, 3.3, None))
    inputs = [evidence.inputs for evidence in record.evidence]
    assert len(inputs) <= MOST_POINTS + 1
    assert (inputs[0], inputs[-1]) == (0, 3 * MOST_POINTS)
    assert inputs == sorted(set(inputs))
    assert set(np.diff(inputs)[:-1]) <= {4}
    listed = record.listed_inputs(str)
    assert [entry.score for entry in listed] == [49.0] * LISTED_INPUTS
    assert [entry.name for entry in listed] == [str(49 + 50 * i) for i in range(LISTED_INPUTS)]


def test_the_page_lists_the_least_familiar_inputs_and_escapes_text(tmp_path: Path, opened: Opener) -> None:
    hostile = "<b>note</b>\u202e"
    rows = [f"{row},{'<script>alert(1)</script>' if i % 2 else 'b'}" for i, row in enumerate(table_rows(600, 0))]
    train = tmp_path / "train.csv"
    train.write_text("\n".join([f"{HEADER},{hostile}", *rows]))
    today = tmp_path / "<i>today.csv"
    today.write_text("\n".join([f"{HEADER},{hostile}", *(f"{row},b" for row in table_rows(250, 3, 0.4))]))
    detector = onefold.LastLayerGP(width=128, device="cpu").fit(train).calibrate(train)
    detector.save(tmp_path / "m.onefold")
    page = tmp_path / "page.html"
    assert cli.main(["watch", str(tmp_path / "m.onefold"), str(today), "--report", str(page)]) == 3
    for width in (1200, 390):
        tab = opened(page, width=width)
        assert tab.locator("h1").inner_text() == "The stream has changed"
        assert "<i>today.csv, inputs 1 to 250" in tab.locator(".lead").inner_text()
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        expected = [f"{i + 1:,}" for i in np.argsort(-detector.score(today), kind="stable")[:10]]
        assert tab.locator(".least tbody th").all_inner_texts() == expected
        columns = tab.locator(".shifts tbody th").all_inner_texts()
        assert set(columns) == {"length", "weight", "colour", r"<b>note</b>\u202e"}
        assert columns[0] == "colour"
        assert tab.locator("script:not([type=module]), b b, i").count() == 0
        assert tab.locator("figure img").count() == 3


def test_the_page_shows_images_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name, count, low in (("train", 150, 0), ("held_out", 100, 0), ("new", 30, 0), ("odd", 30, 200)):
        for i in range(count):
            folder = tmp_path / ("new" if name == "odd" else name)
            folder.mkdir(exist_ok=True)
            pixels = rng.integers(low, low + 55, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}{i:03d}.png")
    (tmp_path / "new" / "broken.png").write_bytes(b"no image")
    detector = onefold.KNN(device="cpu").fit(tmp_path / "train")
    detector.calibrate(tmp_path / "held_out").save(tmp_path / "m.onefold")
    page = tmp_path / "page.html"
    status = cli.main(["watch", str(tmp_path / "m.onefold"), str(tmp_path / "new"), "--report", str(page), "--stop"])
    assert status == 3
    text = page.read_text()
    assert text.count("<td><img") == LISTED_INPUTS
    assert text.count('<th scope="row">odd') == LISTED_INPUTS
    assert "Shifted columns" not in text
    capsys.readouterr()
    assert cli.main(["watch", str(tmp_path / "m.onefold"), "-"]) == 2
    assert "standard input: only rows of numbers or of a table can be read" in capsys.readouterr().err


def test_a_file_without_samples_has_no_shifts(tmp_path: Path) -> None:
    detector = onefold.load("m.onefold", device="cpu")
    detector.save(tmp_path / "m.onefold", samples=False)
    page = tmp_path / "page.html"
    assert cli.main(["watch", str(tmp_path / "m.onefold"), "today.csv", "--report", str(page)]) == 0
    text = page.read_text()
    assert "No change was detected" in text
    assert "Shifted columns" not in text


def test_an_empty_record_has_no_page() -> None:
    record = WatchRecord(onefold.load("v.onefold", device="cpu"), Evidence(0, 0, 0.0, 0.0, 3.3, None))
    assert record.listed_inputs(str) == []
    assert "No change was detected" in render(record, title="x", alpha=0.001, names=str)
