"""Contextual Similarity Distillation: the variance of an infinite ensemble as the result of one regression."""

from onefold.distil.contexts import AugmentedContexts, ExtraContexts, Mixture, TrainContexts
from onefold.distil.fit import Architecture, distillation, similarity_model
from onefold.distil.known_query import distil_known_queries
from onefold.distil.limit import PairKernel, all_pairs, contextual_limit
from onefold.distil.loss import similarity_loss
from onefold.distil.model import Similarity
from onefold.nn.augment import Chain, augment

__all__ = [
    "Architecture",
    "AugmentedContexts",
    "Chain",
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
