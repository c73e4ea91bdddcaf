"""A CSD bonus reaches goals that random exploration does not: a chain of 40 states, DeepSea of 20 × 20."""

from pathlib import Path

import pytest

from onefold.rl.run_folder import RunFolder
from onefold.rl.runs import train
from onefold.rl.settings import make_run

SEEDS = [0, 1, 2]
ONE_SEED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]


@pytest.mark.parametrize("seed", SEEDS)
def test_csd_reaches_the_far_end_of_the_chain(seed: int, tmp_path: Path) -> None:
    rows = train(make_run("csd", "chain-40", 8000, seed), tmp_path / "run", device="cpu", checkpoint_every=10**6)
    assert any(row["success"] > 0 for row in rows)


@pytest.mark.parametrize("seed", ONE_SEED)
def test_dqn_does_not_reach_it(seed: int, tmp_path: Path) -> None:
    for _ in train(make_run("dqn", "chain-40", 8000, seed), tmp_path / "run", device="cpu", checkpoint_every=10**6):
        pass
    episodes = RunFolder(tmp_path / "run").read_table("episodes.csv")
    assert len(episodes) >= 150
    assert not any(int(row["success"]) for row in episodes)


@pytest.mark.parametrize(("size", "frames"), [(8, 5000), pytest.param(20, 24_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", ONE_SEED)
def test_csd_solves_deep_sea(size: int, frames: int, seed: int, tmp_path: Path) -> None:
    """One sequence of actions in a million reaches the reward of DeepSea of 20 × 20.

    The last quarter of the episodes counts: single seeds miss the reward for some episodes and reach it again.
    """
    for _ in train(
        make_run("csd", f"deep-sea-{size}", frames, seed), tmp_path / "run", device="cpu", checkpoint_every=10**6
    ):
        pass
    episodes = RunFolder(tmp_path / "run").read_table("episodes.csv")
    last = [int(row["success"]) for row in episodes[-(len(episodes) // 4) :]]
    assert sum(last) > len(last) / 2


@pytest.mark.slow
def test_dqn_does_not_solve_deep_sea(tmp_path: Path) -> None:
    for _ in train(make_run("dqn", "deep-sea-20", 24_000, 0), tmp_path / "run", device="cpu", checkpoint_every=10**6):
        pass
    assert not any(int(row["success"]) for row in RunFolder(tmp_path / "run").read_table("episodes.csv"))
