"""Data of the two toy figures of the paper: regressions for queries in 1-D, and four variances in 2-D."""

import itertools
import math
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Generator, Tensor

from onefold.core.provenance import provenance
from onefold.distil import distil_known_queries
from onefold.distil.limit import PairKernel
from onefold.distil.wide import distil_wide, wide_similarity
from onefold.exact import ntk_gp, reference_ensemble
from onefold.kernels import infinite, last_layer
from onefold.metrics import rank_correlation
from onefold.nn.nets import NTKMLP
from onefold.types import Kernel

LAW = infinite(1, activation="erf", w_std=3.0, b_std=3.0)
SHRINK = 0.01  # factor of the labels in training; keeps networks of these widths close to their wide limit
EXTENT = 2.5  # queries and contexts lie in [−EXTENT, EXTENT]²
CSD_WIDTH = 1024
EXACT, LAST_LAYER = "exact NTK-GP", "CSD, last layer"


class Line(NamedTuple):
    """Data of figure (a): for each query x_t the kernel Θ(x, x_t) and the trained regression g_{x_t}(x) on a grid."""

    x_train: NDArray[np.float32]
    x_query: NDArray[np.float32]
    grid: NDArray[np.float32]
    prior: Float[np.ndarray, "q p"]
    labels: Float[np.ndarray, "q n"]
    regression: Float[np.ndarray, "q p"]
    variance: Float[np.ndarray, " q"]
    exact: Float[np.ndarray, " q"]


class Plane(NamedTuple):
    """Data of figure (b): the train points, and variances on a square grid by name."""

    x_train: Float[np.ndarray, "n 2"]
    variances: dict[str, Float[np.ndarray, "g g"]]


def line(seed: int = 0, width: int = 16384, steps: int = 1000) -> Line:
    """Return the method of Section 3.1 in one dimension, with variances by Eq. 10 and by Eq. 7."""
    x = torch.tensor([[-1.7], [-1.3], [-0.2], [0.35], [1.5]])
    query = torch.tensor([[-2.5], [-0.75], [0.1], [0.9]])
    grid = torch.linspace(-3, 3, 241)[:, None]
    net = _network(1, width, Generator().manual_seed(seed))
    distilled = distil_known_queries(net, LAW, x, query, grid, steps=steps, shrink=SHRINK, label="known queries")
    exact = ntk_gp(LAW, x, torch.zeros(len(x)), query).variance
    tensors = (
        x[:, 0],
        query[:, 0],
        grid[:, 0],
        LAW(query, grid),
        LAW(query, x),
        distilled.regression,
        distilled.variance,
        exact,
    )
    return Line(*(t.numpy() for t in tensors))


def plane(seed: int = 0, members: int = 100, resolution: int = 40, steps: int = 1200) -> Plane:
    """Return variances for the same train points by an ensemble, the closed form, and CSD with two kinds of labels."""
    generator = Generator().manual_seed(seed)
    x = _moons(24, generator)
    y = torch.sin(2 * x[:, 0]) * x[:, 1]
    axis = torch.linspace(-EXTENT, EXTENT, resolution)
    grid = torch.cartesian_prod(axis, axis).flip(1)
    contexts = torch.cat([x, (2 * torch.rand(72, 2, generator=generator) - 1) * EXTENT])
    predictions, _ = reference_ensemble(
        _network(2, 512, generator),
        x,
        y,
        grid,
        members=members,
        steps=steps,
        momentum=0.9,
        generator=generator,
        corrected=True,
        label=f"{members} networks",
    )
    prior = last_layer(_network(2, CSD_WIDTH, generator))
    variances = {
        f"{members} trained networks": predictions.var(0),
        EXACT: ntk_gp(LAW, x, y, grid).variance,
        "CSD, full NTK": _csd(LAW, x, contexts, grid, steps, generator, "CSD, full NTK"),
        LAST_LAYER: _csd(prior, x, contexts, grid, steps, generator, LAST_LAYER),
    }
    return Plane(x.numpy(), {name: v.double().reshape(resolution, -1).numpy() for name, v in variances.items()})


def run(seed: int = 0) -> tuple[Line, Plane, dict[str, Any]]:
    """Return the data of both figures, and a summary with the rank correlation of every pair of variances."""
    started = time.perf_counter()
    first, second = line(seed), plane(seed)
    pairs = itertools.combinations(second.variances, 2)
    correlations = {f"{a} / {b}": rank_correlation(second.variances[a], second.variances[b]) for a, b in pairs}
    error = np.abs(first.variance - first.exact) / first.exact
    summary = {
        **provenance(torch.device("cpu")),
        "seed": seed,
        "kernel": asdict(LAW),
        "line": {
            "queries": first.x_query.tolist(),
            "variance": first.variance.tolist(),
            "exact_variance": first.exact.tolist(),
            "mean_relative_error": float(error.mean()),
        },
        "plane": {"rank_correlation": correlations},
        "seconds": round(time.perf_counter() - started, 1),
    }
    return first, second, summary


def _csd(
    labels: Kernel, x: Tensor, contexts: Tensor, grid: Tensor, steps: int, generator: Generator, label: str
) -> Tensor:
    """Return Θ(x, x) − g(x, x) on the grid (Eq. 12), by one contextual model with contexts from the domain."""
    model = wide_similarity(2, LAW, CSD_WIDTH, generator)
    distil_wide(model, PairKernel(LAW, LAW), labels, x, contexts, steps=steps, shrink=SHRINK, label=label)
    with torch.no_grad():
        return (labels.diag(grid) - model.confidence(grid) / SHRINK).clamp(min=0)


def _network(inputs: int, width: int, generator: Generator) -> NTKMLP:
    return NTKMLP(inputs, [width], activation=LAW.activation, w_std=LAW.w_std, b_std=LAW.b_std, generator=generator)


def _moons(n: int, generator: Generator) -> Float[Tensor, "n 2"]:
    """Return points on two interleaved half circles, with a little noise."""
    angle = torch.rand(n, generator=generator) * math.pi
    upper = torch.arange(n) < n // 2
    horizontal = torch.where(upper, angle.cos() - 0.4, 0.6 - angle.cos())
    vertical = torch.where(upper, angle.sin() - 0.2, 0.3 - angle.sin())
    return 1.2 * torch.stack([horizontal, vertical], 1) + 0.08 * torch.randn(n, 2, generator=generator)
