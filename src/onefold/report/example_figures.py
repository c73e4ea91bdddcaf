"""Figures of the toy and the demo, drawn without the global state of pyplot."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from onefold.core.storage import write_bytes
from onefold.toy import EXACT, EXTENT, LAST_LAYER, Line, Plane

INK, MUTED, FAMILIAR, UNFAMILIAR = "#1d2733", "#8b97a5", "#2a78b5", "#d1495b"
DPI = 160
BINS = 40  # of a histogram


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


def data_uri(figure: Figure) -> str:
    """Return the figure as a data URI of an SVG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def draw_line(line: Line, path: Path) -> None:
    """Draw the paper's first figure: a panel for each query, where the gap at the query is the ensemble's variance."""
    count = len(line.x_query)
    figure = Figure(figsize=(3.3 * count, 3.1), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for i, ax in enumerate(axes):
        query, grid = line.x_query[i], line.grid
        top, bottom = (np.interp(query, grid, curve[i]) for curve in (line.prior, line.regression))
        ax.plot(grid, line.prior[i], ":", color=INK, lw=1.4, label="prior kernel Θ(x, xₜ)")
        ax.plot(grid, line.regression[i], color=FAMILIAR, lw=2, label="after training, g(x)")
        ax.plot(line.x_train, line.labels[i], "o", color=INK, ms=4.5, label="labels Θ(X, xₜ)")
        ax.plot([query, query], [bottom, top], color=UNFAMILIAR, lw=3, solid_capstyle="butt", label="variance at xₜ")
        ax.axvline(query, color=UNFAMILIAR, lw=0.8, alpha=0.35)
        ax.set_title(
            f"xₜ = {query:g}:  variance {line.variance[i]:.2f}, exact {line.exact[i]:.2f}", fontsize=9, color=INK
        )
        ax.set_xlabel("x", color=INK)
        _style_axes(ax)
    axes[0].set_ylabel("similarity to xₜ", color=INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    write_bytes(path, png(figure))


def draw_plane(plane: Plane, path: Path) -> None:
    """Draw the paper's second figure: variances side by side on one scale, with the training points."""
    names = list(plane.variances)
    figure = Figure(figsize=(3.1 * len(names) + 0.8, 3.5), layout="constrained")
    axes = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    exact = plane.variances[EXACT]
    top, e = float(np.quantile(exact, 0.99)), EXTENT
    for ax, name in zip(axes, names, strict=True):
        variance, title = plane.variances[name], name
        if name == LAST_LAYER:  # its kernel has fewer terms and a smaller scale; the title states the factor
            factor = float((variance * exact).sum() / (variance**2).sum())
            variance, title = factor * variance, f"{name} (× {factor:.1f})"
        ax.imshow(
            variance,
            origin="lower",
            extent=(-e, e, -e, e),
            vmin=0,
            vmax=top,
            cmap="viridis",
            interpolation="bilinear",
        )
        ax.plot(*plane.x_train.T, "o", color=UNFAMILIAR, mec="white", mew=0.6, ms=4.5)
        ax.set_title(title, fontsize=10, color=INK)
        ax.tick_params(colors=MUTED, labelsize=7)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="variance", shrink=0.85, pad=0.01)
    write_bytes(path, png(figure))


def histogram(
    familiar: NDArray[np.float64],
    unfamiliar: Mapping[str, NDArray[np.float64]],
    axis: Mapping[str, Any],
    threshold: float,
) -> Figure:
    """Return histograms of the familiar scores against those of each unfamiliar set, on one axis of `score_axis`."""
    columns = 2
    rows = -(-len(unfamiliar) // columns)
    figure = Figure(figsize=(3.6 * columns, 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    bins = (np.logspace if axis["log"] else np.linspace)(axis["lo"], axis["hi"], BINS + 1)
    for ax, (name, scores) in zip(axes, unfamiliar.items(), strict=False):
        for values, colour in ((familiar, FAMILIAR), (scores, UNFAMILIAR)):
            ax.hist(
                np.clip(values, bins[0], bins[-1]), bins=list(bins), weights=np.full(len(values), 1 / len(values)),
                color=colour, alpha=0.62,
            )  # fmt: skip
        ax.axvline(threshold, color=INK, lw=1, ls="--")
        ax.set_xscale("log" if axis["log"] else "linear")
        ax.set_title(name, fontsize=9, color=INK)
        _style_axes(ax)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    return figure


def labelled_images(
    images: Sequence[Float[np.ndarray, "h w"]], labels: Sequence[str], flagged: Sequence[bool], columns: int = 6
) -> Figure:
    """Return small images in rows, with a label below each; labels of flagged images have the colour of alarms."""
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(0.95 * columns, 1.3 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
    for ax, image, label, alarm in zip(axes, images, labels, flagged, strict=False):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        ax.set_xlabel(label, fontsize=9, color=UNFAMILIAR if alarm else FAMILIAR, labelpad=3)
    return figure


def _style_axes(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)
    ax.tick_params(colors=MUTED, labelsize=8)
