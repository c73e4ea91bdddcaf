"""Uncertainty methods, one file each: fit on familiar data, then score any. Bigger is stranger."""

from onefold.methods.csd import CSD
from onefold.methods.energy import Energy
from onefold.methods.ensemble import DeepEnsemble
from onefold.methods.knn import KNN
from onefold.methods.laplace import Laplace
from onefold.methods.last_layer_gp import LastLayerGP
from onefold.methods.mc_dropout import MCDropout
from onefold.methods.rnd import RND
from onefold.methods.sgmcmc import SGMCMC

METHODS = {
    method.__name__: method for method in (CSD, LastLayerGP, RND, DeepEnsemble, MCDropout, Laplace, SGMCMC, KNN, Energy)
}

__all__ = ["CSD", "KNN", "METHODS", "RND", "SGMCMC", "DeepEnsemble", "Energy", "Laplace", "LastLayerGP", "MCDropout"]
