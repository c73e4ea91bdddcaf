"""The report of the distribution-shift benchmark: its figures, its files, and the page in a real browser."""

import base64
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

import matplotlib
import pytest
from browser import Opener
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from onefold import cli
from onefold.bench.grid import PRESETS
from onefold.bench.results import BINS, FALSE_ALARM_RATES, FORMAT, KEPT_SHARES, collect, parse_unit
from onefold.bench.rows import ROWS, select_rows
from onefold.errors import FileError, InputError
from onefold.report.bench_figures import draw_figures
from onefold.report.bench_table import Measurement, Section, TableRow, build_table, list_measurements, shown_sections
from onefold.report.bench_text import compare, to_json, to_latex, to_markdown
from onefold.report.figures import DARK, RC, draw_figure, label_text
from onefold.report.paper import PAPER

ROOT = Path(__file__).parent.parent
TEX = ROOT.parent / "shared" / "paper" / "contextual-similarity-distillation.tex"
SETS = ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k")
SKILL = {
    "mcd": 1.3, "laplace": 1.2, "rnd": 2.2, "ens3": 1.9, "ens15": 2.3, "csd": 2.5, "csd_aug": 2.9, "csd_ood": 3.2,
    "last_layer_gp": 2.6, "knn": 2.7, "energy": 1.4, "csd_post_hoc": 3.0,
}  # fmt: skip
SOME = ("mcd", "mcd-noflips", "rnd", "csd", "csd_ood", "csd-small_init")
TWO = ("fashion_mnist", "kmnist_10k")
NORMAL = NormalDist()
Unit = dict[str, Any]


def metrics(auroc: float) -> dict[str, float]:
    """All figures of a pair, each a known function of its AUROC."""
    less = {"auroc": 0, "aupr_in": 1, "aupr_out": 2, "aupr_in_plain": 3, "aupr_out_plain": 4}
    return {**{name: auroc - part for name, part in less.items()}, "fpr95": 100 - auroc}


def unit(method: str, id_: str, seed: int, scores: dict[str, dict[str, float]], **changes: Any) -> Unit:
    """A unit's file, as bench/evaluate.py writes it, with these AUROCs by score and OOD set."""
    known = ROWS.get(method)
    default = known.default if known and known.default in scores else next(iter(scores))
    row = {"method": method, "title": known.title if known else method, "ours": bool(known and known.ours)}
    found = {
        "format": FORMAT, "unit": f"{method}/{id_}/seed{seed}", "onefold": "0.1.0", "commit": "0123456789ab",
        "date": "2026-11-15T15:18:54+00:00", "python": "3.11.7", "torch": "2.13.0", "device": "NVIDIA H200",
        "cores": 16,
        "settings": {**PRESETS["paper"].settings(), **row},
        "data": {"id": id_, "train": 60000, "test": 10000, "ood": dict.fromkeys(scores[default], 9000)},
        "accuracy": 0.9,
        "default": default,
        "scores": {kind: {name: metrics(value) for name, value in pairs.items()} for kind, pairs in scores.items()},
        "curves": curves({name: (value - 50) / 15 for name, value in scores[default].items()}),
        "cost": {"fit_s": 10.0, "score_us": 20.0, "parameters": 1000, "peak_mb": 500.0},
    }  # fmt: skip
    return {**found, **changes}


def curves(distances: dict[str, float]) -> dict[str, Any]:
    """Curves of scores that are normal: the ID scores about 0, each OOD set about its distance."""
    edges = [-4 + 12 * i / BINS for i in range(BINS + 1)]

    def counts(middle: float) -> list[int]:
        shares = [NORMAL.cdf(edge - middle) for edge in edges]
        return [round(10000 * (b - a)) for a, b in itertools.pairwise(shares)]

    def found(distance: float) -> list[float]:
        return [1.0 if rate >= 1 else NORMAL.cdf(distance + NORMAL.inv_cdf(rate)) for rate in FALSE_ALARM_RATES]

    groups = {"familiar": 0.0, **distances}
    return {
        "roc": {name: found(distance) for name, distance in distances.items()},
        "histogram": {"low": -4.0, "high": 8.0, "counts": {name: counts(at) for name, at in groups.items()}},
        "rejection": [1 - 0.1 * share for share in KEPT_SHARES],
    }


def write(folder: Path, units: Sequence[Unit], preset: str = "paper") -> Path:
    """A results folder of these units."""
    names = sorted({str(one["data"]["id"]) for one in units})
    about = {"format": FORMAT, "settings": PRESETS[preset].settings(), "data": dict.fromkeys(names, "0123abcd" * 8)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(about))
    for i, one in enumerate(units):
        path = folder / "units" / one["settings"]["method"] / f"{i:04}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))
    return folder


def large(ids: Sequence[str] = SETS, seeds: int = 3, methods: Sequence[str] = tuple(ROWS)) -> list[Unit]:
    """Every method on every set with several seeds, with figures such as a real run could have."""
    return [
        realistic(method, ids, place, seed) for method in methods for place in range(len(ids)) for seed in range(seeds)
    ]


def realistic(method: str, ids: Sequence[str], place: int, seed: int) -> Unit:
    rng = random.Random(f"{method}/{place}/{seed}")
    skill = SKILL.get(method.removesuffix("-noflips"), 1.7) + 0.15 * method.endswith("-noflips") - 0.25 * place
    kinds = {"score": 0.0, "variance": -0.3, "relative": -0.1} if "csd" in method or "gp" in method else {"score": 0.0}
    if ROWS[method].default == "mutual_information":
        kinds = {"mutual_information": 0.0, "entropy": 0.2 * place - 0.2, "variance": -0.1}
    others = [name for name in ids if name != ids[place]]
    far = {**{name: 0.2 * i for i, name in enumerate(others)}, "perturbed": -0.3, "perturbed_clipped": -1.2}

    def auroc(distance: float) -> float:
        return 100 * NORMAL.cdf((distance + rng.gauss(0, 0.08)) / math.sqrt(2))

    scores = {kind: {name: auroc(skill + less + d) for name, d in far.items()} for kind, less in kinds.items()}
    accuracy = 0.97 - 0.02 * place + 0.004 * rng.random()
    cost = {
        "fit_s": 10 ** (2 * rng.random() - 0.5), "score_us": 10 ** (0.5 + 2 * rng.random()),
        "parameters": round(1e6 * rng.random()), "peak_mb": 500 + 2000 * rng.random(),
    }  # fmt: skip
    made = unit(method, ids[place], seed, scores, cost=cost, accuracy=accuracy)
    made["curves"]["rejection"] = [1 - (1 - accuracy) * share ** (1 + skill / 2) for share in KEPT_SHARES]
    return made


def table_of(folder: Path, units: Sequence[Unit]) -> list[Section]:
    return build_table(collect(write(folder, units)).units)


def row_of(section: Section, name: str, *, by_paper_score: bool = False) -> TableRow:
    return next(row for row in section.rows if (row.name, row.by_paper_score) == (name, by_paper_score))


def value(row: TableRow, figure: str) -> float:
    found = row.estimate(figure)
    assert found is not None
    return found.mean


# The figures


def test_the_published_figures_are_the_papers() -> None:
    if not TEX.is_file():
        pytest.skip("the paper's source is not beside this repository")
    text = TEX.read_text("utf-8")
    labels = {"average": "ooddetection", "fashion_mnist": "ooddetfm", "mnist": "ooddetmn", "notmnist": "ooddetnm",
              "kmnist": "ooddetkm"}  # fmt: skip
    assert set(PAPER) == set(labels)
    for name, label in labels.items():
        body = text.split(f"\\label{{tab:{label}}}")[1].split("\\end{table}")[0]
        found = {}
        for line in body.splitlines():
            if "\\pm" in line:
                method, *cells = line.strip().removesuffix("\\\\").split("&")
                numbers = [(*map(float, re.findall(r"\d+\.\d+", cell)), 10) for cell in cells]
                keys = ("accuracy", "auroc", "aupr_in", "aupr_out")
                found[method.strip().rstrip(".")] = dict(zip(keys, numbers, strict=True))
        assert len(found) == 9
        assert PAPER[name] == found


def test_the_titles_of_the_papers_rows_are_those_of_the_benchmark() -> None:
    assert set(PAPER["mnist"]) - {"BNN-MCMC"} <= {method.title for method in ROWS.values()}


def test_times_are_those_of_units_that_had_the_machine_to_themselves(tmp_path: Path) -> None:
    def made(method: str, seed: int, seconds: float, alone: bool) -> Unit:
        cost = {"fit_s": seconds, "score_us": 1.0, "parameters": 1000, "peak_mb": 500.0, "alone": alone}
        auroc = 80.0 + 5 * method.endswith("noflips")
        return unit(method, "mine", seed, {"entropy": dict.fromkeys(("a", "perturbed"), auroc)}, cost=cost)

    units = [made("ens3", 0, 10.0, True), made("ens3", 1, 30.0, False), made("ens3-noflips", 0, 50.0, False)]
    assert row_of(table_of(tmp_path / "1", units[:2])[0], "ens3").estimate("fit_s") == (10, None, 1)
    best = row_of(table_of(tmp_path / "2", units)[0], "ens3")  # without flips, which costs the same
    assert (best.estimate("auroc"), best.estimate("fit_s")) == ((85, None, 1), (10, None, 1))
    assert row_of(table_of(tmp_path / "3", units[1:2])[0], "ens3").estimate("fit_s") is None


def test_means_are_those_computed_by_hand(tmp_path: Path) -> None:
    names: list[str] = ["a", "b", "perturbed", "perturbed_clipped"]
    pairs = [dict(zip(names, figures, strict=True)) for figures in ((90.0, 80.0, 70.0, 40.0), (91.0, 84.0, 71.0, 50.0))]
    units = [unit("rnd", "mine", seed, {"score": pair}, accuracy=0.8 + 0.1 * seed) for seed, pair in enumerate(pairs)]
    units[1]["cost"] = {"fit_s": 30.0, "score_us": 40.0, "parameters": 1000, "peak_mb": 700.0}
    row = row_of(table_of(tmp_path, units)[0], "rnd")
    root = math.sqrt(2)
    wanted = {  # mean and standard deviation over the two seeds
        "auroc": (81, root), "auroc_other": (86.25, 1.25 * root), "auroc_clipped": (45, 5 * root),
        "aupr_in": (80, root), "aupr_out": (79, root), "fpr95": (19, root), "aupr_in_plain": (78, root),
        "accuracy": (85, 5 * root), "fit_s": (20, 10 * root), "score_us": (30, 10 * root), "parameters": (1000, 0),
        "peak_mb": (600, 100 * root),
    }  # fmt: skip
    for figure, (middle, spread) in wanted.items():
        assert row.estimate(figure) == (pytest.approx(middle), pytest.approx(spread), 2), figure
    assert row.seeds == [0, 1]
    assert row.by_set["b"] == {0: 80.0, 1: 84.0}
    assert row_of(table_of(tmp_path / "one", units[:1])[0], "rnd").estimate("auroc") == (
        pytest.approx(80),
        None,
        1,
    )


def test_rivals_are_at_their_best_in_hindsight_and_ours_as_fixed_beforehand(tmp_path: Path) -> None:
    def pair(auroc: float) -> dict[str, float]:
        return {"other": auroc, "perturbed": auroc}

    ens = {"mutual_information": pair(80), "entropy": pair(85), "variance": pair(70)}
    better, luckier = ens | {"variance": pair(88)}, ens | {"variance": pair(60), "entropy": pair(99)}
    csd = {"score": pair(90), "variance": pair(95), "relative": pair(97)}
    units = [unit("ens3", "a", 0, ens), unit("ens3", "a", 1, ens), unit("ens3-noflips", "a", 0, better)]
    units += [unit("ens3", "b", 0, luckier), unit("ens3-noflips", "b", 0, better), unit("ens3-noflips", "b", 1, better)]
    units += [unit("csd", id_, 0, csd) for id_ in "ab"]
    units += [unit("last_layer_gp", id_, 0, csd) for id_ in "ab"]
    table = table_of(tmp_path, units)
    first, second = (row_of(section, "ens3") for section in table[:-1])
    assert (value(first, "auroc"), first.form, first.best_of) == (88, "variance, no flips", 6)
    assert (value(second, "auroc"), second.form) == (99, "entropy, flips")
    assert [unit.row for unit in second.units] == ["ens3"]
    assert value(row_of(table[-1], "ens3"), "auroc") == (88 + 99) / 2
    assert row_of(table[-1], "ens3").forms == {"a": "variance, no flips", "b": "entropy, flips"}
    for section in table[:-1]:
        gp, ours, papers = (
            row_of(section, "last_layer_gp"),
            row_of(section, "csd"),
            row_of(section, "csd", by_paper_score=True),
        )
        assert [value(row, "auroc") for row in (gp, ours, papers)] == [97, 90, 95]
        assert (gp.form, gp.best_of, ours.best_of, papers.form) == ("relative", 3, 0, "variance")
        assert [row.title for row in section.rows] == ["ENS(3)", "LastLayerGP", "CSD", "CSD"]


def test_the_average_is_over_seeds_that_every_set_has(tmp_path: Path) -> None:
    figures = {"a": [80, 82, 99], "b": [90, 94], "c": [70, 66, 0]}
    units = [
        unit("rnd", id_, seed, {"score": {"x": auroc, "perturbed": auroc}})
        for id_, values in figures.items()
        for seed, auroc in enumerate(values)
    ]
    units += [unit("knn", "a", 0, {"score": {"x": 50.0, "perturbed": 50.0}})]
    average = table_of(tmp_path, units)[-1]
    assert row_of(average, "rnd").estimate("auroc") == (
        pytest.approx((80 + 242 / 3) / 2),
        pytest.approx(2 / 3 / math.sqrt(2)),
        2,
    )
    assert [row.name for row in average.rows] == ["rnd"]
    assert any("kNN on the classifier" in note for note in average.notes)


def test_gaps_are_where_the_paper_has_the_same_set(tmp_path: Path) -> None:
    units = large(ids=(*SETS, "mine"), seeds=2, methods=("mcd", "rnd", "knn", "csd", "csd_aug"))
    table = table_of(tmp_path, units)
    sections = {section.name: section for section in table[:-1]}
    assert list(sections) == [*SETS, "mine"]
    rows = to_json(table, collect(tmp_path))["sets"]
    for name in ("fashion_mnist", "mnist"):
        for row in rows[name]["rows"]:
            published = PAPER[name].get(row["title"])
            assert (row["paper"] is None) == (published is None)
            for metric, figure in (published or {}).items():
                assert row["paper"][metric]["gap"] == pytest.approx(row["figures"][metric]["mean"] - figure.mean)
        assert [row["title"] for row in rows[name]["rows"] if row["paper"]] == ["MCD", "RND", *["CSD", "CSD-Aug"] * 2]
    for name, why in {"kmnist_10k": "other data", "notmnist_22k": "other data", "mine": "not among the paper"}.items():
        assert not any(row.paper for row in sections[name].rows)
        assert why in sections[name].notes[0]
        assert "No gaps" in sections[name].notes[0]
    assert not any(row.paper for row in table[-1].rows)


def test_the_average_has_gaps_if_all_four_sets_are_the_papers(tmp_path: Path) -> None:
    names = ("notmnist", "kmnist", "mnist", "fashion_mnist")
    table = table_of(tmp_path, large(ids=names, seeds=1, methods=("rnd", "csd_ood")))
    assert [section.name for section in table[:-1]] == ["fashion_mnist", "mnist", "kmnist", "notmnist"]
    for section in shown_sections(table):
        assert row_of(section, "rnd").paper == PAPER[section.name]["RND"]
        assert row_of(section, "csd_ood", by_paper_score=True).paper == PAPER[section.name]["CSD-OOD"]
    assert "same OOD sets" in table[0].notes[0]


def test_differences_are_paired_over_common_seeds(tmp_path: Path) -> None:
    def units(method: str, figures: dict[int, tuple[float, float]]) -> list[Unit]:
        return [unit(method, "mine", seed, {"score": {"x": x, "perturbed": p}}) for seed, (x, p) in figures.items()]

    made = units("csd", {0: (90, 94), 1: (92, 96), 2: (91, 93), 5: (10, 10)}) + units("csd_ood", {0: (99, 99)})
    made += units("rnd", {0: (80, 90), 1: (84, 90), 2: (81, 95), 7: (20, 20)}) + units("knn", {2: (90, 91)})
    made += units("energy", {8: (50, 60), 9: (52, 58)})
    made += units("csd_default", {0: (70, 70)}) + units("csd-small_init", {0: (99, 99)})
    section = table_of(tmp_path / "1", made[:-2])[0]
    worse = table_of(tmp_path / "2", made)[0]  # who is compared is not chosen by its figures
    assert {row.name for row, _ in worse.comparisons} == {"csd_ood", "csd_default"}
    pairs = {(row.name, rival.name): (row, rival) for row, rival in section.comparisons}
    assert list(pairs) == [(ours, rival) for ours in ("csd_ood", "csd") for rival in ("rnd", "knn", "energy")]
    all_, other = [92 - 85, 94 - 87, 92 - 88], [10, 8, 10]
    for figure, deltas in (("auroc", all_), ("auroc_other", other)):
        error = stdev(deltas) / math.sqrt(3)
        assert compare(*pairs["csd", "rnd"], figure) == (pytest.approx(mean(deltas)), pytest.approx(error), 3)
    ours = mean([92, 94, 92, 10])
    assert compare(*pairs["csd", "knn"], "auroc") == (pytest.approx(ours - 90.5), None, 1)
    assert compare(*pairs["csd", "energy"], "auroc") == (pytest.approx(ours - 55), None, 0)
    informed = compare(*pairs["csd_ood", "rnd"], "auroc")
    assert informed is not None
    assert informed.spread is None


def test_measurements_are_one_flat_list(tmp_path: Path) -> None:
    scores = {"score": {"x": 90.0, "perturbed": 80.0}, "variance": {"x": 70.0, "perturbed": 60.0}}
    cost = {"fit_s": 3.0, "parameters": 7, "alone": False}
    content = unit("csd", "mine", 4, scores, cost=cost)
    measurements = list_measurements(collect(write(tmp_path, [content])).units)
    assert Measurement("mine", "csd", 4, "variance", "x", "auroc", 70.0) in measurements
    assert Measurement("mine", "csd", 4, "", "perturbed", "fpr95", 20.0) in measurements
    whole = [m for m in measurements if not m.ood]
    assert whole == [
        Measurement("mine", "csd", 4, "", "", "accuracy", 90.0),
        Measurement("mine", "csd", 4, "", "", "parameters", 7.0),
    ]  # not the time, as other units ran on the machine
    assert len(measurements) == len(set(measurements)) == 2 + 3 * 2 * 6


def test_figures_that_were_not_measured_are_absent_from_the_table(tmp_path: Path) -> None:
    scores = {"score": {"x": 90.0, "perturbed": 80.0}}
    old = unit("rnd", "mine", 0, scores, curves={}, cost={"fit_s": 3.0})
    for figures in old["scores"]["score"].values():
        del figures["aupr_in"]
    new = unit("knn", "mine", 0, scores, new_part={"figure": 1})
    new["scores"]["score"]["x"]["new_metric"] = 5.0
    assert cli.main(["report", str(write(tmp_path, [old, new]))]) == 0
    section = build_table(collect(tmp_path).units)[0]
    assert row_of(section, "rnd").estimate("aupr_in") is None
    assert value(row_of(section, "rnd"), "auroc") == 85
    assert value(row_of(section, "knn"), "aupr_in") == 84
    assert "| RND | its one score | 1 | **85.00** | **90.00** | – |" in (tmp_path / "report" / "table.md").read_text(
        "utf-8"
    )


def test_rows_of_other_programs_form_the_family_that_their_files_name(tmp_path: Path) -> None:
    """Two variants of one method that this version does not know: one row, the better score of the better variant."""
    made = []
    for name, variant, aurocs in (("po_vim", "flips", (60.0, 70.0)), ("po_vim-noflips", "no flips", (80.0, 75.0))):
        scores = {
            kind: {"mnist": value, "perturbed": value, "perturbed_clipped": value}
            for kind, value in zip(("chosen", "documented"), aurocs, strict=True)
        }
        one = unit(name, "fashion_mnist", 0, scores)
        one["settings"] |= {"title": "ViM", "family": "po_vim", "variant": variant}
        made.append(one)
    section = table_of(tmp_path, made)[0]
    (row,) = section.rows
    assert (row.name, row.title, row.auroc, row.best_of) == ("po_vim", "ViM", 80.0, 4)
    assert row.form == "chosen, no flips"
    made[0]["settings"]["family"] = ""
    made[1]["settings"]["variant"] = "x" * 201
    collected = collect(write(tmp_path / "bad", [*made, unit("rnd", "fashion_mnist", 0, scores)]))
    assert [one.row for one in collected.units] == ["rnd"]
    assert len(collected.skipped) == 2


def test_only_ood_sets_that_all_units_have_count(tmp_path: Path) -> None:
    units = [
        unit("rnd", "mine", 0, {"score": {"x": 90.0, "y": 10.0, "perturbed": 80.0}}),
        unit("knn", "mine", 0, {"score": {"x": 70.0, "perturbed": 60.0}}),
        unit("knn", "alone", 0, {"score": {"perturbed": 60.0}}),
    ]
    alone, mine, _ = table_of(tmp_path, units)
    assert (mine.other_sets, value(row_of(mine, "rnd"), "auroc")) == (["x"], 85)
    assert any("measured against y" in note for note in mine.notes)
    assert (value(row_of(alone, "knn"), "auroc"), row_of(alone, "knn").estimate("auroc_other")) == (60, None)


def test_a_set_may_be_called_average(tmp_path: Path) -> None:
    table = table_of(tmp_path, large(ids=("average", "mnist"), seeds=1, methods=("rnd", "csd")))
    assert [section.is_average for section in shown_sections(table)] == [True, False, False]
    assert not row_of(table[1], "rnd").paper
    stems = [figure.stem for _, figure in draw_figures(table)]
    assert len(set(stems)) == len(stems)


# What a unit's file may hold


BASE = unit("csd", "mine", 0, {"score": {"x": 90.0, "perturbed": 80.0}, "variance": {"x": 90.0, "perturbed": 80.0}})


def change(path: str, new: Any) -> Unit:
    """The unit with one part replaced, or removed."""
    made = copy.deepcopy(BASE)
    *way, last = path.split(".")
    inner = functools.reduce(lambda part, key: part[key], way, made)
    if new is KeyError:
        del inner[last]
    else:
        inner[last] = new
    return made


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("accuracy", math.nan, "accuracy: nan is not a finite number"),
        ("accuracy", 1.5, "accuracy: not a number from 0 to 1"),
        ("scores.score.x.auroc", math.nan, "scores.score.x.auroc: nan is not a finite number"),
        ("scores.score.x.auroc", 1e300, "scores.score.x.auroc: not a number from -0 to 100"),
        ("scores.score.x.auroc", KeyError, "scores.score.x: lacks auroc"),
        ("scores.score.x.fpr95", -3.0, "fpr95: not a number"),
        ("scores.score.x.fpr95", True, "fpr95: True is not a finite number"),
        ("scores.score.x.aupr_in", "98", "aupr_in: '98' is not a finite number"),
        ("scores.variance.perturbed", KeyError, "scores.variance: lacks perturbed"),
        ("data.ood", {"x": 5}, "data.ood: lacks the set perturbed"),
        ("data.ood.x", -1, "x: not a number from 0"),
        ("scores", {}, "scores: lacks the default score score"),
        ("default", "energy", "scores: lacks the default score energy"),
        ("default", None, "default is missing"),
        ("cost.fit_s", math.inf, "cost.fit_s: inf is not a finite number"),
        ("cost.parameters", 10**400, "cost.parameters: the integer is too large"),
        ("cost.peak_mb", -1, "cost.peak_mb: not a number from 0"),
        ("curves.roc.x", [0.5], "curves.roc.x: 1 numbers instead of 18"),
        ("curves.rejection", [2.0] * len(KEPT_SHARES), "curves.rejection: not a number from 0 to 1"),
        ("curves.histogram.low", 9.0, "curves.histogram: low is not below high"),
        ("curves.histogram.counts", KeyError, "curves.histogram.counts: lacks familiar"),
        ("curves.histogram", 5, "curves.histogram: not an object"),
        ("data.id", "x" * 201, "not a name of 1 to 200 characters"),
        ("data.id", 5, "id_set: 5 is not text"),
        ("data.train", None, "train is missing"),
        ("data.test", None, "data.test: not a number of images"),
        ("settings.steps", 17, "made with other settings"),
        ("settings.method", "", "not a name of 1 to 200 characters"),
        ("unit", "csd/mine", "unit: does not end in /seed"),
    ],
)
def test_figures_that_cannot_be_are_named_and_left_out(tmp_path: Path, path: str, new: Any, message: str) -> None:
    good = unit("rnd", "mine", 0, {"score": {"x": 90.0, "perturbed": 80.0}})
    collected = collect(write(tmp_path, [change(path, new), good]))
    assert [one.row for one in collected.units] == ["rnd"]
    assert len(collected.skipped) == 1
    assert message in collected.skipped[0]
    assert collected.skipped[0].startswith("csd/mine")


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def leaves(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    for key in (
        content if isinstance(content, dict) else range(min(2, len(content))) if isinstance(content, list) else ()
    ):
        yield from leaves(content[key], (*way, key))


WAYS = [way for way in leaves(BASE) if way and way[0] not in ("unit", "format")]


@settings(max_examples=300)
@given(st.sampled_from(WAYS), ODD)
def test_whatever_stands_in_a_file_is_used_or_refused(way: tuple[Any, ...], new: Any) -> None:
    made = copy.deepcopy(BASE)
    functools.reduce(lambda part, key: part[key], way[:-1], made)[way[-1]] = new
    if any(not isinstance(made[part], dict) for part in ("settings", "data", "scores", "curves", "cost")):
        return  # ResultsFolder.read_all refuses these
    try:
        found = parse_unit(made, PRESETS["paper"].settings())
    except FileError:
        return
    table = build_table([found])
    json.dumps([row.estimate(figure) for row in table[-1].rows for figure in row.values], allow_nan=False)
    assert to_markdown(table)
    assert to_latex(table)


@pytest.mark.parametrize(
    "content",
    [
        '{"format": ' + "9" * 400 + "}", '{"format": ' + "9" * 2_000_000 + "}", "[" * 100_000,
        '{"format": ' + "[" * 40 + "]" * 40 + "}", "[" + "[]," * 1_000_000 + "[]]", " " * 8 * 2**20 + "{}", None,
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["units", "failures"])
def test_small_files_of_a_benchmark_take_little_memory(place: str, content: str | None, tmp_path: Path) -> None:
    """Whatever they hold is bounded before it is read, and the good units are reported; a pipe is left out."""
    path = write(tmp_path, [BASE]) / place / "bad.json"
    path.parent.mkdir(exist_ok=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    tracemalloc.start()
    try:
        collected = collect(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * 2**20
    assert [one.row for one in collected.units] == ["csd"]
    assert len(collected.skipped) == 1
    assert collected.skipped[0].startswith(f"{path}: ")
    assert len(collected.skipped[0]) < 600


def test_twins_count_once(tmp_path: Path) -> None:
    collected = collect(write(tmp_path, [BASE, BASE]))
    assert (len(collected.units), collected.skipped) == (
        1,
        ["csd/mine/seed0: a second file of this unit; the first one is used"],
    )


# The files


class Cells(HTMLParser):
    """The rows of the page's tables, by the table's class: text by cell, parts of a cell apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[list[list[str]]]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.row: list[list[str]] | None = None
        self.blocks: list[str] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "table":
            self.tables.append((values.get("class") or "", []))
        if tag == "tr" and values.get("class") == "row":
            self.row = []
            self.tables[-1][1].append(self.row)
        if tag in ("td", "th") and self.row is not None:
            self.row.append([])
        self.open = tag in ("script", "style")
        if self.open:
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in ("script", "style")
        if tag == "tr":
            self.row = None

    def handle_data(self, data: str) -> None:
        if self.open:
            self.blocks[-1] += data
        elif self.row and data.strip():
            self.row[-1].append(data.strip().replace("±\xa0", ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of several methods on two sets, with a failure and damaged files."""
    made = write(tmp_path_factory.mktemp("results") / "shift", large(TWO, 2, SOME))
    (made / "failures" / "laplace" / "mnist").mkdir(parents=True)
    failure = {"unit": "laplace/mnist/seed0", "reason": "ran out of <memory>", "traceback": ""}
    (made / "failures" / "laplace" / "mnist" / "seed0.json").write_text(json.dumps(failure))
    (made / "failures" / "laplace" / "mnist" / "seed1.json").write_text("{")
    (made / "units" / "rnd" / "cut.json").write_text('{"format": 1, "unit": "rnd')
    return made


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert cli.main(["report", str(folder), "-o", str(out)]) == 0
    return out


def test_json_is_one_object_and_equals_the_page(folder: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert not (folder / "report").exists()
    assert "cut.json: is cut short or damaged" in said.err
    page = Cells((report / "index.html").read_text("utf-8"))
    detection = [rows for name, rows in page.tables if name == "detection"]
    cost = [rows for name, rows in page.tables if name == "cost"]
    duels = [rows for name, rows in page.tables if name == "differences"]
    sections = [figures["average"], *figures["sets"].values()]
    kinds = ["rival", "rival", "ours", "ours", "ablation", "paper", "paper", "paper"]
    assert [[row["kind"] for row in section["rows"]] for section in sections] == [kinds] * 3
    names = ("auroc", "auroc_other", "aupr_in", "aupr_out", "fpr95", "accuracy", "auroc_clipped")
    for section, rows, costs, pairs in zip(sections, detection, cost, duels, strict=True):
        for row, (head, *cells) in zip(section["rows"], rows, strict=True):
            assert head[0] == row["title"]
            for name, cell in zip(names, cells, strict=True):
                found = row["figures"][name]
                wanted = [f"{found['mean']:.2f}", f"{found['sd']:.2f}"]
                if row["paper"] and name in row["paper"]:
                    wanted.append(f"{row['paper'][name]['gap']:+.2f}".replace("-", "−"))
                assert cell == wanted, (row["title"], name)
        assert [head[0] for head, *_ in costs] == [row["title"] for row in section["rows"] if row["kind"] != "paper"]
        for row, (_, fit, *_) in zip(section["rows"], costs, strict=False):
            assert float(fit[0].replace(",", "")) == pytest.approx(row["figures"]["fit_s"]["mean"], rel=0.01)
        for duel, (_, all_, other, n) in zip(section["differences"], pairs, strict=True):
            for found, cell in ((duel["auroc"], all_), (duel["auroc_other"], other)):
                assert cell == [f"{found['mean']:+.2f} ± {found['se']:.2f}".replace("-", "−")]
            assert n == [str(duel["auroc"]["n"])]


def test_the_best_of_a_column_is_marked(report: Path) -> None:
    text = (report / "index.html").read_text("utf-8")
    table = text.split('<table class="detection">')[1].split("</table>")[0]
    best = [float(mean) for mean in re.findall(r'<td class="best"><span class="mean">([\d.]+)', table)]
    means = [
        [float(mean) for mean in re.findall(r'class="mean">([\d.]+)', row)]
        for row in table.split('<tr class="row">')[1:]
    ]
    columns = list(zip(*means, strict=True))
    assert len(means) == 8
    wanted = sorted(
        pick for i, values in enumerate(columns) for pick in values if pick == (min if i == 4 else max)(values)
    )
    assert sorted(best) == wanted
    assert "**" in (report / "table.md").read_text()
    assert "\\textbf{" in (report / "table.tex").read_text()


def test_tables_in_markdown_and_latex_have_all_rows(folder: Path, report: Path) -> None:
    table = build_table(collect(folder).units)
    text, tex = (report / "table.md").read_text("utf-8"), (report / "table.tex").read_text("utf-8")
    assert (text, tex) == (to_markdown(table), to_latex(table))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    each = sum(
        len(s.rows) + sum(not row.by_paper_score for row in s.rows) + len(s.comparisons) for s in shown_sections(table)
    )
    assert len(rows) == each + 3 * 2 * len(shown_sections(table))
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 3  # columns of the three tables
    blocks = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", tex, re.DOTALL)
    assert len(blocks) == 3 * len(shown_sections(table))
    for columns, body in blocks:
        lines = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(columns) - 1}
        assert all(line.count("{") == line.count("}") for line in lines)
        assert body.count("\\toprule") == body.count("\\bottomrule") == 1
    assert re.search(r"MCD & .* & 2 & [\d.]+ \$\\pm\$ [\d.]+ \((\+|\$-\$)[\d.]+\)", tex)


def test_only_its_own_script_and_style_may_run_and_nothing_is_asked_for(report: Path) -> None:
    text = (report / "index.html").read_text("utf-8")
    page = Cells(text)
    policy = next(values["content"] or "" for tag, values in page.tags if values.get("http-equiv"))
    rules = {part.split()[0]: part.split()[1:] for part in policy.split(";")}
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in page.blocks]
    assert hashes == rules["style-src"] + rules["script-src"]
    assert (rules["default-src"], rules["img-src"]) == (["'none'"], ["data:"])
    addresses = [
        value or "" for _, values in page.tags for name, value in values.items() if name in ("src", "srcset", "href")
    ]
    assert len(addresses) == 1 + 3 + 2 * 39
    assert all(address.startswith(("data:", "#panel-")) for address in addresses)
    assert "ran out of &lt;memory&gt;" in text
    assert "seed1.json: is cut short or damaged" in text
    assert not any("style" in values for _, values in page.tags)


def test_plots_are_there_as_png_and_svg_and_always_the_same(report: Path, tmp_path: Path) -> None:
    names = {f"{kind}_{name}" for kind in ("roc", "roc_log", "scores", "rejection") for name in TWO}
    names |= {"pairs", *(f"cost_{name}" for name in ("average", *TWO))}
    files = {path.name: path.read_bytes() for path in (report / "plots").iterdir()}
    assert set(files) == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(content.startswith(b"\x89PNG") for name, content in files.items() if name.endswith("png"))
    assert not any(re.search(rb"dc:date|Matplotlib v", content) for content in files.values())
    small = write(tmp_path / "small", [unit("rnd", "a", 0, {"score": {"x": 90.0, "perturbed": 80.0}})])
    for out in ("first", "second"):
        assert cli.main(["report", str(small), "-o", str(tmp_path / out)]) == 0
    first, second = (sorted(p for p in (tmp_path / out).rglob("*") if p.is_file()) for out in ("first", "second"))
    assert len(first) == 3 + 2 * 6
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


NASTY = [
    "<script>alert(1)</script>", "$\\frac{1}{2}$ $x$", "_hidden", "[x] & \\input{y} 100% #~^", "数字 🦉 שלום",
    "photo\u202egpj.exe", "../../escape", "| a | b |", "w" * 200, "lines\nand\x1b[31m red", "half \udc80",
    "{{ 7 * 7 }}",
]  # fmt: skip


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that strangers name, at its worst: sets, methods, scores, commits, failures."""
    units = []
    for i, name in enumerate(NASTY):
        far = {NASTY[i - 1]: 90.0 - i, "perturbed": 80.0, "perturbed_clipped": 60.0}
        scores = {name: far, NASTY[i - 2]: {key: figure - 1 for key, figure in far.items()}}
        for method in (NASTY[i - 3], "csd"):
            made = unit(method, NASTY[i % 2], i, scores, commit=name, device=name, date=name, cores=10**300)
            made["settings"]["title"] = name
            units.append(made)
    made = tmp_path_factory.mktemp("nasty") / "results"
    write(made, [])
    for i, one in enumerate(units):
        (made / "units").mkdir(exist_ok=True)
        (made / "units" / f"{i}.json").write_text(json.dumps(one))
    about = json.loads((made / "bench.json").read_text())
    about["data"] = {name: name for name in NASTY}
    (made / "bench.json").write_text(json.dumps(about))
    (made / "failures").mkdir()
    (made / "failures" / "x.json").write_text(json.dumps({"unit": NASTY[0], "reason": "\n".join(NASTY)}))
    assert cli.main(["report", str(made), "-o", str(made / "out")]) == 0
    return made


def test_what_strangers_named_is_inert(nasty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = nasty / "out"
    text = (out / "index.html").read_text("utf-8")
    page = Cells(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not re.search("[\u202e\x1b]", text)
    assert "{{ 7 * 7 }}" in text
    assert "&lt;script&gt;" in text
    for name in ("table.md", "table.tex"):
        body = (out / name).read_text("utf-8")
        assert "<script>" not in body
        assert not re.search("[\u202e\x1b]", body)
    tex = (out / "table.tex").read_text("utf-8")
    assert "\\input" not in tex
    assert "\\textbackslash{}input\\{y\\}" in tex
    assert {path.parent for path in nasty.rglob("*.svg")} == {out / "plots"}
    assert all(re.fullmatch(r"[a-z0-9_]+\.(png|svg)", path.name) for path in (out / "plots").iterdir())
    assert cli.main(["report", str(nasty), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(figures["sets"]) == set(NASTY[:2])


def test_names_in_pictures_are_plain() -> None:
    assert label_text("fashion_mnist") == "fashion_mnist"
    assert label_text("a$b$") == r"a\$b\$"
    assert label_text("数字") == "□□"
    assert label_text("_x") == " _x"
    assert len(label_text("w" * 200)) == 30


@pytest.mark.parametrize("which", ["folder", "nasty"])
def test_nothing_is_clipped(which: str, request: pytest.FixtureRequest) -> None:
    """Every letter and line of every panel lies inside its picture, and so does every legend."""
    table = build_table(collect(request.getfixturevalue(which)).units)
    seen = set()
    with matplotlib.rc_context(RC):
        for _, plate in draw_figures(table):
            for panel in (plate.panels[0], plate.panels[-1]):
                figure = Figure(figsize=plate.size, layout="constrained")
                panel.draw(figure.subplots())
                figure.draw_without_rendering()
                box, (width, height) = figure.get_tightbbox(), plate.size
                assert box is not None
                assert box.x0 >= -0.01, (plate.stem, panel.alt)
                assert box.y0 >= -0.01, (plate.stem, panel.alt)
                assert box.x1 <= width + 0.01, (plate.stem, panel.alt)
                assert box.y1 <= height + 0.01, (plate.stem, panel.alt)
                seen.add(plate.stem)
            figure = draw_figure(plate)
            figure.draw_without_rendering()
            box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
            assert box is not None
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -0.01, plate.stem
    assert len(seen) == 10 + (2 if which == "folder" else 1)  # no method of strangers has an average


def test_every_method_can_be_told_apart_without_colours(tmp_path: Path) -> None:
    """In lines by colour and dashes together, in points by their marks; ours are full lines, rivals are not."""
    table = table_of(tmp_path, large(("a", "b"), 1))
    by_stem = {plate.stem: plate for _, plate in draw_figures(table)}
    lines, points = by_stem["roc_log_a"].legend, by_stem["cost_a"].legend
    count = len({row.family for row in select_rows(())})
    assert len(lines) == len(points) == count
    looks = [(line.get_color(), str(line.get_linestyle()), str(line._dash_pattern)) for line in lines]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(set(looks)) == count
    assert len({point.get_marker() for point in points}) == count  # pyright: ignore[reportAttributeAccessIssue]
    full = [line.get_label() for line in lines if line.get_linestyle() == "-"]  # pyright: ignore[reportAttributeAccessIssue]
    assert full == [ROWS[name].title for name in ("csd", "csd_aug", "csd_ood", "csd_default", "csd_post_hoc")]
    assert {line.get_color() for line in lines} <= set(DARK)  # pyright: ignore[reportAttributeAccessIssue]


# The command


def test_a_folder_without_results_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, started = tmp_path / "empty", write(tmp_path / "started", [])
    empty.mkdir()
    damaged = write(tmp_path / "damaged", [change("accuracy", math.nan)])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "bench.json").write_text('{"format": 99}')
    wanted = {
        tmp_path / "absent": "no such folder",
        empty: "no results (no bench.json",
        started: "no result that can be read. Fill it with onefold bench run",
        damaged: "no result that can be read (csd/mine/seed0: accuracy: nan is not a finite number)",
        foreign: "has format 99",
    }
    for path, message in wanted.items():
        assert cli.main(["report", str(path)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert re.fullmatch(rf"onefold: .*{re.escape(message)}.*\n", said.err)
        assert not (path / "report").exists()
    with pytest.raises(InputError):
        collect(empty)


def test_by_default_the_page_lies_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write(tmp_path, [unit("rnd", "mine", 0, {"score": {"perturbed": 80.0}})])
    assert cli.main(["report", str(made)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Page: {made / 'report' / 'index.html'}"
    assert cli.main(["report", str(made), "--json", "-o", str(tmp_path / "o")]) == 0
    assert json.loads(capsys.readouterr().out)["units"] == 1
    assert (tmp_path / "o" / "index.html").is_file()


def test_several_machines_and_changed_trees_are_said(tmp_path: Path) -> None:
    scores = {"score": {"x": 90.0, "perturbed": 80.0}}
    units = [unit("rnd", "a", 0, scores), unit("rnd", "a", 1, scores, device="x86_64", commit="0123456789ab+")]
    collected = collect(write(tmp_path, units))
    found = to_json(build_table(collected.units), collected)
    assert [part for part in ("different machines", "marked +") if any(part in line for line in found["remarks"])] == [
        "different machines", "marked +",
    ]  # fmt: skip
    assert found["origins"]["device"] == {"NVIDIA H200": 1, "x86_64": 1}


def test_a_part_of_the_data_is_said_to_be_one(tmp_path: Path) -> None:
    quick = unit("rnd", "mnist", 0, {"score": {"x": 90.0, "perturbed": 80.0}})
    quick["settings"] |= PRESETS["quick"].settings()
    collected = collect(write(tmp_path, [quick], "quick"))
    assert (
        "at most 10,000 train and 2,000 test images of every set. Gaps"
        in to_json(build_table(collected.units), collected)["remarks"][0]
    )


def test_ablations_stand_apart_and_are_no_candidates(tmp_path: Path) -> None:
    scores = {"score": {"x": 99.0, "perturbed": 99.0}, "variance": {"x": 50.0, "perturbed": 50.0}}
    worse = {kind: {name: figure - 5 for name, figure in pairs.items()} for kind, pairs in scores.items()}
    units = [unit("csd-small_init", "a", 0, scores), unit("csd", "a", 0, worse), unit("sgmcmc-noflips", "a", 0, worse)]
    section = table_of(tmp_path, units)[0]
    assert [(row.name, row.kind) for row in section.rows] == [
        ("sgmcmc", "rival"), ("csd", "ours"), ("csd-small_init", "ablation"), ("csd", "paper"),
        ("csd-small_init", "paper"),
    ]  # fmt: skip
    assert section.rows[0].title == "BNN-MCMC"
    assert [row.name for row, _ in section.comparisons] == ["csd"]


# The page in a browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_loads_and_suits_the_scheme(opened: Opener, report: Path, scheme: str) -> None:
    tab = opened(report / "index.html", scheme=scheme)
    assert tab.evaluate("document.images.length") == 8 + 3 * 3 + 2 * (
        4 + 2 + 5
    )  # pairs, cost, then ROC, rejection, scores
    assert tab.evaluate("[...document.images].filter((image) => !image.complete || !image.naturalWidth).length") == 0
    shown = tab.evaluate("[...document.images].map((image) => atob(image.currentSrc.split(',')[1]))")
    ink = {"light": "#1d2733", "dark": "#e9eef3"}
    assert all(ink[scheme] in svg for svg in shown)
    assert not any(ink["light" if scheme == "dark" else "dark"] in svg for svg in shown)


def test_tables_have_all_their_rows(opened: Opener, report: Path) -> None:
    tab = opened(report / "index.html")
    counts = "[...document.querySelectorAll('table')].map((t) => [t.className, t.querySelectorAll('tr.row').length])"
    one = [["detection", 8], ["differences", 4], ["cost", 5]]
    assert tab.evaluate(counts) == [*one * 3, ["data", 0]]
    assert tab.locator(".gap:visible").count() == 0
    tab.locator("#tabs a").nth(1).click()
    assert tab.locator(".gap:visible").count() == 6 * 4
    up, down = (tab.locator(f".gap.{way}:visible").first for way in ("up", "down"))
    assert (up.inner_text()[0], down.inner_text()[0]) == ("+", "−")
    assert len({part.evaluate("(e) => getComputedStyle(e).color") for part in (up, down)}) == 2
    assert "laplace/mnist/seed0" in tab.locator("#failures").inner_text()
    assert tab.locator("#skipped li").count() == 2
    assert tab.locator(".notes li").all_inner_texts() == [
        "Failed, with reasons below: 1 unit.",
        "Left out, with reasons below: 2 files.",
    ]


def test_tabs_work_by_keyboard_and_by_address(opened: Opener, report: Path) -> None:
    tab = opened(report / "index.html")

    def shown() -> list[str]:
        return tab.locator(".panel:visible h2").all_inner_texts()

    titles = ["Average over all sets", *TWO]
    assert shown() == titles[:1]
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "tab-0"
    for key, place in (("ArrowRight", 1), ("End", 2), ("ArrowRight", 0), ("ArrowLeft", 2), ("Home", 0)):
        tab.keyboard.press(key)
        assert shown() == [titles[place]]
        assert tab.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    tab.keyboard.press("Tab")  # into the table, which scrolls sideways where it is wide
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Detection, Average over all sets"
    tab.goto((report / "index.html").as_uri() + "#panel-2")
    tab.reload()
    assert shown() == [titles[2]]


def test_without_its_script_all_sets_are_there(opened: Opener, report: Path) -> None:
    tab = opened(report / "index.html", java_script_enabled=False)
    assert tab.locator(".panel:visible").count() == 3


def test_a_phone_needs_no_sideways_scroll(opened: Opener, report: Path, nasty: Path) -> None:
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    for page in (report, nasty / "out"):
        tab = opened(page / "index.html", width=390, height=844)
        for place in range(tab.locator("#tabs a").count()):
            tab.locator("#tabs a").nth(place).click()
            assert not tab.evaluate(wide)
        method, figure = (tab.locator(f".detection:visible tr.row {cell}").first for cell in ("th", "td:last-child"))
        before = method.bounding_box()["x"]
        tab.locator(".scroll:visible").first.evaluate("(e) => (e.scrollLeft = 10000)")
        assert method.bounding_box()["x"] == pytest.approx(before, abs=2)  # the method's name stays beside its figures
        assert figure.bounding_box()["x"] < 390


def test_nasty_names_do_nothing_but_show(opened: Opener, nasty: Path) -> None:
    tab = opened(nasty / "out" / "index.html")
    assert tab.locator("#tabs a").all_inner_texts() == [NASTY[1], NASTY[0]]
    assert "There is no average" in tab.locator(".notes").inner_text()
    assert tab.locator("script").count() == 1
    assert tab.evaluate("[...document.images].filter((image) => !image.naturalWidth).length") == 0


CONTRAST = """() => {
  const linear = (v) => v <= 0.03928 * 255 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const under = (e) => {
    const colour = e ? parse(getComputedStyle(e).backgroundColor) : [255, 255, 255];
    return colour.length < 4 || colour[3] === 1 ? colour : under(e.parentElement);
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
    if (e.closest('script, style, [aria-hidden]')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(under(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${e.tagName} ${e.className} ${(a + 0.05) / (b + 0.05)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(opened: Opener, report: Path, scheme: str) -> None:
    tab = opened(report / "index.html", scheme=scheme)
    tab.locator("#tabs a").nth(1).click()
    assert tab.evaluate(CONTRAST) == []
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background))) < 60) == (scheme == "dark")
