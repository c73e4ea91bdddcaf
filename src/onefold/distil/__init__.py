"""Contextual Similarity Distillation: one regression whose result is the variance of an infinite ensemble."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.distil.contexts import AugmentedContexts, CopiedContexts, ExtraContexts, Mixture, TrainContexts
    from onefold.distil.fit import distillation
    from onefold.distil.known_query import distil_known_queries
    from onefold.distil.limit import PairKernel, all_pairs, contextual_limit
    from onefold.distil.loss import similarity_loss
    from onefold.distil.model import Architecture, Similarity, similarity_model
    from onefold.nn.augment import Chain, augment

__all__ = [
    "Architecture",
    "AugmentedContexts",
    "Chain",
    "CopiedContexts",
    "ExtraContexts",
    "Mixture",
    "PairKernel",
    "Similarity",
    "TrainContexts",
    "all_pairs",
    "augment",
    "contextual_limit",
    "distil_known_queries",
    "distillation",
    "similarity_loss",
    "similarity_model",
]
MODULES = {
    "onefold.distil.contexts": ("AugmentedContexts", "CopiedContexts", "ExtraContexts", "Mixture", "TrainContexts"),
    "onefold.distil.fit": ("distillation",),
    "onefold.distil.known_query": ("distil_known_queries",),
    "onefold.distil.limit": ("PairKernel", "all_pairs", "contextual_limit"),
    "onefold.distil.loss": ("similarity_loss",),
    "onefold.distil.model": ("Architecture", "Similarity", "similarity_model"),
    "onefold.nn.augment": ("Chain", "augment"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: the exploration bonuses need `model` and `loss` only."""
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'onefold.distil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
