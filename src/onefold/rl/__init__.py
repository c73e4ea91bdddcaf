"""Reinforcement learning: the paper's agents, their environments, and exploration bonuses for other libraries."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.rl.agents import Agent, LinearSchedule
    from onefold.rl.bonus import CSDBonus, LastLayerGPBonus, RNDBonus
    from onefold.rl.gym_wrapper import IntrinsicReward
    from onefold.rl.runs import resume, train
    from onefold.rl.settings import make_run

__all__ = [
    "Agent", "CSDBonus", "IntrinsicReward", "LastLayerGPBonus", "LinearSchedule", "RNDBonus", "make_run", "resume",
    "train",
]  # fmt: skip
MODULES = {"Agent": "agents", "LinearSchedule": "agents", "IntrinsicReward": "gym_wrapper", "make_run": "settings"}
MODULES |= {"resume": "runs", "train": "runs"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: the bonuses need only torch, the rest also needs Gymnasium."""
    if name in __all__:
        return getattr(importlib.import_module(f"onefold.rl.{MODULES.get(name, 'bonus')}"), name)
    raise AttributeError(f"module 'onefold.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
