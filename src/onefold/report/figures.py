"""Figures of reports: panels that share a legend, saved as files and embedded in pages in light and dark colours."""

import base64
import functools
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from onefold.core.storage import write_bytes
from onefold.errors import visible

PLOTS = "plots"  # folder of a report's figures
INK, MUTED, FAINT, PAPER = "#1d2733", "#77838f", "#e3e7ec", "#fffffe"
# The colours of Okabe and Ito, darkened for contrast on white, and their counterparts on a dark page.
DARK = {
    INK: "#e9eef3", MUTED: "#94a0ac", FAINT: "#2b3540", PAPER: "#171d24",
    "#c2410c": "#f0803f", "#a3478f": "#d98ac4", "#b87800": "#e6ac3c", "#0068a8": "#4ea6de", "#00785a": "#2fb58f",
    "#566270": "#a9b5c1", "#3d94cc": "#8cc7ee", "#8c1c2f": "#e77f8e",
}  # fmt: skip
OUR_COLOURS = ("#c2410c", "#a3478f", INK, "#8c1c2f", "#b87800")
RIVAL_COLOURS = ("#0068a8", "#00785a", "#566270", "#3d94cc")
DASHES: Sequence[Any] = ((0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)), (0, (8, 3)))
OUR_MARKERS: Sequence[Any] = "oDphH"
RIVAL_MARKERS: Sequence[Any] = (*"s^vPX<>8d*", (4, 1, 0))  # the last is a star with four points
PANEL_SIZE = (3.7, 2.9)  # inches, the width of a phone
MAX_LABEL = 30  # characters of a name in a figure
RC: dict[Any, Any] = {
    "svg.hashsalt": "onefold", "font.family": "DejaVu Sans", "text.usetex": False,
    "axes.unicode_minus": True, "axes.facecolor": "none", "axes.formatter.useoffset": False,
}  # fmt: skip
UNDATED = {"metadata": {"Date": None, "Creator": None}}
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"


class LineStyle(NamedTuple):
    """How a method or an agent is drawn in every figure."""

    colour: str
    line: Any
    marker: Any
    width: float


class Panel(NamedTuple):
    """Axes of a figure: an alternative text and the function that draws them."""

    alt: str
    draw: Callable[[Axes], None]


class PanelFigure(NamedTuple):
    """Panels with one legend.

    `stem` names the files, `subject` is the data set or environment, `caption` describes the content. `size` is that of
    one panel in inches. A figure that is not `on_page` is only saved as a file.
    """

    stem: str
    subject: str
    title: str
    caption: str
    panels: list[Panel]
    legend: list[Artist]
    size: tuple[float, float] = PANEL_SIZE
    on_page: bool = True


class PagePicture(NamedTuple):
    """An image as two data URIs, for light and dark pages, with its size in pixels."""

    alt: str
    light: str
    dark: str
    width: int
    height: int


class PageFigure(NamedTuple):
    """A figure on a page."""

    title: str
    caption: str
    pictures: list[PagePicture]


def page_figure(figure: PanelFigure) -> PageFigure:
    """Return the figure as it is embedded in a page."""
    return PageFigure(visible(figure.title), visible(figure.caption), embed_panels(figure))


def save_figure(figure: PanelFigure, folder: Path) -> None:
    """Save all panels with the legend as .png and .svg. Equal data gives equal files."""
    with matplotlib.rc_context({**RC, "svg.fonttype": "path"}):
        drawn = draw_figure(figure)
        png = _encode(drawn, "png", dpi=160, facecolor="white", metadata={"Software": None})
        write_bytes(folder / f"{figure.stem}.png", png)
        drawn.set_layout_engine("none")  # the layout is final
        write_bytes(folder / f"{figure.stem}.svg", _encode(drawn, "svg", facecolor="white", **UNDATED))


def draw_figure(figure: PanelFigure) -> Figure:
    """Return all panels, up to three in a row, with the legend below them."""
    columns = min(3, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    width, height = max(2, columns) * figure.size[0], rows * figure.size[1]
    longest = max((len(str(entry.get_label())) for entry in figure.legend), default=0)
    legend_columns = max(1, int(width / (0.8 + 0.085 * longest)))  # inches of a line sample and of a letter
    legend_rows = -(-len(figure.legend) // legend_columns)
    drawn = Figure(figsize=(width, height + 0.22 * legend_rows + 0.35), layout="constrained")
    engine = drawn.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.1, h_pad=0.08)  # pyright: ignore[reportCallIssue]
    title = f"{figure.title}: {label_text(figure.subject, 24)}"
    drawn.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", weight="bold")
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[len(figure.panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes, figure.panels, strict=False):
        panel.draw(ax)
    if figure.legend:
        drawn.legend(
            handles=figure.legend, loc="outside lower center", ncols=legend_columns, frameon=False, fontsize=8,
            labelcolor=INK, handlelength=3.4,
        )  # fmt: skip
    return drawn


def embed_panels(figure: PanelFigure) -> list[PagePicture]:
    """Return each panel and then the legend as pictures of a phone's width.

    Text stays text in the reader's fonts, which keeps the page small.
    """
    pictures = []
    with matplotlib.rc_context({**RC, "svg.fonttype": "none"}):
        for panel in figure.panels:
            drawn = Figure(figsize=figure.size, layout="constrained")
            panel.draw(drawn.subplots())
            pictures.append(_picture(drawn, panel.alt))
        if figure.legend:
            drawn = Figure(figsize=(figure.size[0], 0.3 + 0.2 * len(figure.legend)))
            drawn.legend(
                handles=figure.legend, loc="center left", frameon=False, fontsize=8.5, labelcolor=INK, handlelength=4
            )
            labels = ", ".join(str(entry.get_label()) for entry in figure.legend)
            pictures.append(_picture(drawn, f"Legend: {labels}"))
    return pictures


def _picture(drawn: Figure, alt: str) -> PagePicture:
    svg = _encode(drawn, "svg", facecolor="none", **UNDATED).decode()
    svg = svg.replace("font-family: 'DejaVu Sans'; ", "").replace("*{", f"text{{font-family: {FONTS}}} *{{", 1)
    light = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+|\s*\n", r"\1", path[0]), svg)
    dark = functools.reduce(lambda text, pair: text.replace(*pair), DARK.items(), light)
    width, height = (round(96 * side) for side in drawn.get_size_inches())
    return PagePicture(visible(alt), _svg_uri(light), _svg_uri(dark), width, height)


def _encode(drawn: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format=kind, **options)
    return buffer.getvalue()


def _svg_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def label_text(text: str, longest: int = MAX_LABEL) -> str:
    """Return untrusted text as a label: shortened, without mathematics and characters that the font lacks."""
    text = "".join(letter if ord(letter) in _font_characters() else "□" for letter in visible(text))
    text = text if len(text) <= longest else f"{text[: longest - 9]}…{text[-8:]}"
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


@functools.cache
def _font_characters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def file_stems(names: Iterable[str], default: str) -> list[str]:
    """Return a unique file name without suffix for each untrusted name; `default` where no character is left."""
    stems: list[str] = []
    for i, name in enumerate(names):
        stem = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:40] or default
        while stem in stems:
            stem = f"{stem}_{i}"
        stems.append(stem)
    return stems


def style_axes(ax: Axes, title: str, x: str = "", y: str = "") -> None:
    """Set the title, the labels of both axes and the style of a panel."""
    ax.set_title(title, fontsize=9 * min(1, MAX_LABEL / max(len(title), 1)), color=INK, loc="left")
    ax.set_xlabel(x, fontsize=8, color=INK)
    ax.set_ylabel(y, fontsize=8, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)
    ax.tick_params(which="both", colors=MUTED, labelsize=7.5, labelcolor=INK)
    ax.grid(color=FAINT, lw=0.7)
    ax.set_axisbelow(True)
