"""The agents' settings in MyWayHome are those of the paper's Table "hpsettingsvizdoom"."""

from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Generator

from onefold.rl.agents import AGENTS
from onefold.rl.augmentation import FrameAugmentation
from onefold.rl.bonus_networks import CSDNetworks, RNDNetworks, make_bonus_networks
from onefold.rl.doom import LIVING_COST, SIDE, STACK, STEPS, MyWayHome
from onefold.rl.settings import make_run

MY_WAY_HOME = ("my-way-home-dense", "my-way-home-sparse", "my-way-home-very-sparse")

LEARNING = {
    "replay": {"capacity": 1_000_000, "stack": 6, "n_step": 10, "discount": 0.997, "alpha": 0.5},
    "batch_size": 256,
    "learning_starts": 100_000,
    "bonus_learning_starts": 200_000,
    "target_period": 8000,
    "epsilon": {"start": 1.0, "end": 0.01, "frames": 500_000},
    "per_beta": {"start": 0.45, "end": 1.0, "frames": 5e6},
    "max_grad_norm": 10.0,
    "adam_eps": 0.005 / 256,
    "channels": (32, 32, 64),
    "hidden": 256,
}

# Shared by all agents unless a row below differs.
DEFAULTS: dict[str, Any] = {
    "members": 0, "atoms": 0, "dueling": False, "prior_scale": 0.0, "policy": "greedy",
    "bonus": "none", "bonus_form": "variance", "bonus_head": False, "optimistic": False, "bonus_scale": 1.0,
    "bonus_weight": {"start": 0.1, "end": 0.01, "frames": 3.3e6}, "bonus_reset_every": 0,
    "head_losses": "mean", "q_bound": 10.0, "u_bound": 10.0, "lr": 2.5e-4, "bonus_lr": 2.5e-4,
}  # fmt: skip
BONUS_SCALE = 1 - 0.997**10
TABLE: dict[str, dict[str, Any]] = {
    "dqn": {"members": 1, "dueling": True},
    "bdqn": {"members": 10, "prior_scale": 1.0, "policy": "thompson"},
    "rnd": {
        "atoms": 101, "bonus": "rnd", "bonus_scale": BONUS_SCALE, "q_bound": 5.4, "lr": 6.25e-4,
        "bonus_weight": {"start": 1.0, "end": 0.01, "frames": 3.3e6},
    },
    "ids": {"members": 10, "atoms": 101, "prior_scale": 1.0, "policy": "ids", "head_losses": "sum"},
    "csd": {
        "atoms": 101, "bonus": "csd", "bonus_head": True, "bonus_scale": BONUS_SCALE, "q_bound": 2.0, "u_bound": 3.4,
        "lr": 6.25e-4,
    },
}  # fmt: skip


@pytest.mark.parametrize("environment", MY_WAY_HOME)
@pytest.mark.parametrize("agent", TABLE)
def test_agents_have_the_settings_of_the_paper(agent: str, environment: str) -> None:
    settings = asdict(make_run(agent, environment, 3_000_000, 7))
    assert settings == {
        "name": agent, "environment": environment, "frames": 3_000_000, "seed": 7, "num_envs": 16,
        "agent": DEFAULTS | TABLE[agent], "learning": LEARNING,
    }  # fmt: skip


def test_all_agents_of_the_paper_are_in_the_table() -> None:
    assert set(AGENTS) == set(TABLE)


@pytest.mark.parametrize("agent", ["rnd", "csd"])
def test_bonus_networks_have_the_sizes_of_the_paper(agent: str) -> None:
    """Stages of 16, 16 and 32 channels, one hidden layer of 256, 256 outputs; the target has one hidden layer."""
    networks: Any = make_bonus_networks(AGENTS[agent], (6, 42, 42), 5, Generator().manual_seed(0))
    kind: Any = CSDNetworks if agent == "csd" else RNDNetworks
    assert isinstance(networks, kind)
    trained = [networks.model.phi, networks.model.psi] if agent == "csd" else [networks.scorer.predictor]
    target = networks.prior if agent == "csd" else networks.scorer.target
    for network in trained:
        convolutions = [p.shape for p in network.parameters() if p.ndim == 4]
        assert [shape[0] for shape in convolutions] == [16] * 10 + [32] * 5
        assert [tuple(p.shape) for p in network.parameters() if p.ndim == 2] == [(256, 32 * 6 * 6), (256, 256)]
    assert [p.shape[0] for p in target.parameters() if p.ndim == 4] == [16] * 10 + [32] * 5
    hidden = [tuple(p.shape) for p in target.parameters() if p.ndim == 2]
    assert hidden[0] == (256, 32 * 6 * 6)
    x = torch.rand(3, 6, 42, 42)
    with torch.no_grad():
        assert target(x).shape == (3, 256)
        assert networks.value(x).shape == (3,)


def test_augmentation_has_the_probabilities_of_the_paper() -> None:
    """A quarter of the contexts are augmented: perspective and flip with probability ½, crops of 75 to 100 %."""
    augmentation = FrameAugmentation()
    assert (augmentation.apply, augmentation.perspective, augmentation.flip, augmentation.crop_area) == (
        0.25,
        0.5,
        0.5,
        (0.75, 1.0),
    )


def test_observations_have_the_preprocessing_of_the_paper() -> None:
    assert (SIDE, STACK, STEPS, LIVING_COST) == (42, 6, 2100, 0.0001)
    with MyWayHome() as env:
        assert env.action_space == gymnasium.spaces.Discrete(5)
        assert env.observation_space.shape == (42, 42)
        assert env.observation_space.dtype == np.uint8
