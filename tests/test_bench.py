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
from onefold.bench import cell, engines, previews
from onefold.bench.engines import engine, processes, serial
from onefold.bench.methods import Job
from onefold.bench.results import Results
from onefold.bench.run import Plan, ablation, planned, run
from onefold.bench.search import DROPOUT, LEARNING_RATES, search
from onefold.bench.sets import PERTURBED, choose, contexts, familiar, identity, load, strange_sets
from onefold.bench.units import ABLATION, METHODS, PRESETS, TABLE, Unit, grid, settings_of
from onefold.errors import FileError, InputError, OnefoldError

SMOKE = PRESETS["smoke"]
QUICK_METHODS = ("knn", "energy-noflips", "last_layer_gp")  # a few seconds in all


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_the_papers_grid_has_ten_seeds_and_three_for_what_takes_long() -> None:
    units = grid(PRESETS["paper"], ("mnist", "kmnist"))
    seeds = {name: {unit.seed for unit in units if unit.method == name} for name in TABLE}
    assert all(seeds[name] == set(range(3 if METHODS[name].few else 10)) for name in TABLE)
    assert not {unit.method for unit in units} - set(TABLE)
    assert {"ens15", "mcd", "laplace"} <= {name for name, method in METHODS.items() if method.few}
    assert len(units) == len(set(units)) == 2 * sum(map(len, seeds.values()))
    assert str(Unit("csd_aug", "fashion_mnist", 3)) == "csd_aug/fashion_mnist/seed3"


def test_a_run_that_is_cut_short_has_every_method_at_the_first_seeds() -> None:
    units = grid(PRESETS["paper"], ("mnist",), ("csd", "rnd"))
    assert [(unit.seed, unit.method) for unit in units[:4]] == [(0, "csd"), (0, "rnd"), (1, "csd"), (1, "rnd")]


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"methods": ("dance",)}, "no method 'dance'; known are"), ({"preset": "slow"}, "no preset 'slow'"),
     ({"seeds": (-1,)}, "a seed is a whole number from 0"), ({"engine": "steam"}, "no engine 'steam'"),
     ({"workers": 0}, "at least 1 worker"), ({"ids": ("mnist",)}, "runs on embedded data"),
     ({"preset": "quick", "ids": ("nowhere",)}, "no set 'nowhere'"), ({"preset": "quick"}, "no image sets")],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_is_written(plan: Any, message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message):
        list(run(Plan(out=out, data_dir=tmp_path, **{"preset": "smoke", **plan})))
    assert not list(out.glob("*.json"))


# --- the data ---------------------------------------------------------------------------------------------------------


def make_set(folder: Path, name: str, count: int, seed: int, *, labels: bool = True) -> None:
    rng = np.random.default_rng(seed)
    arrays = {"x_train": rng.integers(0, 256, (count, 28, 28)), "x_test": rng.integers(0, 256, (count // 2, 28, 28))}
    arrays = {key: value.astype(np.uint8) for key, value in arrays.items()}
    if labels:
        arrays |= {"y_train": np.arange(count) % 4, "y_test": np.arange(count // 2) % 4}
    np.savez(folder / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


def test_sets_are_found_by_family_and_ones_own_by_path(tmp_path: Path) -> None:
    for seed, name in enumerate(["mnist", "kmnist_10k", "notmnist_22k", "other"]):
        make_set(tmp_path, name, 40, seed)
    assert choose(PRESETS["quick"], tmp_path, (), ()).ids == ("mnist", "kmnist_10k", "notmnist_22k")
    make_set(tmp_path, "kmnist", 40, 9)
    assert choose(PRESETS["quick"], tmp_path, (), ()).ids == ("mnist", "kmnist", "notmnist_22k")
    assert choose(PRESETS["quick"], tmp_path, ("kmnist",), ()).strange == ("mnist", "notmnist_22k")
    assert choose(PRESETS["quick"], tmp_path, ("kmnist",), ("mnist",)).strange == ("mnist",)
    own = f"mine={tmp_path / 'other.npz'}"
    assert choose(PRESETS["quick"], tmp_path, ("mnist", own), ()).strange == ()
    data = choose(PRESETS["quick"], tmp_path, ("mnist", own), ("kmnist_10k",))
    assert set(strange_sets(data, "mnist", PRESETS["quick"])) == {"mine", "kmnist_10k", *PERTURBED}
    assert set(strange_sets(data, own, PRESETS["quick"])) == {"mnist", "kmnist_10k", *PERTURBED}
    assert set(identity(data, PRESETS["quick"])) == {"mine", "mnist", "kmnist_10k"}


def test_a_familiar_set_needs_labels(tmp_path: Path) -> None:
    make_set(tmp_path, "mnist", 40, 0)
    make_set(tmp_path, "bare", 40, 1, labels=False)
    data = choose(PRESETS["quick"], tmp_path, ("bare",), ("mnist",))
    with pytest.raises(InputError, match="bare has no labels"):
        familiar(data, "bare", PRESETS["quick"])
    with pytest.raises(InputError, match="bare has no labels"):  # before anything else is done
        list(run(Plan(out=tmp_path / "out", ids=("bare",), strange=("mnist",), data_dir=tmp_path)))
    with pytest.raises(InputError, match="mnist needs other sets to be told from"):
        list(run(Plan(out=tmp_path / "out", ids=(f"mnist={tmp_path / 'mnist.npz'}",), data_dir=tmp_path)))
    assert not (tmp_path / "out").exists()


def test_sets_have_names_of_their_own(tmp_path: Path) -> None:
    for seed, name in enumerate(["mnist", "kmnist"]):
        make_set(tmp_path, name, 40, seed)
    one, other = (f"a={tmp_path / name}.npz" for name in ("mnist", "kmnist"))
    for ids, strange in [((one, other), ()), ((one,), (other,)), (("mnist",), (f"mnist={tmp_path / 'kmnist'}.npz",))]:
        with pytest.raises(InputError, match=r"two sets are called '(a|mnist)'"):
            choose(PRESETS["quick"], tmp_path, ids, strange)
    for name in (*PERTURBED, "familiar"):
        with pytest.raises(InputError, match=f"cannot be called '{name}'"):
            choose(PRESETS["quick"], tmp_path, ("mnist",), (f"{name}={tmp_path / 'kmnist'}.npz",))
    assert choose(PRESETS["quick"], tmp_path, ("mnist", "mnist"), ("kmnist", "kmnist")).names == ("mnist", "kmnist")


def test_a_run_leaves_pictures_of_its_sets(tmp_path: Path) -> None:
    list(run(Plan(out=tmp_path, preset="smoke", methods=("last_layer_gp",))))
    with Image.open(tmp_path / "previews" / "digits.png") as picture:
        grey = np.asarray(picture)
    data = choose(SMOKE, tmp_path, (), ())
    rows = [familiar(data, "digits", SMOKE).x_test, *strange_sets(data, "digits", SMOKE).values()]
    step, size = previews.SIDE + previews.GAP, previews.SIDE // 8
    for i, images in enumerate(rows):
        for j in (0, previews.COLUMNS - 1):
            top, left = previews.GAP + i * step, previews.NAMES + j * step
            shown = grey[top : top + previews.SIDE : size, left : left + previews.SIDE : size]
            np.testing.assert_allclose(shown, 255 * images[j].clip(0, 1), atol=0.51)


def test_contexts_never_hold_an_image_that_is_evaluated(tmp_path: Path) -> None:
    for seed, name in enumerate(["mnist", "kmnist", "notmnist"]):
        make_set(tmp_path, name, 60, seed)
    data, preset = choose(PRESETS["quick"], tmp_path, (), ()), PRESETS["quick"]
    drawn = contexts(data, "mnist", preset, seed=0)
    assert len(drawn) == 3 * 60
    seen = {image.tobytes() for image in drawn}
    evaluated = [*strange_sets(data, "mnist", preset).values(), familiar(data, "mnist", preset).x_test]
    assert not seen & {image.tobytes() for x in evaluated for image in x}
    trains = {image.tobytes() for name in ("kmnist", "notmnist") for image in load(name, tmp_path, None, None).x_train}
    assert sum(image.tobytes() in trains for image in drawn) == 2 * 60
    assert not np.array_equal(drawn, contexts(data, "mnist", preset, seed=1))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_curves_are_what_they_say() -> None:
    familiar_scores, strange_scores = np.arange(1000.0), np.arange(500.0, 1500.0)
    found = dict(zip(cell.RATES, cell.roc(familiar_scores, strange_scores), strict=True))
    assert found[0.1] == pytest.approx(0.6, abs=0.002)  # 900 and above are alarms
    assert found[1.0] == 1.0
    assert list(found.values()) == sorted(found.values())
    counts = cell.histogram(familiar_scores, {"s": strange_scores})["counts"]
    assert sum(counts["familiar"]) == sum(counts["s"]) == 1000
    right = familiar_scores < 500
    kept = dict(zip(cell.KEPT, cell.rejection(familiar_scores, right), strict=True))
    assert kept[1.0] == 0.5
    assert kept[0.5] == 1.0


def test_means_are_over_foreign_sets_and_the_unclipped_perturbed_one() -> None:
    strange = {
        "a": {"auroc": 90.0},
        "b": {"auroc": 60.0},
        "perturbed": {"auroc": 30.0},
        "perturbed_clipped": {"auroc": 0.0},
    }
    assert cell.means(strange, "auroc") == (60.0, 75.0)


def test_a_unit_says_everything(tmp_path: Path) -> None:
    data = choose(SMOKE, tmp_path, (), ())
    job = Job(Unit("last_layer_gp", "digits", 0), SMOKE, data, tmp_path)
    result = cell.run_unit(job)
    assert json.loads(json.dumps(result)) == result
    assert set(result["scores"]) == {"score", "variance", "relative"}
    assert set(result["scores"]["score"]) == {"letters", "perturbed", "perturbed_clipped"}
    assert {"commit", "date", "device", "torch"} <= set(result)
    assert result["scores"]["score"]["letters"]["auroc"] > 95
    import onefold

    images = familiar(data, "digits", SMOKE)
    gp = onefold.LastLayerGP(seed=0).fit(images.x_train)
    by_hand = 100 * metrics.auroc(gp.score(images.x_test), gp.score(strange_sets(data, "digits", SMOKE)["letters"]))
    assert result["scores"]["score"]["letters"]["auroc"] == pytest.approx(by_hand)
    assert 0.1 < result["accuracy"] < 1
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # the separate classifier, for the next unit


def test_a_damaged_classifier_is_made_again(tmp_path: Path) -> None:
    job = Job(Unit("energy", "digits", 0), SMOKE, choose(SMOKE, tmp_path, (), ()), tmp_path)
    first = cell.run_unit(job)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    assert cell.run_unit(job)["scores"] == first["scores"]
    assert file.stat().st_size > 1000


# --- the folder -------------------------------------------------------------------------------------------------------


def begun(folder: Path) -> Results:
    results = Results(folder)
    results.begin(settings_of(SMOKE), {"digits": "abc"})
    return results


def test_a_folder_belongs_to_settings_and_data(tmp_path: Path) -> None:
    results = begun(tmp_path / "r")
    results.begin(settings_of(SMOKE), {"digits": "abc"})
    with pytest.raises(InputError, match="results on digits, this run is on digits, letters: they cannot stand in one"):
        results.begin(settings_of(SMOKE), {"digits": "abc", "letters": "def"})
    assert results.about()["data"] == {"digits": "abc"}
    with pytest.raises(InputError, match="preset 'smoke' with other settings: name another folder"):
        results.begin(settings_of(PRESETS["quick"]), {"digits": "abc"})
    with pytest.raises(InputError, match="other images of 'digits'"):
        results.begin(settings_of(SMOKE), {"digits": "xyz"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not empty and holds no benchmark"):
        begun(tmp_path / "full")


def test_a_unit_that_no_report_takes_is_done_again(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path, preset="smoke", methods=("last_layer_gp",))
    unit = next(iter(run(plan))).unit
    path, settings = Results(tmp_path).path(unit), settings_of(SMOKE)
    for name, value in [("accuracy", float("nan")), ("curves", {}), ("cost", {}), ("default", "dance"), ("scores", {})]:
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
        assert Results(tmp_path).read(unit, settings) is None, name
        assert [progress.before for progress in run(plan)] == [False]
    assert Results(tmp_path).read(unit, {**settings, "steps": 61}) is None
    assert [progress.before for progress in run(plan)] == [True]


def test_a_damaged_manifest_says_what_to_do(tmp_path: Path) -> None:
    results = begun(tmp_path)
    (tmp_path / "bench.json").write_text("{")
    with pytest.raises(FileError, match=r"bench\.json: is cut short or damaged, .* name another folder"):
        results.begin(settings_of(SMOKE), {"digits": "abc"})


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    results = begun(tmp_path)
    path = tmp_path / "bench.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(FileError, match=r"bench\.json: was written in format 99, this version reads 1"):
        results.about()


def test_a_unit_cut_short_is_done_again_and_named_in_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = list(run(Plan(out=out, preset="smoke", methods=("last_layer_gp",))))
    path = Results(out).path(first[0].unit)
    whole = path.read_text()
    for damage in ("", whole[: len(whole) // 2], "[]", '{"format": 1}', whole.replace('"accuracy"', '"akkuracy"')):
        path.write_text(damage)
        assert Results(out).read(first[0].unit, settings_of(PRESETS["smoke"])) is None
        results, bad = Results(out).every()
        assert not results
        assert len(bad) == 1
        assert str(path) in bad[0]
    again = list(run(Plan(out=out, preset="smoke", methods=("last_layer_gp",))))
    assert not again[0].before
    assert again[0].result is not None
    assert again[0].result["scores"] == first[0].result["scores"]  # pyright: ignore[reportOptionalSubscript]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Results(tmp_path).locked(), pytest.raises(InputError, match="another run is writing"):
        list(run(Plan(out=tmp_path, preset="smoke", methods=("knn",))))


def test_failures_are_kept_with_their_reason_and_forgotten_when_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(job: Any) -> Any:
        raise RuntimeError(f"no luck with {job.unit}")

    arguments = ["bench", "run", "-o", str(tmp_path / "r"), "--preset", "smoke", "--methods", "last_layer_gp"]
    with monkeypatch.context() as patched:
        patched.setattr("onefold.bench.run.run_unit", broken)
        assert cli.main(arguments) == 1
    assert "RuntimeError: no luck with last_layer_gp/digits/seed0" in capsys.readouterr().err
    (failure,) = Results(tmp_path / "r").failures()
    assert "Traceback" in failure["traceback"]
    (tmp_path / "r" / "failures" / "last_layer_gp" / "digits" / "seed0.json").write_text("{")
    (damaged,) = Results(tmp_path / "r").failures()
    assert damaged["unit"] == "last_layer_gp/digits/seed0"
    assert "cut short" in damaged["reason"]
    assert cli.main(arguments) == 0
    assert not Results(tmp_path / "r").failures()
    assert len(Results(tmp_path / "r").every()[0]) == 1


# --- engines ----------------------------------------------------------------------------------------------------------


def test_engines_answer_for_every_job() -> None:
    jobs = [("plain", "abc"), ("raise", "bread"), ("plain", "abcd"), ("large", "")]
    for map_over in (serial, processes):
        done = sorted(map_over(bench_work.double, jobs, 2), key=lambda d: d.place)
        assert [d.result and d.result["value"] for d in done] == [6, None, 8, None]
        assert done[1].reason == "ValueError: no bread today"
        assert done[3].reason == "there was not enough memory"
        assert not list(map_over(bench_work.double, [], 2))


def test_a_process_that_dies_costs_its_job_and_no_other(tmp_path: Path) -> None:
    """Not the one beside it either, which is at work meanwhile."""
    jobs: list[Any] = [
        ("slow", "ab"),
        ("die", str(tmp_path / "once")),
        ("exit", ""),
        *(("plain", "x" * i) for i in (1, 2, 3)),
    ]
    done = sorted(processes(bench_work.double, jobs, 2), key=lambda d: d.place)
    assert [d.result and d.result["value"] for d in done] == [4, None, None, 2, 4, 6]
    assert "killed or ran out of memory" in done[1].reason
    assert "exit code 9" in done[2].reason


def test_processes_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sorted(os.sched_getaffinity(0))
    found = [done.result or {} for done in processes(bench_work.cores, [0, 1], 2)]
    assert sorted(core for each in found for core in each["cores"]) == (ours if len(ours) > 1 else 2 * ours)
    assert all(each["threads"] == len(each["cores"]) for each in found)
    monkeypatch.setattr(engines, "_cores", lambda: list(range(3, 19)))
    for count in (1, 2, 5, 16):
        shares = [engines._share(place, count) for place in range(count)]
        assert [core for share in shares for core in share] == list(range(3, 19))
        assert {len(share) for share in shares} <= {16 // count, -(-16 // count)}
    assert {core for place in range(18) for core in engines._share(place, 18)} == set(range(3, 19))
    assert all(len(engines._share(place, 18)) == 1 for place in range(18))


OWNER = """
import signal, sys
from bench_work import hold
from onefold.bench.engines import processes

if __name__ == "__main__":
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.default_int_handler)
    list(processes(hold, [sys.argv[1]] * 3, 2))
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_their_owner(end: signal.Signals, tmp_path: Path) -> None:
    """However it ends, what they have is saved; by Ctrl-C, too, which all of them hear."""
    (script := tmp_path / "owner.py").write_text(OWNER)
    (busy := tmp_path / "busy").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "JAXTYPING_DISABLE": "1"}
    command = [sys.executable, str(script), str(busy)]
    owner = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 6000
    while len(pids := [int(path.name) for path in busy.iterdir()]) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all(map(running, pids))
    (os.killpg if end == signal.SIGINT else os.kill)(owner.pid, end)
    assert owner.wait(600) != 0
    assert gone(pids, 10.0 if end == signal.SIGKILL else 0.0)
    assert sorted(int(path.name) for path in busy.iterdir() if path.read_text() == "saved") == sorted(pids)


@pytest.mark.slow
def test_processes_give_the_table_of_a_serial_run(tmp_path: Path) -> None:
    plans = [
        Plan(out=tmp_path / name, preset="smoke", methods=QUICK_METHODS, engine=name)
        for name in ("serial", "processes")
    ]
    tables = [sorted((str(p.unit), json.dumps(p.result["scores"])) for p in run(plan) if p.result) for plan in plans]
    assert len(tables[0]) == len(QUICK_METHODS)
    assert [unit for unit, _ in tables[0]] == [unit for unit, _ in tables[1]]
    for (_, one), (_, other) in zip(*tables, strict=True):
        for kind, sets in json.loads(one).items():
            for name, values in sets.items():
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
                done = list(engine("ray")(bench_work.overlap, [str(tmp_path)] * 4, count))
                assert max((d.result or {})["others"] for d in done) == count - 1
            if gpus == 0:
                (dead,) = engine("ray")(bench_work.double, [("exit", "")], 1)
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
        list(engine("ray")(bench_work.double, [("plain", "a")], 1))


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
        done = sorted(engine("ray")(bench_work.slow, jobs), key=lambda d: d.place)
        thread.join()
        assert [d.result for d in done] == [d.result for d in serial_squares(jobs)]
        starts = sum(len(path.read_text().split()) for path in tmp_path.glob("started-*"))
        assert starts > len(jobs)  # one was lost in the middle and began anew
    finally:
        ray.shutdown()
        cluster.shutdown()


def serial_squares(jobs: list[Any]) -> list[Any]:
    from onefold.bench.engines import Done

    return [Done(place, {"number": n, "square": n * n}) for place, (_, n, _) in enumerate(jobs)]


# --- killed and resumed -----------------------------------------------------------------------------------------------


def killed_after(arguments: list[str], out: Path, units: int, seconds: float) -> int | None:
    """Start a run into this folder and kill it so long after it has so many results; its exit status if it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "onefold.cli", *arguments, "-o", str(out)],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None:
        if out.exists() and len(Results(out).every()[0]) >= units:
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
    undisturbed = {result["unit"]: result for result in Results(tmp_path / "calm").every()[0]}
    results, bad = Results(tmp_path / "killed").every()
    assert not bad
    assert sorted(r["unit"] for r in results) == sorted(undisturbed)
    for result in results:
        calm = undisturbed[result["unit"]]
        assert result["scores"] == calm["scores"]
        assert result["accuracy"] == calm["accuracy"]


def test_planned_jobs_share_one_folder_for_classifiers(tmp_path: Path) -> None:
    jobs, results = planned(Plan(out=tmp_path / "o", preset="smoke"))
    assert {job.cache for job in jobs} == {results.classifiers.absolute()}
    assert {job.unit.method for job in jobs} == set(TABLE)


# --- ablation and search ----------------------------------------------------------------------------------------------


def test_an_ablation_is_every_form_of_csd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(["fashion_mnist", "mnist", "kmnist_10k"]):
        make_set(tmp_path, name, 40, seed)
    plans: list[Plan] = []
    monkeypatch.setattr("onefold.bench.run.run", lambda plan: plans.append(plan) or iter(()))
    list(ablation(Plan(out=tmp_path / "a", preset="ablate", data_dir=tmp_path)))
    assert plans[0].methods == ABLATION
    assert set(ABLATION) == {name for name, method in METHODS.items() if method.ours}
    assert plans[0].ids == ("fashion_mnist", "kmnist_10k")
    assert choose(PRESETS["ablate"], tmp_path, plans[0].ids, plans[0].strange).strange == ("mnist",)


@pytest.mark.parametrize("method", ["csd-small_init", "csd-random_pairs", "csd-full_ntk", "csd_post_hoc-train"])
def test_every_form_of_csd_is_another_detector(method: str, tmp_path: Path) -> None:
    short = replace(SMOKE, steps=15, batch=8, warmup=2, train=150, test=60)
    data = choose(short, tmp_path, (), ())
    jobs = [Job(Unit(name, "digits", 0), short, data, tmp_path) for name in (method, "csd")]
    found = [cell.run_unit(job)["scores"]["relative"]["letters"]["auroc"] for job in jobs]
    assert found[0] != found[1]


def test_a_search_tries_every_value_once_and_goes_on_with_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def quick(job: Job) -> dict[str, Any]:
        asked.append(job.rates)
        value = 90 - abs(np.log10(job.rates.mcd) + 3) - abs(job.rates.dropout - 0.25)
        if job.rates.mcd == 0.1:
            raise RuntimeError("diverged")
        strange = {name: {"auroc": value} for name in ("letters", *PERTURBED)}
        return {"scores": {"score": strange}, "default": "score"}

    monkeypatch.setattr("onefold.bench.search.run_unit", quick)
    plan = Plan(out=tmp_path / "s", preset="smoke")
    tried = list(search(plan, "mcd"))
    assert [(t.rate, t.value) for t in tried] == [
        *(("mcd", rate) for rate in LEARNING_RATES), *(("dropout", rate) for rate in DROPOUT),
    ]  # fmt: skip
    assert tried[6].reason == "RuntimeError: diverged"
    assert {rates.dropout for rates in asked[:7]} == {0.15}  # as in the paper's table
    assert {rates.mcd for rates in asked[7:]} == {1e-3}
    again = list(search(plan, "mcd"))
    assert [t.auroc for t in again] == [t.auroc for t in tried]
    assert len(asked) == 13  # only what failed was tried again
    journal = tmp_path / "s" / "search.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"distributions"' in line)
    journal.write_bytes(b"".join(lines[: last + 1])[:-20])  # the disk was full
    cut = list(search(plan, "mcd"))
    assert [t.auroc for t in cut] == [t.auroc for t in tried]
    assert len(asked) == 15  # what failed, and what the lost line had told of
    assert [t.auroc for t in search(plan, "mcd")] == [t.auroc for t in tried]
    with pytest.raises(InputError, match="no search space for 'knn'"):
        list(search(plan, "knn"))
