"""Rebuilding what is published: pages and figures from result files, and the benchmark on complete image sets."""

import contextlib
import gzip
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_data_sets import cifar_members, colour_set, encode, made_up, md5, members, tarred, write_svhn, zipped

from onefold.bench.results import collect
from onefold.data.catalogue import CATALOGUE, IDX_FILES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def paper() -> Iterator[ModuleType]:
    """benchmarks/paper.py, and on its path benchmarks/tables.py."""
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("paper")
    sys.path[:] = path


def test_pictures_are_compared_by_pixels(paper: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(10, 240, (20, 50, 3), np.uint8)
    changed = pixels.copy()
    changed[3, 4, 1] += paper.LEVELS + 1
    for name, image in {"a": pixels, "b": pixels + np.uint8(paper.LEVELS), "c": changed, "d": pixels[:19]}.items():
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    a, b, c, d = (tmp_path / f"{name}.png" for name in "abcd")
    assert paper.same_picture(a, b)
    assert not paper.same_picture(a, c)
    assert paper.same_picture(a, c, share=1 / 1000)
    assert not paper.same_picture(a, c, share=0.99 / 1000)
    assert not paper.same_picture(a, d, share=1.0)
    assert not paper.same_picture(a, tmp_path / "absent.png")


def test_a_page_that_differs_fails(
    paper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "docs/results/cost.md"
    committed = tmp_path / "repository" / name
    committed.parent.mkdir(parents=True)
    text = (ROOT / name).read_text("utf-8")
    committed.write_text(text, "utf-8")
    monkeypatch.setattr(paper, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(paper.tables, "PAGES", {name: paper.tables.PAGES[name]})
    monkeypatch.setattr(paper.tables, "FIGURES", ())
    assert paper.main(["--out", str(tmp_path / "out"), "--fast"]) == 0
    committed.write_text(text.replace("| CSD, fit | ", "| CSD, fit | 1"), "utf-8")
    assert paper.main(["--out", str(tmp_path / "out"), "--fast"]) == 1
    assert f"DIFFERS  {name}" in capsys.readouterr().out
    assert (tmp_path / "out" / name).read_text("utf-8") == text


@pytest.mark.slow
def test_figures_from_result_files_are_the_committed_ones(paper: ModuleType, tmp_path: Path) -> None:
    for name in paper.build_figures(tmp_path, computed=False):
        assert paper.same_picture(tmp_path / name, ROOT / name), name


def test_every_picture_of_the_site_has_a_script(paper: ModuleType) -> None:
    names = {name for figure in paper.tables.FIGURES for name in figure.file_names()}
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == {*names, "score_page.png"}
    for figure in paper.tables.FIGURES:
        assert figure.script == "onefold toy" or (ROOT / figure.script).is_file()
        text = (ROOT / figure.page).read_text("utf-8")
        assert all(f"images/{name}.png" in text for name in figure.names), figure


def test_sources_of_tables_are_the_files_they_read(paper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, opened, open_path = paper.tables, set[str](), Path.open
    writers = {writer for writers in tables.PAGES.values() for writer in writers} - {
        tables.provenance,
        tables.reproduce,
    }
    assert {writer.__name__ for writer in writers} == set(tables.SOURCES)

    def recorded(path: Path, *args: Any, **options: Any) -> Any:
        if path.is_relative_to(tables.RESULTS):
            opened.add(path.relative_to(tables.RESULTS).parts[0])
        return open_path(path, *args, **options)

    monkeypatch.setattr(Path, "open", recorded)
    for writer in writers:
        if tables.SOURCES[writer.__name__] != ("shift",):  # reading all of its files again and again takes long
            opened.clear()
            tables.result.cache_clear()
            writer()
            assert opened == set(tables.SOURCES[writer.__name__]), writer.__name__
    assert set(tables.COMMANDS) == {path.name for path in tables.RESULTS.iterdir()}


def test_times_are_shown_in_the_largest_fitting_unit(paper: ModuleType) -> None:
    shown = [paper.tables.shown_time(seconds) for seconds in (0.3, 89, 90, 5399, 5400)]
    assert shown == ["0.3 s", "89.0 s", "1.5 min", "90.0 min", "1.5 h"]
    unit = {"cost": {"fit_s": 2.0, "score_us": 1000.0}, "data": {"test": 500, "ood": {"a": 1500, "b": 1000}}}
    assert paper.tables.RECORDED["shift"](unit) == 5.0


# --- complete image sets ----------------------------------------------------------------------------------------------


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def write_stand_ins(folder: Path) -> dict[str, list[str]]:
    """Write a small file of the right format for every file of the catalogue; return their checksums by set."""
    sums: dict[str, list[str]] = {}
    for seed, (name, entry) in enumerate(CATALOGUE.items()):
        place = folder / name
        place.mkdir(parents=True)
        files = [mirrors[0].file for mirrors in entry.files]
        if entry.format == "idx":
            arrays = made_up(60, 20, seed)
            for file, key in zip(files, IDX_FILES, strict=True):
                (place / file).write_bytes(gzip.compress(encode(arrays[key])))
        elif entry.format == "notmnist":
            (place / files[0]).write_bytes(zipped(members()))
        elif entry.format == "cifar10":
            (place / files[0]).write_bytes(tarred(cifar_members(colour_set(60, 20))))
        else:
            arrays = colour_set(60, 20, seed)
            for file, part in zip(files, ("train", "test"), strict=True):
                write_svhn(place / file, arrays[f"x_{part}"], arrays[f"y_{part}"])
        sums[name] = [md5((place / file).read_bytes()) for file in files]
    return sums


COMMAND = """#!{python}
import json, sys
from dataclasses import replace
from urllib.parse import urlsplit
from onefold.bench import grid
from onefold.cli import main
from onefold.data import catalogue, download

address, sums = {address!r}, json.loads({sums!r})
download.DEFAULT_RETRIES.__init__(timeout=5, tries=1)
catalogue.CATALOGUE = {{
    name: replace(entry, files=tuple(
        (catalogue.Mirror(f"{{address}}{{name}}/{{mirrors[0].file}}", md5),)
        for mirrors, md5 in zip(entry.files, sums[name], strict=True)
    ))
    for name, entry in catalogue.CATALOGUE.items()
}}
grid.PRESETS["paper"] = replace(grid.PRESETS["paper"], steps=2, warmup=1, batch=8, seeds=(0,))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_full_sets_download_run_and_resume(tmp_path: Path) -> None:
    """The script against a local server: an absent file stops it, and the same command then resumes and finishes."""
    sums = write_stand_ins(tmp_path / "files")
    svhn = tmp_path / "files" / "svhn" / "test_32x32.mat"
    svhn.rename(tmp_path / "later.mat")
    command, out = tmp_path / "onefold", tmp_path / "out"
    environment = {**os.environ, "ONEFOLD": str(command), "METHODS": "last_layer_gp energy-noflips", "no_proxy": "*"}

    def run() -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "benchmarks" / "full_sets.sh")
        return subprocess.run([script, str(out)], capture_output=True, text=True, env=environment, check=False)

    with serve(tmp_path / "files") as address:
        command.write_text(COMMAND.format(python=sys.executable, address=address, sums=json.dumps(sums)), "utf-8")
        command.chmod(0o755)
        stopped = run()
        assert stopped.returncode != 0
        assert "test_32x32.mat" in stopped.stderr
        assert not (out / "grey").exists()
        (tmp_path / "later.mat").rename(svhn)
        first = run()
    assert first.returncode == 0, first.stderr
    expected = {
        "grey": {"fashion_mnist", "mnist", "kmnist", "notmnist"},
        "grey_large": {"fashion_mnist", "mnist", "kmnist", "notmnist_large"},
        "colour": {"cifar10", "svhn"},
    }
    for name, sets in expected.items():
        units = collect(out / name).units
        assert {(unit.row, unit.id_set, unit.seed) for unit in units} == {
            (row, id_set, 0) for row in ("last_layer_gp", "energy-noflips") for id_set in sets
        }
        assert all(set(unit.ood_sets) == sets - {unit.id_set} | {"perturbed", "perturbed_clipped"} for unit in units)
        assert "| LastLayerGP |" in (out / name / "report" / "table.md").read_text("utf-8")
    written = {path: path.stat().st_mtime_ns for path in out.glob("*/units/*/*/*.json")}
    again = run()  # the server is gone
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/units/*/*/*.json")} == written
