"""The report of reinforcement-learning runs: its statistics, what it refuses, its files, and the page in a browser."""

import base64
import hashlib
import json
import os
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from browser import Opener
from matplotlib.figure import Figure
from scipy import stats
from test_shift_report import CONTRAST, NASTY, Cells

from onefold import cli
from onefold.errors import FileError, InputError
from onefold.report.figures import RC, draw_figure, save_figure
from onefold.report.runs_maps import coverage, inside, map_plates, places
from onefold.report.runs_plots import curve_plates, styles_of
from onefold.report.runs_read import collect, read
from onefold.report.runs_table import RETURN, SUCCESS, build
from onefold.report.runs_text import as_json, markdown, remarks
from onefold.report.stats import (
    improvement,
    improvement_interval,
    iqm,
    iqm_interval,
    on_grid,
    t_half,
    wins,
)  # fmt: skip
from onefold.rl.grid import final_return
from onefold.rl.run_folder import EPISODES, PROGRESS, PROGRESS_COLUMNS, RunFolder, final_episodes
from onefold.rl.settings import Run, make_run
from onefold.rl.visit_counts import VisitCounts

ORIGIN = {
    "onefold": "0.1.0", "commit": "0123456789ab", "date": "2026-11-15T18:43:21+00:00", "python": "3.11.7",
    "torch": "2.13.0", "device": "NVIDIA H200", "cores": 16,
}  # fmt: skip
DOOM = "my-way-home-sparse"


def made(path: Path, run: Run, *, skill: float, share: float = 1.0, **about: Any) -> Path:
    """A run's folder as training leaves it, of an agent that finds the goal sooner the more skill it has."""
    folder, visits = RunFolder(path), VisitCounts(run.environment, run.frames)
    folder.create(run, {**ORIGIN, **about})
    chance = np.random.default_rng([run.seed, round(1000 * skill)])
    done, length = int(share * run.frames), max(1, run.frames // 1000)
    episodes, progress, best = [], [], 1.0 if run.environment in (DOOM, "my-way-home-dense") else 11.0
    for frames in range(length, done + 1, length):
        reached = chance.random() < skill * frames / run.frames - 0.1
        reward = best * (0.9 + 0.1 * chance.random()) if reached else 0.0
        episodes.append((frames, 0, length, f"{reward:.6g}", int(reached)))
    for frames in np.linspace(done / 60, done, 60).astype(int) if done else []:
        learned = max(0.0, frames / run.frames)
        row = dict.fromkeys(PROGRESS_COLUMNS, 0.0) | {"frames": frames, "seconds": frames / 1000, "worker_restarts": 0}
        row |= {"bonus": np.exp(-5 * learned), "loss": 2 - learned + 0.1 * chance.random(), "q_clipped": 0.01 * learned}
        progress.append([row[name] for name in PROGRESS_COLUMNS])
    for frames in np.linspace(1, done, 400) if done else []:
        visits.add(int(frames), walked(visits.bounds, run.environment, skill * frames / run.frames, chance))
    folder.append(EPISODES, episodes)
    folder.append(PROGRESS, progress)
    folder.save_visits(visits)
    return path


def walked(bounds: tuple[float, ...], environment: str, reach: float, chance: np.random.Generator) -> np.ndarray:
    """Positions of one time: the further from the start, the more the agent knows; always within the walls."""
    left, bottom, right, top = bounds
    if environment.startswith("chain"):
        return np.stack([chance.integers(0, 2 + int(reach * (right - 2.001)), 10), np.zeros(10)], axis=1)
    points = chance.random((400, 2)) * (right - left, top - bottom) + (left, bottom)
    if environment.startswith("my-way-home"):
        from onefold.rl.tasks import read_map

        floor = inside(read_map().walls, (left, bottom, right, top), (48, 48))
        cells = ((points - (left, bottom)) / (right - left, top - bottom) * 48).astype(int)
        points = points[floor[cells[:, 1], cells[:, 0]]]
    far = np.abs(points - (left, bottom + 0.63 * (top - bottom))).sum(1) / (right - left + top - bottom)
    return points[far <= 0.1 + 0.9 * reach][:40].astype(np.float32)


def several(folder: Path, worlds: dict[str, int], agents: dict[str, float], seeds: int) -> Path:
    for world, frames in worlds.items():
        for agent, skill in agents.items():
            for seed in range(seeds):
                made(folder / world / f"{agent}-{seed}", make_run(agent, world, frames, seed), skill=skill)
    return folder


# The statistics


def test_a_bin_has_the_mean_of_its_episodes_or_what_was_before() -> None:
    edges = np.linspace(0, 50, 6)
    frames, values = np.array([11.0, 20.0, 35.0, 53.0]), np.array([1.0, 3.0, 7.0, 9.0])
    np.testing.assert_array_equal(on_grid(frames, values, edges, 50), [np.nan, 2, 2, 7, 9])
    np.testing.assert_array_equal(on_grid(frames, values, edges, 39), [np.nan, 2, 2, np.nan, np.nan])
    holes = np.array([1.0, np.nan, np.inf, 9.0])
    np.testing.assert_array_equal(on_grid(frames, holes, edges, 50), [np.nan, 1, 1, 1, 9])
    np.testing.assert_array_equal(on_grid(np.zeros(0), np.zeros(0), edges, 50), [np.nan] * 5)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_intervals_are_students(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(n, 4))
    low, high = stats.t.interval(0.9, n - 1, values.mean(0), stats.sem(values, axis=0))
    np.testing.assert_allclose(values.mean(0) - t_half(values), low)
    np.testing.assert_allclose(values.mean(0) + t_half(values), high)


def test_interquartile_means_are_those_computed_by_hand_and_by_scipy() -> None:
    assert iqm(np.array([100.0, 0.0, 2.0, 1.0])) == 1.5
    assert iqm(np.array([5.0, 1.0, 3.0])) == 3
    for n in range(1, 20):
        values = np.random.default_rng(n).normal(size=(2, n))
        np.testing.assert_allclose(iqm(values), stats.trim_mean(values, 0.25, axis=1))


def test_the_bootstrap_draws_within_worlds() -> None:
    """Two worlds of equal runs: whatever is drawn within them is the same, so there is no spread."""
    assert iqm_interval([np.zeros(4), np.ones(4)]) == (0.5, 0.5)
    assert iqm_interval([np.full(3, 0.7)]) == (pytest.approx(0.7), pytest.approx(0.7))
    assert iqm_interval([np.array([1.0]), np.array([2.0])]) is None
    assert iqm_interval([np.array([1.0]), np.arange(4.0)]) is None  # a single run would count as certain
    runs = np.random.default_rng(0).normal(size=40)
    known = stats.bootstrap(
        (runs,), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), method="percentile", rng=1, n_resamples=4000
    ).confidence_interval
    assert iqm_interval([runs]) == (pytest.approx(known.low, abs=0.05), pytest.approx(known.high, abs=0.05))


def test_the_probability_of_improvement_is_mann_and_whitneys() -> None:
    assert wins(np.array([1.0, 2.0]), np.array([1.0, 3.0])) == pytest.approx((0.5 + 0 + 1 + 0) / 4)
    chance = np.random.default_rng(0)
    for _ in range(20):
        x, y = chance.integers(0, 4, 7).astype(float), chance.integers(1, 5, 5).astype(float)
        u = stats.mannwhitneyu(x, y).statistic
        assert improvement([(x, y)]) == pytest.approx(u / 35)
        assert improvement([(x, y), (x + 9, y)]) == pytest.approx((u / 35 + 1) / 2)
        assert improvement([(x, y)]) + improvement([(y, x)]) == pytest.approx(1)
        interval = improvement_interval([(x, y)])
        assert interval is not None
        assert 0 <= interval.low <= improvement([(x, y)]) <= interval.high <= 1
    one = np.ones(1)
    assert improvement_interval([(one, one)]) is None
    assert improvement_interval([(one, np.arange(4.0))]) is None
    assert improvement_interval([(np.ones(3), np.zeros(3))]) == (1, 1)
    assert improvement_interval([(np.ones(3), np.ones(3))]) == (0.5, 0.5)


# What is read, and what is refused


def written(path: Path, run: Run, episodes: list[tuple[int, float, int]], progress: list[dict[str, int]]) -> Path:
    folder = RunFolder(path)
    folder.create(run, ORIGIN)
    folder.append(EPISODES, [(frames, 0, 10, reward, reached) for frames, reward, reached in episodes])
    folder.append(PROGRESS, [[row.get(name, 0.0) for name in PROGRESS_COLUMNS] for row in progress])
    folder.save_visits(VisitCounts(run.environment, run.frames))
    return path


def test_figures_of_a_run_are_those_computed_by_hand(tmp_path: Path) -> None:
    episodes = [(100, 0.0, 0), (400, 1.0, 1), (900, 5.0, 1), (901, 1.0, 1), (1000, 2.0, 0)]
    progress = [
        {"frames": 300, "seconds": 1, "worker_restarts": 2}, {"frames": 600, "seconds": 2, "worker_restarts": 3},
        {"frames": 800, "seconds": 3, "worker_restarts": 1}, {"frames": 1000, "seconds": 4, "worker_restarts": 1},
    ]  # fmt: skip
    found = read(written(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), episodes, progress), "a")
    assert found is not None
    assert (found.whole, found.frames, found.seconds, found.speed, found.replaced) == (True, 1000, 4, 250, 4)
    assert (found.final(RETURN), found.final(SUCCESS), found.first_goal) == (1.5, 0.5, 400)
    early = read(written(tmp_path / "b", make_run("csd", "chain-8", 1000, 1), episodes[:1], progress[:2]), "b")
    assert early is not None
    assert (early.whole, early.final(RETURN), early.first_goal) == (False, None, None)
    new = read(written(tmp_path / "c", make_run("csd", "chain-8", 1000, 2), [], []), "c")
    assert new is not None
    assert (new.whole, new.frames, new.seconds, new.speed, new.replaced) == (False, 0, 0, None, 0)


def test_who_fails_is_not_left_out(tmp_path: Path) -> None:
    """Its episodes last long, and none of them may end in the last tenth: then the last of every environment count."""
    end = [{"frames": 1000, "seconds": 1}]
    good = written(tmp_path / "good", make_run("csd", "chain-8", 1000, 0), [(500, 0.0, 0), (950, 1.0, 1)], end)
    bad = written(tmp_path / "bad", make_run("csd", "chain-8", 1000, 1), [(400, 8.0, 1), (800, 0.0, 0)], end)
    table = build(collect(tmp_path).records)
    assert table.worlds[0].rows[0].finals(SUCCESS).tolist() == [1, 0]
    assert (final_return(good), final_return(bad)) == (1, 0)
    frames, environments = np.array([300.0, 400.0, 700.0, 800.0]), np.array([0.0, 1.0, 0.0, 2.0])
    assert final_episodes(frames, environments, 1000).tolist() == [False, True, True, True]
    assert final_episodes(frames, environments, 880).tolist() == [False, False, False, True]


def test_agents_are_compared_over_whole_runs(tmp_path: Path) -> None:
    end = [{"frames": 1000, "seconds": 10}]
    for agent, values in {"csd": [3.0, 5.0], "dqn": [1.0, 3.0, 3.0]}.items():
        for seed, value in enumerate(values):
            run = make_run(agent, "chain-8", 1000, seed)
            written(tmp_path / f"{agent}{seed}", run, [(1000, value, int(value > 2))], end)
    late = [(500, 100.0, 1)]
    written(tmp_path / "late", make_run("csd", "chain-8", 1000, 7), late, [{"frames": 500, "seconds": 5}])
    found = collect(tmp_path)
    table = build(found.records)
    figures = as_json(found, table)["worlds"]["chain-8"]
    csd, dqn = figures["agents"]["CSD"], figures["agents"]["DQN"]
    assert (csd["seeds"], csd["unfinished"], dqn["seeds"]) == ([0, 1], [7], [0, 1, 2])
    assert (csd["return"]["mean"], csd["return"]["n"], csd["success"]["mean"]) == (4, 2, 1)
    assert (csd["first_goal_median"], dqn["first_goal_median"]) == (1000, 1000)
    assert csd["return"]["interval"] == [3, 5]
    assert dqn["return"]["iqm"] == pytest.approx(7 / 3)
    duels = {(duel["first"], duel["second"]): duel["probability"] for duel in figures["improvement"]}
    assert duels == {("CSD", "DQN"): pytest.approx((1 + 2 * 0.5 + 3) / 6), ("DQN", "CSD"): pytest.approx(1 / 6)}
    curve = {run["seed"]: run["curve"] for run in csd["runs"]}[1]
    assert (curve["frames"][-1], curve["return"][-1], curve["success"][-1]) == (1000, 5, 1)
    assert curve["return"][:-1] == [None] * 49
    assert len(curve["cells"]) == 20
    open_ = {run["seed"]: run["curve"] for run in csd["runs"]}[7]
    assert open_["cells"] == [None] * 20  # no map has been written
    assert any("Unfinished: 1 run of 6" in line for line in remarks(found, table))
    assert any(line.endswith("and others may do worse: CSD in chain-8.") for line in remarks(found, table))
    assert "unfinished, 50%" in markdown(table)


def test_over_all_worlds_only_success_is_averaged(tmp_path: Path) -> None:
    several(tmp_path, {"chain-8": 2000, "chain-5": 2000}, {"csd": 1.0, "dqn": 0.1}, 2)
    made(tmp_path / "more", make_run("rnd", "chain-8", 2000, 0), skill=0.5)
    found = collect(tmp_path)
    table = build(found.records)
    assert set(table.shared) == {"CSD", "DQN"}
    every = np.concatenate([world.rows[-1].finals(SUCCESS) for world in table.worlds])
    assert table.shared["CSD"].iqm == pytest.approx(stats.trim_mean(every, 0.25))
    assert any("for want of whole runs in each world: RND" in line for line in remarks(found, table))
    both = {(duel.first, duel.second): duel.worlds for duel in table.duels}
    assert (both["CSD", "DQN"], both["CSD", "RND"]) == (2, 1)


def test_one_name_for_different_things_is_said(tmp_path: Path) -> None:
    for world, bonus_head in (("chain-8", True), ("chain-5", False)):
        for seed in (0, 1):
            run = make_run("csd", world, 1000, seed)
            run = replace(run, agent=replace(run.agent, bonus_head=bonus_head))
            made(tmp_path / world / f"csd{seed}", run, skill=1.0, commit=f"{seed}" * 12)
            made(tmp_path / world / f"dqn{seed}", make_run("dqn", world, 1000, seed), skill=0.5)
    found = collect(tmp_path)
    table = build(found.records)
    assert (table.mixed, list(table.shared), table.duels) == (["CSD"], ["DQN"], [])
    assert len(table.worlds[0].duels) == 2
    said = remarks(found, table)
    assert "In no figure over all worlds, as settings differ between them: CSD." in said
    assert any(line.endswith("by the same settings: CSD in chain-5, CSD in chain-8.") for line in said)
    assert not any("for want of whole runs" in line for line in said)


def test_who_learns_otherwise_in_one_world_is_in_no_figure_over_all(tmp_path: Path) -> None:
    for world, every in (("chain-8", 400), ("chain-5", 4000)):
        for agent in ("csd", "dqn"):
            run = make_run(agent, world, 1000, 0)
            learning = replace(run.learning, target_period=every) if agent == "csd" else run.learning
            made(tmp_path / world / agent, replace(run, learning=learning), skill=1.0)
    table = build(collect(tmp_path).records)
    assert (table.mixed, list(table.shared), table.duels) == (["CSD"], ["DQN"], [])


@pytest.mark.parametrize(("size", "end"), [(8, 3.5), (48, 3.5), (96, 7.5)])
def test_places_of_a_chain_have_their_numbers(size: int, end: float, tmp_path: Path) -> None:
    """Also where a cell of the map holds two of them."""
    path, visits = (
        made(tmp_path / "a", make_run("csd", f"chain-{size}", 1000, 0), skill=1.0),
        VisitCounts(f"chain-{size}", 1000),
    )
    for place in range(int(end + 0.5)):
        visits.add(1000, np.array([[place, 0.0]], np.float32))
    RunFolder(path).save_visits(visits)
    world = build(collect(tmp_path).records).worlds[0]
    where = places(world)
    assert where is not None
    axes = Figure().add_subplot()
    map_plates(world, where, "x").file.panels[0].draw(axes)
    assert axes.get_xlim() == (-0.5, end)


def test_a_map_of_one_column_is_no_tower(tmp_path: Path) -> None:
    path, visits = (
        made(tmp_path / "a", make_run("csd", "deep-sea-48", 1000, 0), skill=0.0),
        VisitCounts("deep-sea-48", 1000),
    )
    visits.counts[:, :, 3] = 1
    RunFolder(path).save_visits(visits)
    world = build(collect(tmp_path).records).worlds[0]
    where = places(world)
    assert where is not None
    width, height = map_plates(world, where, "x").file.size
    assert height < 2 * width


def test_single_runs_are_within_the_picture_and_worlds_without_a_goal_have_none(tmp_path: Path) -> None:
    for seed, skill in ((0, 0.0), (1, 1.0)):
        made(tmp_path / f"{seed}", make_run("dqn", "chain-8", 1000, seed), skill=skill)
        made(tmp_path / f"cart{seed}", make_run("dqn", "CartPole-v1", 1000, seed), skill=skill)
    written(tmp_path / "none", make_run("dqn", "deep-sea-5", 1000, 0), [], [])
    table = build(collect(tmp_path).records)
    styles, panels = styles_of(table), {}
    for world in table.worlds:
        for panel in curve_plates(world, styles, "x", None)[0].panels:
            axes = Figure().add_subplot()
            panel.draw(axes)
            panels[world.name, axes.get_ylabel()] = axes
    chain = panels["chain-8", "return"]
    highest = max(float(np.nanmax(line.get_ydata())) for line in chain.lines)
    assert chain.get_ylim()[1] >= highest > 0.9
    assert ("CartPole-v1", "return") in panels
    assert ("CartPole-v1", "episodes, %") not in panels
    assert [text.get_text() for text in panels["deep-sea-5", "return"].texts] == ["nothing yet"]
    assert not panels["chain-8", "return"].texts
    assert "not reached" not in markdown(build(collect(tmp_path / "cart0").records))


def test_runs_of_fewer_frames_are_not_said_to_be_worse(tmp_path: Path) -> None:
    for agent, frames in (("csd", 2000), ("dqn", 2000), ("bdqn", 1000)):
        made(tmp_path / agent, make_run(agent, "chain-8", frames, 0), skill=1.0)
    found = collect(tmp_path)
    table = build(found.records)
    assert [(row.title, row.frames) for row in table.worlds[0].rows] == [("DQN", 2000), ("BDQN+P", 1000), ("CSD", 2000)]
    assert {(duel.first, duel.second) for duel in table.duels} == {("CSD", "DQN"), ("DQN", "CSD")}
    assert any(
        line.startswith("Some agents were given more frames than others in chain-8") for line in remarks(found, table)
    )
    even = build([record for record in found.records if record.run.frames == 2000])
    assert not any("more frames" in line for line in remarks(found, even))


def test_rivals_that_learn_otherwise_are_said(tmp_path: Path) -> None:
    made(tmp_path / "csd", make_run("csd", "chain-8", 2000, 0), skill=1.0)
    made(tmp_path / "dqn", make_run("dqn", "chain-8", 1000, 0), skill=1.0)  # whose ramps are shorter, and nothing else
    found = collect(tmp_path)
    assert not any("how they learn" in line for line in remarks(found, build(found.records)))
    run = make_run("rnd", "chain-8", 2000, 0)
    made(tmp_path / "rnd", replace(run, learning=replace(run.learning, target_period=4000)), skill=1.0)
    found = collect(tmp_path)
    said = "Agents also differ in how they learn in chain-8: target period 400 (DQN, CSD) and 4,000 (RND)."
    assert said in remarks(found, build(found.records))
    learning = replace(run.learning, epsilon=replace(run.learning.epsilon, frames=7.0))
    made(tmp_path / "even" / "rnd", replace(run, learning=learning), skill=1.0)
    made(tmp_path / "even" / "csd", make_run("csd", "chain-8", 2000, 0), skill=1.0)
    found = collect(tmp_path / "even")
    said = "Agents also differ in how they learn in chain-8: epsilon frames 7 (RND) and 200 (CSD)."
    assert said in remarks(found, build(found.records))


def test_runs_with_different_settings_are_apart(tmp_path: Path) -> None:
    run = make_run("csd", "chain-8", 1000, 0)
    kinds = [
        run, replace(run, frames=2000), replace(run, learning=replace(run.learning, batch_size=32)),
        replace(run, agent=replace(run.agent, atoms=51)), replace(run, name="CSD"), replace(run, seed=1),
    ]  # fmt: skip
    for i, kind in enumerate(kinds):
        made(tmp_path / str(i), kind, skill=1.0)
    table = build(collect(tmp_path).records)
    titles = {row.title: len(row.records) for row in table.worlds[0].rows}
    rest = ", atoms 101, batch size 64)"
    assert titles == {
        f"CSD (name csd, frames 1,000{rest}": 2, f"CSD (name csd, frames 2,000{rest}": 1,
        "CSD (name csd, frames 1,000, atoms 101, batch size 32)": 1,
        "CSD (name csd, frames 1,000, atoms 51, batch size 64)": 1,
        f"CSD (name CSD, frames 1,000{rest}": 1,
    }  # fmt: skip
    two = build([record for record in table.records if record.path in "01"])
    assert [row.title for row in two.worlds[0].rows] == ["CSD (frames 1,000)", "CSD (frames 2,000)"]


def cut(name: str, what: str, new: str) -> Any:
    def change(path: Path) -> None:
        text = (path / name).read_text()
        assert what in text
        (path / name).write_text(text.replace(what, new, 1))

    return change


def with_large_bonus(path: Path) -> None:
    head, first, *rest = (path / PROGRESS).read_text().splitlines()
    values = first.split(",")
    values[head.split(",").index("bonus")] = "1e300"
    (path / PROGRESS).write_text("\n".join([head, ",".join(values), *rest, ""]))


VISITED = "0 0 0 0"
DAMAGES = {
    "settings.json: is cut short or damaged": lambda path: (path / "settings.json").write_text("{"),
    "settings.json: is damaged: it has more than 32 levels": lambda path: (path / "settings.json").write_text(
        "[" * 100_000
    ),
    "visits.json: is damaged: it has more than 32 levels": lambda path: (path / "visits.json").write_text(
        '{"counts": ' + "[" * 40 + "]" * 40 + "}"
    ),
    "settings.json: is damaged: it has more than 1.0 MiB": lambda path: (path / "settings.json").write_text(
        " " * 2**20 + "{}"
    ),
    "settings.json: is cut short or damaged: an integer of more than 1,000 digits": cut(
        "settings.json", '"frames": 1000', f'"frames": {"9" * 1001}'
    ),
    "settings.json: is damaged (the setting learning_starts is too large an integer)": cut(
        "settings.json", '"learning_starts": 500', f'"learning_starts": {"9" * 400}'
    ),
    "settings.json: is damaged (the setting lr is too large an integer)": cut(
        "settings.json", '"lr": 0.001', f'"lr": {"9" * 400}'
    ),
    "settings.json: is damaged (the setting environment cannot be [": cut(
        "settings.json", '"environment": "chain-8"', f'"environment": ["{"x" * 10_000}"]'
    ),
    "was written in format 9": cut("settings.json", '"format": 2', '"format": 9'),
    "is damaged (the setting frames cannot be 'many')": cut("settings.json", '"frames": 1000', '"frames": "many"'),
    "has a name of more than 200 letters": cut("settings.json", '"name": "csd"', f'"name": "{"x" * 300}"'),
    "progress.csv: is missing": lambda path: (path / "progress.csv").unlink(),
    "it lacks the column seconds": cut("progress.csv", "seconds", "hours"),
    "could not convert string to float: 'x'": cut("progress.csv", "\n16,", "\nx,"),
    "line 2 has 20 values, not 19": cut("progress.csv", "\n16,", "\n16,1,"),
    "its frames go backwards": cut("progress.csv", "\n16,", "\n999,"),
    "frames is not always a number from 1": cut("progress.csv", "\n16,", "\nnan,"),
    "return is not always a number": cut("episodes.csv", "\n1,0,1,0,0", "\n1,0,1,nan,0"),
    "success is not always a number from 0 to 1": cut("episodes.csv", "\n1,0,1,0,0", "\n1,0,1,0,2"),
    "environment is not always a number from 0": cut("episodes.csv", "\n1,0,1,0,0", "\n1,nan,1,0,0"),
    "length is not always a number from 0": cut("episodes.csv", "\n1,0,1,0,0", "\n1,0,inf,0,0"),
    "visits.json: is missing": lambda path: (path / "visits.json").unlink(),
    "visits.json: is cut short or damaged": lambda path: (path / "visits.json").write_text('{"counts'),
    "it has not 20 grids of 48 × 48 counts": cut("visits.json", VISITED, "-1 0 0 0"),
    "its bounds are no four numbers": cut("visits.json", '"bounds": [\n    0.0', '"bounds": [\n    "0.0"'),
    "its bounds are none": cut("visits.json", '"bounds": [\n    0.0', '"bounds": [\n    1e400'),
    "bonus is not always a number from -1e+30 to 1e+30": with_large_bonus,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_what_is_damaged_is_named_and_left_out(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = made(tmp_path / "bad", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    DAMAGES[message](bad)
    with pytest.raises(InputError, match=re.escape(message)):
        collect(tmp_path)
    assert cli.main(["report", str(bad)]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"onefold: .*{re.escape(message)}.*\n", said.err)
    assert said.out == ""
    made(tmp_path / "good", make_run("csd", "chain-8", 1000, 1), skill=1.0)
    found = collect(tmp_path)
    assert [record.path for record in found.records] == ["good"]
    assert len(found.skipped) == 1
    assert message in found.skipped[0]


@pytest.mark.parametrize("cells", ["0 0 0", "0 x 0 0", "0 ٣ 0 0", f"{'9' * 15} 0 0 0"])
def test_maps_of_no_counts_are_refused(cells: str, tmp_path: Path) -> None:
    path = made(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    cut("visits.json", VISITED, cells)(path)
    with pytest.raises(FileError, match=r"visits\.json: is damaged: it has not 20 grids of 48 × 48 counts"):
        read(path, "a")


@pytest.mark.parametrize("bounds", [[0, 0, 1, 1e-9], [0, 0, 1e-9, 1], [0, 0, 1e20, 1e20], [0, 0, 1], {}, None])
def test_maps_of_no_sane_shape_are_refused(bounds: Any, tmp_path: Path) -> None:
    path = made(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    content = json.loads((path / "visits.json").read_text())
    (path / "visits.json").write_text(json.dumps({**content, "bounds": bounds}))
    with pytest.raises(FileError, match=r"visits\.json: is damaged: its bounds are"):
        read(path, "a")


def in_settings(text: str) -> Any:
    return lambda path: cut("settings.json", '"format": 2', f'"format": {text}')(path)


HOSTILE: dict[str, Any] = {
    "a cell of many digits": cut("visits.json", VISITED, f"{'9' * 20_000} 0 0 0"),
    "a cell as large as the file": cut("visits.json", VISITED, f"{'9' * 900_000} 0 0 0"),
    "many cells": cut("visits.json", VISITED, "0 " * 400_000 + "0 0 0 0"),
    "a long integer": in_settings("9" * 900_000),
    "many lists": in_settings(f"[{'[],' * 300_000}[]]"),
    "a large file": lambda path: (path / "settings.json").write_bytes(bytes(32 * 2**20)),
    "a line of many values": cut(PROGRESS, "\n16,", f"\n{'1,' * 2_000_000}16,"),
    "a value of many digits": cut(PROGRESS, "\n16,", f"\n{'1' * 4_000_000}16,"),
    "many empty lines": cut(EPISODES, "\n1,0,1,0,0", "\n" * 4_000_000 + "1,0,1,0,0"),
    "many columns": cut(EPISODES, "frames,", f"frames,{'x,' * 2_000_000}"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_small_files_of_a_run_take_little_memory(what: str, tmp_path: Path) -> None:
    """Whatever they hold is bounded before it is read, and the good runs are reported."""
    made(tmp_path / "good", make_run("csd", "chain-8", 1000, 1), skill=1.0)
    HOSTILE[what](made(tmp_path / "bad", make_run("csd", "chain-8", 1000, 0), skill=1.0))
    tracemalloc.start()
    try:
        found = collect(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
    assert [record.path for record in found.records] == ["good"]
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith(f"{tmp_path / 'bad'}/")
    assert len(found.skipped[0]) < 600


def test_a_pipe_in_place_of_a_file_is_left_out(tmp_path: Path) -> None:
    made(tmp_path / "good", make_run("csd", "chain-8", 1000, 1), skill=1.0)
    for i, name in enumerate(("settings.json", "visits.json", PROGRESS)):
        path = made(tmp_path / str(i), make_run("csd", "chain-8", 1000, 0), skill=1.0)
        (path / name).unlink()
        os.mkfifo(path / name)
    found = collect(tmp_path)
    assert [record.path for record in found.records] == ["good"]
    assert len(found.skipped) == 3


def test_a_run_under_way_can_be_read(tmp_path: Path) -> None:
    path = made(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), skill=1.0, share=0.5)
    before = read(path, "a")
    for name in (EPISODES, PROGRESS):
        with (path / name).open("a") as file:
            file.write("501,3")
    after = read(path, "a")
    assert before is not None
    assert after is not None
    assert (before.frames, len(before.episodes["frames"])) == (after.frames, len(after.episodes["frames"]))


def test_a_folder_without_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, message in (
        ("empty", None, "no results (no bench.json, and no settings.json of a run at any depth)"),
        ("editor", '{"tabs": 4}', "no settings.json in it is of `onefold rl train`"),
        ("jsonc", "// not JSON", "no settings.json in it is of `onefold rl train`"),
    ):
        (tmp_path / name / "inner").mkdir(parents=True)
        if content:
            (tmp_path / name / "inner" / "settings.json").write_text(content)
        assert cli.main(["report", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert re.fullmatch(rf"onefold: .*{re.escape(message)}.*\n", said.err)
        assert not (tmp_path / name / "report").exists()


def test_twins_count_once(tmp_path: Path) -> None:
    for name in "ab":
        made(tmp_path / name, make_run("csd", "chain-8", 1000, 0), skill=1.0)
    found = collect(tmp_path)
    assert [record.path for record in found.records] == ["a"]
    assert found.skipped == ["b: is the same run as a; the later one counts"]
    made(tmp_path / "c", make_run("csd", "chain-8", 1000, 0), skill=0.0, date="2026-12-01T00:00:00+00:00")
    assert [record.path for record in collect(tmp_path).records] == ["c"]


def test_of_twins_the_longer_one_counts(tmp_path: Path) -> None:
    for name in "ab":
        made(tmp_path / name, make_run("csd", "chain-8", 1000, 0), skill=1.0)
    path = tmp_path / "a" / "progress.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    found = collect(tmp_path)
    assert [record.path for record in found.records] == ["b"]
    assert found.skipped == ["a: is the same run as b; the longer one counts"]


# The maps


def test_the_floor_of_my_way_home_lies_within_its_walls() -> None:
    tasks = pytest.importorskip("onefold.rl.tasks")
    pytest.importorskip("vizdoom")
    plan = tasks.read_map()
    bounds = (160.0, -704.0, 1120.0, 128.0)
    floor = inside(plan.walls, bounds, (48, 48))
    for x, y in [plan.goal, *plan.spots.values()]:
        assert floor[int((y + 704) / 832 * 48), int((x - 160) / 960 * 48)]
    assert not floor[0, 0]
    assert floor.sum() == 776
    square = np.array([[0, 0, 2, 0], [2, 0, 2, 2], [2, 2, 0, 2], [0, 2, 0, 0]], np.float32)
    wanted = np.zeros((4, 4), bool)
    wanted[:2, :2] = True
    np.testing.assert_array_equal(inside(square, (0.0, 0.0, 4.0, 4.0), (4, 4)), wanted)


def test_coverage_is_the_share_of_places_seen_so_far(tmp_path: Path) -> None:
    run = make_run("csd", "chain-8", 1000, 0)
    path = made(tmp_path / "a", run, skill=1.0)
    visits = VisitCounts("chain-8", 1000)
    for frames, place in ((1, 0), (50, 0), (51, 1), (500, 0), (1000, 3)):
        visits.add(frames, np.array([[place, 0.0]], np.float32))
    RunFolder(path).save_visits(visits)
    record = read(path, "a")
    assert record is not None
    where = places(build([record]).worlds[0])
    assert where is not None
    assert where.flat
    frames, share = coverage(where).curve(record)
    np.testing.assert_array_equal(frames, np.arange(50, 1001, 50))
    np.testing.assert_allclose(share, [1 / 3, *[2 / 3] * 18, 1])


def test_there_may_be_no_places_and_no_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known of the world is taken from what was visited."""
    silent = written(tmp_path / "a", make_run("dqn", "CartPole-v1", 1000, 0), [], [])
    made(tmp_path / "b", make_run("dqn", DOOM, 1000, 0), skill=1.0)

    def unknown() -> None:
        raise FileError("another map")

    monkeypatch.setattr("onefold.report.runs_maps.read_map", unknown)
    doom, cart = build(collect(tmp_path).records).worlds
    where = places(doom)
    assert where is not None
    assert (where.plan, where.spots) == (None, [])
    np.testing.assert_array_equal(where.floor, doom.rows[0].records[0].visits.any(0))
    assert cart.rows[0].records[0].path == silent.name
    assert places(cart) is None
    early = replace(doom.rows[0].records[0], run=make_run("dqn", "CartPole-v1", 2000, 0))
    mixed = build([cart.rows[0].records[0], early]).worlds[0]  # neither is whole, and one has been nowhere
    known = places(mixed)
    assert known is not None
    assert [strip for strip, _ in map_plates(mixed, known, "x").rows] == [
        "unfinished: DQN (frames 1,000)",
        "unfinished: DQN (frames 2,000)",
    ]


# The page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two agents with three seeds in a chain; in MyWayHome one with two, and one that is under way."""
    runs = several(tmp_path_factory.mktemp("runs"), {"chain-8": 2000}, {"dqn": 0.2, "csd": 1.0}, 3)
    for seed in (0, 1):
        made(runs / "doom" / str(seed), make_run("csd", DOOM, 500_000, seed), skill=1.0)
    made(runs / "doom" / "late", make_run("rnd", DOOM, 500_000, 0), skill=0.6, share=0.4, device="NVIDIA A100")
    made(runs / "doom" / "broken", make_run("rnd", DOOM, 500_000, 1), skill=0.6)
    (runs / "doom" / "broken" / "visits.json").write_text("<b>")
    return runs


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page; of the plots only the names are kept, for drawing them takes long."""
    out = tmp_path_factory.mktemp("report")
    stems = reported(folder, out)
    worlds = ("chain_8", "my_way_home_sparse")
    assert len(stems) == 8
    each = {f"{kind}_{world}" for kind in ("curves", "inside", "visits") for world in worlds}
    assert set(stems) == {"returns", "successes", *each}
    return out


def reported(folder: Path, out: Path) -> list[str]:
    stems = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onefold.report.runs_page.save_figure", lambda plate, _: stems.append(plate.stem))
        assert cli.main(["report", str(folder), "-o", str(out)]) == 0
    return stems


def test_json_is_one_object_and_equals_the_page(folder: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert "visits.json: is cut short or damaged" in said.err
    assert figures["runs"] == 9
    assert not (folder / "report").exists()
    tables = [rows for _, rows in Cells((report / "index.html").read_text("utf-8")).tables]
    shared, duels, sparse, runs, chain, pairs, every = tables
    agents = figures["worlds"]["chain-8"]["agents"]
    for row, (title, found) in zip(chain, agents.items(), strict=True):
        interval = found["return"]["interval"]
        ranged = f"{found['return']['iqm']:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
        assert [cell[0] for cell in row[:5]] == [title, "3", "2,000", f"{found['return']['mean']:.3f}", ranged]
        assert row[5] == [f"{100 * found['success']['mean']:.1f}"]
    assert [cell[0] for cell in sparse[0][:2]] == ["RND", "0 + 1 unfinished"]
    assert sparse[0][3] == ["–"]
    assert [row[3] for row in runs] == [["unfinished, 40%"], ["whole"], ["whole"]]
    assert [row[0][0] for row in every] == [run["path"] for found in agents.values() for run in found["runs"]]
    better = next(duel for duel in figures["worlds"]["chain-8"]["improvement"] if duel["first"] == "CSD")
    assert pairs[1][1][0].startswith(f"{better['probability']:.2f} [")
    assert len(duels) == 2
    assert [row[0][0] for row in shared] == list(figures["success"]) == ["CSD"]


def test_nothing_is_asked_for_and_everything_is_said_in_words(report: Path) -> None:
    text = (report / "index.html").read_text("utf-8")
    page = Cells(text)
    policy = next(values["content"] or "" for _, values in page.tags if values.get("http-equiv"))
    rules = {part.split()[0]: part.split()[1:] for part in policy.split(";")}
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in page.blocks]
    assert hashes == rules["style-src"] + rules["script-src"]
    addresses = [v or "" for _, values in page.tags for n, v in values.items() if n in ("src", "srcset", "href")]
    assert all(address.startswith(("data:", "#panel-")) for address in addresses)
    names = [tag for tag, _ in page.tags]
    assert names.count("caption") == names.count("table") == 7
    alts = [values.get("alt") or "" for tag, values in page.tags if tag == "img"]
    assert all(len(alt) > 10 for alt in alts)
    assert any(
        re.search(r"Return \(return\) over frames in chain-8. At the end: DQN [\d.]+, CSD [\d.]+", a) for a in alts
    )
    assert any("RND has no whole run" in alt for alt in alts)
    for said in ("RND 0 + 1 unfinished (commit 0123456789ab on NVIDIA A100)", "CSD 3", "Unfinished: 1 run of 9",
                 "on different machines", "Left out, for the reasons listed below: 1 run."):  # fmt: skip
        assert said in text, said


def test_by_default_everything_lies_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Page: {run / 'report' / 'index.html'}"
    assert "| run | CSD | 0 | whole |" in (run / "report" / "table.md").read_text()
    files = {path.name: path.read_bytes() for path in (run / "report" / "plots").iterdir()}
    stems = ("curves_chain_8", "inside_chain_8", "visits_chain_8")
    assert set(files) == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    world = build(collect(run).records).worlds[0]
    where = places(world)
    assert where is not None
    save_figure(map_plates(world, where, "chain_8").file, tmp_path)
    for kind in ("png", "svg"):  # the same runs give the same files
        assert files[f"visits_chain_8.{kind}"] == (tmp_path / f"visits_chain_8.{kind}").read_bytes()


def test_nothing_is_clipped(folder: Path) -> None:
    """Every letter and line of a plate lies inside its picture."""
    table = build(collect(folder).records)
    plates = []
    for world, where in ((world, places(world)) for world in table.worlds):
        assert where is not None
        plates += [map_plates(world, where, "x").file, curve_plates(world, styles_of(table), "x", coverage(where))[0]]
    for plate in plates[:3]:
        with matplotlib.rc_context(RC):
            figure = draw_figure(plate)
            figure.draw_without_rendering()
            box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert box is not None
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -0.01, plate.stem


def test_agents_can_be_told_apart_and_a_single_run_has_no_interval(folder: Path) -> None:
    record = collect(folder).records[0]
    records = [replace(record, run=replace(record.run, name=name)) for name in "abcdefgh"]
    table = build(records)
    styles = styles_of(table)
    assert len({(style.colour, str(style.line)) for style in styles.values()}) == 8
    curves, _ = curve_plates(table.worlds[0], styles, "x", None)
    assert [str(key.get_label()) for key in curves.legend] == [f"{name}, 1 seed, no interval" for name in "abcdefgh"]
    ax = Figure().subplots()
    curves.panels[0].draw(ax)
    assert (len(ax.lines), len(ax.collections)) == (8, 0)


@pytest.mark.parametrize(("runs", "lines", "bands"), [(1, 1, 0), (2, 3, 0), (3, 4, 1), (5, 6, 1), (6, 1, 1)])
def test_intervals_begin_with_three_runs_and_few_are_shown_one_by_one(
    folder: Path, runs: int, lines: int, bands: int
) -> None:
    """Student's interval of two fills the picture; and the mean of a few says little if they end far apart."""
    record = collect(folder).records[0]
    table = build([replace(record, run=replace(record.run, seed=seed)) for seed in range(runs)])
    curves, _ = curve_plates(table.worlds[0], styles_of(table), "x", None)
    ax = Figure().subplots()
    curves.panels[0].draw(ax)
    assert (len(ax.lines), len(ax.collections)) == (lines, bands)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("nasty")
    for i, name in enumerate(NASTY):
        run = replace(make_run("csd", "chain-8", 1000, i), name=name, environment=NASTY[i % 2])
        made(runs / str(i), run, skill=i % 2, commit=name, device=name, date=name)
        if i % 2:
            RunFolder(runs / str(i)).save_visits(VisitCounts("nowhere", 1000))
    (runs / "<img src=x>").mkdir()
    (runs / "<img src=x>" / "settings.json").write_text("{")
    (runs / "<img src=x>" / "progress.csv").write_text("")
    stems = reported(runs, runs / "out")
    assert all(re.fullmatch(r"[a-z0-9_]+", stem) for stem in stems)
    assert len(set(stems)) == len(stems) == 1 + 2 + 2  # no map: only known environments have bounds
    return runs / "out"


def test_what_strangers_named_is_inert(nasty: Path) -> None:
    text, table = ((nasty / name).read_text("utf-8") for name in ("index.html", "table.md"))
    tags = [tag for tag, _ in Cells(text).tags]
    assert tags.count("script") == 1
    assert "&lt;img src=x&gt;" in text
    assert "{{ 7 * 7 }}" in text
    for body in (text, table):
        assert not re.search("[\u202e\x1b]", body)
    assert "<script>" not in table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {8, 11, 12, 14}


# The page in a browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_loads_and_every_text_is_readable(opened: Opener, report: Path, scheme: str) -> None:
    tab = opened(report / "index.html", scheme=scheme)
    assert tab.locator("#tabs a").all_inner_texts() == ["All worlds", DOOM, "chain-8"]
    assert tab.evaluate("[...document.images].filter((i) => !i.complete || !i.naturalWidth).length") == 0
    shown = tab.evaluate("[...document.images].map((image) => atob(image.currentSrc.split(',')[1]))")
    assert len(shown) == 2 * 3 + (7 + 2 * 5 + 1 + 4) + (7 + 2 + 1 + 4)
    ink = {"light": "#1d2733", "dark": "#e9eef3"}
    assert all(ink[scheme] in svg for svg in shown)
    for place in range(3):
        tab.locator("#tabs a").nth(place).click()
        assert tab.evaluate(CONTRAST) == []


def test_a_phone_needs_no_sideways_scroll(opened: Opener, report: Path, nasty: Path) -> None:
    for page in (report, nasty):
        tab = opened(page / "index.html", width=390, height=844)
        for place in range(tab.locator("#tabs a").count()):
            tab.locator("#tabs a").nth(place).click()
            assert not tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
