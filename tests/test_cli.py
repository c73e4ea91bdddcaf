"""The command line: help, errors, the demo and the toy, and their pages."""

import dataclasses
import json
import os
import pickle
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import CHROMIUM

from onefold import cli, demo, toy
from onefold.cli.jobs import FIT_METHODS, Fit, Job
from onefold.cli.main import COMMANDS, Group, options, parse
from onefold.errors import InputError, renamed_argument
from onefold.report.demo_page import render
from onefold.report.example_figures import draw_line, draw_plane, histogram, labelled_images
from onefold.report.score_page import score_axis


def onefold(*arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onefold.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **keywords)


def test_help_teaches_and_version_is_one_line() -> None:
    for arguments in ((), ("--help",)):
        done = onefold(*arguments)
        assert done.returncode == 0
        assert "demo" in done.stdout
        assert "toy" in done.stdout
    assert "--seed" in onefold("demo", "--help").stdout
    assert re.fullmatch(r"onefold \d+\.\d+\.\d+\S*\n", onefold("--version").stdout)


def test_bad_arguments_fail_without_a_traceback(tmp_path: Path) -> None:
    for arguments in (("demo", "--seed", "many"), ("dance",), ("toy", "--outt", "x")):
        done = onefold(*arguments)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr + done.stdout
    occupied = tmp_path / "file"
    occupied.write_text("mine")
    done = onefold("demo", "--out", str(occupied / "x"))
    assert done.returncode == 2
    assert done.stderr.strip() == f"onefold: {occupied / 'x'}: Not a directory"
    assert occupied.read_text() == "mine"


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onefold.errors import InputError

    def refuse(_: int) -> None:
        raise InputError("these digits are not digits")

    monkeypatch.setattr(demo, "demo_data", refuse)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "onefold: these digits are not digits\n"

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo_data", interrupt)
    assert cli.main(["demo"]) == 130


def commands(group: Group = COMMANDS, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Job]]]:
    """Yield the words of every command and its job."""
    for word, command in group.commands.items():
        if isinstance(command, Group):
            yield from commands(command, (*words, word))
        else:
            yield (*words, word), command


@pytest.mark.parametrize(("words", "job"), list(commands()), ids=[" ".join(words) for words, _ in commands()])
def test_help_has_a_summary_and_examples_that_parse(words: tuple[str, ...], job: type[Job]) -> None:
    summary, _, details = (job.__doc__ or "").partition("\n")
    assert summary.endswith(".")
    examples = [shlex.split(line) for line in details.partition("For example:")[2].splitlines() if line.strip()]
    assert examples
    for example in examples:
        assert example[: len(words) + 1] == ["onefold", *words]
        assert type(parse(example[1:])) is job


def test_help_of_fit_describes_every_method() -> None:
    text = onefold("fit", "--help").stdout
    assert {"csd", "gp", "rnd", "knn"} <= set(FIT_METHODS)
    assert all(f"{name}: " in text for name in FIT_METHODS)


def test_errors_have_an_argument_and_a_hint() -> None:
    error = InputError("must be positive", argument="fpr", hint="Use 0.05.")
    assert str(error) == "fpr: must be positive. Use 0.05."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(InputError("odd \x1b[2J")) == r"odd \u001b[2J"
    with pytest.raises(InputError, match=r"^data/x\.npy: no rows$"), renamed_argument("x", "data/x.npy"):
        raise InputError("no rows", argument="x")
    with pytest.raises(InputError, match=r"^context: no rows$"), renamed_argument("x", "data/x.npy"):
        raise InputError("no rows", argument="context")


def test_errors_name_the_option_that_sets_an_argument() -> None:
    names = options(Fit("data", Path("m.onefold")))
    assert names["fpr"] == "--fpr"
    assert names["model"] == "--model"
    assert "data" not in names, "an argument without an option"


@pytest.fixture(scope="module")
def small_demo() -> Any:
    """A result with made-up answers: the page is tested here, the run of the demo below."""
    data, rng = demo.demo_data(), np.random.default_rng(0)
    unfamiliar = {**data.unfamiliar, "<script>alert(1)</script>": data.unfamiliar["noise"]}
    data = data._replace(unfamiliar=unfamiliar)

    def answers(images: Any, shift: float) -> demo.Answers:
        n = len(images)
        scores = shift + rng.random(n)
        pvalues = np.where(scores > 1, 0.01, 0.5)
        return demo.Answers(rng.integers(0, 10, n), rng.uniform(0.5, 1, n), scores, pvalues, scores > 1, n)

    others = {name: answers(images, 0.3) for name, images in unfamiliar.items()}
    result = demo.DemoResult(0.98, 1.0, answers(data.x_test, 0.0), others, {"scoring": 1.0}, torch.device("cpu"))
    return demo.summary(result, data, 0), result, data


def test_results_hold_their_provenance_and_the_shares(small_demo: Any) -> None:
    summary, result, _ = small_demo
    again = json.loads(json.dumps(summary))
    assert {"commit", "date", "seed", "device", "data", "recipe", "torch", "threshold"} <= set(again)
    letters, answers = again["sets"]["letters"], result.unfamiliar["letters"]
    assert letters["flagged"] == pytest.approx(np.mean(answers.scores > 1))
    assert letters["confident"] == pytest.approx(np.mean(answers.confidence >= 0.9))
    assert letters["auroc"] == pytest.approx(np.mean(answers.scores[:, None] > result.digits.scores[None]))
    lower = answers.confidence[:, None] < result.digits.confidence[None]
    assert letters["auroc_of_confidence"] == pytest.approx(np.mean(lower))
    assert "auroc" not in again["sets"]["digits"]


def page_of(small_demo: Any) -> str:
    summary, result, data = small_demo
    return render(summary, result, data)


class Links(HTMLParser):
    """Every address that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_escapes_what_it_shows(small_demo: Any) -> None:
    page = page_of(small_demo)
    links = Links()
    links.feed(page)
    assert len(links.addresses) == 3
    assert all(address.startswith("data:image/svg+xml;base64,") for address in links.addresses)
    assert "script" not in links.tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_scores_are_drawn_on_an_axis_that_suits_them(scale: str) -> None:
    """Scores that can be negative on a linear axis, scores that span decades on a logarithmic one; none is left out."""
    rng = np.random.default_rng(0)
    familiar, unfamiliar = rng.normal(0, 1, 500), {"near": rng.normal(2, 1, 400), "far": rng.normal(6, 1, 400)}
    if scale == "log":
        familiar, unfamiliar = np.exp(familiar), {name: np.exp(scores) for name, scores in unfamiliar.items()}
    figure = histogram(familiar, unfamiliar, score_axis(np.concatenate([familiar, *unfamiliar.values()])), 1.5)
    assert len(figure.axes) == 2
    for ax in figure.axes:
        heights = [[bar.get_height() for bar in bars] for bars in ax.containers]  # pyright: ignore[reportGeneralTypeIssues]
        assert ax.get_xscale() == scale
        np.testing.assert_allclose(np.sum(heights, axis=1), 1)
        assert np.max(heights) < 0.25
        assert min(np.count_nonzero(row) for row in heights) >= 10


def test_the_page_names_the_axis_and_marks_flagged_images(small_demo: Any) -> None:
    summary, result, data = small_demo
    assert "The axis is linear." in page_of(small_demo)
    digits = dataclasses.replace(result.digits, scores=np.exp(10 * result.digits.scores))
    assert "The axis is logarithmic." in render(summary, dataclasses.replace(result, digits=digits), data)
    figure = labelled_images([np.zeros((8, 8))] * 3, ["3", "5", "7"], [True, False, True])
    colours = [ax.xaxis.label.get_color() for ax in figure.axes[:3]]
    assert colours[0] == colours[2] != colours[1]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_in_a_browser(small_demo: Any, tmp_path: Path) -> None:
    """Chromium lays it out: all pictures load, every row is there, nothing runs over the side of a narrow screen."""
    assert CHROMIUM is not None
    probe = (
        "<script>onload = () => { const wide = document.documentElement.scrollWidth > innerWidth;"
        "document.title = [...document.images].every(i => i.naturalWidth > 0) + ' ' + document.images.length + ' ' +"
        "document.querySelectorAll('#sets tbody tr').length + ' ' + wide; }</script>"
    )
    path = tmp_path / "index.html"
    path.write_text(page_of(small_demo).replace("</body>", probe + "</body>"), encoding="utf-8")
    for width in ("1100", "400"):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
                 f"--user-data-dir={tmp_path / width}", f"--window-size={width},900"]  # fmt: skip
        command = [CHROMIUM, *flags, "--dump-dom", path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        assert "<title>true 3 6 false</title>" in done.stdout


@pytest.fixture
def pty_output() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    yield master, slave
    os.close(master)


def test_progress_is_shown_at_a_terminal(pty_output: tuple[int, int]) -> None:
    master, slave = pty_output
    code = (
        "import numpy as np, onefold; from onefold.nn.train import Recipe;"
        "onefold.RND(recipe=Recipe(steps=400, batch=8)).fit(np.random.default_rng(0).normal(size=(40, 4)))"
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    try:
        while chunk := os.read(master, 65536):  # as it comes: a terminal that nobody reads stops whoever writes to it
            seen += chunk
    except OSError:  # the terminal is closed
        pass
    assert process.wait() == 0
    assert b"RND" in seen
    assert b"loss 0." in seen


def test_known_queries_of_the_toy_figure(tmp_path: Path) -> None:
    line = toy.line(width=2048, steps=500)
    np.testing.assert_allclose(line.variance, line.exact, rtol=0.25)
    at_train = [np.interp(line.x_train, line.grid, g) for g in line.regression]
    np.testing.assert_allclose(at_train, line.labels, rtol=0.05, atol=0.5)
    draw_line(line, tmp_path / "line.png")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")


def test_the_plane_is_drawn_on_one_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = ("100 trained networks", toy.EXACT, "CSD, full NTK", toy.LAST_LAYER)
    plane = toy.Plane(rng.normal(size=(5, 2)).astype(np.float32), {name: rng.random((6, 6)) for name in names})
    draw_plane(plane, tmp_path / "plane.png")
    assert (tmp_path / "plane.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_whole_toy(tmp_path: Path) -> None:
    done = onefold("toy", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "toy.json").read_text())
    assert summary["plane"]["rank_correlation"][f"{toy.EXACT} / CSD, full NTK"] >= 0.95
    assert summary["line"]["mean_relative_error"] < 0.05
    assert {p.name for p in tmp_path.iterdir()} == {"toy.json", "toy_1d.png", "toy_2d.png"}


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    done = onefold("demo", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["accuracy"] > 0.95
    assert result["sets"]["digits"]["flagged"] <= 0.12
    for name, figures in result["sets"].items():
        assert figures["same_alarms_exported"] == figures["images"]
        assert name == "digits" or figures["flagged"] > 0.85
        assert name in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"digits.onefold", "digits.pt2", "index.html", "results.json"}
