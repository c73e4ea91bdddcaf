"""Figures of a distribution-shift benchmark: pairs of sets, ROC, scores, rejection, and AUROC against cost."""

from collections.abc import Callable, Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from onefold.bench.results import FALSE_ALARM_RATES, KEPT_SHARES
from onefold.bench.sets import PERTURBED
from onefold.report.bench_table import Section, TableRow, shown_sections
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
from onefold.report.stats import mean

HISTOGRAM = (3.7, 2.1)
WORST = 50.0  # AUROC of guessing, at the dark end of a matrix


def draw_figures(table: Sequence[Section]) -> Iterator[tuple[int, PanelFigure]]:
    """Yield all figures, each with the index of its section among those shown.

    Args:
        table: Sections of `build_table`.
    """
    shown = shown_sections(table)
    styles, stems = _line_styles(shown), file_stems((section.name for section in shown), "set")
    yield 0, _draw_pairs(table[:-1])
    for i, (section, stem) in enumerate(zip(shown, stems, strict=True)):
        rows = [row for row in section.rows if row.kind in ("rival", "ours")]
        yield i, _draw_cost(section, rows, styles, stem)
        if not section.is_average:
            yield i, _draw_roc(section, rows, styles, stem, log=True)
            yield i, _draw_roc(section, rows, styles, stem, log=False)
            yield i, _draw_rejection(section, rows, styles, stem)
            yield i, _draw_histograms(section, rows, stem)


def _line_styles(sections: Sequence[Section]) -> dict[str, LineStyle]:
    """Return the style of each row: full lines for forms of CSD, dashed lines for rivals."""
    rows = [row for section in sections for row in section.rows if row.kind in ("rival", "ours")]
    ours = list(dict.fromkeys(row.name for row in rows if row.ours))
    rivals = list(dict.fromkeys(row.name for row in rows if not row.ours))
    styles = {}
    for i, method in enumerate(ours):
        line = "-" if i < len(OUR_COLOURS) else DASHES[i % len(DASHES)]
        styles[method] = LineStyle(OUR_COLOURS[i % len(OUR_COLOURS)], line, OUR_MARKERS[i % len(OUR_MARKERS)], 2.0)
    for i, method in enumerate(rivals):
        dash = DASHES[i // len(RIVAL_COLOURS) % len(DASHES)]
        marker = RIVAL_MARKERS[i % len(RIVAL_MARKERS)]
        styles[method] = LineStyle(RIVAL_COLOURS[i % len(RIVAL_COLOURS)], dash, marker, 1.3)
    return styles


def _draw_pairs(sections: Sequence[Section]) -> PanelFigure:
    """AUROC of every ID set against every OOD set, one panel for each row."""
    names = dict.fromkeys([section.name for section in sections])
    names |= dict.fromkeys(name for section in sections for name in section.other_sets)
    ood = [*(name for name in names if any(name in section.other_sets for section in sections)), *PERTURBED]
    panels = []
    for key in dict.fromkeys((row.name, row.by_paper_score) for section in sections for row in section.rows):
        values = np.full((len(sections), len(ood)), np.nan)
        title = ""
        for i, section in enumerate(sections):
            for row in section.rows:
                if (row.name, row.by_paper_score) == key:
                    title = f"{row.title}, by variance" if row.by_paper_score else row.title
                    values[i] = [mean(row.by_set[name].values()) if name in row.by_set else np.nan for name in ood]
        panels.append(Panel(f"AUROC of {title}, pair by pair", _pair_matrix(title, values, sections, ood)))
    caption = (
        "AUROC for every pair of an ID set (row) and an OOD set (column), mean over seeds. Bright is good; dark is "
        "guessing or worse."
    )
    size = (PANEL_SIZE[0], 1.1 + 0.34 * len(sections))
    return PanelFigure("pairs", "all sets", "Pair by pair", caption, panels, [], size)


def _pair_matrix(
    title: str, values: np.ndarray, sections: Sequence[Section], ood: Sequence[str]
) -> Callable[[Axes], None]:
    def draw(ax: Axes) -> None:
        colours = matplotlib.colormaps["cividis"]
        ax.pcolormesh(np.ma.masked_invalid(values), cmap=colours, vmin=WORST, vmax=100, edgecolors=PAPER, lw=1)
        size = 7.5 if len(ood) <= 6 else 6.5 if len(ood) <= 8 else 0
        for (i, j), value in np.ndenumerate(values):
            if size and np.isfinite(value):
                red, green, blue, _ = colours((value - WORST) / (100 - WORST))
                bright = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.18
                ink = "#0b0b0b" if bright else "#fdfdfd"  # contrast with the cell, in light and dark pages
                ax.text(j + 0.5, i + 0.5, f"{value:.1f}", ha="center", va="center", fontsize=size, color=ink)
        style_axes(ax, label_text(title, 44))
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
        ax.invert_yaxis()
        names = [label_text(name, 18) for name in ood]
        ax.set_xticks(np.arange(len(ood)) + 0.5, names, rotation=28, ha="right", rotation_mode="anchor")
        ax.set_yticks(np.arange(len(sections)) + 0.5, [label_text(section.name, 18) for section in sections])
        ax.tick_params(length=0, labelsize=7)

    return draw


def _draw_roc(
    section: Section, rows: Sequence[TableRow], styles: dict[str, LineStyle], stem: str, *, log: bool
) -> PanelFigure:
    """Detected OOD images against false alarms, one panel for each OOD set, mean over seeds."""
    names = [*section.other_sets, *(name for name in PERTURBED if any(name in row.by_set for row in rows))]

    def panel(name: str) -> Callable[[Axes], None]:
        def draw(ax: Axes) -> None:
            rates = [100 * rate for rate in (FALSE_ALARM_RATES if log else (0.0, *FALSE_ALARM_RATES))]
            ax.plot(rates, rates, color=MUTED, lw=0.8, ls=":")
            for row in rows:
                curves = [unit.roc[name] for unit in row.units if name in unit.roc]
                if curves:
                    curve = [100 * mean(values) for values in zip(*curves, strict=True)]
                    style = styles[row.name]
                    ends = curve if log else [0.0, *curve]
                    ax.plot(rates, ends, color=style.colour, ls=style.line, lw=style.width)
            style_axes(ax, f"against {label_text(name)}", "false alarms, %", "detected, %")
            ax.set_ylim(0, 102)
            if log:
                ax.set_xscale("log")
                ax.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
                ax.minorticks_off()

        return draw

    panels = [Panel(f"ROC curves, {section.name} against {name}", panel(name)) for name in names]
    axis = ", which is on a logarithmic axis" if log else ""
    caption = (
        f"Share of OOD images detected at each rate of false alarms{axis}; mean over seeds. Default scores, with the "
        "training (flips or none) that the table shows."
    )
    name = f"roc{'_log' if log else ''}_{stem}"
    legend = _legend_lines(rows, styles)
    return PanelFigure(name, section.name, "Detections and false alarms", caption, panels, legend, on_page=log)


def _draw_rejection(section: Section, rows: Sequence[TableRow], styles: dict[str, LineStyle], stem: str) -> PanelFigure:
    """Accuracy on the rest of the test set when the images with the largest scores are rejected."""

    def draw(ax: Axes) -> None:
        for row in rows:
            curves = [unit.rejection for unit in row.units if unit.rejection]
            if curves:
                curve = [100 * mean(values) for values in zip(*curves, strict=True)]
                rejected, style = [100 * (1 - kept) for kept in KEPT_SHARES], styles[row.name]
                ax.plot(rejected, curve, color=style.colour, ls=style.line, lw=style.width)
        style_axes(ax, "accuracy on the rest", "rejected, %", "accuracy, %")

    caption = (
        "Accuracy on the ID test set when the images with the largest scores are rejected; a good score rejects the "
        "mistakes first. For CSD, RND and LastLayerGP, the accuracy is the separate classifier's. Default scores, mean "
        "over seeds."
    )
    panels = [Panel(f"Accuracy against rejection on {section.name}", draw)]
    legend = _legend_lines(rows, styles)
    return PanelFigure(f"rejection_{stem}", section.name, "Rejection by score", caption, panels, legend)


def _draw_histograms(section: Section, rows: Sequence[TableRow], stem: str) -> PanelFigure:
    """Scores of the ID test set and of every OOD set, one panel for each row, for its first seed."""
    ood = [*section.other_sets, *PERTURBED]
    palette = [OUR_COLOURS[0], OUR_COLOURS[3], RIVAL_COLOURS[1], OUR_COLOURS[1], *RIVAL_COLOURS[2:]]
    colours = dict(zip(ood, palette * len(ood), strict=False))
    dashes = dict(zip(ood, ["-", *DASHES] * len(ood), strict=False))

    def panel(row: TableRow) -> Callable[[Axes], None]:
        low, high = row.units[0].histogram_range or (0.0, 1.0)
        counts = row.units[0].histogram

        def draw(ax: Axes) -> None:
            for name, values in counts.items():
                if name == "familiar" or name in ood:
                    edges = np.linspace(low, high, len(values) + 1)
                    shares = 100 * np.array(values) / max(sum(values), 1)
                    if name == "familiar":
                        ax.stairs(shares, edges, fill=True, color=RIVAL_COLOURS[0], alpha=0.45, lw=0)
                    else:
                        ax.stairs(shares, edges, color=colours[name], ls=dashes[name], lw=1.3)
            score = label_text(row.units[0].default.replace("_", " "))
            style_axes(ax, label_text(row.title), f"{score}, seed {row.units[0].seed}", "%")
            ax.set_yscale("function", functions=(lambda y: np.sqrt(np.clip(y, 0, None)), np.square))
            ax.set_ylim(0, None)
            ax.set_yticks([tick for tick in (1, 5, 20, 50, 100) if tick < ax.get_ylim()[1]])
            ax.xaxis.set_major_locator(MaxNLocator(5))

        return draw

    legend: list[Artist] = [Patch(color=RIVAL_COLOURS[0], alpha=0.45, label=label_text(f"{section.name}, held out"))]
    legend += [Line2D([], [], color=colours[name], ls=dashes[name], lw=1.5, label=label_text(name)) for name in ood]
    caption = (
        "Scores of held-out ID images (filled) and of every OOD set (lines), one seed, default scores. The vertical "
        "axis is a square root, which shows small shares. The outer bars include all scores beyond them."
    )
    panels = [Panel(f"Scores of {row.title} on {section.name}", panel(row)) for row in rows]
    return PanelFigure(f"scores_{stem}", section.name, "Scores", caption, panels, legend, HISTOGRAM)


def _draw_cost(section: Section, rows: Sequence[TableRow], styles: dict[str, LineStyle], stem: str) -> PanelFigure:
    """AUROC against the time to fit and the time to score."""

    def panel(figure: str, label: str) -> Callable[[Axes], None]:
        def draw(ax: Axes) -> None:
            for row in rows:
                times, quality, style = row.estimate(figure), row.estimate("auroc"), styles[row.name]
                if times and quality:
                    x, error = max(times.mean, 1e-4), quality.spread or 0.0
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

    legend: list[Artist] = [
        Line2D([], [], color=s.colour, marker=s.marker, ls="", ms=6.5, mec="none", label=label_text(row.title))
        for row in rows
        for s in [styles[row.name]]
    ]
    panels = [
        Panel("AUROC against the time to fit", panel("fit_s", "time to fit, s")),
        Panel("AUROC against the time to score", panel("score_us", "time to score, µs per image")),
    ]
    caption = (
        "AUROC as in the table (bars: standard deviation over seeds) against time on logarithmic axes. The upper left "
        "corner is best. For methods on the classifier, the time does not include training the classifier."
    )
    return PanelFigure(f"cost_{stem}", section.name, "AUROC against cost", caption, panels, legend)


def _legend_lines(rows: Sequence[TableRow], styles: dict[str, LineStyle]) -> list[Artist]:
    return [
        Line2D([], [], color=s.colour, ls=s.line, lw=s.width, label=label_text(row.title))
        for row in rows
        for s in [styles[row.name]]
    ]
