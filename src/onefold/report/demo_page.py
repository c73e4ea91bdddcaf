"""Page of the demo: one self-contained HTML file in which every value is escaped."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onefold.demo import CONFIDENT, DemoData, DemoResult
from onefold.report.example_figures import data_uri, histogram, labelled_images
from onefold.report.html import render_page
from onefold.report.score_page import score_axis

SHOWN = 24  # images in a picture


def render(summary: Mapping[str, Any], result: DemoResult, data: DemoData) -> str:
    """Return the page as HTML.

    Args:
        summary: Summary of the demo, with its provenance.
        result: Answers of classifier, detector and exported file.
        data: The familiar and the unfamiliar images.
    """
    scores = {name: answers.scores for name, answers in result.unfamiliar.items()}
    axis = score_axis(np.concatenate([result.digits.scores, *scores.values()]), result.threshold)
    everything = [result.digits, *result.unfamiliar.values()]
    return render_page(
        "demo_page.html.j2",
        summary=summary,
        rows=[_row(name, figures) for name, figures in summary["sets"].items()],
        confident=CONFIDENT,
        histogram=data_uri(histogram(result.digits.scores, scores, axis, result.threshold)),
        logarithmic=axis["log"],
        mistakes=_mistakes(result, data),
        same=sum(answers.same_alarms for answers in everything),
        count=sum(len(answers.scores) for answers in everything),
        largest=max(summary["sets"], key=lambda name: summary["sets"][name]["confident"] * (name != "digits")),
    )


def _row(name: str, figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of one row of the table."""
    return {
        "name": name,
        "images": f"{figures['images']}",
        "confident": f"{100 * figures['confident']:.1f}",
        "flagged": f"{100 * figures['flagged']:.1f}",
        "auroc": f"{100 * figures['auroc']:.1f}" if "auroc" in figures else "–",
        "auroc_of_confidence": f"{100 * figures['auroc_of_confidence']:.1f}" if "auroc" in figures else "–",
    }


def _mistakes(result: DemoResult, data: DemoData) -> list[tuple[str, str]]:
    """Return pictures of the images of two sets that the classifier is most confident about, with their titles."""
    pictures = []
    for name in ("letters", "perturbed digits"):
        answers = result.unfamiliar[name]
        order = np.argsort(-answers.confidence, kind="stable")[:SHOWN]
        labels = [f"{answers.predicted[i]} · {answers.confidence[i]:.0%}\np = {answers.pvalues[i]:.3f}" for i in order]
        colours = answers.flagged[order].tolist()
        images = [data.unfamiliar[name][i, 0] for i in order]
        pictures.append((name, data_uri(labelled_images(images, labels, colours))))
    return pictures
