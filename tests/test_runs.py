"""Runs from start to end: learning curves, checkpoints, resuming, videos, grids, and invalid input."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from onefold.cli import main
from onefold.core import storage
from onefold.core.rng import generators
from onefold.core.schema import to_json
from onefold.errors import FileError, InputError, MissingExtraError, TrainingError
from onefold.report.runs_data import collect_runs
from onefold.rl import console, grid
from onefold.rl.agents import Agent, Learning, LinearSchedule, ReplaySettings
from onefold.rl.compression import compress
from onefold.rl.play import GameView, Player, Rollout
from onefold.rl.run_folder import (
    CHECKPOINT,
    CHECKPOINT_KIND,
    EPISODES,
    NETWORKS,
    NETWORKS_KIND,
    PROGRESS,
    SETTINGS,
    RunFolder,
)
from onefold.rl.runs import TrainingRun, resume, train
from onefold.rl.settings import make_run, override_settings, parse_run
from onefold.rl.tasks import read_map
from onefold.rl.td import QNetwork
from onefold.rl.vector_env import LocalVectorEnv
from onefold.rl.video import GOAL, PATH, PLAYER, VideoFile
from onefold.rl.visit_counts import VisitCounts

AGENTS = ["dqn", "bdqn", "rnd", "ids", "csd"]
QUICK = ("ids", "csd")  # together they use all parts


def run_until(rows: Iterator[dict[str, Any]], frames: int = 10**9) -> None:
    for row in rows:
        if row["frames"] >= frames:
            rows.close()  # pyright: ignore[reportAttributeAccessIssue]
            return


def results_of(folder: Path) -> dict[str, Any]:
    """Return the results of a run that do not depend on time."""
    progress = [
        {name: value for name, value in row.items() if name not in ("seconds", "frames_per_second")}
        for row in RunFolder(folder).read_table("progress.csv")
    ]
    networks = {name: t.tolist() for name, t in storage.load(folder / NETWORKS, NETWORKS_KIND)[0].items()}
    texts = {name: (folder / name).read_text() for name in ("episodes.csv", "visits.json")}
    return {"progress": progress, "networks": networks, **texts}


@pytest.mark.parametrize("agent", [pytest.param(a, marks=() if a in QUICK else pytest.mark.slow) for a in AGENTS])
def test_a_resumed_run_is_the_uninterrupted_one(agent: str, tmp_path: Path) -> None:
    run = make_run(agent, "chain-8", 900, 3)
    run_until(train(run, tmp_path / "whole", device="cpu", checkpoint_every=200))
    run_until(
        train(run, tmp_path / "parts", device="cpu", checkpoint_every=200), 100
    )  # before the first checkpoint is due
    run_until(resume(tmp_path / "parts", device="cpu", checkpoint_every=200), 700)
    run_until(resume(tmp_path / "parts", device="cpu", checkpoint_every=200), 810)
    run_until(resume(tmp_path / "parts", device="cpu", checkpoint_every=200))
    whole, parts = results_of(tmp_path / "whole"), results_of(tmp_path / "parts")
    assert whole == parts
    assert len(whole["progress"]) > 100
    run_until(resume(tmp_path / "parts", device="cpu"))  # nothing is left to do
    assert results_of(tmp_path / "parts") == whole


def test_a_resumed_run_counts_restarts_and_keeps_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random generator of a GPU has another state, so a GPU run cannot be resumed on the CPU."""
    run = make_run("dqn", "chain-8", 900, 3)
    monkeypatch.setattr(LocalVectorEnv, "restarts", 2, raising=False)
    run_until(train(run, tmp_path, device="cpu", checkpoint_every=200), 500)
    run_until(resume(tmp_path, device="cpu", checkpoint_every=200), 700)
    run_until(resume(tmp_path, device="cpu", checkpoint_every=200))
    assert [int(row["worker_restarts"]) for row in RunFolder(tmp_path).read_table(PROGRESS)][-1] == 6
    tensors, header = storage.load(tmp_path / CHECKPOINT, CHECKPOINT_KIND)
    storage.save(
        tmp_path / CHECKPOINT,
        CHECKPOINT_KIND,
        tensors | {"learner.generator": torch.zeros(16, dtype=torch.uint8)},
        header,
    )
    with pytest.raises(FileError, match=r"cannot resume a GPU run on the CPU \(or the reverse\)"):
        run_until(resume(tmp_path, device="cpu"))


@pytest.mark.parametrize("agent", QUICK)
def test_a_finished_run_that_is_trained_longer_is_the_long_one(agent: str, tmp_path: Path) -> None:
    """If its schedules have the lengths of the long run. It is also stopped on the way."""
    run = make_run(agent, "chain-8", 1400, 3)
    run_until(train(run, tmp_path / "long", device="cpu", checkpoint_every=10**6))
    run_until(train(replace(run, frames=700), tmp_path / "run", device="cpu", checkpoint_every=10**6))
    assert RunFolder(tmp_path / "run").trained_frames() == 700
    run_until(resume(tmp_path / "run", frames=1400, device="cpu", checkpoint_every=100), 1030)
    assert RunFolder(tmp_path / "run").read_run() == run
    run_until(resume(tmp_path / "run", device="cpu"))
    assert results_of(tmp_path / "run") == results_of(tmp_path / "long")
    assert RunFolder(tmp_path / "run").trained_frames() == 1400


def test_a_run_killed_while_it_is_extended_can_be_resumed(tmp_path: Path) -> None:
    """Settings are written before the checkpoint. A checkpoint of a longer run belongs to another run."""
    run = make_run("dqn", "chain-8", 600, 3)
    run_until(train(run, tmp_path, device="cpu"))
    RunFolder(tmp_path).update_settings(replace(run, frames=1000))
    assert {"onefold", "commit", "format"} <= set(json.loads((tmp_path / SETTINGS).read_text()))
    run_until(resume(tmp_path, device="cpu"))
    assert RunFolder(tmp_path).trained_frames() == 1000
    RunFolder(tmp_path).update_settings(run)
    with pytest.raises(FileError, match="belongs to a run with other settings"):
        run_until(resume(tmp_path, device="cpu"))


def test_frames_train_a_run_longer(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, epsilon = copied(done, tmp_path / "run"), RunFolder(done).read_run().learning.epsilon
    assert main(["rl", "resume", str(run), "--frames", "500"]) == 2
    assert capsys.readouterr().err == ("onefold: --frames: the run has 600 (got 500). Give more to train it longer.\n")
    assert main(["rl", "resume", str(run), "--frames", "600"]) == 0
    assert "already trained to its end. --frames trains it longer" in capsys.readouterr().out
    assert main(["rl", "resume", str(run), "--frames", "8e2", "--device", "cpu"]) == 0
    assert (RunFolder(run).read_run().frames, RunFolder(run).trained_frames()) == (800, 800)
    assert RunFolder(run).read_run().learning.epsilon == epsilon  # whose length was a tenth of 600 frames
    (run / CHECKPOINT).unlink()
    assert main(["rl", "resume", str(run), "--frames", "1000"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("run: there is no checkpoint to resume from. Train the run again.")
    assert RunFolder(run).read_run().frames == 800


@pytest.mark.parametrize(("before", "after"), [(900, 900), (900, 2700), (10, 20), (1000, 1500), (7, 1000)])
def test_visits_of_an_extended_run_are_in_the_slices_of_their_frames(before: int, after: int) -> None:
    """A slice of the shorter run that overlaps two slices is added to the later one."""
    short, whole, longer = (VisitCounts("chain-8", frames) for frames in (before, after, after))
    for frame in range(1, before + 1):
        position = np.array([[frame % 8, 0.0]], np.float32)
        short.add(frame, position)
        whole.add(frame, position)
    longer.restore(short.counts.copy(), before)
    assert longer.counts.sum() == before
    if after % before == 0:
        np.testing.assert_array_equal(longer.counts, whole.counts)
    assert (longer.counts.sum((1, 2)).cumsum() <= whole.counts.sum((1, 2)).cumsum()).all()


def test_learning_starts_once_the_replay_holds_transitions(tmp_path: Path) -> None:
    run_until(train(make_run("csd", "chain-8", 1600, 0, 200), tmp_path, device="cpu"))
    losses = [float(row["loss"]) for row in RunFolder(tmp_path).read_table(PROGRESS)]
    assert losses[:3] == [0.0] * 3
    assert all(loss > 0 for loss in losses[-3:])


def test_a_resumed_doom_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """ViZDoom in a worker process: the actions of current episodes are replayed."""
    learning = Learning(
        replay=ReplaySettings(capacity=400, stack=3, n_step=3), batch_size=4, channels=(4, 4), hidden=8,
        learning_starts=120, bonus_learning_starts=160, target_period=40,
    )  # fmt: skip
    run = replace(make_run("dqn", "my-way-home-sparse", 240, 0, 2), learning=learning)
    run_until(train(run, tmp_path / "whole", device="cpu", workers=1, checkpoint_every=60))
    run_until(train(run, tmp_path / "parts", device="cpu", workers=1, checkpoint_every=60), 200)
    run_until(resume(tmp_path / "parts", device="cpu", workers=1, checkpoint_every=60))
    whole = results_of(tmp_path / "whole")
    assert whole == results_of(tmp_path / "parts")
    assert len(whole["progress"]) == 120


def straight_path(steps: int, reached: bool) -> Rollout:
    """Return an episode straight from the start of the sparse task to the goal, looking north; screens brighten."""
    places = np.linspace(read_map().spots[10], read_map().goal, steps + 1).astype(np.float32)
    screens = [np.full((120, 160), 40 + 200 * i // steps, np.uint8) for i in range(steps + 1)]
    return Rollout(steps, 0.0, reached, [GameView(*view, 90.0) for view in zip(screens, places, strict=True)])


def pixels_of(picture: np.ndarray, colour: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Return x and y of the map's pixels with about this colour, without the caption."""
    ys, xs = np.nonzero(np.abs(picture[:330, 480:].astype(int) - colour).max(-1) < 12)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def has_goal_caption(picture: np.ndarray) -> bool:
    """Return True if there is text in the colour of the goal below the map, to the right."""
    foot = picture[330:, 660:].astype(int)
    return bool((np.abs(foot - GOAL).max(-1) < 60).any())


@pytest.mark.parametrize(("steps", "reached"), [(20, True), (21, True), (20, False)])
def test_a_gif_has_the_games_speed_and_holds_the_last_frame(steps: int, reached: bool, tmp_path: Path) -> None:
    """A frame lasts for two of the game's 35 frames per second, rounded to 10 ms."""
    played = straight_path(steps, reached)
    VideoFile(tmp_path / "play.gif").write(played)
    with Image.open(tmp_path / "play.gif") as file:
        frames = [(frame.info["duration"], np.asarray(frame.convert("RGB"))) for frame in ImageSequence.Iterator(file)]
    assert [duration for duration, _ in frames] == [60] * 10 + [1000]
    assert {picture.shape for _, picture in frames} == {(360, 840, 3)}
    for (_, picture), view in zip(frames, played.views[steps % 2 :: 2], strict=True):
        assert np.ptp(picture[:, :480]) == 0
        assert abs(int(picture[0, 0, 0]) - int(view.screen[0, 0])) <= 9
    assert len(np.unique(np.stack([picture for _, picture in frames]).astype(int) @ (1, 256, 256**2))) <= 64
    assert [has_goal_caption(picture) for _, picture in frames] == [False] * 10 + [reached]


@pytest.mark.parametrize("kind", [".gif", ".mp4"])
def test_the_map_shows_the_path_the_player_and_the_goal(kind: str, tmp_path: Path) -> None:
    """Half-way, the path lies behind the player, who looks up, and the star ahead."""
    walls, _, goal = read_map()
    low, high = walls.reshape(-1, 2).min(0), walls.reshape(-1, 2).max(0)
    played = straight_path(40, False)
    played = played._replace(views=played.views[:21])
    VideoFile(tmp_path / f"play{kind}").write(played)
    with av.open(str(tmp_path / f"play{kind}")) as file:
        picture = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)][-1]

    def at(place: Any) -> np.ndarray:
        return 180 + (np.asarray(place) - (low + high) / 2) / (high - low).max() * 316 * (1, -1)

    player, start, star = at(played.views[-1].position), at(played.views[0].position), at(goal)
    white, way, green = (np.array(pixels_of(picture, colour)) for colour in (PLAYER, PATH, GOAL))
    assert np.abs(white[:, 0] - player[0]).max() <= 7  # a dot, and a line that goes up from it
    assert 14 <= player[1] - white[:, 1].min() <= 19
    assert 4 <= white[:, 1].max() - player[1] <= 7
    assert np.abs(green.mean(0) - star).max() < 2
    along = (way - start) @ (player - start) / np.sum((player - start) ** 2)
    assert along.min() < 0.1
    assert 0.85 < along.max() < 1
    across = np.cross(np.append(player - start, 0), np.c_[way - start, np.zeros(len(way))])[:, 2]
    assert np.abs(across).max() / np.linalg.norm(player - start) < 3
    for x1, y1, x2, y2 in walls:
        x, y = at(((x1 + x2) / 2, (y1 + y2) / 2)).astype(int)
        near = picture[y - 1 : y + 2, 480 + x - 1 : 480 + x + 2]
        assert near.max() > 80


def test_an_mp4_has_the_games_speed_and_holds_the_last_frame(tmp_path: Path) -> None:
    """PyAV decodes the number, the duration and the brightness of the frames."""
    played = straight_path(39, True)
    VideoFile(tmp_path / "new" / "play.mp4").write(played)
    with av.open(str(tmp_path / "new" / "play.mp4")) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == Fraction(35, 2)
        shown = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
    assert {picture.shape for picture in shown} == {(360, 840, 3)}
    views = played.views[1::2]
    held = [views[-1]] * 17  # a second, with the last frame itself
    assert len(shown) == len(views) + 17
    for picture, view in zip(shown, views + held, strict=True):
        assert abs(float(picture[:, :470].mean()) - float(view.screen[0, 0])) < 8
    assert [has_goal_caption(picture) for picture in shown] == [False] * 19 + [True] * 18


def test_an_unsupported_video_format_is_an_error_before_any_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"play.avi: the suffix must be .gif or .mp4\.$"):
        VideoFile(tmp_path / "play.avi")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onefold\[video\]'"):
        VideoFile(tmp_path / "play.mp4")
    VideoFile(tmp_path / "play.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_command_can_be_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--agent", "csd", "--env", "chain-8", "--frames", "1000", "--checkpoint", "100", "--device", "cpu"]
    command = [sys.executable, "-m", "onefold.cli", "rl", "train", "-o", str(out), *options]
    environment = {**os.environ, "JAXTYPING_DISABLE": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (out / "progress.csv").exists() or len(RunFolder(out).read_table("progress.csv")) < 180:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (out / "episodes.csv").open("a") as file:
        file.write("99,1,")  # as if killed while writing a row
    assert main(["rl", "resume", str(out), "--device", "cpu"]) == 0
    rows = RunFolder(out).read_table("progress.csv")
    frames = [int(row["frames"]) for row in rows]
    assert frames == sorted(set(frames))
    assert frames[-1] == 1000
    with (out / "episodes.csv").open() as file:
        ended = [int(row["frames"]) for row in csv.DictReader(file)]
    assert ended == sorted(ended)
    assert 1000 // 18 - 8 <= len(ended) <= 1000 // 17


def test_a_trained_agent_plays_from_its_networks_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("csd", "chain-8", 700, 0)
    run_until(train(run, tmp_path / "run", device="cpu"))
    player = Player(tmp_path / "run", 0, 0.0)
    assert [rollout.length for rollout in player.play(3)] == [17] * 3
    assert main(["rl", "eval", str(tmp_path / "run" / NETWORKS), "--episodes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"episodes", "return", "success", "length"}
    assert main(["rl", "watch", str(tmp_path / "run"), "-o", str(tmp_path / "x.gif")]) == 2
    assert capsys.readouterr().err.endswith("chain-8: has no screen to record. Only MyWayHome has one.\n")
    with pytest.raises(InputError, match="no screen"):
        player.play(1, views=True)  # before any episode
    assert not (tmp_path / "x.gif").exists()


@pytest.mark.parametrize("agent", ["csd", "ids"])
def test_network_files_are_small_and_give_the_agents_values(agent: str, tmp_path: Path) -> None:
    """With the paper's sizes: below 16 MB, and the same values up to rounding, priors included."""
    run = make_run(agent, "my-way-home-sparse", 1000, 0)
    network = QNetwork(run.agent, run.learning, (6, 42, 42), 5, generators(0, 3)[0])
    light = compress({f"online.{name}": t for name, t in network.state_dict().items()})
    storage.save(tmp_path / "networks", NETWORKS_KIND, light, {"run": to_json(run), "frames": 0})
    assert (tmp_path / "networks").stat().st_size < 16e6
    player = Player(tmp_path / "networks", 0, 0.0)
    x = torch.rand(4, 6, 42, 42, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pairs = [(a, b) for a, b in zip(network(x), player.network(x), strict=True) if a is not None]
    for expected, actual in pairs:
        assert float((expected - actual).norm() / expected.norm()) < 0.005


def test_settings_round_trip_and_invalid_ones_are_refused() -> None:
    for agent in AGENTS:
        run = make_run(agent, "chain-8", 1000, 0)
        assert parse_run(json.loads(json.dumps(to_json(run)))) == run
    good = json.loads(json.dumps(to_json(make_run("csd", "chain-8", 1000, 0))))
    for change in (
        {"frames": "many"}, {"agent": {"members": True}}, {"learning": []}, {"more": 1}, {"seed": None},
        {"learning": {**good["learning"], "channels": ["a"]}}, {"learning": {**good["learning"], "channels": 8}},
        {"agent": {**good["agent"], "bonus": "cds"}},
        {"agent": {**good["agent"], "policy": 7}}, {"learning": {**good["learning"], "batch_size": -3}},
        {"learning": {**good["learning"], "adam_eps": 0.0}},
    ):  # fmt: skip
        with pytest.raises(InputError):
            parse_run({**good, **change})


def test_set_changes_any_setting(tmp_path: Path) -> None:
    others = ["learning.target_period=80", "learning.replay.capacity=1e4", "learning.channels=[8, 8]", "agent.lr=1e-3"]
    run = override_settings(
        make_run("rnd", "chain-8", 600, 0), [*others, "agent.bonus_head=true", "agent.bonus_weight.start=0.5"]
    )
    base = make_run("rnd", "chain-8", 600, 0)
    learning = replace(
        base.learning, target_period=80, channels=(8, 8), replay=replace(base.learning.replay, capacity=10_000)
    )
    weight = replace(base.agent.bonus_weight, start=0.5)
    agent = replace(base.agent, lr=1e-3, bonus_head=True, bonus_weight=weight)
    assert run == replace(base, learning=learning, agent=agent)
    assert override_settings(base, ["agent.bonus=none"]).agent.bonus == "none"
    options = ["--env", "chain-8", "--frames", "600", "--device", "cpu", "--agent", "rnd", "--set", *others]
    assert main(["rl", "train", "-o", str(tmp_path / "one"), *options]) == 0
    assert RunFolder(tmp_path / "one").read_run() == override_settings(base, others)
    options = ["--envs", "chain-8", "--frames", "600", "--device", "cpu", "--agents", "rnd", "--set", *others]
    assert main(["rl", "grid", "-o", str(tmp_path / "many"), "--seeds", "0", *options]) == 0
    assert results_of(tmp_path / "many/rnd/chain-8/seed0") == results_of(tmp_path / "one")
    nothing = (
        "learning.target",
        "learning.targets=1",
        "agent.bonus_weight=1",
        "frames=7",
        "seed=1",
        "agent=1",
        "agent.lr.x=1",
    )
    for wrong in (*nothing, "agent.lr=much", "agent.lr=-1", "agent.bonus=1", "learning.batch_size=1.5", "agent.lr=[1]"):
        with pytest.raises(InputError):
            override_settings(base, [wrong])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_until(train(make_run("dqn", "chain-8", 600, 0), folder, device="cpu"))
    return folder


def copied(done: Path, to: Path) -> Path:
    to.mkdir()
    for path in done.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_bad_input_is_one_line(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[str], str]] = [
        (
            ["rl", "train", "-o", str(done)],
            "holds a run. Continue it with `onefold rl resume`",
        ),
        (["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-2"], "chain-N: N must be at least 3 (got 2)"),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "Doom-v9"],
            "environment 'Doom-v9': there is no such environment.",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--frames", "2"],
            "run: frames must be between",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--frames", "nan"],
            "--frames: nan is not a count",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--checkpoint", "0"],
            "--checkpoint: 0.0 is not a count",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--environments", "0"],
            "run: num_envs must be",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--workers", "-3"],
            "--workers: -3",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--set", "learning.replay.capacity=1e13"],
            "a replay of 10,000,000,000,000 needs 418.4 TiB of memory",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--set", "x=1"],
            "'x=1': is not a setting. Use a name",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--set", "agent.lrr=1"],
            "settings.json, such as agent.lr=…",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--set", "learning.channels=4,4"],
            "'4,4' is not a list, such as",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--set", "agent.optimistic=True"],
            "'True' is not true or false",
        ),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--set", "learning.hidden=1000000000000"],
            "out of memory. Use smaller",
        ),
        (["rl", "train", "-o", str(tmp_path / "a"), "--set", "agent.lr=low"], "agent.lr: 'low' is not a finite number"),
        (["rl", "search", "dqn", "-o", str(tmp_path / "a"), "--trials", "-1"], "--trials: -1"),
        (["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--seed", "-1"], "seed"),
        (["rl", "resume", str(tmp_path / "none")], "holds no run (there is no settings.json)"),
        (["rl", "eval", str(tmp_path / "none")], "cannot be read"),
        (["rl", "eval", str(done), "--epsilon", "2"], "--epsilon: must be between 0 and 1 (got 2.0)"),
        (["rl", "eval", str(done), "--episodes", "0"], "--episodes: 0"),
        (["rl", "eval", str(done), "--seed", "-1"], "seed"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error, (arguments, error)
        assert error.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_damaged_files_are_refused_by_name_and_kept(done: Path, tmp_path: Path) -> None:
    cut = copied(done, tmp_path / "cut")
    content = (cut / CHECKPOINT).read_bytes()
    (cut / CHECKPOINT).write_bytes(content[: len(content) // 2])
    with pytest.raises(FileError, match=r"checkpoint.safetensors: damaged"):
        run_until(resume(cut, device="cpu"))
    assert (cut / CHECKPOINT).read_bytes() == content[: len(content) // 2]
    other = copied(done, tmp_path / "other")
    settings = json.loads((other / SETTINGS).read_text())
    settings["run"]["seed"] = 7
    (other / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(FileError, match="belongs to a run with other settings"):
        run_until(resume(other, device="cpu"))
    large = json.dumps(settings).replace('"lr": 0.001', f'"lr": {"9" * 400}')
    for content, message in (
        ("{", "is cut short or damaged"), ("[" * 100_000, "more than 32 levels"), (large, "lr: the integer is"),
    ):  # fmt: skip
        (other / SETTINGS).write_text(content)
        with pytest.raises(FileError, match=f"{SETTINGS}: .*{message}"):
            run_until(resume(other, device="cpu"))
    missing = copied(done, tmp_path / "missing")
    tensors, header = storage.load(missing / CHECKPOINT, CHECKPOINT_KIND)
    del tensors["learner.member"]
    storage.save(missing / CHECKPOINT, CHECKPOINT_KIND, tensors, header)
    with pytest.raises(FileError, match="the checkpoint is not of this run"):
        run_until(resume(missing, device="cpu"))
    (missing / CHECKPOINT).unlink()
    with pytest.raises(InputError, match="there is no checkpoint to resume from"):
        run_until(resume(missing, device="cpu"))


def test_a_loss_of_nan_ends_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: list[bytes] = []
    save = TrainingRun.save_checkpoint

    def save_and_break(self: TrainingRun) -> None:
        save(self)
        good.append((tmp_path / "run" / CHECKPOINT).read_bytes())
        if len(good) == 3:
            with torch.no_grad():
                next(self.learner.online.parameters()).fill_(float("nan"))

    monkeypatch.setattr(TrainingRun, "save_checkpoint", save_and_break)
    monkeypatch.setattr("onefold.rl.runs.REPORTS", 2)  # a checkpoint is due before the next report
    with pytest.raises(TrainingError, match=r"loss is NaN or infinite\. The last checkpoint is intact"):
        run_until(train(make_run("dqn", "chain-8", 2000, 0), tmp_path / "run", device="cpu", checkpoint_every=400))
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == good[2]
    monkeypatch.undo()
    run_until(resume(tmp_path / "run", device="cpu"), 1500)


def test_visits_are_counted_by_position_and_time(tmp_path: Path) -> None:
    run_until(train(make_run("dqn", "chain-8", 1000, 0), tmp_path / "run", device="cpu"))
    visits = json.loads((tmp_path / "run" / "visits.json").read_text())
    counts = np.array([[row.split() for row in part] for part in visits["counts"]], int)
    assert counts.sum() == 1000
    assert counts.sum((1, 2)).tolist() == [48, 52] * 10
    assert set(np.nonzero(counts.sum((0, 1)))[0]) <= {state * 48 // 8 for state in range(8)}


def test_visits_are_written_during_a_run(tmp_path: Path) -> None:
    run_until(train(make_run("dqn", "chain-8", 1000, 0), tmp_path / "run", device="cpu", checkpoint_every=10**6), 520)
    visits = json.loads((tmp_path / "run" / "visits.json").read_text())
    assert 450 <= sum(int(n) for part in visits["counts"] for row in part for n in row.split()) <= 520


def test_schedules_of_my_way_home_do_not_depend_on_the_length_of_a_run() -> None:
    """A run of 3 million frames is the beginning of one of 5 million; small environments scale with the run."""
    runs = [make_run("csd", "my-way-home-sparse", frames, 0) for frames in (5_000_000, 3_000_000)]
    assert replace(runs[0], frames=3_000_000) == runs[1]
    small = make_run("csd", "chain-8", 6000, 0)
    schedules = (small.agent.bonus_weight, small.learning.epsilon, small.learning.per_beta)
    assert [schedule.frames for schedule in schedules] == [6000, 600, 6000]


def test_a_grid_trains_what_is_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--agents", "dqn", "rnd", "--envs", "chain-8", "--frames", "600", "--device", "cpu", "-o", str(tmp_path)]
    assert main(["rl", "grid", "--seeds", "0", *options]) == 0
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.csv")}
    assert {path.parent.relative_to(tmp_path).as_posix() for path in first} == {
        "dqn/chain-8/seed0",
        "rnd/chain-8/seed0",
    }
    whole = results_of(tmp_path / "dqn/chain-8/seed0")
    stopped = tmp_path / "dqn/chain-8/seed1"
    run_until(train(make_run("dqn", "chain-8", 600, 1), stopped, device="cpu", checkpoint_every=200), 450)
    assert main(["rl", "grid", "--seeds", "0", "1", *options]) == 0
    assert capsys.readouterr().err.count("chain-8/seed1: 600 frames") == 2
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert results_of(tmp_path / "dqn/chain-8/seed0") == whole
    run_until(train(make_run("dqn", "chain-8", 600, 1), tmp_path / "alone", device="cpu", checkpoint_every=200))
    assert results_of(stopped) == results_of(tmp_path / "alone")
    assert main(["rl", "grid", "--seeds", "0", *options, "--frames", "700"]) == 2
    assert "holds a run with other settings. Choose another folder with -o" in capsys.readouterr().err


def test_many_runs_and_episodes_print_their_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.05)
    options = ["--agents", "dqn", "--envs", "chain-8", "--frames", "600", "--device", "cpu", "-o", str(tmp_path)]
    assert main(["rl", "grid", "--seeds", "0", *options]) == 0
    assert re.search(r"all runs: [\d,]+ of 600 frames, [\d,]+/s, [\d.]+ min left", capsys.readouterr().err)
    assert main(["rl", "grid", "--seeds", "0", *options]) == 0
    assert "dqn/chain-8/seed0: already trained: 600 frames" in capsys.readouterr().err
    run = tmp_path / "dqn" / "chain-8" / "seed0"
    assert main(["rl", "resume", str(run)]) == 0
    assert "already trained to its end" in capsys.readouterr().out
    assert main(["rl", "eval", str(run), "--episodes", "10"]) == 0
    printed = capsys.readouterr()
    assert re.match(r"10 episodes: return [\d.]+, goal reached in \d+%, \d+ steps on average", printed.out)
    assert printed.err.splitlines()[-2:] == ["episodes: 9 of 10", "episodes: 10 of 10"]
    for wrong, message in (
        ("--seeds", "at least one agent, one environment and one seed"),
        ("--workers=0", "--workers"),
    ):
        assert main(["rl", "grid", wrong, *options]) == 2
        assert message in capsys.readouterr().err


def test_an_environment_without_a_goal_has_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CartPole has a reward of 1 for every step."""
    run_until(train(make_run("dqn", "CartPole-v1", 600, 0), str(tmp_path / "run"), device="cpu"))
    rows = RunFolder(tmp_path / "run").read_table(PROGRESS)
    assert float(rows[-1]["return"]) > 1
    assert rows[-1]["success"] == "nan"
    assert {row["success"] for row in RunFolder(tmp_path / "run").read_table(EPISODES)} == {"0"}
    assert main(["rl", "eval", str(tmp_path / "run"), "--episodes", "2"]) == 0
    assert "goal" not in capsys.readouterr().out
    figures = collect_runs(tmp_path).records[0]
    assert (figures.final("success"), figures.first_goal) == (None, None)


@pytest.mark.parametrize("kind", ["Vector", "Image"])
def test_an_environment_of_a_users_module_is_named_by_the_module(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vectors of float64 and grey images; positions that are not two numbers are not counted."""
    name, out = f"users_environments:{kind}-v0", tmp_path / "run"
    options = ["--agent", "csd", "--frames", "600", "--device", "cpu", "--set", "learning.channels=[4,4]"]
    assert main(["rl", "train", "-o", str(out), "--env", name, *options]) == 0
    assert RunFolder(out).read_run().environment == name
    assert np.isfinite([float(row["loss"]) for row in RunFolder(out).read_table(PROGRESS)]).all()
    assert not collect_runs(tmp_path).records[0].visits.any()
    assert main(["rl", "eval", str(out), "--episodes", "2", "--env", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["length"] == 9
    assert main(["rl", "resume", str(out), "--env", name, "--frames", "700", "--device", "cpu"]) == 0
    assert RunFolder(out).trained_frames() == 700
    for command in ("resume", "eval"):
        assert main(["rl", command, str(out), "--env", "CartPole-v1"]) == 2
        assert f"--env: the run's environment is {name} (got CartPole-v1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Dict", "observations: must be a Box (got Dict"), ("Tuple", "observations: must be a Box (got Tuple"),
        ("State", "observations: must be a Box (got Discrete"), ("Colour", "or grey images (got shape (20, 24, 3))"),
        ("Number", "(got shape ())"), ("Empty", "(got shape (0,))"),
        ("Continuous", "actions: must be Discrete and start at 0 (got Box"),
        ("Shifted", "actions: must be Discrete and start at 0 (got Discrete"),
        ("Vektor", "environment 'users_environments:Vektor-v0': its module does not register this id. "
                   "Did you mean Vector-v0?"),
    ],
)  # fmt: skip
def test_unsupported_environments_are_errors_of_one_line(
    kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "train", "-o", str(tmp_path / "run"), "--env", f"users_environments:{kind}-v0"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_modules_are_imported_from_the_working_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "mine_here.py").write_text("raise ValueError('no\\nluck')")
    (tmp_path / "mine_leaves.py").write_text("raise SystemExit(0)")
    for module, message in (
        ("mine_here", "ValueError: no luck"), ("mine_leaves", "SystemExit: 0"), ("mine_away", "No module named"),
        ("", "Empty module name"), (".x", "relative import"),
    ):  # fmt: skip
        assert main(["rl", "grid", "-o", "runs", "--envs", f"{module}:Any-v0"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"onefold: environment '{module}:Any-v0': {module!r} cannot be imported (")
        assert message in error
        assert error.count("\n") == 1


def test_a_runs_folder_cannot_cause_an_import(tmp_path: Path) -> None:
    """Only an environment on the command line is imported, also in the processes of a grid."""
    tests, out = Path(__file__).parent, tmp_path / "runs/dqn/users_environments:Vector-v0/seed0"
    environment = {**os.environ, "IMPORTED": str(tmp_path / "imported"), "JAXTYPING_DISABLE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *sys.path])

    def onefold(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "onefold.cli", "rl", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)

    name, quick = "users_environments:Vector-v0", ["--frames", "600", "--device", "cpu"]
    grid_of = ["grid", "-o", "runs", "--agents", "dqn", "--envs", name, "--seeds", "0", "--engine", "processes"]
    done = onefold(*grid_of, *quick)
    assert done.returncode == 0, done.stderr
    assert RunFolder(out).trained_frames() == 600
    (tmp_path / "imported").unlink()
    for command in (["resume", str(out), "--frames", "700", "--device", "cpu"], ["eval", str(out)]):
        done = onefold(*command)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            f"onefold: environment {name!r}: its module is not imported. Import it, or pass this name with --env."
        )
        assert not (tmp_path / "imported").exists()
    assert collect_runs(tmp_path).records[0].run.environment == name


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "members"}, {"bonus": "CSD"}, {"lr": float("inf")}, {"bonus_lr": float("nan")},
        {"prior_scale": float("nan")}, {"q_bound": 1e300},
    ],
)  # fmt: skip
def test_invalid_agents_are_refused(wrong: dict[str, Any]) -> None:
    agent = Agent()
    for name, value in wrong.items():
        object.__setattr__(agent, name, value)  # the type checker of the tests would refuse it first
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=rf"^agent\.{name}: .*{re.escape(str(value))}"):
        agent.__post_init__()


@pytest.mark.parametrize("wrong", [{"start": float("nan")}, {"end": float("inf")}, {"frames": -1.0}])
def test_schedules_must_be_finite(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="schedule: start, end and frames must be finite"):
        LinearSchedule(**{"start": 1.0, "end": 0.0, "frames": 10.0, **wrong})
    with pytest.raises(InputError, match=r"learning\.epsilon: must stay between 0 and 1 \(got 3\.0 and 0\.0\)"):
        Learning(epsilon=LinearSchedule(start=3.0, end=0.0, frames=10.0))


def test_the_papers_search_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {agent: len(grid.plan_search(agent, "my-way-home-sparse", 1000, 0, tmp_path)) for agent in AGENTS}
    assert sizes == {"dqn": 6, "bdqn": 18, "ids": 18, "rnd": 216, "csd": 216}
    drawn = grid.plan_search("csd", "my-way-home-sparse", 1000, 0, tmp_path, 20)
    assert len({job.out.name for job in drawn}) == 20
    assert all(f"weight={job.run.agent.bonus_weight.start:g}," in job.out.name for job in drawn)
    csd = [job.run.agent for job in grid.plan_search("csd", "my-way-home-sparse", 1000, 0, tmp_path)]
    assert {(agent.q_bound, agent.u_bound) for agent in csd} == {(2.0, 3.4)}
    for job in grid.plan_search("rnd", "my-way-home-sparse", 1000, 0, tmp_path):  # one head learns rewards and bonuses
        assert job.run.agent.q_bound / max(1.0, job.run.agent.bonus_weight.start) == pytest.approx(5.4)
    small = [job.run.agent.bonus_weight for job in grid.plan_search("csd", "chain-8", 1000, 0, tmp_path)]
    assert all(weight.end <= weight.start for weight in small)
    options = ["--env", "chain-8", "--frames", "600", "--trials", "2", "--device", "cpu", "-o", str(tmp_path)]
    assert main(["rl", "search", "dqn", *options]) == 0
    best = capsys.readouterr().out.splitlines()[1:]
    assert len(best) == 2
    assert all(line.startswith("lr=") for line in best)
    assert main(["rl", "search", "ppo", *options]) == 2
    assert "agent: 'ppo' is not one of dqn, bdqn, rnd, ids, csd" in capsys.readouterr().err
