"""MyWayHome: three tasks from one map; rewards, ends and observations; games that leave nothing behind."""

import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pids import gone, running

from onefold.errors import FileError, InputError, MissingExtraError, OnefoldError
from onefold.rl import doom, tasks
from onefold.rl.doom import STEPS, MyWayHome, downscale
from onefold.rl.tasks import Variant, packaged_map, read_map, write_scenario

# The spots on the scripted player's path to the goal.
PATH = [11, 16, 17, 18, 22, 23, 24, 25, 26]
DETOUR: dict[Variant, list[int]] = {"sparse": [], "very_sparse": [14, 13, 12]}


@pytest.fixture
def env() -> Iterator[MyWayHome]:
    with MyWayHome("sparse", render_mode="rgb_array") as env:
        yield env


def play(env: MyWayHome, seed: int, actions: list[int]) -> list[Any]:
    """Return all outcomes of an episode: frames, rewards, ends, positions, angles."""
    frame, info = env.reset(seed=seed)
    seen: list[Any] = [frame.tobytes(), info["position"].tobytes(), info["angle"]]
    for action in actions:
        frame, reward, terminated, truncated, info = env.step(action)
        seen += [frame.tobytes(), reward, terminated, truncated, info["position"].tobytes(), info["angle"]]
    return seen


@pytest.mark.parametrize(
    ("variant", "position", "low", "high"),
    [("sparse", (240, -176), 0.0, 3.6), ("very_sparse", (543.986, -672.089), 176.4, 183.6)],
)
def test_sparse_tasks_have_a_fixed_start(
    variant: Variant, position: tuple[float, float], low: float, high: float
) -> None:
    angles = []
    with MyWayHome(variant) as env:
        for seed in range(30):
            info = env.reset(seed=seed)[1]
            np.testing.assert_allclose(info["position"], position, atol=0.01)
            angles.append(info["angle"])
    assert low <= min(angles) < low + 0.3 * (high - low)  # the whole range is used
    assert high - 0.3 * (high - low) < max(angles) <= high


def test_the_dense_task_starts_at_every_spot() -> None:
    spots, angles = {tuple(np.round(place).tolist()) for place in read_map().spots.values()}, []
    seen = set()
    with MyWayHome("dense") as env:
        for seed in range(150):
            info = env.reset(seed=seed)[1]
            seen.add(tuple(np.round(info["position"]).tolist()))
            angles.append(info["angle"])
    assert seen == spots
    assert len(spots) == 17
    assert min(angles) < 10
    assert max(angles) > 350


@pytest.mark.parametrize(("variant", "fewest", "most"), [("sparse", 350, 450), ("very_sparse", 500, 600)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_walk_reaches_the_goal(variant: Variant, fewest: int, most: int, seed: int) -> None:
    spots = read_map().spots
    way = [*(spots[i] for i in DETOUR[variant] + PATH), read_map().goal]
    with MyWayHome(variant) as env:
        _, info = env.reset(seed=seed)
        rewards, terminated, truncated = [], False, False
        while not terminated and not truncated:
            x, y = info["position"]
            while len(way) > 1 and math.dist((x, y), way[0]) < 24:
                way.pop(0)
            turn = (math.degrees(math.atan2(way[0][1] - y, way[0][0] - x)) - info["angle"] + 180) % 360 - 180
            _, reward, terminated, truncated, info = env.step(2 if abs(turn) < 6 else int(turn < 0))
            rewards.append(reward)
        cost = 0.0001
        assert terminated
        assert not truncated
        assert fewest <= len(rewards) <= most
        assert rewards[-1] == pytest.approx(1 - cost)
        assert rewards[:-1] == [pytest.approx(-cost)] * (len(rewards) - 1)
        assert math.dist(info["position"], read_map().goal) < 40
        with pytest.raises(InputError, match="reset"):
            env.step(2)
        assert env.reset(seed=3)[1]["position"].tolist() != info["position"].tolist()
        assert env.step(0)[1:4] == (-cost, False, False)  # the goal has no effect on the next episode


def test_episodes_are_truncated_after_2100_steps(env: MyWayHome) -> None:
    for _ in range(2):
        env.reset(seed=0)
        ends = [env.step(0)[1:4] for _ in range(STEPS)]
        assert ends == [(-0.0001, False, False)] * (STEPS - 1) + [(-0.0001, False, True)]
        with pytest.raises(InputError, match="reset"):
            env.step(0)


def test_same_seed_same_episode(env: MyWayHome) -> None:
    actions = np.random.default_rng(0).choice(3, 600, p=[0.2, 0.2, 0.6]).tolist()
    first = play(env, 5, actions)
    play(env, 6, actions[:77])
    assert play(env, 5, actions) == first  # independent of earlier episodes
    with MyWayHome("sparse") as other:
        assert play(other, 5, actions) == first
        assert play(other, 6, actions) != first
        other.reset(seed=9)
        unseeded = play_on(other, actions[:30])
        other.reset(seed=9)
        assert play_on(other, actions[:30]) == unseeded  # an episode without a seed follows from the last seed


def play_on(env: MyWayHome, actions: list[int]) -> list[Any]:
    env.reset()
    return [env.step(action)[0].tobytes() for action in actions]


def test_actions_turn_and_move(env: MyWayHome) -> None:
    _, info = env.reset(seed=0)
    left = env.step(0)[4]
    assert 0 < (left["angle"] - info["angle"]) % 360 < 90
    assert left["position"].tolist() == info["position"].tolist()
    right = env.step(1)[4]
    assert 270 < (right["angle"] - left["angle"]) % 360 < 360
    ahead = [env.step(2)[4] for _ in range(10)][-1]
    assert ahead["position"][0] > info["position"][0] + 10
    strafed = [env.step(3)[4] for _ in range(10)][-1]  # the player looks east, so left is north
    assert strafed["angle"] == ahead["angle"]
    assert strafed["position"][1] > ahead["position"][1] + 5
    back = [env.step(4)[4] for _ in range(20)][-1]
    assert back["position"][1] < strafed["position"][1] - 5
    for action in (5, -1):
        with pytest.raises(InputError, match="action: must be 0 to 4"):
            env.step(action)


def test_render_returns_the_screen(env: MyWayHome) -> None:
    frame, _ = env.reset(seed=0)
    picture = env.render()
    assert picture is not None
    assert picture.shape == (120, 160, 3)
    assert (downscale(picture[:, :, 1]) == frame).all()
    assert len(np.unique(frame)) > 20
    with pytest.raises(InputError, match="render_mode"):
        MyWayHome(render_mode="human")


@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version")
@pytest.mark.parametrize("name", ["Dense", "Sparse", "VerySparse"])
def test_follows_gymnasiums_rules(name: str) -> None:
    with gymnasium.make(f"onefold/MyWayHome{name}-v0", render_mode="rgb_array") as stacked:
        assert stacked.observation_space.shape == (6, 42, 42)
        check_env(stacked)
        check_env(stacked.unwrapped)
        first, _ = stacked.reset(seed=0)
        second = stacked.step(2)[0]
        assert (second[:5] == first[1:]).all()
        assert (second[5] != first[5]).any()


def area_average(screen: np.ndarray) -> np.ndarray:
    """Return the area averages in float64, from the finest common grid."""
    fine = np.repeat(np.repeat(screen.astype(float), 42 // 6, 0), 42 // 2, 1)  # 840 × 3360: 20 × 80 for each output
    return fine.reshape(42, 20, 42, 80).mean((1, 3))


@given(arrays(np.uint8, (120, 160), elements=st.integers(0, 255), fill=st.integers(0, 255)))
def test_downscale_is_the_area_average(screen: np.ndarray) -> None:
    assert (downscale(screen) == np.rint(area_average(screen))).all()


def test_downscale_of_noise() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        screen = rng.integers(256, size=(120, 160), dtype=np.uint8)
        assert (downscale(screen) == np.rint(area_average(screen))).all()
    assert (downscale(np.full((120, 160), 255, np.uint8)) == 255).all()


def test_the_map() -> None:
    lines = read_map().walls
    assert lines.shape == (76, 4)
    ends, counts = np.unique(lines.reshape(-1, 2), axis=0, return_counts=True)
    assert (lines.reshape(-1, 2).min(0) == (160, -704)).all()
    assert (lines.reshape(-1, 2).max(0) == (1120, 128)).all()
    assert len(ends) == 76
    assert (counts == 2).all()  # the walls are closed polygons
    assert read_map().goal == (1040, -352)
    assert sorted(read_map().spots) == list(range(10, 27))
    with pytest.raises(ValueError, match="read-only"):
        lines[:] = 0  # the map is cached


def test_only_the_start_differs(tmp_path: Path) -> None:
    original = packaged_map().read_bytes()
    assert write_scenario("dense", tmp_path).read_bytes() == original
    changed = set()
    for variant in ("sparse", "very_sparse"):
        content = write_scenario(variant, tmp_path).read_bytes()
        places = np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(original, np.uint8))
        assert len(content) == len(original)
        assert places.min() >= 25358 + 20  # the second routine of the script
        assert places.max() < 25358 + 64
        changed.add(content)
    assert len(changed) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "my_way_home_dense.wad", "my_way_home_sparse.wad", "my_way_home_very_sparse.wad",
    ]  # fmt: skip


def test_damaged_maps_are_refused(tmp_path: Path) -> None:
    content, path = packaged_map().read_bytes(), tmp_path / "map.wad"
    rng = np.random.default_rng(0)
    damaged = [b"", content[:-1], content + b"\0", content[: len(content) // 2], bytes(len(content)), b"PWAD"]
    places = [*rng.integers(len(content), size=200), *range(16)]
    damaged += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    for bad in damaged:
        path.write_bytes(bad)
        for use in (lambda: write_scenario("sparse", tmp_path, path), lambda: read_map.__wrapped__(path)):
            with pytest.raises(FileError, match=r"map\.wad: is not the map of vizdoom"):
                use()
    with pytest.raises(FileError, match="cannot be read"):
        write_scenario("dense", tmp_path, tmp_path / "none.wad")
    with pytest.raises(FileError, match="cannot be read"):
        write_scenario("dense", tmp_path, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["map.wad"]


def test_unknown_variants_are_refused() -> None:
    name: Any = "densest"
    with pytest.raises(InputError, match="is not one of dense, sparse, very_sparse"):
        tasks.check_variant(name)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    for use in (MyWayHome, packaged_map):
        with pytest.raises(MissingExtraError, match=r"pip install 'onefold\[rl\]'"):
            use()
    code = "import sys; sys.modules['gymnasium'] = None; import onefold.rl.doom"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("needs gymnasium: pip install 'onefold[rl]'")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\nexit 3\n", "exit code 3"),
        ("#!/bin/sh\necho 'libSDL2: no such\nlibrary' >&2; exit 127\n", "library"),
        ("#!/bin/sh\nkill -9 $$\n", "exit code -9"),
        ("nothing that could run", "Exec format"),
        (None, "No such file"),
    ],
)
def test_a_game_that_does_not_start(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured, engine = doom._configure_game, tmp_path / "engine"
    if script is not None:
        engine.write_text(script)
        engine.chmod(0o700)

    def broken() -> Any:
        game = configured()
        game.set_vizdoom_path(str(engine))
        return game

    monkeypatch.setattr(doom, "_configure_game", broken)
    with pytest.raises(OnefoldError, match=f"the game does not start .*{reason}") as caught:
        MyWayHome().reset(seed=0)
    assert "\n" not in str(caught.value)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files in the working folder, the temporary folder or shared memory, even while the game runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = MyWayHome()
    env.reset(seed=0)
    name = env._game.get_instance_id()
    assert Path.cwd() == tmp_path
    assert [file for file in Path("/dev/shm").iterdir() if name in file.name] == []
    assert list(tmp_path.iterdir()) == []
    assert engines(name) != []
    env.close()
    env.close()
    assert list(tmp_path.iterdir()) == []
    assert engines(name) == []


LONE = """
    from onefold.rl.doom import MyWayHome
    env = MyWayHome()
    env.reset(seed=0)
    print(env._game.get_instance_id(), flush=True)
    input()
"""


@pytest.mark.parametrize("has_setpriv", [True, False])
def test_a_game_ends_with_its_owner(has_setpriv: bool, tmp_path: Path) -> None:
    """Even if the owner is killed, where setpriv works; without it, games run all the same."""
    if not has_setpriv:
        (tmp_path / "setpriv").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "setpriv").chmod(0o700)
    elif shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, of util-linux")
    way = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXTYPING_DISABLE": "1"}
    command, pipe = [sys.executable, "-c", textwrap.dedent(LONE)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | way) as owner:
        assert owner.stdout is not None
        games = engines(owner.stdout.readline().strip())
        owner.kill()
    try:
        assert len(games) == 1
        assert gone(games, seconds=10.0 if has_setpriv else 0.5) == has_setpriv
    finally:
        for pid in filter(running, games):
            os.kill(pid, 9)


def test_a_crashed_game_starts_again() -> None:
    with MyWayHome() as env:
        before = env.reset(seed=4)[0]
        for pid in engines(env._game.get_instance_id()):
            os.kill(pid, 9)
        with pytest.raises(Exception, match="crash"):
            env.step(0)
        assert (env.reset(seed=4)[0] == before).all()


def engines(name: str) -> list[int]:
    """Return the processes of a game."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if name in (folder / "cmdline").read_text("utf-8", "replace"):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids
