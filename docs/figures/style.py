"""Style of the site's figures: colours of the light and the dark version, and writing both."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onefold.core.storage import write_bytes

IMAGES = Path(__file__).parent.parent / "images"
DPI = 150


@dataclass(frozen=True)
class Look:
    """The colours of a picture."""

    name: str
    paper: str
    ink: str
    muted: str
    faint: str
    blue: str
    red: str
    gold: str


LIGHT = Look("light", "#ffffff", "#1d2733", "#6b7785", "#d5dbe2", "#2a78b5", "#d1495b", "#c98a1b")
DARK = Look("dark", "#1b222c", "#e8edf3", "#98a5b3", "#3b4653", "#6db3ea", "#f0788a", "#e6b455")


def both(name: str, draw: Callable[[Look], Figure], folder: Path = IMAGES) -> None:
    """Write NAME.png and NAME_dark.png, by default to docs/images."""
    for look, suffix in ((LIGHT, ""), (DARK, "_dark")):
        settings: dict[Any, Any] = {
            "font.size": 12, "text.color": look.ink, "axes.edgecolor": look.muted, "axes.labelcolor": look.ink,
            "axes.facecolor": look.paper, "axes.titlecolor": look.ink, "xtick.color": look.muted,
            "ytick.color": look.muted, "axes.titlesize": 13, "axes.spines.top": False, "axes.spines.right": False,
            "legend.frameon": False, "legend.fontsize": 11, "font.family": "DejaVu Sans",
        }  # fmt: skip
        with matplotlib.rc_context(settings):
            buffer = io.BytesIO()
            draw(look).savefig(buffer, format="png", dpi=DPI, facecolor=look.paper, metadata={"Software": None})
        write_bytes(folder / f"{name}{suffix}.png", buffer.getvalue())


def panels(columns: int, width: float, height: float, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, sharey=sharey)[0])
