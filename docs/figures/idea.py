"""The pictures of docs/idea.md, computed by the package: `python docs/figures/idea.py`, a minute on two cores."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from style import IMAGES, Look, both, panels
from torch import Generator

from onefold.distil import distil_known_queries
from onefold.distil.known_query import KnownQueries
from onefold.distil.limit import PairKernel, all_pairs, contextual_limit
from onefold.exact import ntk_gp, reference_ensemble
from onefold.kernels import infinite
from onefold.metrics import rank_correlation
from onefold.nn.nets import NTKMLP

ROOT = Path(__file__).parent.parent.parent
LAW = infinite(1, activation="erf", w_std=3.0, b_std=3.0)
X = torch.tensor([[-2.1], [-1.7], [-1.2], [0.3], [0.8], [1.1]])
Y = torch.tensor([0.6, 1.2, 0.9, -0.9, -1.1, -0.6])
GRID = torch.linspace(-3, 3, 121)[:, None]
LINE = GRID[:, 0].numpy()
SHRINK = 0.01  # share of the labels that is trained on: keeps networks of these widths near their wide limit
QUERIES = (-1.45, -0.45, 2.4)


class Ensemble(NamedTuple):
    """What networks say along the line, trained ones and infinitely wide ones, and the law of infinitely many."""

    trained: Float[np.ndarray, "m g"]
    drawn: Float[np.ndarray, "n g"]
    deviation: Float[np.ndarray, " g"]


def ensemble() -> Ensemble:
    """Networks that differ by their random start only, trained on the same six points; Eq. 6–7, and draws from it."""
    generator = Generator().manual_seed(2)
    trained, _ = reference_ensemble(
        network(2048, generator), X, Y, GRID, members=8, steps=1000, momentum=0.9, generator=generator,
        corrected=True, label="eight networks",
    )  # fmt: skip
    law = ntk_gp(LAW, X, Y, GRID)
    values, vectors = torch.linalg.eigh(law.covariance)
    root = vectors * values.clamp(min=0).sqrt()
    drawn = law.mean.T + torch.randn(3000, len(GRID), generator=generator, dtype=root.dtype) @ root.T
    return Ensemble(trained.numpy(), drawn.numpy(), law.variance.sqrt().numpy())


def network(width: int, generator: Generator) -> NTKMLP:
    return NTKMLP(1, [width], activation=LAW.activation, w_std=LAW.w_std, b_std=LAW.b_std, generator=generator)


def disagree(found: Ensemble, look: Look) -> Figure:
    """Eight networks agree on the data and nowhere else."""
    figure, axes = panels(2, 11, 4.2, sharey=True)
    for curve in found.trained:
        axes[0].plot(LINE, curve, color=look.blue, lw=1.6, alpha=0.75)
    axes[0].set_title("eight networks, one data set")
    axes[1].set_title("how far apart they are: the uncertainty")
    middle, spread = found.trained.mean(0), found.trained.std(0, ddof=1)
    axes[1].plot(LINE, middle, color=look.blue, lw=2)
    axes[1].fill_between(LINE, middle - 2 * spread, middle + 2 * spread, color=look.blue, alpha=0.25, lw=0)
    for ax in axes:
        points(ax, look)
        ax.set_ylim(-9, 9)
        ax.set_xlabel("input")
    axes[0].set_ylabel("prediction")
    note(axes[1], look, "far from data\nthey disagree", (2.15, 2.6), (2.15, 2.6))
    note(axes[1], look, "on the data\nthey agree", (-1.2, 0.7), (-1.75, -6.5))
    return figure


def more_members(found: Ensemble, look: Look) -> Figure:
    """Ten ensembles of each size estimate the deviation; the closed form is the line that they gather around."""
    figure, axes = panels(3, 13, 3.9, sharey=True)
    inside = found.deviation > 0.2 * found.deviation.max()
    for ax, size in zip(axes, (3, 15, 100), strict=True):
        spreads = found.drawn.reshape(-1, size, len(LINE)).std(1, ddof=1)
        error = float(np.sqrt(((spreads[:, inside] / found.deviation[inside] - 1) ** 2).mean()))
        for curve in spreads[:10]:
            ax.plot(LINE, curve, color=look.blue, lw=1.1, alpha=0.6, label="ten ensembles of this size")
        ax.plot(LINE, found.deviation, "--", color=look.red, lw=2.2, label="infinitely many: closed form")
        ax.plot(X[:, 0], np.zeros(len(X)), "o", color=look.ink, ms=6, label="train points", clip_on=False, zorder=5)
        ax.set_title(f"{size} networks: off by {error:.0%}")
        ax.set_ylim(0, 8)
        ax.set_xlabel("input")
    axes[0].set_ylabel("standard deviation")
    handles, labels = axes[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3)
    return figure


def regressions() -> KnownQueries:
    """Section 3.1: one network trained for each query."""
    net, query = network(8192, Generator().manual_seed(0)), torch.tensor(QUERIES)[:, None]
    return distil_known_queries(net, LAW, X, query, GRID, steps=1000, shrink=SHRINK, label="queries")


def known_queries(known: KnownQueries, look: Look) -> Figure:
    """One regression a query: what is left of the similarity at the query itself is the variance."""
    query = torch.tensor(QUERIES)[:, None]
    exact = ntk_gp(LAW, X, Y, query).variance
    similarity, labels = LAW(query, GRID).numpy(), LAW(query, X).numpy()
    figure, axes = panels(3, 13, 4.2, sharey=True)
    for i, ax in enumerate(axes):
        here, learned = QUERIES[i], known.regression[i].numpy()
        top, bottom = np.interp(here, LINE, similarity[i]), np.interp(here, LINE, learned)
        ax.axvline(here, color=look.red, lw=1, alpha=0.4)
        ax.plot(LINE, similarity[i], ":", color=look.ink, lw=1.8, label="similarity to the query, before any data")
        ax.plot(LINE, learned, color=look.blue, lw=2.4, label="a network trained on it at the data")
        ax.plot(X[:, 0], labels[i], "o", color=look.ink, ms=6, label="its labels")
        ax.plot([here, here], [bottom, top], color=look.red, lw=5, solid_capstyle="butt", label="gap = variance")
        ax.set_title(
            f"query at {minus(here)}\ngap {float(known.variance[i]):.2f}, exact variance {float(exact[i]):.2f}"
        )
        ax.set_xlabel("input")
    axes[0].set_ylabel("similarity to the query")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


class Contextual(NamedTuple):
    """The labels and the learned similarity of every pair of input and context, and the variances on the diagonal."""

    labels: Float[np.ndarray, "n g"]
    learned: Float[np.ndarray, "g g"]
    variance: Float[np.ndarray, " g"]
    exact: Float[np.ndarray, " g"]


def contextual() -> Contextual:
    """g(x, c) of one infinitely wide model (Eq. 26): trained on train points against contexts, asked everywhere."""
    contexts = torch.linspace(-3, 3, 31)[:, None]
    pairs, labels = all_pairs(X, contexts), LAW(X, contexts).flatten()
    learned = contextual_limit(PairKernel(LAW, LAW), labels, pairs, all_pairs(GRID, GRID)).reshape(len(GRID), -1)
    variance = (LAW.diag(GRID) - learned.diagonal()).clamp(min=0)
    exact = ntk_gp(LAW, X, Y, GRID).variance
    return Contextual(LAW(X, GRID).numpy(), learned.numpy(), variance.numpy(), exact.numpy())


def all_queries(found: Contextual, look: Look) -> Figure:
    """Stripes of labels, the learned map, and its diagonal."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.15])
    low, high = float(found.learned.min()), float(found.labels.max())
    stripes = np.full_like(found.learned, np.nan)
    for x, row in zip(X[:, 0], found.labels, strict=True):
        at = int((x + 3) / 6 * (len(LINE) - 1))
        stripes[at - 1 : at + 2] = row
    for ax, values in zip(axes[:2], (stripes, found.learned), strict=True):
        ax.imshow(values, origin="lower", extent=(-3, 3, -3, 3), vmin=low, vmax=high, cmap="viridis")
        ax.set_xlabel("context: which query?")
        ax.set_ylabel("input")
    axes[1].plot([-3, 3], [-3, 3], color=look.red, lw=2.5)
    axes[0].set_title("what is known: similarities\nof the data to any context")
    axes[1].set_title("one model of two inputs\nlearns it and fills in the rest")
    axes[2].plot(LINE, found.exact, "--", color=look.red, lw=2.2, label="exact variance")
    axes[2].plot(LINE, found.variance, color=look.blue, lw=2.4, label="similarity lost on the diagonal")
    axes[2].plot(X[:, 0], np.zeros(len(X)), "o", color=look.ink, ms=6, clip_on=False, zorder=5)
    agreement = rank_correlation(found.variance, found.exact)
    axes[2].set_title(f"the diagonal: each input is its own query\n(rank correlation {agreement:.3f})")
    axes[2].set_xlabel("input")
    axes[2].set_ylim(0)
    axes[2].legend(loc="upper center")
    return figure


def one_pass(look: Look) -> Figure:
    """What happens to an input, and what that costs beside an ensemble (results/scoring_cpu.json)."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
    left.set_xlim(0, 11.4)
    left.set_ylim(0, 6)
    left.axis("off")
    box(left, look, (0.1, 2.5), (1.5, 1.0), "input x", look.faint)
    rows = ((4.5, "φ(x)   as an input", look.blue), (2.5, "ψ(x)   as its own context", look.blue),
            (0.5, "φ₀(x)   random, not trained", look.gold))  # fmt: skip
    for y, text, colour in rows:
        box(left, look, (2.5, y), (4.6, 1.0), text, colour)
        arrow(left, look, (1.6, 3.0), (2.5, y + 0.5))
        arrow(left, look, (7.1, y + 0.5), (8.2, 3.0))
    box(left, look, (8.2, 2.2), (3.1, 1.6), "variance\n‖φ₀‖² · ½‖φ − ψ‖²", look.red)
    left.set_title("one forward pass (φ and ψ scaled to length 1)")
    passes = json.loads((ROOT / "results" / "scoring_cpu.json").read_text("utf-8"))["passes"]
    names = ["one classifier", "CSD", "ensemble of 3", "ensemble of 15", "MC dropout, 100 samples"]
    colours = [look.blue if name == "CSD" else look.faint for name in names]
    right.barh(names[::-1], [passes[name] for name in names[::-1]], color=colours[::-1])
    for i, name in enumerate(names[::-1]):
        right.text(passes[name] * 1.08, i, f"{passes[name]:.3g}", va="center", color=look.ink)
    right.set_xscale("log")
    right.set_xlim(0.5, 400)
    right.set_title("cost, in passes of one classifier")
    right.tick_params(axis="y", colors=look.ink, length=0)
    right.tick_params(axis="x", labelbottom=False, length=0, which="both")
    right.spines[["left", "bottom"]].set_visible(False)
    return figure


def minus(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def points(ax: Axes, look: Look) -> None:
    ax.plot(X[:, 0], Y, "o", color=look.ink, ms=7, mec=look.paper, mew=1, zorder=5)


def note(ax: Axes, look: Look, text: str, at: tuple[float, float], where: tuple[float, float]) -> None:
    style = {"arrowstyle": "-", "color": look.muted, "lw": 1}
    ax.annotate(text, at, where, ha="center", va="center", color=look.ink, fontsize=11, arrowprops=style)


def box(ax: Axes, look: Look, at: tuple[float, float], size: tuple[float, float], text: str, colour: str) -> None:
    shape = FancyBboxPatch(at, *size, boxstyle="round,pad=0,rounding_size=0.18", fc="none", ec=colour, lw=2.2)
    ax.add_patch(shape)
    ax.text(at[0] + size[0] / 2, at[1] + size[1] / 2, text, ha="center", va="center", color=look.ink, fontsize=12)


def arrow(ax: Axes, look: Look, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=look.muted, lw=1.3, shrinkB=2))


def main(folder: Path = IMAGES) -> None:
    trained, known, pairs = ensemble(), regressions(), contextual()
    both("idea_disagree", lambda look: disagree(trained, look), folder)
    both("idea_infinite", lambda look: more_members(trained, look), folder)
    both("idea_queries", lambda look: known_queries(known, look), folder)
    both("idea_contexts", lambda look: all_queries(pairs, look), folder)
    both("idea_pass", one_pass, folder)


if __name__ == "__main__":
    main()
