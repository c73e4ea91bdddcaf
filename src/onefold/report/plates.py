"""Plates: panels that share a legend, as one figure in files and as single pictures on a page, in light and dark."""

import base64
import functools
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from onefold.core.storage import write_bytes
from onefold.errors import visible

INK, MUTED, FAINT, PAPER = "#1d2733", "#77838f", "#e3e7ec", "#fffffe"
# Okabe and Ito's colours, darkened until they stand out on white, and what they become on a dark page.
DARK = {
    INK: "#e9eef3", MUTED: "#94a0ac", FAINT: "#2b3540", PAPER: "#171d24",
    "#c2410c": "#f0803f", "#a3478f": "#d98ac4", "#b87800": "#e6ac3c", "#0068a8": "#4ea6de", "#00785a": "#2fb58f",
    "#566270": "#a9b5c1", "#3d94cc": "#8cc7ee", "#8c1c2f": "#e77f8e",
}  # fmt: skip
OURS = ("#c2410c", "#a3478f", INK, "#8c1c2f", "#b87800")
RIVALS = ("#0068a8", "#00785a", "#566270", "#3d94cc")
DASHES: Sequence[Any] = ((0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)), (0, (8, 3)))
OURS_MARKS: Sequence[Any] = "oDphH"
RIVAL_MARKS: Sequence[Any] = (*"s^vPX<>8d*", (4, 1, 0))  # the last is a star of four points
SIZE = (3.7, 2.9)  # inches of a panel: the width of a phone
LONGEST = 30  # letters of a name in a picture
RC: dict[Any, Any] = {
    "svg.hashsalt": "onefold", "font.family": "DejaVu Sans", "text.usetex": False,
    "axes.unicode_minus": True, "axes.facecolor": "none", "axes.formatter.useoffset": False,
}  # fmt: skip
UNDATED = {"metadata": {"Date": None, "Creator": None}}
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"


class Panel(NamedTuple):
    """A picture: what it shows in words, and how it is drawn."""

    alt: str
    draw: Callable[[Axes], None]


class Plate(NamedTuple):
    """Panels with one legend. `stem` is its file's name, `of` the set it is about, `caption` says what is seen."""

    stem: str
    of: str
    title: str
    caption: str
    panels: list[Panel]
    keys: list[Artist]
    size: tuple[float, float] = SIZE
    on_page: bool = True


class Picture(NamedTuple):
    """For a page: addresses that hold the picture itself."""

    alt: str
    light: str
    dark: str
    width: int
    height: int


def save(plate: Plate, folder: Path) -> None:
    """The whole plate as .png and .svg, legend below; the same figures give the same files."""
    with matplotlib.rc_context({**RC, "svg.fonttype": "path"}):
        figure = whole(plate)
        write_bytes(
            folder / f"{plate.stem}.png", _file(figure, "png", dpi=160, facecolor="white", metadata={"Software": None})
        )
        figure.set_layout_engine("none")  # everything has its place by now
        write_bytes(folder / f"{plate.stem}.svg", _file(figure, "svg", facecolor="white", **UNDATED))


def whole(plate: Plate) -> Figure:
    """All panels of a plate, up to three abreast, and its legend below them."""
    columns = min(3, len(plate.panels))
    rows = -(-len(plate.panels) // columns)
    width, height = max(2, columns) * plate.size[0], rows * plate.size[1]
    longest = max((len(str(key.get_label())) for key in plate.keys), default=0)
    abreast = max(1, int(width / (0.8 + 0.085 * longest)))  # inches of a line's sample and of a letter
    keyed = -(-len(plate.keys) // abreast)
    figure = Figure(figsize=(width, height + 0.22 * keyed + 0.35), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.1, h_pad=0.08)  # pyright: ignore[reportCallIssue]
    figure.suptitle(f"{plate.title}: {plain(plate.of, 24)}", fontsize=11, color=INK, x=0.01, ha="left", weight="bold")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[len(plate.panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes, plate.panels, strict=False):
        panel.draw(ax)
    if plate.keys:
        figure.legend(
            handles=plate.keys, loc="outside lower center", ncols=abreast, frameon=False, fontsize=8,
            labelcolor=INK, handlelength=3.4,
        )  # fmt: skip
    return figure


def pictures(plate: Plate) -> list[Picture]:
    """Each panel, then the legend, small enough for a phone; letters are the reader's own, which keeps pages light."""
    found = []
    with matplotlib.rc_context({**RC, "svg.fonttype": "none"}):
        for panel in plate.panels:
            figure = Figure(figsize=plate.size, layout="constrained")
            panel.draw(figure.subplots())
            found.append(_picture(figure, panel.alt))
        if plate.keys:
            figure = Figure(figsize=(plate.size[0], 0.3 + 0.2 * len(plate.keys)))
            figure.legend(
                handles=plate.keys, loc="center left", frameon=False, fontsize=8.5, labelcolor=INK, handlelength=4
            )
            found.append(_picture(figure, f"Legend: {', '.join(str(key.get_label()) for key in plate.keys)}"))
    return found


def _picture(figure: Figure, alt: str) -> Picture:
    svg = _file(figure, "svg", facecolor="none", **UNDATED).decode()
    svg = svg.replace("font-family: 'DejaVu Sans'; ", "").replace("*{", f"text{{font-family: {FONTS}}} *{{", 1)
    light = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+|\s*\n", r"\1", path[0]), svg)
    dark = functools.reduce(lambda text, pair: text.replace(*pair), DARK.items(), light)
    width, height = (round(96 * side) for side in figure.get_size_inches())
    return Picture(visible(alt), _uri(light), _uri(dark), width, height)


def _file(figure: Figure, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()


def _uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def plain(text: str, longest: int = LONGEST) -> str:
    """A stranger's text as a picture can hold it: short, no mathematics, no letter that the font lacks."""
    text = "".join(letter if ord(letter) in _letters() else "□" for letter in visible(text))
    text = text if len(text) <= longest else f"{text[: longest - 9]}…{text[-8:]}"
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def tidy(ax: Axes, title: str, x: str = "", y: str = "") -> None:
    """The look of every panel."""
    ax.set_title(title, fontsize=9 * min(1, LONGEST / max(len(title), 1)), color=INK, loc="left")
    ax.set_xlabel(x, fontsize=8, color=INK)
    ax.set_ylabel(y, fontsize=8, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)
    ax.tick_params(which="both", colors=MUTED, labelsize=7.5, labelcolor=INK)
    ax.grid(color=FAINT, lw=0.7)
    ax.set_axisbelow(True)
