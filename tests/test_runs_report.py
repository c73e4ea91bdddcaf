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
from onefold.report.runs_comparison import compare_runs
from onefold.report.runs_data import RETURN, SUCCESS, collect_runs, read_run
from onefold.report.runs_figures import (
    agent_styles,
    coverage_metric,
    curve_figures,
    environment_map,
    floor_cells,
    visit_figures,
)
from onefold.report.runs_stats import (
    bin_means,
    improvement,
    improvement_interval,
    iqm,
    iqm_interval,
    t_half_width,
    win_probability,
)  # fmt: skip
from onefold.report.runs_tables import as_json, markdown, remarks
from onefold.rl.grid import final_return
from onefold.rl.run_folder import EPISODES, PROGRESS, PROGRESS_COLUMNS, RunFolder, final_episodes
from onefold.rl.settings import Run, make_run
from onefold.rl.visit_counts import VisitCounts

ORIGIN = {
    "onefold": "0.1.0", "commit": "0123456789ab", "date": "2026-11-15T18:43:21+00:00", "python": "3.11.7",
    "torch": "2.13.0", "device": "NVIDIA H200", "cores": 16,
}  # fmt: skip
DOOM = "my-way-home-sparse"


def write_run(path: Path, run: Run, *, skill: float, share: float = 1.0, **about: Any) -> Path:
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
        visits.add(int(frames), positions(visits.bounds, run.environment, skill * frames / run.frames, chance))
    folder.append(EPISODES, episodes)
    folder.append(PROGRESS, progress)
    folder.save_visits(visits)
    return path


def positions(bounds: tuple[float, ...], environment: str, reach: float, chance: np.random.Generator) -> np.ndarray:
    """Positions within the walls at one time: the further from the start, the larger the reach."""
    left, bottom, right, top = bounds
    if environment.startswith("chain"):
        return np.stack([chance.integers(0, 2 + int(reach * (right - 2.001)), 10), np.zeros(10)], axis=1).astype(
            np.float32
        )
    points = chance.random((400, 2)) * (right - left, top - bottom) + (left, bottom)
    if environment.startswith("my-way-home"):
        from onefold.rl.tasks import read_map

        floor = floor_cells(read_map().walls, (left, bottom, right, top), (48, 48))
        cells = ((points - (left, bottom)) / (right - left, top - bottom) * 48).astype(int)
        points = points[floor[cells[:, 1], cells[:, 0]]]
    far = np.abs(points - (left, bottom + 0.63 * (top - bottom))).sum(1) / (right - left + top - bottom)
    return points[far <= 0.1 + 0.9 * reach][:40].astype(np.float32)


def write_runs(folder: Path, environments: dict[str, int], agents: dict[str, float], seeds: int) -> Path:
    for environment, frames in environments.items():
        for agent, skill in agents.items():
            for seed in range(seeds):
                write_run(
                    folder / environment / f"{agent}-{seed}", make_run(agent, environment, frames, seed), skill=skill
                )
    return folder


# The statistics


def test_a_bin_has_the_mean_of_its_episodes_or_what_was_before() -> None:
    edges = np.linspace(0, 50, 6)
    frames, values = np.array([11.0, 20.0, 35.0, 53.0]), np.array([1.0, 3.0, 7.0, 9.0])
    np.testing.assert_array_equal(bin_means(frames, values, edges, 50), [np.nan, 2, 2, 7, 9])
    np.testing.assert_array_equal(bin_means(frames, values, edges, 39), [np.nan, 2, 2, np.nan, np.nan])
    holes = np.array([1.0, np.nan, np.inf, 9.0])
    np.testing.assert_array_equal(bin_means(frames, holes, edges, 50), [np.nan, 1, 1, 1, 9])
    np.testing.assert_array_equal(bin_means(np.zeros(0), np.zeros(0), edges, 50), [np.nan] * 5)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_intervals_are_students(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(n, 4))
    low, high = stats.t.interval(0.9, n - 1, values.mean(0), stats.sem(values, axis=0))
    np.testing.assert_allclose(values.mean(0) - t_half_width(values), low)
    np.testing.assert_allclose(values.mean(0) + t_half_width(values), high)


def test_interquartile_means_are_those_computed_by_hand_and_by_scipy() -> None:
    assert iqm(np.array([100.0, 0.0, 2.0, 1.0])) == 1.5
    assert iqm(np.array([5.0, 1.0, 3.0])) == 3
    for n in range(1, 20):
        values = np.random.default_rng(n).normal(size=(2, n))
        np.testing.assert_allclose(iqm(values), stats.trim_mean(values, 0.25, axis=1))


def test_the_bootstrap_draws_within_environments() -> None:
    """In two environments of equal runs every sample is the same, so there is no spread."""
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
    assert win_probability(np.array([1.0, 2.0]), np.array([1.0, 3.0])) == pytest.approx((0.5 + 0 + 1 + 0) / 4)
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


def write_rows(path: Path, run: Run, episodes: list[tuple[int, float, int]], progress: list[dict[str, int]]) -> Path:
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
    found = read_run(write_rows(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), episodes, progress), "a")
    assert found is not None
    assert (found.finished, found.frames, found.seconds, found.frames_per_second, found.replaced_workers) == (
        True,
        1000,
        4,
        250,
        4,
    )
    assert (found.final(RETURN), found.final(SUCCESS), found.first_goal) == (1.5, 0.5, 400)
    early = read_run(write_rows(tmp_path / "b", make_run("csd", "chain-8", 1000, 1), episodes[:1], progress[:2]), "b")
    assert early is not None
    assert (early.finished, early.final(RETURN), early.first_goal) == (False, None, None)
    new = read_run(write_rows(tmp_path / "c", make_run("csd", "chain-8", 1000, 2), [], []), "c")
    assert new is not None
    assert (new.finished, new.frames, new.seconds, new.frames_per_second, new.replaced_workers) == (
        False,
        0,
        0,
        None,
        0,
    )


def test_failing_runs_are_averaged_too(tmp_path: Path) -> None:
    """Their episodes are long. If none ends in the last tenth, the last episode of each environment copy counts."""
    end = [{"frames": 1000, "seconds": 1}]
    good = write_rows(tmp_path / "good", make_run("csd", "chain-8", 1000, 0), [(500, 0.0, 0), (950, 1.0, 1)], end)
    bad = write_rows(tmp_path / "bad", make_run("csd", "chain-8", 1000, 1), [(400, 8.0, 1), (800, 0.0, 0)], end)
    table = compare_runs(collect_runs(tmp_path).records)
    assert table.environments[0].agents[0].finals(SUCCESS).tolist() == [1, 0]
    assert (final_return(good), final_return(bad)) == (1, 0)
    frames, environments = np.array([300.0, 400.0, 700.0, 800.0]), np.array([0.0, 1.0, 0.0, 2.0])
    assert final_episodes(frames, environments, 1000).tolist() == [False, True, True, True]
    assert final_episodes(frames, environments, 880).tolist() == [False, False, False, True]


def test_agents_are_compared_over_finished_runs(tmp_path: Path) -> None:
    end = [{"frames": 1000, "seconds": 10}]
    for agent, values in {"csd": [3.0, 5.0], "dqn": [1.0, 3.0, 3.0]}.items():
        for seed, value in enumerate(values):
            run = make_run(agent, "chain-8", 1000, seed)
            write_rows(tmp_path / f"{agent}{seed}", run, [(1000, value, int(value > 2))], end)
    late = [(500, 100.0, 1)]
    write_rows(tmp_path / "late", make_run("csd", "chain-8", 1000, 7), late, [{"frames": 500, "seconds": 5}])
    found = collect_runs(tmp_path)
    table = compare_runs(found.records)
    figures = as_json(found, table)["environments"]["chain-8"]
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


def test_over_all_environments_only_success_is_averaged(tmp_path: Path) -> None:
    write_runs(tmp_path, {"chain-8": 2000, "chain-5": 2000}, {"csd": 1.0, "dqn": 0.1}, 2)
    write_run(tmp_path / "more", make_run("rnd", "chain-8", 2000, 0), skill=0.5)
    found = collect_runs(tmp_path)
    table = compare_runs(found.records)
    assert set(table.success) == {"CSD", "DQN"}
    every = np.concatenate([environment.agents[-1].finals(SUCCESS) for environment in table.environments])
    assert table.success["CSD"].iqm == pytest.approx(stats.trim_mean(every, 0.25))
    assert any("without finished runs in every environment: RND" in line for line in remarks(found, table))
    both = {(duel.first, duel.second): duel.environments for duel in table.pairs}
    assert (both["CSD", "DQN"], both["CSD", "RND"]) == (2, 1)


def test_agents_with_different_settings_are_not_averaged_over_environments(tmp_path: Path) -> None:
    for environment, bonus_head in (("chain-8", True), ("chain-5", False)):
        for seed in (0, 1):
            run = make_run("csd", environment, 1000, seed)
            run = replace(run, agent=replace(run.agent, bonus_head=bonus_head))
            write_run(tmp_path / environment / f"csd{seed}", run, skill=1.0, commit=f"{seed}" * 12)
            write_run(tmp_path / environment / f"dqn{seed}", make_run("dqn", environment, 1000, seed), skill=0.5)
    found = collect_runs(tmp_path)
    table = compare_runs(found.records)
    assert (list(table.mixed_settings), list(table.success), table.pairs) == (["CSD"], ["DQN"], [])
    assert len(table.environments[0].pairs) == 2
    said = remarks(found, table)
    assert (
        "CSD is not averaged over environments, as its settings differ between them: "
        "bonus head false (chain-5) and true (chain-8)."
    ) in said
    assert any(line.endswith("in them: CSD in chain-5, CSD in chain-8.") for line in said)
    assert not any("without finished runs" in line for line in said)


def test_agents_that_learn_differently_are_not_averaged_over_environments(tmp_path: Path) -> None:
    for environment, every in (("chain-8", 400), ("chain-5", 4000)):
        for agent in ("csd", "dqn"):
            run = make_run(agent, environment, 1000, 0)
            learning = replace(run.learning, target_period=every) if agent == "csd" else run.learning
            write_run(tmp_path / environment / agent, replace(run, learning=learning), skill=1.0)
    table = compare_runs(collect_runs(tmp_path).records)
    assert (list(table.mixed_settings), list(table.success), table.pairs) == (["CSD"], ["DQN"], [])


def test_runs_of_different_bonus_forms_are_not_averaged(tmp_path: Path) -> None:
    run = make_run("csd", "chain-8", 1000, 0)
    for seed, form in enumerate(("variance", "variance", "centred")):
        agent = replace(run.agent, bonus_form=form)
        write_run(tmp_path / str(seed), replace(run, seed=seed, agent=agent), skill=1.0)
    found = collect_runs(tmp_path)
    comparison = compare_runs(found.records)
    agents = {agent.title: len(agent.finals(RETURN)) for agent in comparison.environments[0].agents}
    assert agents == {"CSD (bonus form variance)": 2, "CSD (bonus form centred)": 1}
    assert any(line.startswith("Runs of one agent with different settings") for line in remarks(found, comparison))


def test_default_bonus_forms_of_two_environments_are_not_averaged(tmp_path: Path) -> None:
    """Deep-sea's default form is another one than the chain's."""
    write_runs(tmp_path, {"chain-8": 1000, "deep-sea-5": 1000}, {"csd": 1.0, "dqn": 0.5}, 1)
    found = collect_runs(tmp_path)
    comparison = compare_runs(found.records)
    assert comparison.mixed_settings == {"CSD": ["bonus form variance (chain-8) and relative (deep-sea-5)"]}
    assert list(comparison.success) == ["DQN"]
    assert comparison.pairs == []
    assert (
        "CSD is not averaged over environments, as its settings differ between them: "
        "bonus form variance (chain-8) and relative (deep-sea-5)."
    ) in remarks(found, comparison)


@pytest.mark.parametrize(("size", "end"), [(8, 3.5), (48, 3.5), (96, 7.5)])
def test_places_of_a_chain_have_their_numbers(size: int, end: float, tmp_path: Path) -> None:
    """Also where a cell of the map holds two of them."""
    path, visits = (
        write_run(tmp_path / "a", make_run("csd", f"chain-{size}", 1000, 0), skill=1.0),
        VisitCounts(f"chain-{size}", 1000),
    )
    for place in range(int(end + 0.5)):
        visits.add(1000, np.array([[place, 0.0]], np.float32))
    RunFolder(path).save_visits(visits)
    environment = compare_runs(collect_runs(tmp_path).records).environments[0]
    where = environment_map(environment)
    assert where is not None
    axes = Figure().add_subplot()
    visit_figures(environment, where, "x").file.panels[0].draw(axes)
    assert axes.get_xlim() == (-0.5, end)


def test_a_map_of_one_column_has_a_bounded_height(tmp_path: Path) -> None:
    path, visits = (
        write_run(tmp_path / "a", make_run("csd", "deep-sea-48", 1000, 0), skill=0.0),
        VisitCounts("deep-sea-48", 1000),
    )
    visits.counts[:, :, 3] = 1
    RunFolder(path).save_visits(visits)
    environment = compare_runs(collect_runs(tmp_path).records).environments[0]
    where = environment_map(environment)
    assert where is not None
    width, height = visit_figures(environment, where, "x").file.size
    assert height < 2 * width


def test_single_runs_fit_the_axes_and_success_needs_a_goal(tmp_path: Path) -> None:
    for seed, skill in ((0, 0.0), (1, 1.0)):
        write_run(tmp_path / f"{seed}", make_run("dqn", "chain-8", 1000, seed), skill=skill)
        write_run(tmp_path / f"cart{seed}", make_run("dqn", "CartPole-v1", 1000, seed), skill=skill)
    write_rows(tmp_path / "none", make_run("dqn", "deep-sea-5", 1000, 0), [], [])
    table = compare_runs(collect_runs(tmp_path).records)
    styles, panels = agent_styles(table), {}
    for environment in table.environments:
        for panel in curve_figures(environment, styles, "x", None)[0].panels:
            axes = Figure().add_subplot()
            panel.draw(axes)
            panels[environment.name, axes.get_ylabel()] = axes
    chain = panels["chain-8", "return"]
    highest = max(float(np.nanmax(line.get_ydata())) for line in chain.lines)
    assert chain.get_ylim()[1] >= highest > 0.9
    assert ("CartPole-v1", "return") in panels
    assert ("CartPole-v1", "episodes, %") not in panels
    assert [text.get_text() for text in panels["deep-sea-5", "return"].texts] == ["nothing yet"]
    assert not panels["chain-8", "return"].texts
    assert "not reached" not in markdown(compare_runs(collect_runs(tmp_path / "cart0").records))


def test_runs_of_different_lengths_are_not_compared(tmp_path: Path) -> None:
    for agent, frames in (("csd", 2000), ("dqn", 2000), ("bdqn", 1000)):
        write_run(tmp_path / agent, make_run(agent, "chain-8", frames, 0), skill=1.0)
    found = collect_runs(tmp_path)
    table = compare_runs(found.records)
    assert [(row.title, row.run.frames) for row in table.environments[0].agents] == [
        ("DQN", 2000),
        ("BDQN+P", 1000),
        ("CSD", 2000),
    ]
    assert {(duel.first, duel.second) for duel in table.pairs} == {("CSD", "DQN"), ("DQN", "CSD")}
    assert any(line.startswith("Some agents have more frames than others in chain-8") for line in remarks(found, table))
    even = compare_runs([record for record in found.records if record.run.frames == 2000])
    assert not any("more frames" in line for line in remarks(found, even))


def test_remarks_name_different_learning_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "csd", make_run("csd", "chain-8", 2000, 0), skill=1.0)
    write_run(tmp_path / "dqn", make_run("dqn", "chain-8", 1000, 0), skill=1.0)  # shorter schedules
    found = collect_runs(tmp_path)
    assert not any("Learning settings differ" in line for line in remarks(found, compare_runs(found.records)))
    run = make_run("rnd", "chain-8", 2000, 0)
    write_run(tmp_path / "rnd", replace(run, learning=replace(run.learning, target_period=4000)), skill=1.0)
    found = collect_runs(tmp_path)
    said = "Learning settings differ between agents in chain-8: target period 400 (DQN, CSD) and 4,000 (RND)."
    assert said in remarks(found, compare_runs(found.records))
    learning = replace(run.learning, epsilon=replace(run.learning.epsilon, frames=7.0))
    write_run(tmp_path / "even" / "rnd", replace(run, learning=learning), skill=1.0)
    write_run(tmp_path / "even" / "csd", make_run("csd", "chain-8", 2000, 0), skill=1.0)
    found = collect_runs(tmp_path / "even")
    said = "Learning settings differ between agents in chain-8: epsilon frames 7 (RND) and 200 (CSD)."
    assert said in remarks(found, compare_runs(found.records))


def test_runs_with_different_settings_are_not_averaged(tmp_path: Path) -> None:
    run = make_run("csd", "chain-8", 1000, 0)
    kinds = [
        run, replace(run, frames=2000), replace(run, learning=replace(run.learning, batch_size=32)),
        replace(run, agent=replace(run.agent, atoms=51)), replace(run, name="CSD"), replace(run, seed=1),
    ]  # fmt: skip
    for i, kind in enumerate(kinds):
        write_run(tmp_path / str(i), kind, skill=1.0)
    table = compare_runs(collect_runs(tmp_path).records)
    titles = {row.title: len(row.records) for row in table.environments[0].agents}
    rest = ", atoms 101, batch size 64)"
    assert titles == {
        f"CSD (name csd, frames 1,000{rest}": 2, f"CSD (name csd, frames 2,000{rest}": 1,
        "CSD (name csd, frames 1,000, atoms 101, batch size 32)": 1,
        "CSD (name csd, frames 1,000, atoms 51, batch size 64)": 1,
        f"CSD (name CSD, frames 1,000{rest}": 1,
    }  # fmt: skip
    two = compare_runs([record for record in table.records if record.path in "01"])
    assert [row.title for row in two.environments[0].agents] == ["CSD (frames 1,000)", "CSD (frames 2,000)"]


def edit(name: str, what: str, new: str) -> Any:
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
    "settings.json: is cut short or damaged: an integer of more than 1,000 digits": edit(
        "settings.json", '"frames": 1000', f'"frames": {"9" * 1001}'
    ),
    "settings.json: is damaged (learning.learning_starts: the integer is too large": edit(
        "settings.json", '"learning_starts": 500', f'"learning_starts": {"9" * 400}'
    ),
    "settings.json: is damaged (agent.lr: the integer is too large": edit(
        "settings.json", '"lr": 0.001', f'"lr": {"9" * 400}'
    ),
    "settings.json: is damaged (environment: [": edit(
        "settings.json", '"environment": "chain-8"', f'"environment": ["{"x" * 10_000}"]'
    ),
    "has format 9": edit("settings.json", '"format": 2', '"format": 9'),
    "is damaged (frames: 'many' is not an integer": edit("settings.json", '"frames": 1000', '"frames": "many"'),
    "a name has more than 200 characters": edit("settings.json", '"name": "csd"', f'"name": "{"x" * 300}"'),
    "progress.csv: is missing": lambda path: (path / "progress.csv").unlink(),
    "it lacks the column seconds": edit("progress.csv", "seconds", "hours"),
    "could not convert string to float: 'x'": edit("progress.csv", "\n16,", "\nx,"),
    "line 2 has 20 values, not 19": edit("progress.csv", "\n16,", "\n16,1,"),
    "its frames decrease": edit("progress.csv", "\n16,", "\n999,"),
    "frames has a value that is not between 1": edit("progress.csv", "\n16,", "\nnan,"),
    "return has a value that is not between": edit("episodes.csv", "\n1,0,1,0,0", "\n1,0,1,nan,0"),
    "success has a value that is not between 0 and 1": edit("episodes.csv", "\n1,0,1,0,0", "\n1,0,1,0,2"),
    "environment has a value that is not between 0": edit("episodes.csv", "\n1,0,1,0,0", "\n1,nan,1,0,0"),
    "length has a value that is not between 0": edit("episodes.csv", "\n1,0,1,0,0", "\n1,0,inf,0,0"),
    "visits.json: is missing": lambda path: (path / "visits.json").unlink(),
    "visits.json: is cut short or damaged": lambda path: (path / "visits.json").write_text('{"counts'),
    "counts are not 20 grids of 48 × 48 integers": edit("visits.json", VISITED, "-1 0 0 0"),
    "visits.json: is damaged (bounds[0]: '0.0' is not a finite number)": edit(
        "visits.json", '"bounds": [\n    0.0', '"bounds": [\n    "0.0"'
    ),
    "visits.json: is damaged (bounds[0]: inf is not a finite number)": edit(
        "visits.json", '"bounds": [\n    0.0', '"bounds": [\n    1e400'
    ),
    "bonus has a value that is not between -1e+30 and 1e+30": with_large_bonus,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_runs_are_listed_and_left_out(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_run(tmp_path / "bad", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    DAMAGES[message](bad)
    with pytest.raises(InputError, match=re.escape(message)):
        collect_runs(tmp_path)
    assert cli.main(["report", str(bad)]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"onefold: .*{re.escape(message)}.*\n", said.err)
    assert said.out == ""
    write_run(tmp_path / "good", make_run("csd", "chain-8", 1000, 1), skill=1.0)
    found = collect_runs(tmp_path)
    assert [record.path for record in found.records] == ["good"]
    assert len(found.skipped) == 1
    assert message in found.skipped[0]


@pytest.mark.parametrize("cells", ["0 0 0", "0 x 0 0", "0 ٣ 0 0", f"{'9' * 15} 0 0 0"])
def test_invalid_counts_are_refused(cells: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    edit("visits.json", VISITED, cells)(path)
    with pytest.raises(FileError, match=r"visits\.json: is damaged: counts are not 20 grids of 48 × 48 integers"):
        read_run(path, "a")


@pytest.mark.parametrize("bounds", [[0, 0, 1, 1e-9], [0, 0, 1e-9, 1], [0, 0, 1e20, 1e20], [0, 0, 1], {}, None])
def test_invalid_bounds_are_refused(bounds: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    content = json.loads((path / "visits.json").read_text())
    (path / "visits.json").write_text(json.dumps({**content, "bounds": bounds}))
    with pytest.raises(FileError, match=r"visits\.json: is damaged(: bounds are not left| \(bounds: )"):
        read_run(path, "a")


def in_settings(text: str) -> Any:
    return lambda path: edit("settings.json", '"format": 2', f'"format": {text}')(path)


HOSTILE: dict[str, Any] = {
    "a cell of many digits": edit("visits.json", VISITED, f"{'9' * 20_000} 0 0 0"),
    "a cell as large as the file": edit("visits.json", VISITED, f"{'9' * 900_000} 0 0 0"),
    "many cells": edit("visits.json", VISITED, "0 " * 400_000 + "0 0 0 0"),
    "a long integer": in_settings("9" * 900_000),
    "many lists": in_settings(f"[{'[],' * 300_000}[]]"),
    "a large file": lambda path: (path / "settings.json").write_bytes(bytes(32 * 2**20)),
    "a line of many values": edit(PROGRESS, "\n16,", f"\n{'1,' * 2_000_000}16,"),
    "a value of many digits": edit(PROGRESS, "\n16,", f"\n{'1' * 4_000_000}16,"),
    "many empty lines": edit(EPISODES, "\n1,0,1,0,0", "\n" * 4_000_000 + "1,0,1,0,0"),
    "many columns": edit(EPISODES, "frames,", f"frames,{'x,' * 2_000_000}"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_small_files_of_a_run_take_little_memory(what: str, tmp_path: Path) -> None:
    """Whatever they hold is bounded before it is read, and the good runs are reported."""
    write_run(tmp_path / "good", make_run("csd", "chain-8", 1000, 1), skill=1.0)
    HOSTILE[what](write_run(tmp_path / "bad", make_run("csd", "chain-8", 1000, 0), skill=1.0))
    tracemalloc.start()
    try:
        found = collect_runs(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
    assert [record.path for record in found.records] == ["good"]
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith(f"{tmp_path / 'bad'}/")
    assert len(found.skipped[0]) < 600


def test_a_pipe_in_place_of_a_file_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "good", make_run("csd", "chain-8", 1000, 1), skill=1.0)
    for i, name in enumerate(("settings.json", "visits.json", PROGRESS)):
        path = write_run(tmp_path / str(i), make_run("csd", "chain-8", 1000, 0), skill=1.0)
        (path / name).unlink()
        os.mkfifo(path / name)
    found = collect_runs(tmp_path)
    assert [record.path for record in found.records] == ["good"]
    assert len(found.skipped) == 3


def test_a_running_run_can_be_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", make_run("csd", "chain-8", 1000, 0), skill=1.0, share=0.5)
    before = read_run(path, "a")
    for name in (EPISODES, PROGRESS):
        with (path / name).open("a") as file:
            file.write("501,3")
    after = read_run(path, "a")
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


def test_the_later_of_two_equal_runs_counts(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, make_run("csd", "chain-8", 1000, 0), skill=1.0)
    found = collect_runs(tmp_path)
    assert [record.path for record in found.records] == ["a"]
    assert found.skipped == ["b: is the same run as a; the later one counts"]
    write_run(tmp_path / "c", make_run("csd", "chain-8", 1000, 0), skill=0.0, date="2026-12-01T00:00:00+00:00")
    assert [record.path for record in collect_runs(tmp_path).records] == ["c"]


def test_the_longer_of_two_equal_runs_counts(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, make_run("csd", "chain-8", 1000, 0), skill=1.0)
    path = tmp_path / "a" / "progress.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    found = collect_runs(tmp_path)
    assert [record.path for record in found.records] == ["b"]
    assert found.skipped == ["a: is the same run as b; the longer one counts"]


# The maps


def test_the_floor_of_my_way_home_lies_within_its_walls() -> None:
    tasks = pytest.importorskip("onefold.rl.tasks")
    pytest.importorskip("vizdoom")
    plan = tasks.read_map()
    bounds = (160.0, -704.0, 1120.0, 128.0)
    floor = floor_cells(plan.walls, bounds, (48, 48))
    for x, y in [plan.goal, *plan.spots.values()]:
        assert floor[int((y + 704) / 832 * 48), int((x - 160) / 960 * 48)]
    assert not floor[0, 0]
    assert floor.sum() == 776
    square = np.array([[0, 0, 2, 0], [2, 0, 2, 2], [2, 2, 0, 2], [0, 2, 0, 0]], np.float32)
    wanted = np.zeros((4, 4), bool)
    wanted[:2, :2] = True
    np.testing.assert_array_equal(floor_cells(square, (0.0, 0.0, 4.0, 4.0), (4, 4)), wanted)


def test_coverage_is_the_share_of_places_seen_so_far(tmp_path: Path) -> None:
    run = make_run("csd", "chain-8", 1000, 0)
    path = write_run(tmp_path / "a", run, skill=1.0)
    visits = VisitCounts("chain-8", 1000)
    for frames, place in ((1, 0), (50, 0), (51, 1), (500, 0), (1000, 3)):
        visits.add(frames, np.array([[place, 0.0]], np.float32))
    RunFolder(path).save_visits(visits)
    record = read_run(path, "a")
    assert record is not None
    where = environment_map(compare_runs([record]).environments[0])
    assert where is not None
    assert where.is_line
    frames, share = coverage_metric(where).curve(record)
    np.testing.assert_array_equal(frames, np.arange(50, 1001, 50))
    np.testing.assert_allclose(share, [1 / 3, *[2 / 3] * 18, 1])


def test_visits_and_the_game_map_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the game's map, the visited cells are the floor."""
    silent = write_rows(tmp_path / "a", make_run("dqn", "CartPole-v1", 1000, 0), [], [])
    write_run(tmp_path / "b", make_run("dqn", DOOM, 1000, 0), skill=1.0)

    def unknown() -> None:
        raise FileError("another map")

    monkeypatch.setattr("onefold.report.runs_figures.read_map", unknown)
    doom, cart = compare_runs(collect_runs(tmp_path).records).environments
    where = environment_map(doom)
    assert where is not None
    assert (where.game_map, where.starts) == (None, [])
    np.testing.assert_array_equal(where.floor, doom.agents[0].records[0].visits.any(0))
    assert cart.agents[0].records[0].path == silent.name
    assert environment_map(cart) is None
    early = replace(doom.agents[0].records[0], run=make_run("dqn", "CartPole-v1", 2000, 0))
    # Neither run is finished, and one has no visits.
    mixed = compare_runs([cart.agents[0].records[0], early]).environments[0]
    known = environment_map(mixed)
    assert known is not None
    assert [strip for strip, _ in visit_figures(mixed, known, "x").agents] == [
        "unfinished: DQN (frames 1,000)",
        "unfinished: DQN (frames 2,000)",
    ]


# The page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two agents with three seeds in a chain; in MyWayHome one with two, and one that is under way."""
    runs = write_runs(tmp_path_factory.mktemp("runs"), {"chain-8": 2000}, {"dqn": 0.2, "csd": 1.0}, 3)
    for seed in (0, 1):
        write_run(runs / "doom" / str(seed), make_run("csd", DOOM, 500_000, seed), skill=1.0)
    write_run(runs / "doom" / "late", make_run("rnd", DOOM, 500_000, 0), skill=0.6, share=0.4, device="NVIDIA A100")
    write_run(runs / "doom" / "broken", make_run("rnd", DOOM, 500_000, 1), skill=0.6)
    (runs / "doom" / "broken" / "visits.json").write_text("<b>")
    return runs


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page; of the plots only the names are kept, for drawing them takes long."""
    out = tmp_path_factory.mktemp("report")
    stems = reported(folder, out)
    environments = ("chain_8", "my_way_home_sparse")
    assert len(stems) == 8
    each = {f"{kind}_{environment}" for kind in ("curves", "inside", "visits") for environment in environments}
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
    agents = figures["environments"]["chain-8"]["agents"]
    for row, (title, found) in zip(chain, agents.items(), strict=True):
        interval = found["return"]["interval"]
        ranged = f"{found['return']['iqm']:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
        assert [cell[0] for cell in row[:5]] == [title, "3", "2,000", f"{found['return']['mean']:.3f}", ranged]
        assert row[5] == [f"{100 * found['success']['mean']:.1f}"]
    assert [cell[0] for cell in sparse[0][:2]] == ["RND", "0 + 1 unfinished"]
    assert sparse[0][3] == ["–"]
    assert [row[3] for row in runs] == [["unfinished, 40%"], ["finished"], ["finished"]]
    assert [row[0][0] for row in every] == [run["path"] for found in agents.values() for run in found["runs"]]
    better = next(duel for duel in figures["environments"]["chain-8"]["improvement"] if duel["first"] == "CSD")
    assert pairs[1][1][0].startswith(f"{better['probability']:.2f} [")
    assert len(duels) == 2
    assert [row[0][0] for row in shared] == list(figures["success"]) == ["CSD"]


def test_the_page_requests_nothing_and_describes_every_picture(report: Path) -> None:
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
    assert any("RND has no finished run" in alt for alt in alts)
    for said in ("RND 0 + 1 unfinished (commit 0123456789ab on NVIDIA A100)", "CSD 3", "Unfinished: 1 run of 9",
                 "on different machines", "Left out, for the reasons listed below: 1 run."):  # fmt: skip
        assert said in text, said


def test_by_default_everything_lies_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", make_run("csd", "chain-8", 1000, 0), skill=1.0)
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Page: {run / 'report' / 'index.html'}"
    assert "| run | CSD | 0 | finished |" in (run / "report" / "table.md").read_text()
    files = {path.name: path.read_bytes() for path in (run / "report" / "plots").iterdir()}
    stems = ("curves_chain_8", "inside_chain_8", "visits_chain_8")
    assert set(files) == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    environment = compare_runs(collect_runs(run).records).environments[0]
    where = environment_map(environment)
    assert where is not None
    save_figure(visit_figures(environment, where, "chain_8").file, tmp_path)
    for kind in ("png", "svg"):  # the same runs give the same files
        assert files[f"visits_chain_8.{kind}"] == (tmp_path / f"visits_chain_8.{kind}").read_bytes()


def test_nothing_is_clipped(folder: Path) -> None:
    """Every letter and line of a plate lies inside its picture."""
    table = compare_runs(collect_runs(folder).records)
    plates = []
    for environment, where in ((environment, environment_map(environment)) for environment in table.environments):
        assert where is not None
        plates += [
            visit_figures(environment, where, "x").file,
            curve_figures(environment, agent_styles(table), "x", coverage_metric(where))[0],
        ]
    for plate in plates[:3]:
        with matplotlib.rc_context(RC):
            figure = draw_figure(plate)
            figure.draw_without_rendering()
            box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert box is not None
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -0.01, plate.stem


def test_agents_have_distinct_styles_and_a_single_run_has_no_interval(folder: Path) -> None:
    record = collect_runs(folder).records[0]
    records = [replace(record, run=replace(record.run, name=name)) for name in "abcdefgh"]
    table = compare_runs(records)
    styles = agent_styles(table)
    assert len({(style.colour, str(style.line)) for style in styles.values()}) == 8
    curves, _ = curve_figures(table.environments[0], styles, "x", None)
    assert [str(key.get_label()) for key in curves.legend] == [f"{name}, 1 seed, no interval" for name in "abcdefgh"]
    ax = Figure().subplots()
    curves.panels[0].draw(ax)
    assert (len(ax.lines), len(ax.collections)) == (8, 0)


@pytest.mark.parametrize(("runs", "lines", "bands"), [(1, 1, 0), (2, 3, 0), (3, 4, 1), (5, 6, 1), (6, 1, 1)])
def test_intervals_begin_with_three_runs_and_few_are_shown_one_by_one(
    folder: Path, runs: int, lines: int, bands: int
) -> None:
    """Student's interval of two fills the picture; and the mean of a few says little if they end far apart."""
    record = collect_runs(folder).records[0]
    table = compare_runs([replace(record, run=replace(record.run, seed=seed)) for seed in range(runs)])
    curves, _ = curve_figures(table.environments[0], agent_styles(table), "x", None)
    ax = Figure().subplots()
    curves.panels[0].draw(ax)
    assert (len(ax.lines), len(ax.collections)) == (lines, bands)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("nasty")
    for i, name in enumerate(NASTY):
        run = replace(make_run("csd", "chain-8", 1000, i), name=name, environment=NASTY[i % 2])
        write_run(runs / str(i), run, skill=i % 2, commit=name, device=name, date=name)
        if i % 2:
            RunFolder(runs / str(i)).save_visits(VisitCounts("nowhere", 1000))
    (runs / "<img src=x>").mkdir()
    (runs / "<img src=x>" / "settings.json").write_text("{")
    (runs / "<img src=x>" / "progress.csv").write_text("")
    stems = reported(runs, runs / "out")
    assert all(re.fullmatch(r"[a-z0-9_]+", stem) for stem in stems)
    assert len(set(stems)) == len(stems) == 1 + 2 + 2  # no map: only known environments have bounds
    return runs / "out"


def test_untrusted_names_are_inert(nasty: Path) -> None:
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
    assert tab.locator("#tabs a").all_inner_texts() == ["All environments", DOOM, "chain-8"]
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
