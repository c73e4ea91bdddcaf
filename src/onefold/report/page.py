"""The demo's page: one self-contained HTML file; everything it shows is escaped."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onefold.demo import Outcome, Sets
from onefold.report.html import render_page
from onefold.report.plots import contact_sheet, data_uri, histogram
from onefold.report.score_page import score_axis
from onefold.report.tables import Cell

SHOWN = 24  # images on a contact sheet
LOWER_IS_BETTER = ("FPR95", "fit", "score")


def render(result: Mapping[str, Any], outcomes: Sequence[Outcome], data: Sets, chosen: str) -> str:
    """The page for these outcomes, with pictures of what the method `chosen` finds familiar and strange."""
    figures = [o.figures for o in outcomes]
    metrics, strange = list(figures[0]), list(data.unfamiliar)
    count = (1 + len(strange)) * len(data.familiar.x_test)
    means = {metric: [f[metric]["mean"] for f in figures] for metric in metrics}
    means["fit"] = [o.fit_seconds for o in outcomes]
    means["score"] = [1e6 * o.score_seconds / count for o in outcomes]
    by_set = {name: [f["AUROC"][name] for f in figures] for name in strange}
    return render_page(
        "demo_page.html.j2",
        result=result,
        metrics=metrics,
        strange=strange,
        means=_rows(outcomes, means),
        by_set=_rows(outcomes, by_set),
        histograms=[_histogram(outcome) for outcome in outcomes],
        chosen=chosen,
        sheets=_sheets(next(o for o in outcomes if o.name == chosen), data),
    )


def _histogram(outcome: Outcome) -> tuple[str, bool, str]:
    """The method's name, whether its axis is logarithmic, and the picture."""
    axis = score_axis(np.concatenate([outcome.familiar, *outcome.unfamiliar.values()]))
    return outcome.name, axis["log"], data_uri(histogram(outcome.familiar, outcome.unfamiliar, axis))


def _rows(outcomes: Sequence[Outcome], columns: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One row a method; the best value of a column, after rounding, is marked."""
    cells: dict[str, list[Cell]] = {}
    for name, values in columns.items():
        texts = [f"{value:.1f}" for value in values]
        best = (min if name in LOWER_IS_BETTER else max)(map(float, texts))
        cells[name] = [Cell(text, best=float(text) == best) for text in texts]
    return [
        {"name": o.name, "note": o.note, "cells": [column[i] for column in cells.values()]}
        for i, o in enumerate(outcomes)
    ]


def _sheets(outcome: Outcome, data: Sets) -> list[tuple[str, str]]:
    held_out, letters = data.familiar.x_test, data.unfamiliar["letters"]

    def sheet(images: np.ndarray, scores: np.ndarray, pick: Callable[[np.ndarray], np.ndarray]) -> str:
        return data_uri(contact_sheet(list(images[pick(np.argsort(scores))])))

    return [
        ("Most familiar digits", sheet(held_out, outcome.familiar, lambda order: order[:SHOWN])),
        ("Strangest digits", sheet(held_out, outcome.familiar, lambda order: order[::-1][:SHOWN])),
        ("Letters that pass as digits", sheet(letters, outcome.unfamiliar["letters"], lambda order: order[:SHOWN])),
        ("Strangest letters", sheet(letters, outcome.unfamiliar["letters"], lambda order: order[::-1][:SHOWN])),
    ]
