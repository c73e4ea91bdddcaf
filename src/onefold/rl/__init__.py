"""Exploration: agents that find a far goal with no other reward, the parts that they are made of, and their bonus for
agents of other libraries."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.rl.bonus import CSDBonus, LastLayerGPBonus, RNDBonus
    from onefold.rl.intrinsic import IntrinsicReward

__all__ = ["CSDBonus", "IntrinsicReward", "LastLayerGPBonus", "RNDBonus"]


def __getattr__(name: str) -> Any:
    """On first use: the bonuses need torch alone, the rest needs Gymnasium, too."""
    if name in __all__:
        module = "intrinsic" if name == "IntrinsicReward" else "bonus"
        return getattr(importlib.import_module(f"onefold.rl.{module}"), name)
    raise AttributeError(f"module 'onefold.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
