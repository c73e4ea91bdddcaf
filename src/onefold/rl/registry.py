"""Environments by name, with the learning settings that suit each."""

import difflib
import functools
import importlib
import re
import sys
from dataclasses import replace
from typing import NamedTuple

from onefold.errors import InputError
from onefold.rl.agents import Agent, Learning, LinearSchedule, ReplaySettings
from onefold.rl.env_table import EnvFactory, summarise_error
from onefold.rl.gymnasium_import import gymnasium

DOOM_VARIANTS = {"my-way-home-dense": "dense", "my-way-home-sparse": "sparse", "my-way-home-very-sparse": "very_sparse"}
ENVIRONMENT_NAMES = (*DOOM_VARIANTS, "chain-N", "deep-sea-N")
SMALL_NAME = re.compile(r"(chain|deep-sea)-(\d+)")
SMALLEST_SIZE = {"chain": 3, "deep-sea": 1}


class EnvironmentSpec(NamedTuple):
    """How to make and run environments of one kind."""

    make: EnvFactory
    num_envs: int
    """Default number of environments that step together."""
    in_workers: bool
    """Whether they run in worker processes."""
    learning: Learning
    """Default learning settings."""


def find_environment(name: str, frames: int) -> EnvironmentSpec:
    """Return the environment with this name, for a run of this many frames.

    Names other than `ENVIRONMENT_NAMES` are ids of Gymnasium. The module of `module:Id` must have been imported: a name
    can come from an untrusted file, which must not cause an import.
    """
    if name in DOOM_VARIANTS:
        return EnvironmentSpec(functools.partial(_make_doom, variant=DOOM_VARIANTS[name]), 16, True, Learning())
    small = Learning(
        replay=ReplaySettings(capacity=20_000, stack=1, n_step=3, discount=0.99),
        batch_size=64,
        learning_starts=500,
        bonus_learning_starts=0,
        target_period=400,
        epsilon=LinearSchedule(start=1.0, end=0.01, frames=frames / 10),
        per_beta=LinearSchedule(start=0.45, end=1.0, frames=frames),
        hidden=64,
    )
    if match := SMALL_NAME.fullmatch(name):
        kind, size = match[1], int(match[2][:9])
        if kind == "deep-sea":  # n-step returns would blame earlier steps for a later wrong step
            small = replace(small, replay=replace(small.replay, n_step=1), target_period=80)
        if size < SMALLEST_SIZE[kind]:
            raise InputError(f"{kind}-N: N must be at least {SMALLEST_SIZE[kind]} (got {size}).")
        return EnvironmentSpec(functools.partial(_make_small, kind=kind, size=size), 4, False, small)
    module, _, id_ = name.rpartition(":")
    if module and module not in sys.modules:
        raise InputError(
            f"environment {name[:100]!r}: its module is not imported. Import it, or pass this name with --env."
        )
    if id_ not in gymnasium.registry:
        similar = difflib.get_close_matches(id_[:100], gymnasium.registry, 1)
        names = "" if module else f" Use {', '.join(ENVIRONMENT_NAMES)}, or an id of Gymnasium."
        hint = f" Did you mean {similar[0]}?" if similar else names
        problem = "its module does not register this id" if module else "there is no such environment"
        raise InputError(f"environment {name[:100]!r}: {problem}.{hint}")
    return EnvironmentSpec(functools.partial(_make_gymnasium, name=id_), 4, False, small)


def import_environment(name: str) -> None:
    """Import the module of `module:Id`, which registers the id with Gymnasium; only for names that the user typed."""
    module, colon, _ = name.rpartition(":")
    if not colon:
        return
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"environment {name!r}: {module!r} cannot be imported ({summarise_error(error)}).") from error


def has_goal(name: str) -> bool:
    """Return True if a large reward of the environment means that its goal was reached."""
    return name in DOOM_VARIANTS or SMALL_NAME.fullmatch(name) is not None


def adapt_agent(agent: Agent, name: str, frames: int) -> Agent:
    """Return the agent with settings that suit the environment.

    The paper's values are for MyWayHome. Elsewhere, learning rates and supports are larger, and the weight of the bonus
    falls over the whole run.
    """
    if name in DOOM_VARIANTS:
        return agent
    weight = LinearSchedule(start=1.5, end=0.15, frames=frames)
    agent = replace(
        agent, lr=1e-3, bonus_lr=1e-3, bonus_weight=weight, bonus_scale=1.0, bonus_form="variance", head_losses="sum",
        q_bound=10.0, u_bound=10.0,
    )  # fmt: skip
    if name.startswith("deep-sea-") and agent.bonus == "csd":
        weight = replace(weight, end=weight.start)
        return replace(agent, bonus_head=False, optimistic=True, bonus_form="relative", bonus_weight=weight)
    return agent


def _make_doom(number: int, variant: str) -> gymnasium.Env:
    from onefold.rl.doom import MyWayHome

    del number
    return MyWayHome(variant)  # pyright: ignore[reportArgumentType]


def _make_small(number: int, kind: str, size: int) -> gymnasium.Env:
    from onefold.rl.small_envs import DeceptiveChain, DeepSea

    del number
    return DeceptiveChain(size) if kind == "chain" else DeepSea(size)


def _make_gymnasium(number: int, name: str) -> gymnasium.Env:
    del number
    return gymnasium.make(name)
