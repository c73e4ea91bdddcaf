"""Curiosity finds what chance does not: the deceptive chain of 40 states."""

from pathlib import Path

import pytest

from onefold.rl.folder import Folder
from onefold.rl.runs import train
from onefold.rl.settings import run_of

SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_csd_reaches_the_far_end_of_the_chain(seed: int, tmp_path: Path) -> None:
    rows = train(run_of("csd", "chain-40", 8000, seed), tmp_path / "run", device="cpu", every=10**6)
    assert any(row["reached"] > 0 for row in rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_chance_does_not(seed: int, tmp_path: Path) -> None:
    for _ in train(run_of("dqn", "chain-40", 8000, seed), tmp_path / "run", device="cpu", every=10**6):
        pass
    episodes = Folder(tmp_path / "run").rows("episodes.csv")
    assert len(episodes) >= 150
    assert not any(int(row["reached"]) for row in episodes)
