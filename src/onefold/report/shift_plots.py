"""Pictures of a distribution-shift benchmark: pairs, ROC, scores, rejection, and what quality costs."""

from collections.abc import Callable, Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from onefold.bench.results import FALSE_ALARM_RATES as RATES
from onefold.bench.results import KEPT_SHARES as KEPT
from onefold.bench.sets import PERTURBED
from onefold.report.figures import (
    DASHES,
    MUTED,
    OUR_COLOURS,
    OUR_MARKERS,
    PANEL_SIZE,
    PAPER,
    RIVAL_COLOURS,
    RIVAL_MARKERS,
    LineStyle,
    Panel,
    PanelFigure,
    file_stems,
    label_text,
    style_axes,
)
from onefold.report.seeds import mean
from onefold.report.shift import Row, Section, Table

HISTOGRAM = (3.7, 2.1)
WORST = 50.0  # AUROC at the dark end of a matrix: what guessing has


def plates(table: Table) -> Iterator[tuple[int, PanelFigure]]:
    """All plates, each with the place, among those shown, of the section it belongs to."""
    styles, stems = _styles(table), file_stems((section.name for section in table.shown), "set")
    yield 0, matrices(table)
    for i, section in enumerate(table.shown):
        rows, stem = [row for row in section.rows if not row.extra and not row.ablation], stems[i]
        yield i, cost(section, rows, styles, stem)
        if not section.of_all:
            yield i, roc(section, rows, styles, stem, log=True)
            yield i, roc(section, rows, styles, stem, log=False)
            yield i, rejection(section, rows, styles, stem)
            yield i, histograms(section, rows, stem)


def _styles(table: Table) -> dict[str, LineStyle]:
    rows = [row for section in table.shown for row in section.rows if not row.ablation]
    ours = list(dict.fromkeys(row.method for row in rows if row.ours))
    rivals = list(dict.fromkeys(row.method for row in rows if not row.ours))
    found = {}
    for i, method in enumerate(ours):
        line = "-" if i < len(OUR_COLOURS) else DASHES[i % len(DASHES)]
        found[method] = LineStyle(OUR_COLOURS[i % len(OUR_COLOURS)], line, OUR_MARKERS[i % len(OUR_MARKERS)], 2.0)
    for i, method in enumerate(rivals):
        dash = DASHES[i // len(RIVAL_COLOURS) % len(DASHES)]
        marker = RIVAL_MARKERS[i % len(RIVAL_MARKERS)]
        found[method] = LineStyle(RIVAL_COLOURS[i % len(RIVAL_COLOURS)], dash, marker, 1.3)
    return found


def matrices(table: Table) -> PanelFigure:
    """AUROC of every familiar set against every strange one, a panel a row."""
    sections = table.sections
    foreign = dict.fromkeys([section.name for section in sections])
    foreign |= dict.fromkeys(name for section in sections for name in section.foreign)
    strange = [*(name for name in foreign if any(name in section.foreign for section in sections)), *PERTURBED]
    panels = []
    for method, extra in dict.fromkeys((row.method, row.extra) for section in sections for row in section.rows):
        values = np.full((len(sections), len(strange)), np.nan)
        title = ""
        for i, section in enumerate(sections):
            for row in section.rows:
                if (row.method, row.extra) == (method, extra):
                    title = f"{row.title}, by variance" if extra else row.title
                    values[i] = [mean(row.pairs[name].values()) if name in row.pairs else np.nan for name in strange]
        panels.append(Panel(f"AUROC of {title}, pair by pair", _matrix(title, values, sections, strange)))
    caption = (
        "AUROC against every strange set, mean over seeds: a row is the familiar set, a column the strange one. Bright "
        "is good; dark is guessing or worse."
    )
    size = (PANEL_SIZE[0], 1.1 + 0.34 * len(sections))
    return PanelFigure("pairs", "all sets", "Pair by pair", caption, panels, [], size)


def _matrix(
    title: str, values: np.ndarray, sections: Sequence[Section], strange: Sequence[str]
) -> Callable[[Axes], None]:
    def draw(ax: Axes) -> None:
        colours = matplotlib.colormaps["cividis"]
        ax.pcolormesh(np.ma.masked_invalid(values), cmap=colours, vmin=WORST, vmax=100, edgecolors=PAPER, lw=1)
        size = 7.5 if len(strange) <= 6 else 6.5 if len(strange) <= 8 else 0
        for (i, j), value in np.ndenumerate(values):
            if size and np.isfinite(value):
                red, green, blue, _ = colours((value - WORST) / (100 - WORST))
                bright = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.18
                ink = "#0b0b0b" if bright else "#fdfdfd"  # not the page's ink: it stands on the cell's own colour
                ax.text(j + 0.5, i + 0.5, f"{value:.1f}", ha="center", va="center", fontsize=size, color=ink)
        style_axes(ax, label_text(title, 44))
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
        ax.invert_yaxis()
        names = [label_text(name, 18) for name in strange]
        ax.set_xticks(np.arange(len(strange)) + 0.5, names, rotation=28, ha="right", rotation_mode="anchor")
        ax.set_yticks(np.arange(len(sections)) + 0.5, [label_text(section.name, 18) for section in sections])
        ax.tick_params(length=0, labelsize=7)

    return draw


def roc(section: Section, rows: Sequence[Row], styles: dict[str, LineStyle], stem: str, *, log: bool) -> PanelFigure:
    """Strange inputs found against false alarms, a panel a strange set, mean over seeds."""
    names = [*section.foreign, *(name for name in PERTURBED if any(name in row.pairs for row in rows))]

    def panel(name: str) -> Callable[[Axes], None]:
        def draw(ax: Axes) -> None:
            rates = [100 * rate for rate in (RATES if log else (0.0, *RATES))]
            ax.plot(rates, rates, color=MUTED, lw=0.8, ls=":")
            for row in rows:
                found = [unit.roc[name] for unit in row.units if name in unit.roc]
                if found:
                    curve = [100 * mean(values) for values in zip(*found, strict=True)]
                    style = styles[row.method]
                    ends = curve if log else [0.0, *curve]
                    ax.plot(rates, ends, color=style.colour, ls=style.line, lw=style.width)
            style_axes(ax, f"against {label_text(name)}", "false alarms, %", "found, %")
            ax.set_ylim(0, 102)
            if log:
                ax.set_xscale("log")
                ax.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
                ax.minorticks_off()

        return draw

    panels = [Panel(f"ROC curves, {section.name} against {name}", panel(name)) for name in names]
    axis = ", which is on a logarithmic axis" if log else ""
    caption = (
        f"Share of strange images found at each rate of false alarms{axis}; mean over seeds. Every method by its "
        "default score, in the variant (flips or none) that the table has."
    )
    name = f"roc{'_log' if log else ''}_{stem}"
    legend = _lines(rows, styles)
    return PanelFigure(name, section.name, "Alarms, right and false", caption, panels, legend, on_page=log)


def rejection(section: Section, rows: Sequence[Row], styles: dict[str, LineStyle], stem: str) -> PanelFigure:
    """Accuracy on what is left when the strangest-looking test images are turned away."""

    def draw(ax: Axes) -> None:
        for row in rows:
            curve = [100 * mean(values) for values in zip(*(unit.rejection for unit in row.units), strict=True)]
            style = styles[row.method]
            ax.plot([100 * (1 - kept) for kept in KEPT], curve, color=style.colour, ls=style.line, lw=style.width)
        style_axes(ax, "accuracy on what is kept", "turned away, %", "accuracy, %")

    caption = (
        "Accuracy on the familiar test set when the images that look strangest are turned away; a good score turns the "
        "mistakes away first. CSD, RND and LastLayerGP judge the separate classifier. Default scores, mean over seeds."
    )
    panels = [Panel(f"Accuracy against rejection on {section.name}", draw)]
    return PanelFigure(
        f"rejection_{stem}", section.name, "Turning away what looks strange", caption, panels, _lines(rows, styles)
    )


def histograms(section: Section, rows: Sequence[Row], stem: str) -> PanelFigure:
    """Scores of the familiar test set and of every strange one, a panel a method, for its first seed."""
    strange = [*section.foreign, *PERTURBED]
    palette = [OUR_COLOURS[0], OUR_COLOURS[3], RIVAL_COLOURS[1], OUR_COLOURS[1], *RIVAL_COLOURS[2:]]
    colours = dict(zip(strange, palette * len(strange), strict=False))
    marks = dict(zip(strange, ["-", *DASHES] * len(strange), strict=False))

    def panel(row: Row) -> Callable[[Axes], None]:
        low, high = row.units[0].histogram_range or (0.0, 1.0)
        counts = row.units[0].histogram

        def draw(ax: Axes) -> None:
            for name, values in counts.items():
                if name == "familiar" or name in strange:
                    edges = np.linspace(low, high, len(values) + 1)
                    shares = 100 * np.array(values) / max(sum(values), 1)
                    if name == "familiar":
                        ax.stairs(shares, edges, fill=True, color=RIVAL_COLOURS[0], alpha=0.45, lw=0)
                    else:
                        ax.stairs(shares, edges, color=colours[name], ls=marks[name], lw=1.3)
            score = label_text(row.units[0].default.replace("_", " "))
            style_axes(ax, label_text(row.title), f"{score}, seed {row.units[0].seed}", "%")
            ax.set_yscale("function", functions=(lambda y: np.sqrt(np.clip(y, 0, None)), np.square))
            ax.set_ylim(0, None)
            ax.set_yticks([tick for tick in (1, 5, 20, 50, 100) if tick < ax.get_ylim()[1]])
            ax.xaxis.set_major_locator(MaxNLocator(5))

        return draw

    keys: list[Artist] = [Patch(color=RIVAL_COLOURS[0], alpha=0.45, label=label_text(f"{section.name}, held out"))]
    keys += [Line2D([], [], color=colours[name], ls=marks[name], lw=1.5, label=label_text(name)) for name in strange]
    caption = (
        "Scores of held-out familiar images (filled) and of every strange set (lines), one seed, default scores. The "
        "vertical axis is a square root, so that small shares can be seen; the outer bars hold what lies beyond them."
    )
    panels = [Panel(f"Scores of {row.title} on {section.name}", panel(row)) for row in rows]
    return PanelFigure(f"scores_{stem}", section.name, "The scores themselves", caption, panels, keys, HISTOGRAM)


def cost(section: Section, rows: Sequence[Row], styles: dict[str, LineStyle], stem: str) -> PanelFigure:
    """AUROC over the time to fit and over the time to score."""

    def panel(figure: str, label: str) -> Callable[[Axes], None]:
        def draw(ax: Axes) -> None:
            for row in rows:
                times, quality, style = row.stat(figure), row.stat("auroc"), styles[row.method]
                if times and quality:
                    x, error = max(times.mean, 1e-4), quality.sd or 0.0
                    ax.errorbar(x, quality.mean, error, color=style.colour, lw=1, capsize=0, alpha=0.7)
                    ax.plot(x, quality.mean, marker=style.marker, color=style.colour, ls="", ms=6.5, mec="none")
            style_axes(ax, label.partition(",")[0], label, "AUROC, %")
            ax.set_xscale("log")
            ax.margins(0.08, 0.1)
            low, high = ax.get_xlim()
            steps = (1, 2, 5) if high < 60 * low else (1, 3) if high < 1000 * low else (1,)
            ax.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
            ax.minorticks_off()

        return draw

    keys: list[Artist] = [
        Line2D([], [], color=s.colour, marker=s.marker, ls="", ms=6.5, mec="none", label=label_text(row.title))
        for row in rows
        for s in [styles[row.method]]
    ]
    panels = [
        Panel("AUROC over the time to fit", panel("fit_s", "time to fit, s")),
        Panel("AUROC over the time to score", panel("score_us", "time to score, µs per image")),
    ]
    caption = (
        "AUROC as in the table (mean, bars: standard deviation over seeds) over time, on logarithmic axes: the upper "
        "left corner is the place to be. For methods on the classifier, training the classifier is not included."
    )
    return PanelFigure(f"cost_{stem}", section.name, "Quality against cost", caption, panels, keys)


def _lines(rows: Sequence[Row], styles: dict[str, LineStyle]) -> list[Artist]:
    return [
        Line2D([], [], color=s.colour, ls=s.line, lw=s.width, label=label_text(row.title))
        for row in rows
        for s in [styles[row.method]]
    ]
