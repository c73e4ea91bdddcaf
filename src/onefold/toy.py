"""The paper's two toy figures, computed: regressions for known queries in 1-D, and four variances in 2-D."""

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
SHRINK = 0.01  # share of the labels that is trained on: keeps networks of these widths near their wide limit
EXTENT = 2.5  # of the plane: queries and contexts lie in [−EXTENT, EXTENT]²
CSD_WIDTH = 1024
EXACT, LAST_LAYER = "exact NTK-GP", "CSD, last layer"


class Line(NamedTuple):
    """Figure (a): for each query x_t the prior kernel Θ(x, x_t) and the trained regression g_{x_t}(x)."""

    x_train: NDArray[np.float32]
    x_query: NDArray[np.float32]
    grid: NDArray[np.float32]
    prior: Float[np.ndarray, "q p"]
    labels: Float[np.ndarray, "q n"]
    regression: Float[np.ndarray, "q p"]
    variance: Float[np.ndarray, " q"]
    exact: Float[np.ndarray, " q"]


class Plane(NamedTuple):
    """Figure (b): variances on a square grid, by name, and the train points."""

    x_train: Float[np.ndarray, "n 2"]
    variances: dict[str, Float[np.ndarray, "g g"]]


def line(seed: int = 0, width: int = 16384, steps: int = 1000) -> Line:
    """Section 3.1 in one dimension, with Eq. 10 beside Eq. 7."""
    x = torch.tensor([[-1.7], [-1.3], [-0.2], [0.35], [1.5]])
    query = torch.tensor([[-2.5], [-0.75], [0.1], [0.9]])
    grid = torch.linspace(-3, 3, 241)[:, None]
    net = _network(1, width, Generator().manual_seed(seed))
    known = distil_known_queries(net, LAW, x, query, grid, steps=steps, shrink=SHRINK, label="known queries")
    exact = ntk_gp(LAW, x, torch.zeros(len(x)), query).variance
    tensors = (
        x[:, 0],
        query[:, 0],
        grid[:, 0],
        LAW(query, grid),
        LAW(query, x),
        known.regression,
        known.variance,
        exact,
    )
    return Line(*(t.numpy() for t in tensors))


def plane(seed: int = 0, members: int = 100, resolution: int = 40, steps: int = 1200) -> Plane:
    """The same train points seen by a trained ensemble, by the closed form and by CSD with two kinds of labels."""
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
    """Both figures' data, and a summary with the agreement of every pair of variances."""
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
    """Θ(x, x) − g(x, x) on the grid (Eq. 12), with contexts from the domain, from one contextual model."""
    model = wide_similarity(2, LAW, CSD_WIDTH, generator)
    distil_wide(model, PairKernel(LAW, LAW), labels, x, contexts, steps=steps, shrink=SHRINK, label=label)
    with torch.no_grad():
        return (labels.diag(grid) - model.confidence(grid) / SHRINK).clamp(min=0)


def _network(inputs: int, width: int, generator: Generator) -> NTKMLP:
    return NTKMLP(inputs, [width], activation=LAW.activation, w_std=LAW.w_std, b_std=LAW.b_std, generator=generator)


def _moons(n: int, generator: Generator) -> Float[Tensor, "n 2"]:
    """Two half circles that hold each other, with a little noise."""
    angle = torch.rand(n, generator=generator) * math.pi
    upper = torch.arange(n) < n // 2
    across = torch.where(upper, angle.cos() - 0.4, 0.6 - angle.cos())
    up = torch.where(upper, angle.sin() - 0.2, 0.3 - angle.sin())
    return 1.2 * torch.stack([across, up], 1) + 0.08 * torch.randn(n, 2, generator=generator)
