"""Where agents can be sent, by name, and how they learn there."""

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
NAMES = (*DOOM_VARIANTS, "chain-N", "deep-sea-N")
SMALL_NAME = re.compile(r"(chain|deep-sea)-(\d+)")
SMALLEST_SIZE = {"chain": 3, "deep-sea": 1}


class EnvironmentSpec(NamedTuple):
    """Environments of one kind: how one is made, how many are run at once, and whether each needs a process."""

    make: EnvFactory
    environments: int
    processes: bool
    learning: Learning


def find_environment(name: str, frames: int) -> EnvironmentSpec:
    """The world of that name, for a run of so many frames; any other name is one of Gymnasium's.

    Of `module:Id` the module must have been imported: a name can come from a file, which may never have one imported.
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
    if found := SMALL_NAME.fullmatch(name):
        size = int(found[2][:9])
        if found[1] == "deep-sea":  # a step off the only way to the treasure must not count for the steps before it
            small = replace(small, replay=replace(small.replay, n_step=1), target_period=80)
        if size < SMALLEST_SIZE[found[1]]:
            raise InputError(f"{found[1]}-N has an N of at least {SMALLEST_SIZE[found[1]]}, not {size}")
        return EnvironmentSpec(functools.partial(_make_small, kind=found[1], size=size), 4, False, small)
    module, _, id_ = name.rpartition(":")
    unknown = f"there is no environment {name[:100]!r}"
    if module and module not in sys.modules:
        raise InputError(f"{unknown}: its module is not imported. Import it, or give --env with this name")
    if id_ not in gymnasium.registry:
        near = difflib.get_close_matches(id_[:100], gymnasium.registry, 1)
        known = "its module registers none such" if module else f"known are {', '.join(NAMES)}, and those of Gymnasium"
        raise InputError(f"{unknown}; {known}{f' (did you mean {near[0]}?)' if near else ''}")
    return EnvironmentSpec(functools.partial(_make_gymnasium, name=id_), 4, False, small)


def import_environment(name: str) -> None:
    """Import the module of `module:Id`, which registers it with Gymnasium. Only for names that the user has typed."""
    module, colon, _ = name.rpartition(":")
    if not colon:
        return
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"environment {name!r}: {module!r} cannot be imported ({summarise_error(error)})") from error


def has_goal(name: str) -> bool:
    """Whether a large reward means that a goal was reached there; of other worlds that is not known."""
    return name in DOOM_VARIANTS or SMALL_NAME.fullmatch(name) is not None


def adapt_agent(agent: Agent, name: str, frames: int) -> Agent:
    """Return the agent as the environment needs it. The paper's values are for MyWayHome; elsewhere, rates and supports
    are larger, and the bonus's weight falls over the whole run."""
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
    from onefold.rl.small_envs import Chain, DeepSea

    del number
    return Chain(size) if kind == "chain" else DeepSea(size)


def _make_gymnasium(number: int, name: str) -> gymnasium.Env:
    del number
    return gymnasium.make(name)
