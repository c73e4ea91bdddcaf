"""Runs from beginning to end: curves, checkpoints, going on after a kill, and what is refused."""

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
from onefold.errors import FileError, InputError, MissingExtraError, TrainingError
from onefold.report.runs_read import collect
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
from onefold.rl.settings import Run, from_plain, make_run, override_settings, plain
from onefold.rl.tasks import read_map
from onefold.rl.td import QNetwork
from onefold.rl.vector_env import LocalVectorEnv
from onefold.rl.video import GOAL, PLAYER, WAY, VideoFile
from onefold.rl.visit_counts import VisitCounts

AGENTS = ["dqn", "bdqn", "rnd", "ids", "csd"]
QUICK = ("ids", "csd")  # they have all the parts between them


def until(rows: Iterator[dict[str, Any]], frames: int = 10**9) -> None:
    for row in rows:
        if row["frames"] >= frames:
            rows.close()  # pyright: ignore[reportAttributeAccessIssue]
            return


def left(folder: Path) -> dict[str, Any]:
    """What a run leaves that does not depend on the clock."""
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
    until(train(run, tmp_path / "whole", device="cpu", checkpoint_every=200))
    until(train(run, tmp_path / "parts", device="cpu", checkpoint_every=200), 100)  # before the first interval is over
    until(resume(tmp_path / "parts", device="cpu", checkpoint_every=200), 700)
    until(resume(tmp_path / "parts", device="cpu", checkpoint_every=200), 810)
    until(resume(tmp_path / "parts", device="cpu", checkpoint_every=200))
    whole, parts = left(tmp_path / "whole"), left(tmp_path / "parts")
    assert whole == parts
    assert len(whole["progress"]) > 100
    until(resume(tmp_path / "parts", device="cpu"))  # there is nothing left to do
    assert left(tmp_path / "parts") == whole


def test_a_run_goes_on_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of a GPU have another state, and replaced workers are counted on."""
    run = make_run("dqn", "chain-8", 900, 3)
    monkeypatch.setattr(LocalVectorEnv, "replaced", 2, raising=False)
    until(train(run, tmp_path, device="cpu", checkpoint_every=200), 500)
    until(resume(tmp_path, device="cpu", checkpoint_every=200), 700)
    until(resume(tmp_path, device="cpu", checkpoint_every=200))
    assert [int(row["worker_restarts"]) for row in RunFolder(tmp_path).read_table(PROGRESS)][-1] == 6
    tensors, header = storage.load(tmp_path / CHECKPOINT, CHECKPOINT_KIND)
    storage.save(
        tmp_path / CHECKPOINT,
        CHECKPOINT_KIND,
        tensors | {"learner.generator": torch.zeros(16, dtype=torch.uint8)},
        header,
    )
    with pytest.raises(FileError, match=r"cannot resume a GPU run on the CPU \(or the reverse\)"):
        until(resume(tmp_path, device="cpu"))


@pytest.mark.parametrize("agent", QUICK)
def test_a_finished_run_that_is_trained_longer_is_the_long_one(agent: str, tmp_path: Path) -> None:
    """If its schedules have the lengths of the long run's. It is stopped on the way, too."""
    run = make_run(agent, "chain-8", 1400, 3)
    until(train(run, tmp_path / "long", device="cpu", checkpoint_every=10**6))
    until(train(replace(run, frames=700), tmp_path / "run", device="cpu", checkpoint_every=10**6))
    assert RunFolder(tmp_path / "run").trained_frames() == 700
    until(resume(tmp_path / "run", frames=1400, device="cpu", checkpoint_every=100), 1030)
    assert RunFolder(tmp_path / "run").read_run() == run
    until(resume(tmp_path / "run", device="cpu"))
    assert left(tmp_path / "run") == left(tmp_path / "long")
    assert RunFolder(tmp_path / "run").trained_frames() == 1400


def test_a_run_that_is_killed_as_it_is_lengthened_goes_on(tmp_path: Path) -> None:
    """Its settings are written before its checkpoint. A checkpoint of a longer run is of another one."""
    run = make_run("dqn", "chain-8", 600, 3)
    until(train(run, tmp_path, device="cpu"))
    RunFolder(tmp_path).update_settings(replace(run, frames=1000))
    assert {"onefold", "commit", "format"} <= set(json.loads((tmp_path / SETTINGS).read_text()))
    until(resume(tmp_path, device="cpu"))
    assert RunFolder(tmp_path).trained_frames() == 1000
    RunFolder(tmp_path).update_settings(run)
    with pytest.raises(FileError, match="belongs to a run with other settings"):
        until(resume(tmp_path, device="cpu"))


def test_a_longer_run_is_asked_for_by_its_frames(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, epsilon = copied(done, tmp_path / "run"), RunFolder(done).read_run().learning.epsilon
    assert main(["rl", "resume", str(run), "--frames", "500"]) == 2
    assert capsys.readouterr().err == ("onefold: frames: the run has 600 (got 500). Give more to train it longer.\n")
    assert main(["rl", "resume", str(run), "--frames", "600"]) == 0
    assert "already trained to its end. --frames trains it longer" in capsys.readouterr().out
    assert main(["rl", "resume", str(run), "--frames", "8e2", "--device", "cpu"]) == 0
    assert (RunFolder(run).read_run().frames, RunFolder(run).trained_frames()) == (800, 800)
    assert RunFolder(run).read_run().learning.epsilon == epsilon  # whose length was a tenth of 600 frames
    (run / CHECKPOINT).unlink()
    assert main(["rl", "resume", str(run), "--frames", "1000"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("run: there is no checkpoint in it to go on from")
    assert RunFolder(run).read_run().frames == 800


@pytest.mark.parametrize(("before", "after"), [(900, 900), (900, 2700), (10, 20), (1000, 1500), (7, 1000)])
def test_visits_of_a_lengthened_run_are_where_they_belong(before: int, after: int) -> None:
    """Each in the slice of its frame; where a slice of the shorter run lies in two, in the later one."""
    short, whole, longer = (VisitCounts("chain-8", frames) for frames in (before, after, after))
    for frame in range(1, before + 1):
        place = np.array([[frame % 8, 0.0]], np.float32)
        short.add(frame, place)
        whole.add(frame, place)
    longer.restore(short.counts.copy(), before)
    assert longer.counts.sum() == before
    if after % before == 0:
        np.testing.assert_array_equal(longer.counts, whole.counts)
    assert (longer.counts.sum((1, 2)).cumsum() <= whole.counts.sum((1, 2)).cumsum()).all()


def test_learning_begins_once_there_is_something_to_learn_from(tmp_path: Path) -> None:
    until(train(make_run("csd", "chain-8", 1600, 0, 200), tmp_path, device="cpu"))
    losses = [float(row["loss"]) for row in RunFolder(tmp_path).read_table(PROGRESS)]
    assert losses[:3] == [0.0] * 3
    assert all(loss > 0 for loss in losses[-3:])


def test_games_go_on_exactly(tmp_path: Path) -> None:
    """ViZDoom in a worker process: episodes under way are played again up to where they were."""
    learning = Learning(
        replay=ReplaySettings(capacity=400, stack=3, n_step=3), batch_size=4, channels=(4, 4), hidden=8,
        learning_starts=120, bonus_learning_starts=160, target_period=40,
    )  # fmt: skip
    run = replace(make_run("dqn", "my-way-home-sparse", 240, 0, 2), learning=learning)
    until(train(run, tmp_path / "whole", device="cpu", workers=1, checkpoint_every=60))
    until(train(run, tmp_path / "parts", device="cpu", workers=1, checkpoint_every=60), 200)
    until(resume(tmp_path / "parts", device="cpu", workers=1, checkpoint_every=60))
    whole = left(tmp_path / "whole")
    assert whole == left(tmp_path / "parts")
    assert len(whole["progress"]) == 120


def walked(steps: int, reached: bool) -> Rollout:
    """From the sparse task's start to the goal as the crow flies, eyes to the north; screens brighten on the way."""
    places = np.linspace(read_map().spots[10], read_map().goal, steps + 1).astype(np.float32)
    screens = [np.full((120, 160), 40 + 200 * i // steps, np.uint8) for i in range(steps + 1)]
    return Rollout(steps, 0.0, reached, [GameView(*view, 90.0) for view in zip(screens, places, strict=True)])


def painted(picture: np.ndarray, colour: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Where the map has that colour, but for rounding: x and y from its upper left corner, its caption left out."""
    ys, xs = np.nonzero(np.abs(picture[:330, 480:].astype(int) - colour).max(-1) < 12)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def said(picture: np.ndarray) -> bool:
    """Something is written at the map's foot, to the right, in the colour of the goal."""
    foot = picture[330:, 660:].astype(int)
    return bool((np.abs(foot - GOAL).max(-1) < 60).any())


@pytest.mark.parametrize(("steps", "reached"), [(20, True), (21, True), (20, False)])
def test_a_gif_goes_at_the_games_pace_and_holds_the_end(steps: int, reached: bool, tmp_path: Path) -> None:
    """A frame lasts two of the game's, which has 35 a second, in GIF's steps; the last is the episode's last."""
    played = walked(steps, reached)
    VideoFile(tmp_path / "play.gif").write(played)
    with Image.open(tmp_path / "play.gif") as file:
        frames = [(frame.info["duration"], np.asarray(frame.convert("RGB"))) for frame in ImageSequence.Iterator(file)]
    assert [duration for duration, _ in frames] == [60] * 10 + [1000]
    assert {picture.shape for _, picture in frames} == {(360, 840, 3)}
    for (_, picture), view in zip(frames, played.views[steps % 2 :: 2], strict=True):
        assert np.ptp(picture[:, :480]) == 0
        assert abs(int(picture[0, 0, 0]) - int(view.screen[0, 0])) <= 9
    assert len(np.unique(np.stack([picture for _, picture in frames]).astype(int) @ (1, 256, 256**2))) <= 64
    assert [said(picture) for _, picture in frames] == [False] * 10 + [reached]


@pytest.mark.parametrize("kind", [".gif", ".mp4"])
def test_the_map_shows_the_way_the_player_and_the_goal(kind: str, tmp_path: Path) -> None:
    """Half-way: the way lies behind the player, who looks up, and the star ahead."""
    walls, _, goal = read_map()
    low, high = walls.reshape(-1, 2).min(0), walls.reshape(-1, 2).max(0)
    played = walked(40, False)
    played = played._replace(views=played.views[:21])
    VideoFile(tmp_path / f"play{kind}").write(played)
    with av.open(str(tmp_path / f"play{kind}")) as file:
        picture = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)][-1]

    def at(place: Any) -> np.ndarray:
        return 180 + (np.asarray(place) - (low + high) / 2) / (high - low).max() * 316 * (1, -1)

    player, start, star = at(played.views[-1].position), at(played.views[0].position), at(goal)
    white, way, green = (np.array(painted(picture, colour)) for colour in (PLAYER, WAY, GOAL))
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


def test_a_movie_is_played_back_at_the_games_own_pace(tmp_path: Path) -> None:
    """MP4, read back by another program of its kind: that many frames, so long, and what they showed."""
    played = walked(39, True)
    VideoFile(tmp_path / "new" / "play.mp4").write(played)
    with av.open(str(tmp_path / "new" / "play.mp4")) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == Fraction(35, 2)
        shown = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
    assert {picture.shape for picture in shown} == {(360, 840, 3)}
    views = played.views[1::2]
    held = [views[-1]] * 17  # with the last itself a second
    assert len(shown) == len(views) + 17
    for picture, view in zip(shown, views + held, strict=True):
        assert abs(float(picture[:, :470].mean()) - float(view.screen[0, 0])) < 8
    assert [said(picture) for picture in shown] == [False] * 19 + [True] * 18


def test_a_movie_that_cannot_be_written_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"play.avi: a movie's name ends in .gif or .mp4$"):
        VideoFile(tmp_path / "play.avi")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onefold\[video\]'"):
        VideoFile(tmp_path / "play.mp4")
    VideoFile(tmp_path / "play.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
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
        file.write("99,1,")  # as if it had been killed in the middle of a row
    assert main(["rl", "resume", str(out), "--device", "cpu"]) == 0
    rows = RunFolder(out).read_table("progress.csv")
    frames = [int(row["frames"]) for row in rows]
    assert frames == sorted(set(frames))
    assert frames[-1] == 1000
    with (out / "episodes.csv").open() as file:
        ended = [int(row["frames"]) for row in csv.DictReader(file)]
    assert ended == sorted(ended)
    assert 1000 // 18 - 8 <= len(ended) <= 1000 // 17


def test_networks_alone_play_as_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("csd", "chain-8", 700, 0)
    until(train(run, tmp_path / "run", device="cpu"))
    player = Player(tmp_path / "run", 0, 0.0)
    played = list(player.play(3))
    assert [p.length for p in played] == [17] * 3
    assert main(["rl", "eval", str(tmp_path / "run" / NETWORKS), "--episodes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"episodes", "return", "success", "length"}
    assert main(["rl", "watch", str(tmp_path / "run"), "-o", str(tmp_path / "x.gif")]) == 2
    assert capsys.readouterr().err.endswith("chain-8 has no screen: only MyWayHome can be shown\n")
    with pytest.raises(InputError, match="no screen"):
        player.play(1, views=True)  # and nothing is played for it
    assert not (tmp_path / "x.gif").exists()


@pytest.mark.parametrize("agent", ["csd", "ids"])
def test_networks_to_share_are_small_and_say_what_the_agent_would(agent: str, tmp_path: Path) -> None:
    """All of the paper's sizes: under 16 MB, and the same values but for rounding, priors included."""
    run = make_run(agent, "my-way-home-sparse", 1000, 0)
    network = QNetwork(run.agent, run.learning, (6, 42, 42), 5, generators(0, 3)[0])
    light = compress({f"online.{name}": t for name, t in network.state_dict().items()})
    storage.save(tmp_path / "networks", NETWORKS_KIND, light, {"run": plain(run), "frames": 0})
    assert (tmp_path / "networks").stat().st_size < 16e6
    player = Player(tmp_path / "networks", 0, 0.0)
    x = torch.rand(4, 6, 42, 42, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pairs = [(a, b) for a, b in zip(network(x), player.network(x), strict=True) if a is not None]
    for own, shared in pairs:
        assert float((own - shared).norm() / own.norm()) < 0.005


def test_settings_come_back_from_a_file() -> None:
    for agent in AGENTS:
        run = make_run(agent, "chain-8", 1000, 0)
        assert from_plain(Run, json.loads(json.dumps(plain(run)))) == run
    good = json.loads(json.dumps(plain(make_run("csd", "chain-8", 1000, 0))))
    for change in (
        {"frames": "many"}, {"agent": {"members": True}}, {"learning": []}, {"more": 1}, {"seed": None},
        {"learning": {**good["learning"], "channels": ["a"]}}, {"learning": {**good["learning"], "channels": 8}},
        {"agent": {**good["agent"], "bonus": "cds"}},
        {"agent": {**good["agent"], "policy": 7}}, {"learning": {**good["learning"], "batch_size": -3}},
        {"learning": {**good["learning"], "adam_eps": 0.0}},
    ):  # fmt: skip
        with pytest.raises(InputError):
            from_plain(Run, {**good, **change})


def test_any_setting_can_be_another(tmp_path: Path) -> None:
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
    assert left(tmp_path / "many/rnd/chain-8/seed0") == left(tmp_path / "one")
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
    until(train(make_run("dqn", "chain-8", 600, 0), folder, device="cpu"))
    return folder


def copied(done: Path, to: Path) -> Path:
    to.mkdir()
    for path in done.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_bad_input_is_one_line(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[str], str]] = [
        (["rl", "train", "-o", str(done)], "is not empty and holds a run: go on with it by `onefold rl resume`"),
        (["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-2"], "chain-N has an N of at least 3, not 2"),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "Doom-v9"],
            "there is no environment 'Doom-v9'; known are",
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
        (["rl", "train", "-o", str(tmp_path / "a"), "--set", "x=1"], "'x=1' changes no setting; one that does: learn"),
        (["rl", "train", "-o", str(tmp_path / "a"), "--set", "agent.lrr=1"], "no setting; one that does: agent.lr=…"),
        (["rl", "train", "-o", str(tmp_path / "a"), "--set", "learning.channels=4,4"], "in brackets are needed"),
        (["rl", "train", "-o", str(tmp_path / "a"), "--set", "agent.optimistic=True"], "'True': true or false"),
        (
            ["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--set", "learning.hidden=1000000000000"],
            "there is not enough memory for that",
        ),
        (["rl", "train", "-o", str(tmp_path / "a"), "--set", "agent.lr=low"], "the setting lr cannot be 'low'"),
        (["rl", "search", "dqn", "-o", str(tmp_path / "a"), "--trials", "-1"], "--trials: -1"),
        (["rl", "train", "-o", str(tmp_path / "a"), "--env", "chain-8", "--seed", "-1"], "seed"),
        (["rl", "resume", str(tmp_path / "none")], "holds no run: there is no settings.json in it"),
        (["rl", "eval", str(tmp_path / "none")], "cannot be read"),
        (["rl", "eval", str(done), "--epsilon", "2"], "epsilon is a share between 0 and 1"),
        (["rl", "eval", str(done), "--episodes", "0"], "--episodes: 0"),
        (["rl", "eval", str(done), "--seed", "-1"], "seed"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error, (arguments, error)
        assert error.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_damaged_files_are_refused_by_name_and_nothing_is_lost(done: Path, tmp_path: Path) -> None:
    cut = copied(done, tmp_path / "cut")
    content = (cut / CHECKPOINT).read_bytes()
    (cut / CHECKPOINT).write_bytes(content[: len(content) // 2])
    with pytest.raises(FileError, match=r"checkpoint.safetensors: damaged"):
        until(resume(cut, device="cpu"))
    assert (cut / CHECKPOINT).read_bytes() == content[: len(content) // 2]
    other = copied(done, tmp_path / "other")
    settings = json.loads((other / SETTINGS).read_text())
    settings["run"]["seed"] = 7
    (other / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(FileError, match="belongs to a run with other settings"):
        until(resume(other, device="cpu"))
    large = json.dumps(settings).replace('"lr": 0.001', f'"lr": {"9" * 400}')
    for content, message in (
        ("{", "is cut short or damaged"), ("[" * 100_000, "more than 32 levels"), (large, "lr is too large an integer"),
    ):  # fmt: skip
        (other / SETTINGS).write_text(content)
        with pytest.raises(FileError, match=f"{SETTINGS}: .*{message}"):
            until(resume(other, device="cpu"))
    missing = copied(done, tmp_path / "missing")
    tensors, header = storage.load(missing / CHECKPOINT, CHECKPOINT_KIND)
    del tensors["learner.member"]
    storage.save(missing / CHECKPOINT, CHECKPOINT_KIND, tensors, header)
    with pytest.raises(FileError, match="its checkpoint is not of this run"):
        until(resume(missing, device="cpu"))
    (missing / CHECKPOINT).unlink()
    with pytest.raises(InputError, match="there is no checkpoint in it to go on from"):
        until(resume(missing, device="cpu"))


def test_a_loss_that_is_no_number_ends_the_run_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: list[bytes] = []
    keep = TrainingRun.save_checkpoint

    def spoiled(self: TrainingRun) -> None:
        keep(self)
        good.append((tmp_path / "run" / CHECKPOINT).read_bytes())
        if len(good) == 3:
            with torch.no_grad():
                next(self.learner.online.parameters()).fill_(float("nan"))

    monkeypatch.setattr(TrainingRun, "save_checkpoint", spoiled)
    monkeypatch.setattr("onefold.rl.runs.REPORTS", 2)  # a checkpoint is due before the next report
    with pytest.raises(TrainingError, match=r"loss is NaN or infinite\. The last checkpoint is intact"):
        until(train(make_run("dqn", "chain-8", 2000, 0), tmp_path / "run", device="cpu", checkpoint_every=400))
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == good[2]
    monkeypatch.undo()
    until(resume(tmp_path / "run", device="cpu"), 1500)


def test_visits_are_counted_where_and_when_they_were(tmp_path: Path) -> None:
    until(train(make_run("dqn", "chain-8", 1000, 0), tmp_path / "run", device="cpu"))
    visits = json.loads((tmp_path / "run" / "visits.json").read_text())
    counts = np.array([[row.split() for row in part] for part in visits["counts"]], int)
    assert counts.sum() == 1000
    assert counts.sum((1, 2)).tolist() == [48, 52] * 10
    assert set(np.nonzero(counts.sum((0, 1)))[0]) <= {state * 48 // 8 for state in range(8)}


def test_the_map_of_visits_can_be_looked_at_while_a_run_goes_on(tmp_path: Path) -> None:
    until(train(make_run("dqn", "chain-8", 1000, 0), tmp_path / "run", device="cpu", checkpoint_every=10**6), 520)
    visits = json.loads((tmp_path / "run" / "visits.json").read_text())
    assert 450 <= sum(int(n) for part in visits["counts"] for row in part for n in row.split()) <= 520


def test_schedules_of_my_way_home_do_not_depend_on_the_length_of_a_run() -> None:
    """A run of 3 million frames is the beginning of one of 5 million; small environments scale with the run."""
    runs = [make_run("csd", "my-way-home-sparse", frames, 0) for frames in (5_000_000, 3_000_000)]
    assert replace(runs[0], frames=3_000_000) == runs[1]
    small = make_run("csd", "chain-8", 6000, 0)
    schedules = (small.agent.bonus_weight, small.learning.epsilon, small.learning.per_beta)
    assert [schedule.frames for schedule in schedules] == [6000, 600, 6000]


def test_a_grid_does_what_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--agents", "dqn", "rnd", "--envs", "chain-8", "--frames", "600", "--device", "cpu", "-o", str(tmp_path)]
    assert main(["rl", "grid", "--seeds", "0", *options]) == 0
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.csv")}
    assert {path.parent.relative_to(tmp_path).as_posix() for path in first} == {
        "dqn/chain-8/seed0",
        "rnd/chain-8/seed0",
    }
    whole = left(tmp_path / "dqn/chain-8/seed0")
    stopped = tmp_path / "dqn/chain-8/seed1"
    until(train(make_run("dqn", "chain-8", 600, 1), stopped, device="cpu", checkpoint_every=200), 450)
    assert main(["rl", "grid", "--seeds", "0", "1", *options]) == 0
    assert capsys.readouterr().err.count("chain-8/seed1: 600 frames") == 2
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert left(tmp_path / "dqn/chain-8/seed0") == whole
    until(train(make_run("dqn", "chain-8", 600, 1), tmp_path / "alone", device="cpu", checkpoint_every=200))
    assert left(stopped) == left(tmp_path / "alone")
    assert main(["rl", "grid", "--seeds", "0", *options, "--frames", "700"]) == 2
    assert "holds a run with other settings: name another folder with -o" in capsys.readouterr().err


def test_who_runs_many_is_told_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.05)
    options = ["--agents", "dqn", "--envs", "chain-8", "--frames", "600", "--device", "cpu", "-o", str(tmp_path)]
    assert main(["rl", "grid", "--seeds", "0", *options]) == 0
    assert re.search(r"all runs: [\d,]+ of 600 frames, [\d,]+/s, [\d.]+ min left", capsys.readouterr().err)
    assert main(["rl", "grid", "--seeds", "0", *options]) == 0
    assert "dqn/chain-8/seed0: done before: 600 frames" in capsys.readouterr().err
    run = tmp_path / "dqn" / "chain-8" / "seed0"
    assert main(["rl", "resume", str(run)]) == 0
    assert "already trained to its end" in capsys.readouterr().out
    assert main(["rl", "eval", str(run), "--episodes", "10"]) == 0
    said = capsys.readouterr()
    assert re.match(r"10 episodes: return [\d.]+, goal reached in \d+%, \d+ steps on average", said.out)
    assert said.err.splitlines()[-1] == "9 of 10 episodes"
    for wrong, message in (("--seeds", "at least one agent, one world and one seed"), ("--workers=0", "--workers")):
        assert main(["rl", "grid", wrong, *options]) == 2
        assert message in capsys.readouterr().err


def test_a_world_without_a_known_goal_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CartPole pays 1 for every step."""
    until(train(make_run("dqn", "CartPole-v1", 600, 0), str(tmp_path / "run"), device="cpu"))
    rows = RunFolder(tmp_path / "run").read_table(PROGRESS)
    assert float(rows[-1]["return"]) > 1
    assert rows[-1]["success"] == "nan"
    assert {row["success"] for row in RunFolder(tmp_path / "run").read_table(EPISODES)} == {"0"}
    assert main(["rl", "eval", str(tmp_path / "run"), "--episodes", "2"]) == 0
    assert "goal" not in capsys.readouterr().out
    figures = collect(tmp_path).records[0]
    assert (figures.final("success"), figures.first_goal) == (None, None)


@pytest.mark.parametrize("kind", ["Vector", "Image"])
def test_an_environment_of_ones_own_is_named_by_its_module(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vectors of other numbers than float32, and grey images; what it says of positions is no map."""
    name, out = f"users_environments:{kind}-v0", tmp_path / "run"
    options = ["--agent", "csd", "--frames", "600", "--device", "cpu", "--set", "learning.channels=[4,4]"]
    assert main(["rl", "train", "-o", str(out), "--env", name, *options]) == 0
    assert RunFolder(out).read_run().environment == name
    assert np.isfinite([float(row["loss"]) for row in RunFolder(out).read_table(PROGRESS)]).all()
    assert not collect(tmp_path).records[0].visits.any()
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
        ("Dict", "observations must be a Box, not Dict"), ("Tuple", "observations must be a Box, not Tuple"),
        ("State", "observations must be a Box, not Discrete"), ("Colour", "or grey images, not of shape (20, 24, 3)"),
        ("Number", "not of shape ()"), ("Empty", "not of shape (0,)"),
        ("Continuous", "actions must be Discrete and begin with 0, not Box"),
        ("Shifted", "actions must be Discrete and begin with 0, not Discrete"),
        ("Vektor", "there is no environment 'users_environments:Vektor-v0'; its module registers none such "
                   "(did you mean Vector-v0?)"),
    ],
)  # fmt: skip
def test_environments_that_cannot_be_trained_on_are_one_line(
    kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "train", "-o", str(tmp_path / "run"), "--env", f"users_environments:{kind}-v0"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_module_is_looked_for_in_the_working_folder_too(
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


def test_a_runs_folder_has_no_module_imported(tmp_path: Path) -> None:
    """Neither its settings nor its networks, until the user names it; other processes of a grid do as they are told."""
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
            f"onefold: there is no environment {name!r}: its module is not imported. "
            "Import it, or give --env with this name"
        )
        assert not (tmp_path / "imported").exists()
    assert collect(tmp_path).records[0].run.environment == name


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "members"}, {"bonus": "CSD"}, {"lr": float("inf")}, {"bonus_lr": float("nan")},
        {"prior_scale": float("nan")}, {"q_bound": 1e300},
    ],
)  # fmt: skip
def test_an_agent_that_cannot_be_is_refused_as_it_is_made(wrong: dict[str, Any]) -> None:
    agent = Agent()
    for name, value in wrong.items():
        object.__setattr__(agent, name, value)  # the tests' type checker would be first
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=rf"^agent\.{name}: .*{re.escape(str(value))}"):
        agent.__post_init__()


@pytest.mark.parametrize("wrong", [{"start": float("nan")}, {"end": float("inf")}, {"frames": -1.0}])
def test_a_schedule_is_finite(wrong: dict[str, float]) -> None:
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
    found = capsys.readouterr().out.splitlines()[1:]
    assert len(found) == 2
    assert all(line.startswith("lr=") for line in found)
    assert main(["rl", "search", "ppo", *options]) == 2
    assert "there is no agent 'ppo'; known are dqn, bdqn, rnd, ids, csd" in capsys.readouterr().err
