"""The detection methods: one entry each, read by the command line, scikit-learn, the benchmark and the docs.

Importing this module loads no torch; `MethodInfo.detector_class` imports the module of a method on first use.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onefold.detectors.base import Detector


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """Description of a detection method.

    Args:
        name: Name of the class in `onefold.detectors` and in the headers of detector files.
        module: Module of the class in `onefold.detectors`.
        command: Name on the command line.
        title: Title in tables and on pages.
        summary: One-line description.
        needs_labels: True if `fit` takes targets, `fit(x, y)`.
        needs_classifier: True if the constructor needs a trained classifier.
        accepts_kernel: True if the constructor takes `kernel=`, so that the method works on a trained model.
        trains: True if `fit` takes gradient steps, and with them `checkpoint=` and `progress=`.
        updates: True if the method has `update`.
        exports: True if the method has `export`.
        has_variance: True if the method has `variance` and `relative`.
    """

    name: str
    module: str
    command: str
    title: str
    summary: str
    needs_labels: bool = False
    needs_classifier: bool = False
    accepts_kernel: bool = False
    trains: bool = False
    updates: bool = False
    exports: bool = False
    has_variance: bool = False

    @property
    def detector_class(self) -> "type[Detector]":
        """Return the class; its module is imported on first use."""
        return getattr(importlib.import_module(f"onefold.detectors.{self.module}"), self.name)


_METHODS = (
    MethodInfo(
        name="CSD",
        module="csd",
        command="csd",
        title="CSD",
        summary="Contextual Similarity Distillation: the variance of an infinite ensemble from one trained model",
        accepts_kernel=True,
        trains=True,
        updates=True,
        exports=True,
        has_variance=True,
    ),
    MethodInfo(
        name="LastLayerGP",
        module="last_layer_gp",
        command="gp",
        title="Last-layer GP",
        summary="Gaussian-process variance of the last layer in closed form; fast, and good on small data",
        accepts_kernel=True,
        updates=True,
        exports=True,
        has_variance=True,
    ),
    MethodInfo(
        name="LocalGP",
        module="local_gp",
        command="local-gp",
        title="Local GP",
        summary="Gaussian-process variance on the nearest training samples, for embeddings; without training",
        accepts_kernel=True,
        updates=True,
        exports=True,
        has_variance=True,
    ),
    MethodInfo(
        name="RND",
        module="rnd",
        command="rnd",
        title="RND",
        summary="Random network distillation: the error of a network that predicts a random one",
        trains=True,
        updates=True,
        exports=True,
    ),
    MethodInfo(
        name="DeepEnsemble",
        module="ensemble",
        command="ensemble",
        title="Deep ensemble",
        summary="Disagreement of several networks trained from independent initialisations",
        needs_labels=True,
        trains=True,
    ),
    MethodInfo(
        name="MCDropout",
        module="mc_dropout",
        command="mcdropout",
        title="MC dropout",
        summary="Disagreement of one network under fixed random draws of dropped units",
        needs_labels=True,
        trains=True,
    ),
    MethodInfo(
        name="Laplace",
        module="laplace",
        command="laplace",
        title="Laplace",
        summary="Disagreement of linearised networks drawn from a Laplace approximation",
        needs_labels=True,
        trains=True,
    ),
    MethodInfo(
        name="SGMCMC",
        module="sgmcmc",
        command="sgmcmc",
        title="SG-MCMC",
        summary="Disagreement of networks sampled from the posterior by stochastic-gradient MCMC",
        needs_labels=True,
        trains=True,
    ),
    MethodInfo(
        name="KNN",
        module="knn",
        command="knn",
        title="KNN",
        summary="Distance to the k-th nearest training sample in feature space",
        accepts_kernel=True,
        updates=True,
        exports=True,
    ),
    MethodInfo(
        name="Energy",
        module="energy",
        command="energy",
        title="Energy",
        summary="Energy of the logits of a trained classifier, without training",
        needs_classifier=True,
        accepts_kernel=True,
        exports=True,
    ),
)

METHODS: dict[str, MethodInfo] = {method.name: method for method in _METHODS}
"""Every method by the name of its class."""


def by_command(command: str) -> MethodInfo:
    """Return the method with this name on the command line; raise KeyError if there is none."""
    return {method.command: method for method in _METHODS}[command]
