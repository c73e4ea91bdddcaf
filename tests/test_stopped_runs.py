"""Runs that are stopped at any time: between two files, by Ctrl-C, by a second process, by a full disk."""

import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from pids import family

from onefold.cli import main
from onefold.core import storage
from onefold.core.runtime import interruptible, raise_interrupt_on_termination
from onefold.errors import FileError, InputError, OnefoldWarning
from onefold.rl.agents import ReplaySettings
from onefold.rl.console import format_duration
from onefold.rl.grid import final_return
from onefold.rl.play import Player
from onefold.rl.replay import Replay
from onefold.rl.run_folder import CHECKPOINT, EPISODES, LOCK, NETWORKS, NETWORKS_KIND, PROGRESS, SETTINGS, RunFolder
from onefold.rl.runs import resume, train
from onefold.rl.settings import make_run

RUN = make_run("dqn", "chain-8", 800, 0)
GRID = ["rl", "grid", "--agents", "dqn", "--envs", "chain-8", "--seeds", "0", "--frames", "800", "--device", "cpu"]


class Killed(BaseException):
    """Stands for the end of the process."""


def run_until(rows: Any, frames: int = 10**9) -> None:
    for row in rows:
        if row["frames"] >= frames:
            rows.close()
            return


def networks(folder: Path) -> tuple[dict[str, Any], int]:
    tensors, header = storage.load(folder / NETWORKS, NETWORKS_KIND)
    return {name: t.tolist() for name, t in tensors.items()}, header["frames"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_until(train(RUN, folder, device="cpu", checkpoint_every=200))
    return folder


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Raise Killed instead of writing the file `name` for the n-th time."""
    save, seen = storage.save, []

    def save_or_raise(path: Path, *rest: Any) -> None:
        if path.name == name:
            seen.append(path)
            if len(seen) == call:
                raise Killed
        save(path, *rest)

    monkeypatch.setattr(storage, "save", save_or_raise)


@pytest.mark.parametrize(("name", "call"), [(CHECKPOINT, 1), (NETWORKS, 1), (CHECKPOINT, 5), (NETWORKS, 5)])
def test_a_grid_continues_wherever_it_was_killed(
    name: str, call: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first and the last checkpoint, and between its two files."""
    arguments, out = [*GRID, "-o", str(tmp_path), "--checkpoint", "200"], tmp_path / "dqn/chain-8/seed0"
    kill_at(monkeypatch, name, call)
    with pytest.raises(Killed):
        main(arguments)
    monkeypatch.undo()
    assert (out / SETTINGS).exists()
    assert main(arguments) == 0
    assert networks(out) == networks(whole)
    assert networks(out)[1] == 800
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main(arguments) == 0  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


def damage_rows(path: Path, changes: dict[int, str]) -> None:
    """Replace rows of a table, counted from 0 below the head."""
    head, *rows = path.read_text().splitlines()
    rows = [changes.get(i, row) for i, row in enumerate(rows)]
    path.write_text("\n".join([head, *rows, ""]))


def test_damaged_rows_cause_a_warning_and_the_others_are_kept(whole: Path, tmp_path: Path) -> None:
    """Rows without numbers, with too few values, cut short, too long, or with frames out of order."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for name, at in ((PROGRESS, "100"), (EPISODES, "3")):
        rows = RunFolder(whole).read_table(name)
        lines = (whole / name).read_text().splitlines()[1:]
        bad = {1: "\0" * 40, 5: lines[5].replace(",", ",x", 1), 9: lines[9].rsplit(",", 1)[0], 11: "", 13: "1" * 9000}
        bad[20] = lines[20].replace(rows[20]["frames"], at if name == EPISODES else "790", 1)
        damage_rows(out / name, bad)
    with pytest.warns(OnefoldWarning) as caught:
        run_until(resume(out, device="cpu"))
    texts = sorted(str(warning.message) for warning in caught)
    for name, text in zip((EPISODES, PROGRESS), texts, strict=True):
        kept = [row for i, row in enumerate(RunFolder(whole).read_table(name)) if i not in (1, 5, 9, 11, 13, 20)]
        assert text == f"{out / name}: damaged rows are left out (6). The other {len(kept):,} are kept."
        assert RunFolder(out).read_table(name) == kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_until(resume(out, device="cpu"))


@pytest.mark.parametrize("content", ["", "frames,second\n1,2\n", "\n"])
def test_a_table_without_its_head_is_refused_and_kept(content: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    damage_rows(out / PROGRESS, {1: "x"})
    (out / EPISODES).write_text(content)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(
        FileError, match=rf"^{re.escape(str(out / EPISODES))}: is damaged: it lacks the column .*Restore"
    ):
        run_until(resume(out, device="cpu"))
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name in before} == before


def test_a_damaged_table_is_not_an_unstarted_run(whole: Path, tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_bytes((whole / SETTINGS).read_bytes())
    (tmp_path / PROGRESS).write_text("\n".join(["frames", "", "x,y", ""]))
    with pytest.raises(InputError, match="holds a run"):
        run_until(train(RUN, tmp_path, device="cpu"))


def test_a_grid_repairs_damaged_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, out = [*GRID, "-o", str(tmp_path)], tmp_path / "dqn/chain-8/seed0"
    assert main(arguments) == 0
    damage_rows(out / PROGRESS, {1: "x"})
    rows = len(RunFolder(out).read_table(PROGRESS))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(arguments) == 0
    assert f"progress.csv: damaged rows are left out (1). The other {rows} are kept" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "already trained: 800 frames" in capsys.readouterr().err
    assert len(RunFolder(out).read_table(PROGRESS)) == rows
    damage_rows(out / EPISODES, {1: "x"})
    with pytest.warns(OnefoldWarning, match=r"episodes\.csv: is damaged: line 3"):
        assert math.isnan(final_return(out))


@pytest.mark.parametrize("again", [["rl", "train", "--agent", "dqn", "--env", "chain-8", "-o"], ["rl", "resume"]])
def test_an_unstarted_run_can_be_trained(
    again: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(monkeypatch, CHECKPOINT, 1)
    with pytest.raises(Killed):
        run_until(train(RUN, tmp_path / "run", device="cpu"))
    monkeypatch.undo()
    frames = ["--frames", "800"] if again[1] == "train" else []
    assert main([*again, str(tmp_path / "run"), *frames, "--checkpoint", "200", "--device", "cpu"]) == 0
    assert networks(tmp_path / "run") == networks(whole)


def test_results_without_a_checkpoint_are_not_an_unstarted_run(whole: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in (SETTINGS, PROGRESS, "episodes.csv", NETWORKS):
        (shared / name).write_bytes((whole / name).read_bytes())
    with pytest.raises(InputError, match="holds a run"):
        run_until(train(RUN, shared, device="cpu"))
    with pytest.raises(InputError, match="there is no checkpoint to resume from"):
        run_until(resume(shared, device="cpu"))
    assert (shared / PROGRESS).read_bytes() == (whole / PROGRESS).read_bytes()


def test_a_killed_process_costs_a_grid_one_run_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command resumes it, with the same result; damaged networks do not stop other runs."""
    monkeypatch.chdir(tmp_path)
    frames, seeds = 1000, [Path(f"runs/dqn/chain-8/seed{seed}") for seed in (0, 1)]
    grid = ["rl", "grid", "--agents", "dqn", "--envs", "chain-8", "--frames", str(frames), "--device", "cpu"]
    grid += ["--checkpoint", "200", "--seeds", "0", "1"]
    many = [*grid, "-o", "runs", "--engine", "processes", "--workers", "2"]

    def kill_one() -> None:
        while not (seeds[1] / PROGRESS).exists() or len(RunFolder(seeds[1]).read_table(PROGRESS)) < 100:  # 400 frames
            time.sleep(0.02)
        lock = str((seeds[1] / LOCK).absolute())
        (worker,) = [pid for pid in family(os.getpid()) if lock in map(os.readlink, Path(f"/proc/{pid}/fd").iterdir())]
        os.kill(worker, signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    assert main(many) == 1
    thread.join()
    printed = capsys.readouterr().err
    assert printed.count("failed: its process was killed or ran out of memory") == 1
    assert printed.count(f": {frames:,} frames") == 1
    assert RunFolder(seeds[1]).trained_frames() < RunFolder(seeds[0]).trained_frames() == frames
    (seeds[0] / NETWORKS).write_bytes((seeds[0] / NETWORKS).read_bytes()[:-9])
    assert main(many) == 0
    assert main([*grid, "-o", "alone"]) == 0
    for seed in seeds:
        assert networks(seed) == networks("alone" / seed.relative_to("runs"))


@pytest.mark.slow
def test_runs_on_ray_write_to_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of Ray have the working folder of the process that started the cluster."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    for name in ("cluster", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cluster")
    ray.init("local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    monkeypatch.chdir(tmp_path / "mine")
    try:
        for _ in range(2):
            assert main([*GRID, "-o", "runs", "--engine", "ray"]) == 0
            assert RunFolder(Path("runs/dqn/chain-8/seed0")).trained_frames() == 800
    finally:
        ray.shutdown()
    assert not list((tmp_path / "cluster").iterdir())


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    first = train(RUN, tmp_path / "run", device="cpu")
    next(first)
    with pytest.raises(InputError, match=r"run: another process is training in this folder\. Wait"):
        run_until(resume(tmp_path / "run", device="cpu"))
    run_until(first)
    run_until(resume(tmp_path / "run", device="cpu"))  # the lock is free again
    assert len(RunFolder(tmp_path / "run").read_table(PROGRESS)) == 200


@pytest.mark.parametrize(
    ("command", "number"), [("train", signal.SIGINT), ("resume", signal.SIGTERM), ("train", signal.SIGHUP)]
)
def test_a_run_stopped_by_a_signal_loses_nothing(command: str, number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, a scheduler's SIGTERM, or the SIGHUP of a closed terminal."""
    out = tmp_path / "run"
    options = ["--agent", "dqn", "--env", "chain-8", "--frames", "1e5", "-o", str(out)]
    if command == "resume":
        run_until(train(make_run("dqn", "chain-8", 100_000, 0), out, device="cpu"), 400)
        options = [str(out)]
    before = len(RunFolder(out).read_table(PROGRESS)) if out.exists() else 0
    arguments = [sys.executable, "-m", "onefold.cli", "rl", command, *options, "--device", "cpu"]
    environment = {**os.environ, "JAXTYPING_DISABLE": "1"}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 600
    while not (out / PROGRESS).exists() or len(RunFolder(out).read_table(PROGRESS)) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, printed = process.communicate(timeout=600)
    assert process.returncode == 130
    assert printed.endswith(f"onefold: stopped. Resume with: onefold rl resume {out}\n")
    _, frames = networks(out)
    assert frames >= int(RunFolder(out).read_table(PROGRESS)[-1]["frames"]) > 0
    run_until(resume(out, device="cpu"), frames + 400)
    assert int(RunFolder(out).read_table(PROGRESS)[-1]["frames"]) >= frames + 400


def test_a_run_of_a_few_frames_ends(tmp_path: Path) -> None:
    run_until(train(make_run("dqn", "chain-8", 3, 0, num_envs=1), tmp_path / "run", device="cpu"))
    assert networks(tmp_path / "run")[1] == 3


def test_a_full_disk_is_an_error_that_names_the_file_and_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full from the third row of progress on."""
    add, rows = Path.open, []

    def full(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == PROGRESS and how[:1] == ("a",):
            rows.append(path)
            if len(rows) == 3:
                return add(Path("/dev/full"), *how, **more)
        return add(path, *how, **more)

    monkeypatch.setattr(Path, "open", full)
    out = tmp_path / "run"
    options = ["--agent", "dqn", "--env", "chain-8", "--frames", "800", "--device", "cpu"]
    assert main(["rl", "train", "-o", str(out), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"{out / PROGRESS}: {os.strerror(errno.ENOSPC)}. Free some space; finished work is kept. "
        f"Resume with: onefold rl resume {out}" in error
    )
    monkeypatch.undo()
    assert main(["rl", "resume", str(out), "--device", "cpu"]) == 0
    assert len(RunFolder(out).read_table(PROGRESS)) == 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_full_disk_for_tensorboard_is_a_warning_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run continues, and TensorBoard's thread prints no traceback."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, seen = RecordWriter.write, []

    def full(self: Any, data: bytes) -> None:
        seen.append(data)
        if len(seen) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    options = ["--agent", "dqn", "--env", "chain-8", "--frames", "600", "--device", "cpu", "-o", str(tmp_path / "run")]
    with warnings.catch_warnings():
        warnings.simplefilter("always", OnefoldWarning)
        assert main(["rl", "train", *options]) == 0
    printed = capfd.readouterr().err
    assert printed.count("TensorBoard: cannot write its files (No space left on device). The run continues") == 1
    assert "Traceback" not in printed
    assert RunFolder(tmp_path / "run").trained_frames() == 600


def test_a_missing_gpu_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "train", "-o", str(tmp_path / "run"), "--env", "chain-8", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "cuda" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_vizdoom_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    assert main(["rl", "train", "-o", str(tmp_path / "run"), "--frames", "2e5", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'onefold[rl]'" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def broken(**_: Any) -> gymnasium.Env:
    raise RuntimeError("no display\nthere is none")


def test_an_environment_that_does_not_start_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gymnasium.register("Broken-v0", entry_point=broken)
    assert main(["rl", "train", "-o", str(tmp_path / "run"), "--env", "Broken-v0", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "no display" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_holds_only_the_used_part_of_the_replay() -> None:
    memory = ReplaySettings(capacity=1_000_000, stack=6, n_step=10)
    replay = Replay(memory, 2, (4, 4), torch.uint8, torch.device("cpu"))
    no = torch.zeros(2, dtype=torch.bool)
    for _ in range(30):
        replay.add(torch.ones(2, 4, 4, dtype=torch.uint8), torch.zeros(2), no, no, no, no)
    assert replay.tensors()["frames"].shape == (30, 2, 4, 4)
    assert sum(t.nbytes for t in replay.tensors().values()) < 10_000


def test_resuming_removes_later_points_from_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_until(train(RUN, tmp_path / "run", device="cpu", checkpoint_every=200), 500)
    run_until(resume(tmp_path / "run", device="cpu"))
    events = accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    steps = [event.step for event in events.Scalars("return")]
    assert steps == [int(row["frames"]) for row in RunFolder(tmp_path / "run").read_table(PROGRESS)]


def test_small_environments_use_one_thread(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = train(RUN, tmp_path / "run", device="cpu")
        next(rows)
        assert torch.get_num_threads() == 1
        rows.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_networks_of_an_unfinished_run_cause_a_warning(tmp_path: Path) -> None:
    run_until(train(RUN, tmp_path / "run", device="cpu", checkpoint_every=200), 500)
    with pytest.warns(OnefoldWarning, match="the networks were trained for 400 of 800 frames"):
        Player(tmp_path / "run", 0, 0.0)


@pytest.mark.filterwarnings("default::onefold.errors.OnefoldWarning")
def test_a_run_too_short_to_learn_causes_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--agent", "dqn", "--env", "chain-8", "--frames", "400", "--device", "cpu"]
    assert main(["rl", "train", "-o", str(tmp_path / "run"), *options]) == 0
    assert "warning: frames: too few to learn anything. Learning starts after 500 frames" in capsys.readouterr().err


def test_a_slow_run_reports_by_time_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, lines and checkpoints are also written by time; each hint is printed once."""
    for name, seconds in (
        ("runs.REPORT_SECONDS", 0.02),
        ("runs.CHECKPOINT_SECONDS", 0.05),
        ("console.LINE_SECONDS", 0.01),
        ("console.SLOW_SECONDS", 0.0),
    ):
        monkeypatch.setattr(f"onefold.rl.{name}", seconds)
    saved: list[int] = []
    save = RunFolder.save_checkpoint
    monkeypatch.setattr(RunFolder, "save_checkpoint", lambda *args: saved.append(1) or save(*args))
    monkeypatch.setattr("onefold.rl.runs.REPORTS", 1)
    options = [
        "--env",
        "CartPole-v1",
        "--agent",
        "csd",
        "--frames",
        "1200",
        "--device",
        "cpu",
        "--set",
        "agent.q_bound=1",
    ]
    assert main(["rl", "train", *options, "-o", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("on a CPU, 4 environments, learning starts after 500 frames")
    assert len(RunFolder(tmp_path / "run").read_table(PROGRESS)) > 10
    assert sum(" frames, " in line and "/s" in line for line in lines) > 10
    assert any(re.search(r": [\d.]+ min left, 1,\d\d\d frames, ", line) for line in lines)
    assert not any(re.search(r"left, [1-4]?\d?\d frames, ", line) for line in lines)
    assert sum("% of Q's targets lie outside ±1 and are clipped" in line for line in lines) == 1
    assert sum("on this machine. Use a GPU" in line for line in lines) == 1
    assert len(saved) > 5


@pytest.mark.parametrize(("seconds", "text"), [(30, "0.5 min"), (7100, "118.3 min"), (7300, "2.0 h"), (2e5, "2 days")])
def test_durations_have_suitable_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_many_runs_that_cannot_start_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    assert main(["rl", "search", "csd", "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("vizdoom") == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_environment_of_a_run_is_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The networks name an environment that is not registered here."""
    tensors, header = storage.load(whole / NETWORKS, NETWORKS_KIND)
    storage.save(
        tmp_path / NETWORKS, NETWORKS_KIND, tensors, {**header, "run": {**header["run"], "environment": "Mine-v0"}}
    )
    assert main(["rl", "eval", str(tmp_path)]) == 2
    assert "environment 'Mine-v0': there is no such environment" in capsys.readouterr().err


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_ignored_signals_stay_ignored(before: signal.Handlers) -> None:
    """As under `nohup`: a closed terminal does not end such a run."""
    original = signal.signal(signal.SIGHUP, before)
    try:
        with raise_interrupt_on_termination():
            ended = signal.getsignal(signal.SIGHUP) is signal.default_int_handler
            with interruptible():
                noted = signal.getsignal(signal.SIGHUP) is not before
        assert ended == noted == (before is signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, original)
