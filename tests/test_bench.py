"""The benchmark: its grid, its units, its results folder, its engines, and runs that are killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_work
import numpy as np
import pytest
from pids import gone, running
from PIL import Image

from onefold import cli, metrics
from onefold.bench import engines, evaluate, sets
from onefold.bench.engines import Outcome, find_engine, run_processes, run_serial
from onefold.bench.grid import PRESETS, Unit, grid_points, order_units, rank
from onefold.bench.results import FALSE_ALARM_RATES, KEPT_SHARES, ResultsFolder, collect
from onefold.bench.rows import ABLATION, ROWS, seeds_by_row, select_rows
from onefold.bench.run import plan_units, run, run_ablation
from onefold.bench.search import DROPOUT, LEARNING_RATES, search
from onefold.bench.sets import (
    PERTURBED,
    choose_sets,
    draw_contexts,
    fingerprint_sets,
    load_id_set,
    load_ood_sets,
    load_set,
    match_shape,
)
from onefold.errors import FileError, InputError, OnefoldError

SMOKE = PRESETS["smoke"]
QUICK = PRESETS["quick"]
TABLE = [row.name for row in select_rows(())]
QUICK_METHODS = ("knn", "energy-noflips", "last_layer_gp")  # a few seconds in all


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_the_papers_grid_has_ten_seeds_and_three_for_what_takes_long() -> None:
    units = order_units(seeds_by_row(PRESETS["paper"]), ("mnist", "kmnist"))
    seeds = {name: {seed for row, _, seed in units if row == name} for name in TABLE}
    assert all(seeds[name] == set(range(3 if ROWS[name].few else 10)) for name in TABLE)
    assert not {row for row, _, _ in units} - set(TABLE)
    assert {"ens15", "mcd", "laplace"} <= {name for name, row in ROWS.items() if row.few}
    assert len(units) == len(set(units)) == 2 * sum(map(len, seeds.values()))
    unit = Unit(row="csd_aug", id_set="fashion_mnist=somewhere/else.npz", seed=3, preset=SMOKE, ood_sets=())
    assert str(unit) == "csd_aug/fashion_mnist/seed3"


def test_a_run_that_is_cut_short_has_every_method_at_the_first_seeds() -> None:
    units = order_units(seeds_by_row(PRESETS["paper"], ("csd", "rnd")), ("mnist",))
    assert [(seed, row) for row, _, seed in units[:4]] == [(0, "csd"), (0, "rnd"), (1, "csd"), (1, "rnd")]


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"methods": ("dance",)}, "no method 'dance'. Use one of: mcd"), ({"preset": "slow"}, "no preset 'slow'"),
     ({"seeds": (-1,)}, "a seed is an integer from 0"), ({"engine": "steam"}, "no engine 'steam'"),
     ({"workers": 0}, "workers: must be an integer of at least 1"), ({"ids": ("mnist",)}, "runs on embedded data"),
     ({"preset": "quick", "ids": ("nowhere",)}, "'nowhere': no such set"), ({"preset": "quick"}, "no image sets")],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_is_written(plan: Any, message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message):
        list(run(out, data_dir=tmp_path, **{"preset": "smoke", **plan}))
    assert not list(out.glob("*.json"))


# --- the data ---------------------------------------------------------------------------------------------------------


def make_set(folder: Path, name: str, count: int, seed: int, *, labels: bool = True) -> None:
    rng = np.random.default_rng(seed)
    arrays = {"x_train": rng.integers(0, 256, (count, 28, 28)), "x_test": rng.integers(0, 256, (count // 2, 28, 28))}
    arrays = {key: value.astype(np.uint8) for key, value in arrays.items()}
    if labels:
        arrays |= {"y_train": np.arange(count) % 4, "y_test": np.arange(count // 2) % 4}
    np.savez(folder / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


def make_units(folder: Path, ids: tuple[str, ...] = (), ood: tuple[str, ...] = (), seed: int = 0) -> dict[str, Unit]:
    """Return a unit for each ID set, by the set's name."""
    units = plan_units(
        folder / "out", preset="quick", methods=("rnd",), ids=ids, ood=ood, seeds=(seed,), data_dir=folder
    )
    return {unit.id_set: unit for unit in units}


def test_the_papers_sets_are_chosen_by_default_and_other_sets_by_path(tmp_path: Path) -> None:
    for seed, name in enumerate(["mnist", "kmnist_10k", "notmnist_22k", "other"]):
        make_set(tmp_path, name, 40, seed)
    assert choose_sets(QUICK, tmp_path, (), ())[0] == ("mnist", "kmnist_10k", "notmnist_22k")
    make_set(tmp_path, "kmnist", 40, 9)
    assert choose_sets(QUICK, tmp_path, (), ())[0] == ("mnist", "kmnist", "notmnist_22k")
    assert choose_sets(QUICK, tmp_path, ("kmnist",), ())[1] == ("kmnist", "mnist", "notmnist_22k")
    assert choose_sets(QUICK, tmp_path, ("kmnist",), ("mnist",))[1] == ("kmnist", "mnist")
    mine = f"mine={tmp_path / 'other.npz'}"
    assert choose_sets(QUICK, tmp_path, ("mnist", mine), ())[1] == ("mnist", mine)
    units = make_units(tmp_path, ("mnist", mine), ("kmnist_10k",))
    assert set(load_ood_sets(units["mnist"])) == {"mine", "kmnist_10k", *PERTURBED}
    assert set(load_ood_sets(units[mine])) == {"mnist", "kmnist_10k", *PERTURBED}


def test_the_fingerprint_of_a_set_changes_with_every_pixel(tmp_path: Path) -> None:
    make_set(tmp_path, "mnist", 400, 0)
    prints = [fingerprint_sets(["mnist"], tmp_path, QUICK)]
    with np.load(tmp_path / "mnist.npz") as file:
        arrays = dict(file)
    arrays["x_train"][200, 14, 14] ^= 1
    np.savez(tmp_path / "mnist.npz", **arrays)
    load_set.cache_clear()
    prints.append(fingerprint_sets(["mnist"], tmp_path, QUICK))
    assert set(prints[0]) == {"mnist"}
    assert prints[0] != prints[1]


def test_an_id_set_needs_labels(tmp_path: Path) -> None:
    make_set(tmp_path, "mnist", 40, 0)
    make_set(tmp_path, "bare", 40, 1, labels=False)
    with pytest.raises(InputError, match="bare: no labels"):
        load_id_set("bare", tmp_path, QUICK)
    with pytest.raises(InputError, match="bare: no labels"):  # before anything is written
        list(run(tmp_path / "out", ids=("bare",), ood=("mnist",), data_dir=tmp_path))
    with pytest.raises(InputError, match=r"mnist: no OOD set to compare with\. Pass --ood NAME"):
        list(run(tmp_path / "out", ids=(f"mnist={tmp_path / 'mnist.npz'}",), data_dir=tmp_path))
    assert not (tmp_path / "out").exists()


def test_names_of_sets_are_unique_and_not_reserved(tmp_path: Path) -> None:
    for seed, name in enumerate(["mnist", "kmnist"]):
        make_set(tmp_path, name, 40, seed)
    one, other = (f"a={tmp_path / name}.npz" for name in ("mnist", "kmnist"))
    for ids, ood in [((one, other), ()), ((one,), (other,)), (("mnist",), (f"mnist={tmp_path / 'kmnist'}.npz",))]:
        with pytest.raises(InputError, match=r"two sets have the name '(a|mnist)'"):
            choose_sets(QUICK, tmp_path, ids, ood)
    for name in (*PERTURBED, "familiar"):
        with pytest.raises(InputError, match=f"the set name '{name}' is reserved"):
            choose_sets(QUICK, tmp_path, ("mnist",), (f"{name}={tmp_path / 'kmnist'}.npz",))
    assert choose_sets(QUICK, tmp_path, ("mnist", "mnist"), ("kmnist", "kmnist"))[1] == ("mnist", "kmnist")


def test_a_run_writes_previews_of_its_sets(tmp_path: Path) -> None:
    list(run(tmp_path, preset="smoke", methods=("last_layer_gp",)))
    with Image.open(tmp_path / "previews" / "digits.png") as picture:
        grey = np.asarray(picture.convert("L"))
    (unit,) = plan_units(tmp_path, preset="smoke", methods=("last_layer_gp",))
    rows = [load_id_set("digits", None, SMOKE).x_test, *load_ood_sets(unit).values()]
    step, size = sets.SIDE + sets.GAP, sets.SIDE // 8
    for i, images in enumerate(rows):
        for j in (0, sets.COLUMNS - 1):
            top, left = sets.GAP + i * step, sets.MARGIN + j * step
            tile = grey[top : top + sets.SIDE : size, left : left + sets.SIDE : size]
            np.testing.assert_allclose(tile, 255 * images[j].clip(0, 1), atol=0.51)


def test_images_take_the_shape_of_the_id_set() -> None:
    rng = np.random.default_rng(0)
    grey, colour = rng.random((5, 12, 10), np.float32), rng.random((5, 3, 12, 10), np.float32)
    assert match_shape(grey, (12, 10)) is grey
    np.testing.assert_array_equal(match_shape(grey, (3, 12, 10)), np.stack([grey] * 3, axis=1))
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    np.testing.assert_allclose(match_shape(colour, (12, 10)), np.tensordot(colour, weights, (1, 0)), rtol=1e-5)
    np.testing.assert_array_equal(match_shape(colour, (1, 12, 10))[:, 0], match_shape(colour, (12, 10)))
    smaller = match_shape(np.full((2, 3, 12, 10), 0.25, np.float32), (6, 5))
    np.testing.assert_allclose(smaller, np.full((2, 6, 5), 0.25), rtol=1e-5)
    assert match_shape(colour, (3, 8, 8)).shape == (5, 3, 8, 8)


@pytest.mark.parametrize("method", ["rnd", "energy", "csd_ood"])
def test_sets_of_any_size_and_colour_are_compared(method: str, tmp_path: Path) -> None:
    """A colour ID set of 10 × 12 pixels against a grey set of 8 × 8."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (rng.integers(0, 128, (60, 3, 10, 12)) + 60 * y[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "colour.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    grey = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "grey.npz", x_train=grey, x_test=grey[:20])
    short = replace(QUICK, steps=4, batch=8, warmup=1, samples=2, small=True)
    unit = Unit(row=method, id_set="colour", seed=0, preset=short, ood_sets=("grey",), data_dir=tmp_path)
    result = evaluate.evaluate(unit)
    assert result["data"] == {
        "id": "colour",
        "train": 60,
        "test": 30,
        "ood": {"grey": 20, **dict.fromkeys(PERTURBED, 30)},
    }
    assert result["accuracy"] > 0.3
    assert all(np.isfinite(list(figures.values())).all() for figures in result["scores"]["score"].values())
    sets.write_previews([unit], tmp_path / "previews")
    with Image.open(tmp_path / "previews" / "colour.png") as picture:
        pixel = picture.getpixel((sets.MARGIN, sets.GAP))
    assert pixel == tuple(int(value) for value in x[0, :, 0, 0])


def test_contexts_never_hold_an_image_that_is_evaluated(tmp_path: Path) -> None:
    for seed, name in enumerate(["mnist", "kmnist", "notmnist"]):
        make_set(tmp_path, name, 60, seed)
    first, second = (make_units(tmp_path, seed=seed)["mnist"] for seed in (0, 1))
    contexts = draw_contexts(first)
    assert len(contexts) == 3 * 60
    seen = {image.tobytes() for image in contexts}
    evaluated = [*load_ood_sets(first).values(), load_id_set("mnist", tmp_path, QUICK).x_test]
    assert not seen & {image.tobytes() for x in evaluated for image in x}
    training = {image.tobytes() for name in ("kmnist", "notmnist") for image in load_set(name, tmp_path).x_train}
    assert sum(image.tobytes() in training for image in contexts) == 2 * 60
    assert not np.array_equal(contexts, draw_contexts(second))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_curves_of_known_scores() -> None:
    id_scores, ood_scores = np.arange(1000.0), np.arange(500.0, 1500.0)
    roc = dict(zip(FALSE_ALARM_RATES, evaluate.roc_curve(id_scores, ood_scores), strict=True))
    assert roc[0.1] == pytest.approx(0.6, abs=0.002)  # 900 and above are alarms
    assert roc[1.0] == 1.0
    assert list(roc.values()) == sorted(roc.values())
    counts = evaluate.score_histogram(id_scores, {"s": ood_scores})["counts"]
    assert sum(counts["familiar"]) == sum(counts["s"]) == 1000
    correct = id_scores < 500
    accuracy = dict(zip(KEPT_SHARES, evaluate.rejection_curve(id_scores, correct), strict=True))
    assert accuracy[1.0] == 0.5
    assert accuracy[0.5] == 1.0


def test_means_are_over_other_sets_and_the_unclipped_perturbed_one() -> None:
    aurocs = {"a": 90.0, "b": 60.0, "perturbed": 30.0, "perturbed_clipped": 0.0}
    figures = {name: {"auroc": auroc} for name, auroc in aurocs.items()}
    assert evaluate.mean_over_sets(figures, "auroc") == (60.0, 75.0)


def smoke_unit(method: str, classifiers: Path) -> Unit:
    return Unit(row=method, id_set="digits", seed=0, preset=SMOKE, ood_sets=("letters",), classifiers=classifiers)


def test_a_unit_has_scores_origin_and_accuracy(tmp_path: Path) -> None:
    unit = smoke_unit("last_layer_gp", tmp_path)
    result = evaluate.evaluate(unit)
    assert json.loads(json.dumps(result)) == result
    assert set(result["scores"]) == {"score", "variance", "relative"}
    assert set(result["scores"]["score"]) == {"letters", "perturbed", "perturbed_clipped"}
    assert {"commit", "date", "device", "torch"} <= set(result)
    assert result["scores"]["score"]["letters"]["auroc"] > 95
    import onefold

    images = load_id_set("digits", None, SMOKE)
    gp = onefold.LastLayerGP(seed=0).fit(images.x_train)
    by_hand = 100 * metrics.auroc(gp.score(images.x_test), gp.score(load_ood_sets(unit)["letters"]))
    assert result["scores"]["score"]["letters"]["auroc"] == pytest.approx(by_hand)
    assert 0.1 < result["accuracy"] < 1
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # the separate classifier, for the next unit


def test_a_damaged_classifier_is_made_again(tmp_path: Path) -> None:
    unit = smoke_unit("energy", tmp_path)
    first = evaluate.evaluate(unit)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    assert evaluate.evaluate(unit)["scores"] == first["scores"]
    assert file.stat().st_size > 1000


# --- the folder -------------------------------------------------------------------------------------------------------


def begun(folder: Path) -> ResultsFolder:
    results = ResultsFolder(folder)
    results.begin(SMOKE.settings(), {"digits": "abc"})
    return results


def test_a_folder_belongs_to_settings_and_data(tmp_path: Path) -> None:
    results = begun(tmp_path / "r")
    results.begin(SMOKE.settings(), {"digits": "abc"})
    with pytest.raises(InputError, match="made on digits, and this run is on digits, letters"):
        results.begin(SMOKE.settings(), {"digits": "abc", "letters": "def"})
    assert results.manifest()["data"] == {"digits": "abc"}
    with pytest.raises(InputError, match="made with the preset 'smoke' and other settings"):
        results.begin(QUICK.settings(), {"digits": "abc"})
    with pytest.raises(InputError, match="made with other images of 'digits'"):
        results.begin(SMOKE.settings(), {"digits": "xyz"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not empty, and not a folder of benchmark results"):
        begun(tmp_path / "full")


def test_a_unit_that_no_report_uses_is_evaluated_again(tmp_path: Path) -> None:
    def evaluated() -> list[bool]:
        return [not outcome.resumed for outcome in run(tmp_path, preset="smoke", methods=("last_layer_gp",))]

    (unit,) = plan_units(tmp_path, preset="smoke", methods=("last_layer_gp",))
    assert evaluated() == [True]
    path = ResultsFolder(tmp_path).path(unit)
    for name, value in [("accuracy", float("nan")), ("default", "dance"), ("scores", {}), ("cost", {"fit_s": -1})]:
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
        assert ResultsFolder(tmp_path).read(unit) is None, name
        assert evaluated() == [True]
    assert ResultsFolder(tmp_path).read(replace(unit, preset=replace(SMOKE, steps=61))) is None
    assert evaluated() == [False]


def test_units_with_fewer_or_more_figures_than_this_version_are_kept(tmp_path: Path) -> None:
    """A newly measured figure neither repeats old units nor keeps them from a report, and the other way round."""
    (outcome,) = run(tmp_path, preset="smoke", methods=("last_layer_gp",))
    path = ResultsFolder(tmp_path).path(outcome.job)
    content = json.loads(path.read_text())
    for by_set in content["scores"].values():
        for figures in by_set.values():
            figures["new_metric"] = [1, "two"]
            del figures["aupr_in_plain"]
    content["new_part"] = {"x": 1}
    content["cost"] = {"fit_s": 1.5, "new_cost": "low"}
    content["curves"] = {"new_curve": [1, 2]}
    path.write_text(json.dumps(content))
    assert ResultsFolder(tmp_path).read(outcome.job) == content
    (unit,) = collect(tmp_path).units
    assert set(unit.scores["score"]["letters"]) == {"auroc", "aupr_in", "aupr_out", "aupr_out_plain", "fpr95"}
    assert unit.cost == {"fit_s": 1.5}
    assert (unit.roc, unit.histogram, unit.rejection) == ({}, {}, [])


def test_a_damaged_manifest_says_what_to_do(tmp_path: Path) -> None:
    results = begun(tmp_path)
    (tmp_path / "bench.json").write_text("{")
    with pytest.raises(FileError, match=r"bench\.json: cut short or damaged, .* Pass another folder"):
        results.begin(SMOKE.settings(), {"digits": "abc"})


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    results = begun(tmp_path)
    path = tmp_path / "bench.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(FileError, match=r"bench\.json: has format 99, this version reads 1"):
        results.manifest()


def test_a_unit_cut_short_is_done_again_and_named_in_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = list(run(out, preset="smoke", methods=("last_layer_gp",)))
    path = ResultsFolder(out).path(first[0].job)
    whole = path.read_text()
    for damage in ("", whole[: len(whole) // 2], "[]", '{"format": 1}', whole.replace('"accuracy"', '"akkuracy"')):
        path.write_text(damage)
        assert ResultsFolder(out).read(first[0].job) is None
        results, bad = ResultsFolder(out).read_all()
        assert not results
        assert len(bad) == 1
        assert str(path) in bad[0]
    again = list(run(out, preset="smoke", methods=("last_layer_gp",)))
    assert not again[0].resumed
    assert again[0].result is not None
    assert again[0].result["scores"] == first[0].result["scores"]  # pyright: ignore[reportOptionalSubscript]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path).lock(), pytest.raises(InputError, match="another run is writing"):
        list(run(tmp_path, preset="smoke", methods=("knn",)))


def test_failures_are_kept_with_their_reason_and_forgotten_when_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(unit: Unit) -> Any:
        raise RuntimeError(f"no luck with {unit}")

    arguments = ["bench", "run", "-o", str(tmp_path / "r"), "--preset", "smoke", "--methods", "last_layer_gp"]
    with monkeypatch.context() as patched:
        patched.setattr("onefold.bench.run.evaluate", broken)
        assert cli.main(arguments) == 1
    assert "RuntimeError: no luck with last_layer_gp/digits/seed0" in capsys.readouterr().err
    path = tmp_path / "r" / "failures" / "last_layer_gp" / "digits" / "seed0.json"
    assert "Traceback" in json.loads(path.read_text())["traceback"]
    failure = {"unit": "last_layer_gp/digits/seed0", "reason": "RuntimeError: no luck with last_layer_gp/digits/seed0"}
    assert ResultsFolder(tmp_path / "r").failures() == ([failure], [])
    path.write_text("{")
    failures, (damaged,) = ResultsFolder(tmp_path / "r").failures()
    assert failures == []
    assert "last_layer_gp/digits/seed0" in damaged
    assert "cut short" in damaged
    assert cli.main(arguments) == 0
    assert ResultsFolder(tmp_path / "r").failures() == ([], [])
    assert len(ResultsFolder(tmp_path / "r").read_all()[0]) == 1


# --- engines ----------------------------------------------------------------------------------------------------------


def test_engines_answer_for_every_job() -> None:
    jobs = [("plain", "abc"), ("raise", "bread"), ("plain", "abcd"), ("large", "")]
    for map_over in (run_serial, run_processes):
        done = sorted(map_over(bench_work.double, jobs, 2), key=lambda outcome: jobs.index(outcome.job))
        assert [d.result and d.result["value"] for d in done] == [6, None, 8, None]
        assert done[1].reason == "ValueError: no bread today"
        assert done[3].reason == "out of memory"
        assert not list(map_over(bench_work.double, [], 2))


def test_a_process_that_dies_costs_its_job_and_no_other(tmp_path: Path) -> None:
    """Not the one beside it either, which is at work meanwhile."""
    once = str(tmp_path / "once")
    jobs: list[Any] = [
        ("beside", once),
        ("die", once),
        ("exit", ""),
        *(("plain", "x" * i) for i in (1, 2, 3)),
    ]
    done = sorted(run_processes(bench_work.double, jobs, 2), key=lambda outcome: jobs.index(outcome.job))
    assert [d.result and d.result["value"] for d in done] == [2 * len(once), None, None, 2, 4, 6]
    assert "killed or ran out of memory" in done[1].reason
    assert "exit code 9" in done[2].reason


def test_processes_have_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sorted(os.sched_getaffinity(0))
    results = [done.result or {} for done in run_processes(bench_work.cores, [str(tmp_path)] * 2, 2)]
    assert sorted(core for each in results for core in each["cores"]) == (ours if len(ours) > 1 else 2 * ours)
    assert all(each["threads"] == len(each["cores"]) for each in results)
    monkeypatch.setattr(engines, "_cores", lambda: list(range(3, 19)))
    for count in (1, 2, 5, 16):
        shares = [engines._share_of_cores(place, count) for place in range(count)]
        assert [core for share in shares for core in share] == list(range(3, 19))
        assert {len(share) for share in shares} <= {16 // count, -(-16 // count)}
    assert {core for place in range(18) for core in engines._share_of_cores(place, 18)} == set(range(3, 19))
    assert all(len(engines._share_of_cores(place, 18)) == 1 for place in range(18))


OWNER = """
import signal, sys
from bench_work import hold
from onefold.bench.engines import run_processes

if __name__ == "__main__":
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.default_int_handler)
    list(run_processes(hold, [sys.argv[1]] * 3, 2))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_their_owner(end: signal.Signals, tmp_path: Path) -> None:
    """However it ends, the workers save what they have; also after Ctrl-C, which the terminal sends to all of them."""
    (script := tmp_path / "owner.py").write_text(OWNER)
    (busy := tmp_path / "busy").mkdir()
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "JAXTYPING_DISABLE": "1"}
    command = [sys.executable, str(script), str(busy)]
    owner = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 600
    while len(pids := [int(path.name) for path in busy.iterdir()]) < 2:
        assert owner.poll() is None, "the owner ended before its workers were busy"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(map(running, pids))
    (os.killpg if end == signal.SIGINT else os.kill)(owner.pid, end)
    assert owner.wait(600) != 0
    assert gone(pids, 10.0 if end == signal.SIGKILL else 0.0)
    assert sorted(int(path.name) for path in busy.iterdir() if path.read_text() == "saved") == sorted(pids)


@pytest.mark.slow
def test_processes_give_the_table_of_a_serial_run(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / name, preset="smoke", methods=QUICK_METHODS, engine=name) for name in ("serial", "processes")
    ]
    tables = [sorted((str(o.job), json.dumps(o.result["scores"])) for o in outcomes if o.result) for outcomes in runs]
    assert len(tables[0]) == len(QUICK_METHODS)
    assert [unit for unit, _ in tables[0]] == [unit for unit, _ in tables[1]]
    for (_, one), (_, other) in zip(*tables, strict=True):
        for kind, by_set in json.loads(one).items():
            for name, values in by_set.items():
                assert values == pytest.approx(json.loads(other)[kind][name], abs=0.05)  # threads round differently


@pytest.mark.slow
def test_ray_does_as_many_at_a_time_as_it_is_told(tmp_path: Path) -> None:
    """On cards that are shared, too; and a job that dies each time is given up."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}}
    for gpus, counts in ((0, (1, 2)), (2, (1, 3))):
        ray.init(
            "local", num_cpus=3, num_gpus=gpus, log_to_driver=False, include_dashboard=False, runtime_env=environment
        )
        try:
            for count in counts:
                done = list(find_engine("ray")(bench_work.overlap, [str(tmp_path)] * 4, count))
                assert max((d.result or {})["others"] for d in done) == count - 1
            if gpus == 0:
                (dead,) = find_engine("ray")(bench_work.double, [("exit", "")], 1)
                assert dead.result is None
                assert "Ray: " in dead.reason
        finally:
            ray.shutdown()


@pytest.mark.parametrize("command", ["bench", "rl"])
def test_a_ray_cluster_that_does_not_answer_is_given_up(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens on a port that was just closed; Ray would try it for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(engines, "CONNECTING", 0.5)
    options = {
        "bench": ["bench", "run", "--preset", "smoke", "--methods", "knn"],
        "rl": ["rl", "grid", "--agents", "dqn", "--envs", "chain-8", "--seeds", "0", "--frames", "600"],
    }[command]
    assert cli.main([*options, "--engine", "ray", "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"onefold: Ray cluster {address}: cannot connect (no answer within 0.5 s). "
        "Start it, or correct or unset RAY_ADDRESS."
    )


def test_an_address_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "no address")
    monkeypatch.setattr(engines, "CONNECTING", 300.0)
    with pytest.raises(OnefoldError, match=r"^Ray cluster no address: cannot connect \(.*Invalid address.*\)\. Start"):
        list(find_engine("ray")(bench_work.double, [("plain", "a")], 1))


@pytest.mark.slow
def test_ray_goes_on_when_a_node_is_lost(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    try:
        doomed = cluster.add_node(num_cpus=1)  # only now, so that this process belongs to the other one
        cluster.wait_for_nodes()
        names = {node["NodeID"]: node for node in ray.nodes()}
        assert len(names) == 2
        jobs = [(str(tmp_path), number, 3.0) for number in range(4)]

        def lose_it() -> None:
            deadline = time.monotonic() + 600
            while time.monotonic() < deadline:
                nodes = {line for path in tmp_path.glob("started-*") for line in path.read_text().split()}
                if len(nodes) == 2:  # a task runs on it
                    cluster.remove_node(doomed, allow_graceful=False)
                    return
                time.sleep(0.1)

        thread = threading.Thread(target=lose_it)
        thread.start()
        done = sorted(find_engine("ray")(bench_work.slow, jobs), key=lambda outcome: jobs.index(outcome.job))
        thread.join()
        assert [d.result for d in done] == [d.result for d in serial_squares(jobs)]
        starts = sum(len(path.read_text().split()) for path in tmp_path.glob("started-*"))
        assert starts > len(jobs)  # one was lost in the middle and began anew
    finally:
        ray.shutdown()
        cluster.shutdown()


def serial_squares(jobs: list[Any]) -> list[Any]:
    return [Outcome(job, {"number": job[1], "square": job[1] ** 2}) for job in jobs]


# --- killed and resumed -----------------------------------------------------------------------------------------------


def killed_after(arguments: list[str], out: Path, units: int, seconds: float) -> int | None:
    """Start a run into this folder and kill it so long after it has so many results; its exit status if it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "onefold.cli", *arguments, "-o", str(out)],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None:
        if out.exists() and len(ResultsFolder(out).read_all()[0]) >= units:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(seconds)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return None
        time.sleep(0.05)
    return process.returncode


@pytest.mark.slow
def test_a_run_killed_many_times_ends_with_the_undisturbed_table(tmp_path: Path) -> None:
    methods = ("knn", "energy", "last_layer_gp", "csd", "rnd", "csd_post_hoc")
    options = ["bench", "run", "--preset", "smoke", "--seeds", "0", "1", "--methods", *methods]
    assert killed_after(options, tmp_path / "calm", 1000, 0) == 0
    rng = np.random.default_rng(0)
    for units in (0, 0, 1, 2, 3, 4, 6):
        assert killed_after(options, tmp_path / "killed", units, rng.uniform(0, 0.5)) is None
    assert killed_after(options, tmp_path / "killed", 1000, 0) == 0
    undisturbed = {result["unit"]: result for result in ResultsFolder(tmp_path / "calm").read_all()[0]}
    results, bad = ResultsFolder(tmp_path / "killed").read_all()
    assert not bad
    assert sorted(r["unit"] for r in results) == sorted(undisturbed)
    for result in results:
        calm = undisturbed[result["unit"]]
        assert result["scores"] == calm["scores"]
        assert result["accuracy"] == calm["accuracy"]


def test_planned_units_share_one_folder_for_classifiers(tmp_path: Path) -> None:
    units = plan_units(tmp_path / "o", preset="smoke")
    assert {unit.classifiers for unit in units} == {ResultsFolder(tmp_path / "o").classifiers.absolute()}
    assert {unit.row for unit in units} == set(TABLE)


# --- ablation and search ----------------------------------------------------------------------------------------------


def test_an_ablation_is_every_form_of_csd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(["fashion_mnist", "mnist", "kmnist_10k"]):
        make_set(tmp_path, name, 40, seed)
    options: dict[str, Any] = {}
    monkeypatch.setattr("onefold.bench.run.run", lambda _, **keywords: options.update(keywords) or iter(()))
    list(run_ablation(tmp_path / "a", data_dir=tmp_path))
    assert options["methods"] == ABLATION
    assert set(ABLATION) == {name for name, row in ROWS.items() if row.ours}
    assert options["ids"] == ("fashion_mnist", "kmnist_10k")
    every_set = choose_sets(PRESETS[options["preset"]], tmp_path, options["ids"], ())[1]
    assert every_set == ("fashion_mnist", "kmnist_10k", "mnist")


@pytest.mark.parametrize("method", ["csd-small_init", "csd-random_pairs", "csd-full_ntk", "csd_post_hoc-train"])
def test_every_form_of_csd_is_another_detector(method: str, tmp_path: Path) -> None:
    short = replace(SMOKE, steps=15, batch=8, warmup=2, train=150, test=60)
    units = [replace(smoke_unit(name, tmp_path), preset=short) for name in (method, "csd")]
    aurocs = [evaluate.evaluate(unit)["scores"]["relative"]["letters"]["auroc"] for unit in units]
    assert aurocs[0] != aurocs[1]


def test_a_search_tries_every_value_once_and_goes_on_with_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []

    def quick(unit: Unit) -> dict[str, Any]:
        asked.append(dict(unit.rates))
        rates = unit.rates
        value = 90 - abs(np.log10(rates["mc_dropout"]) + 3) - abs(rates["dropout"] - 0.25)
        if rates["mc_dropout"] == 0.1:
            raise RuntimeError("diverged")
        figures = {name: {"auroc": value} for name in ("letters", *PERTURBED)}
        return {"scores": {"score": figures}, "default": "score"}

    def tried() -> list[Outcome[dict[str, float]]]:
        return list(search(tmp_path / "s", "mcd", preset="smoke"))

    def aurocs(outcomes: list[Outcome[dict[str, float]]]) -> list[float | None]:
        return [(outcome.result or {}).get("auroc") for outcome in outcomes]

    monkeypatch.setattr("onefold.bench.search.evaluate", quick)
    first = tried()
    assert [outcome.job for outcome in first] == [
        *({"mc_dropout": rate, "dropout": 0.15} for rate in LEARNING_RATES), *({"dropout": rate} for rate in DROPOUT),
    ]  # fmt: skip
    assert first[6].reason == "RuntimeError: diverged"
    assert {rates["dropout"] for rates in asked[:7]} == {0.15}  # as in the paper's table
    assert {rates["mc_dropout"] for rates in asked[7:]} == {1e-3}
    again = tried()
    assert aurocs(again) == aurocs(first)
    assert len(asked) == 13  # only what failed was tried again
    assert [outcome.resumed for outcome in again].count(False) == 1
    journal = tmp_path / "s" / "search.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"distributions"' in line)
    journal.write_bytes(b"".join(lines[: last + 1])[:-20])  # the disk was full
    assert aurocs(tried()) == aurocs(first)
    assert len(asked) == 15  # the failed point, and the one whose line was lost
    assert aurocs(tried()) == aurocs(first)
    with pytest.raises(InputError, match="no search space for 'knn'"):
        list(search(tmp_path / "s", "knn", preset="smoke"))


def test_a_grid_has_every_combination_once_and_a_sample_repeats_none() -> None:
    space = {"lr": (1e-3, 1e-2), "scale": (1.0, 3.0, 5.0)}
    points = grid_points(space)
    assert points[:3] == [{"lr": 1e-3, "scale": scale} for scale in (1.0, 3.0, 5.0)]
    assert len({tuple(point.values()) for point in points}) == 6
    sample = grid_points(space, most=4, seed=1)
    assert len(sample) == len({tuple(point.values()) for point in sample}) == 4
    assert sample == grid_points(space, most=4, seed=1) != grid_points(space, most=4, seed=2)


def test_results_of_a_search_are_ranked_without_failures_and_nan() -> None:
    results = [("a", 1.0), ("b", None), ("c", 3.0), ("d", float("nan")), ("e", 3.0)]
    assert rank(results) == [("c", 3.0), ("e", 3.0), ("a", 1.0)]
