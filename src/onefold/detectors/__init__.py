"""Uncertainty methods, one file each: fit on familiar data, then score any. Bigger is stranger."""

from onefold.detectors.csd import CSD
from onefold.detectors.energy import Energy
from onefold.detectors.ensemble import DeepEnsemble
from onefold.detectors.knn import KNN
from onefold.detectors.laplace import Laplace
from onefold.detectors.last_layer_gp import LastLayerGP
from onefold.detectors.mc_dropout import MCDropout
from onefold.detectors.rnd import RND
from onefold.detectors.sgmcmc import SGMCMC

METHODS = {
    method.__name__: method for method in (CSD, LastLayerGP, RND, DeepEnsemble, MCDropout, Laplace, SGMCMC, KNN, Energy)
}

__all__ = ["CSD", "KNN", "METHODS", "RND", "SGMCMC", "DeepEnsemble", "Energy", "Laplace", "LastLayerGP", "MCDropout"]
