"""Uncertainty methods, one file each: fit on familiar data, then score any. Bigger is stranger."""

from onefold.methods.csd import CSD
from onefold.methods.energy import Energy
from onefold.methods.ensemble import DeepEnsemble
from onefold.methods.knn import KNN
from onefold.methods.last_layer_gp import LastLayerGP
from onefold.methods.mc_dropout import MCDropout
from onefold.methods.rnd import RND

METHODS = {method.__name__: method for method in (CSD, LastLayerGP, RND, DeepEnsemble, MCDropout, KNN, Energy)}

__all__ = ["CSD", "KNN", "METHODS", "RND", "DeepEnsemble", "Energy", "LastLayerGP", "MCDropout"]
