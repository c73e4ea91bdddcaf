"""Page of the demo: one self-contained HTML file in which every value is escaped."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onefold.demo import Outcome, Sets
from onefold.report.example_figures import contact_sheet, data_uri, histogram
from onefold.report.html import render_page
from onefold.report.score_page import score_axis
from onefold.report.tables import Cell

SHEET_IMAGES = 24  # images on a contact sheet
LOWER_IS_BETTER = ("FPR95", "fit", "score")


def render(result: Mapping[str, Any], outcomes: Sequence[Outcome], data: Sets, chosen: str) -> str:
    """Return the page as HTML.

    Args:
        result: Summary of the demo, with its provenance.
        outcomes: Scores and metrics of each method.
        data: The familiar and the unfamiliar sets.
        chosen: Method whose most and least familiar images are shown.
    """
    figures = [o.figures for o in outcomes]
    metrics, unfamiliar = list(figures[0]), list(data.unfamiliar)
    count = (1 + len(unfamiliar)) * len(data.familiar.x_test)
    means = {metric: [f[metric]["mean"] for f in figures] for metric in metrics}
    means["fit"] = [o.fit_seconds for o in outcomes]
    means["score"] = [1e6 * o.score_seconds / count for o in outcomes]
    by_set = {name: [f["AUROC"][name] for f in figures] for name in unfamiliar}
    return render_page(
        "demo_page.html.j2",
        result=result,
        metrics=metrics,
        unfamiliar=unfamiliar,
        means=_rows(outcomes, means),
        by_set=_rows(outcomes, by_set),
        histograms=[_histogram(outcome) for outcome in outcomes],
        chosen=chosen,
        sheets=_sheets(next(o for o in outcomes if o.name == chosen), data),
    )


def _histogram(outcome: Outcome) -> tuple[str, bool, str]:
    """Return the method's name, whether its axis is logarithmic, and the picture."""
    axis = score_axis(np.concatenate([outcome.familiar, *outcome.unfamiliar.values()]))
    return outcome.name, axis["log"], data_uri(histogram(outcome.familiar, outcome.unfamiliar, axis))


def _rows(outcomes: Sequence[Outcome], columns: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return one row for each method, with the best value of each column after rounding."""
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
    """Return contact sheets of the most and least familiar digits and letters, with their titles."""
    sheets = []
    for noun, images, scores in (
        ("digits", data.familiar.x_test, outcome.familiar),
        ("letters", data.unfamiliar["letters"], outcome.unfamiliar["letters"]),
    ):
        order = np.argsort(scores)
        for title, indices in (("Most familiar", order[:SHEET_IMAGES]), ("Least familiar", order[::-1][:SHEET_IMAGES])):
            sheets.append((f"{title} {noun}", data_uri(contact_sheet(list(images[indices])))))
    return sheets
