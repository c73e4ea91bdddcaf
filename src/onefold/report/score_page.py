"""The page people look at after scoring: one self-contained HTML file in which no stranger's text can run."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from markupsafe import Markup

from onefold.errors import InputError, visible
from onefold.report.html import render_page

SHEET = 2048  # pixels along a side of a sheet of thumbnails: what a phone can still decode
PIXELS = 16_000_000  # in all sheets of one kind; larger pictures are shrunk to fit
LOSSLESS_BYTES = 8_000_000  # sheets that would weigh more are stored as JPEG
BLOCK = 8  # JPEG's blocks: cells of whole blocks do not bleed into their neighbours
COLUMNS = 24  # columns in the table; a row, once opened, shows all of them
DECADES = 1.5  # scores that span more are drawn on a logarithmic axis
DEPTH = 9.0  # decades of a logarithmic axis at most; smaller scores are drawn at its left end


@dataclass(frozen=True, kw_only=True)
class ScorePage:
    """What a page shows. An input is flagged when its score is greater than the threshold; bigger is stranger.

    `familiar` are scores of held-out familiar data, `pictures` thumbnails of what was scored, `nearest` the indices of
    each one's closest `familiar_pictures`; `columns`, `values` and `standout` (bigger stands out more) describe tables.
    """

    title: str
    method: str
    familiar: Float[np.ndarray, " m"]
    scores: Float[np.ndarray, " n"]
    names: Sequence[str]
    pvalues: Float[np.ndarray, " n"] | None = None
    threshold: float | None = None
    fpr: float | None = None
    pictures: UInt8[np.ndarray, "n h w"] | UInt8[np.ndarray, "n h w 3"] | None = None
    familiar_pictures: UInt8[np.ndarray, "k fh fw"] | UInt8[np.ndarray, "k fh fw 3"] | None = None
    nearest: Int[np.ndarray, "n j"] | None = None
    columns: Sequence[str] | None = None
    values: Sequence[Sequence[str]] | None = None
    standout: Float[np.ndarray, "n c"] | None = None
    notes: Sequence[str] = ()
    about: Mapping[str, str]


def render(page: ScorePage) -> str:
    """One HTML document that needs nothing but itself; only its own script, known by its hash, may run."""
    _check(page)
    return render_page(
        "score_page.html.j2",
        ["score_page.css"],
        ["score_page.js", "score_page_list.js"],
        title=visible(page.title),
        method=visible(page.method),
        notes=[visible(note) for note in page.notes],
        about={visible(key): visible(value) for key, value in page.about.items()},
        count=len(page.scores),
        calibrated=page.threshold is not None and not np.isnan(page.threshold),
        data=Markup(_inert_json(_content(page))),
    )


def _check(page: ScorePage) -> None:
    n = len(page.scores)
    parts = {"names": page.names, "p-values": page.pvalues, "pictures": page.pictures, "nearest": page.nearest}
    parts |= {"rows": page.values, "standout": page.standout}
    for what, part in parts.items():
        if part is not None and len(part) != n:
            raise InputError(f"the page has {n} scores but {len(part)} {what}: give one for each score")
    if (page.columns is None) != (page.values is None):
        raise InputError("the page has columns without values or values without columns: give both or neither")
    width = len(page.columns or ())
    if any(len(row) != width for row in page.values or ()):
        raise InputError(f"the page has {width} columns: every row needs as many values")
    if page.standout is not None and page.standout.shape[1] != width:
        raise InputError(f"the page has {width} columns but standout for {page.standout.shape[1]}: give one for each")
    if page.nearest is not None and page.nearest.size:
        known = 0 if page.familiar_pictures is None else len(page.familiar_pictures)
        if page.nearest.min() < 0 or page.nearest.max() >= known:
            raise InputError(f"nearest names pictures outside the {known} familiar ones: count them from 0")


def _content(page: ScorePage) -> dict[str, Any]:
    """What the page's script reads. Names come as they are shown; the few that differ also as they are."""
    names = [visible(name) for name in page.names]
    return {
        "axis": score_axis(np.concatenate([page.familiar, page.scores]), page.threshold),
        "familiar": _numbers(page.familiar),
        "scores": _numbers(page.scores),
        "pvalues": None if page.pvalues is None else _numbers(page.pvalues),
        "threshold": _number(page.threshold),
        "fpr": _number(page.fpr),
        "names": names,
        "originals": {i: name for i, name in enumerate(page.names) if name != names[i]},
        "pictures": _atlas(page.pictures),
        "familiarPictures": _atlas(page.familiar_pictures),
        "nearest": None if page.nearest is None else page.nearest.tolist(),
        "columns": None if page.columns is None else [visible(name) for name in page.columns],
        "shown": _shown(page),
        "values": None if page.values is None else [[visible(value) for value in row] for row in page.values],
        "standout": None if page.standout is None else [_numbers(row, digits=4) for row in page.standout],
    }


def _numbers(values: Float[np.ndarray, " n"], digits: int = 17) -> list[float | str | None]:
    return [_number(value, digits) for value in values.tolist()]


def _number(value: float | None, digits: int = 17) -> float | str | None:
    """A number as JSON can hold it: NaN is null, infinities are strings that JavaScript's Number() reads."""
    if value is None or np.isnan(value):
        return None
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{digits}g}")


def score_axis(values: Float[np.ndarray, " n"], threshold: float | None = None) -> dict[str, Any]:
    """Return the range of a histogram of scores, and of its slider: a little more than the values, for both ends to be
    reached. It is in powers of ten (`log`) where scores are never negative and span more than `DECADES`."""
    everything = np.append(values, [] if threshold is None else [threshold]).astype(np.float64)
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        return {"log": False, "lo": 0.0, "hi": 1.0}
    positive = finite[finite > 0]
    if finite.min() >= 0 and len(positive) and np.ptp(np.log10(np.quantile(positive, [0.01, 1]))) > DECADES:
        hi = np.log10(positive.max())
        lo = max(np.log10(positive.min()), hi - DEPTH)
        margin = 0.02 * (hi - lo)
        return {"log": True, "lo": float(lo - margin), "hi": float(min(hi + margin, 308.0))}
    lo, hi = float(finite.min()), float(finite.max())
    margin = 0.02 * (hi - lo) or max(abs(hi), 1.0) * 0.02
    return {"log": False, "lo": lo - margin, "hi": hi + margin}


def _shown(page: ScorePage) -> list[int]:
    """The columns that the table has room for: those that stand out most over all rows, in their own order."""
    if page.columns is None or len(page.columns) <= COLUMNS or page.standout is None:
        return list(range(min(COLUMNS, len(page.columns or ()))))
    weight = np.nan_to_num(page.standout.astype(np.float64), posinf=0, neginf=0).mean(0)
    return sorted(np.argsort(-weight, kind="stable")[:COLUMNS].tolist())


def _atlas(pictures: UInt8[np.ndarray, "n h w *rgb"] | None) -> dict[str, Any] | None:
    """Thumbnails packed into a few large sheets: one request-free picture instead of thousands."""
    if pictures is None or not len(pictures):
        return None
    pictures = _shrunk(pictures)
    height, width = pictures.shape[1:3]
    cell_height, cell_width = (-(-side // BLOCK) * BLOCK for side in (height, width))
    across, down = (max(1, SHEET // side) for side in (cell_width, cell_height))
    border = [(0, 0), (0, cell_height - height), (0, cell_width - width)] + [(0, 0)] * (pictures.ndim - 3)
    cells = np.pad(pictures, border, mode="edge")
    sheets = [_sheet(cells[start : start + across * down], across) for start in range(0, len(cells), across * down)]
    return {
        "width": width, "height": height, "cellWidth": cell_width, "cellHeight": cell_height,
        "across": across, "perSheet": across * down, "sheets": _encoded(sheets),
    }  # fmt: skip


def _shrunk(pictures: UInt8[np.ndarray, "n h w *rgb"]) -> np.ndarray:
    """The pictures, made smaller by a whole factor where all of them together would make the page too heavy."""
    from PIL import Image

    factor = int(np.ceil(np.sqrt(len(pictures) * pictures.shape[1] * pictures.shape[2] / PIXELS)))
    if factor <= 1:
        return pictures
    return np.stack([np.asarray(Image.fromarray(picture).reduce(factor)) for picture in pictures])


def _sheet(cells: UInt8[np.ndarray, "n h w *rgb"], across: int) -> np.ndarray:
    """Cells side by side, row by row."""
    n, height, width, *rgb = cells.shape
    across = min(across, n)
    rows = -(-n // across)
    grid = np.zeros((rows * across, height, width, *rgb), np.uint8)
    grid[:n] = cells
    return grid.reshape(rows, across, height, width, *rgb).swapaxes(1, 2).reshape(rows * height, across * width, *rgb)


def _encoded(sheets: Sequence[np.ndarray]) -> list[str]:
    """Sheets as data URIs: lossless while that is light enough."""
    lossless = [_file(sheet, "PNG") for sheet in sheets]
    if sum(map(len, lossless)) <= LOSSLESS_BYTES:
        return ["data:image/png;base64," + base64.b64encode(file).decode() for file in lossless]
    return [
        "data:image/jpeg;base64," + base64.b64encode(_file(sheet, "JPEG", quality=85, subsampling=0)).decode()
        for sheet in sheets
    ]


def _file(sheet: np.ndarray, kind: str, **options: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, kind, **options)
    return buffer.getvalue()


def _inert_json(content: Mapping[str, Any]) -> str:
    """JSON in pure ASCII in which no tag can begin or end."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
