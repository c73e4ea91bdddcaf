"""`onefold score`: score data, write a table, and a page if asked for."""

from pathlib import Path
from typing import Any

import numpy as np

from onefold.cli.console import print_lines
from onefold.cli.files import check_outputs, load_detector, max_count, write_skipped
from onefold.cli.jobs import Score
from onefold.core.arguments import check_integer
from onefold.core.progress import show_spinner, track_progress
from onefold.core.runtime import trim_memory
from onefold.core.storage import write_bytes
from onefold.detectors.base import Detector
from onefold.detectors.explain import Explanation
from onefold.errors import renamed_argument
from onefold.inputs import ImageFolder, Source, open_source, select
from onefold.report.score_table import check_table, write_table
from onefold.types import Scores


@trim_memory()
def run(job: Score) -> None:
    """Score the data batch by batch and write the outputs."""
    check_table(job.out)
    check_integer(job.explain, "explain", 0)
    check_outputs([job.out] if job.report is None else [job.out, job.report], [job.detector, job.data, job.model])
    detector = load_detector(job.detector, job.model, job.device)
    with renamed_argument("x", job.data):
        with show_spinner("reading"):
            source = open_source(job.data, form=detector.reader.form, name=job.data)
        total, parts, inputs = max_count(source), [], None
        if job.report is not None:
            from onefold.report.score_page import PageInputs, max_inputs  # needs jinja2

            inputs = PageInputs(detector, total) if total is not None and total <= max_inputs(detector) else None
        for raw, part in track_progress(
            detector.scored_batches(source), total, "scoring", lambda scored: len(scored[1])
        ):
            parts.append(part)
            if inputs is not None:
                inputs.add(raw)
        scores = np.concatenate(parts)
        names = source.names if isinstance(source, ImageFolder) else [str(i) for i in range(len(scores))]
        explanations = _explain(detector, source, scores, job.explain)
        columns: dict[str, Any] = {"name": names, "score": scores}
        if detector.alarm is not None:
            columns |= {"pvalue": detector.alarm.pvalues(scores), "is_ood": scores > detector.threshold}
        write_table(job.out, columns)
        skipped = write_skipped([source], job.out)
        notes = [f"{len(scores):,} scored: {job.out}", *skipped]
        if detector.alarm is not None:
            flagged, expected = int(columns["is_ood"].sum()), detector.alarm.fpr * len(scores)
            notes.append(f"{flagged:,} flagged; of as many familiar inputs, about {expected:,.0f} would be")
        if detector.group_alarms is not None:
            notes.append("calibrated in groups: no p-values without the groups. Use is_ood(x, groups=…) in Python")
        if job.report is not None:
            from onefold.report.score_page import render, score_page

            with show_spinner("drawing the page"):
                title = Path(job.data).name
                page = score_page(
                    detector, source, names, scores,
                    title=title, notes=skipped, inputs=inputs, explanations=explanations,
                )  # fmt: skip
                write_bytes(job.report, render(page).encode())
            notes.append(f"Page: {job.report}")
    for i, explanation in explanations.items():
        notes += ["", names[i], *str(explanation).splitlines()]
    print_lines(*notes)


def _explain(detector: Detector, source: Source, scores: Scores, count: int) -> dict[int, Explanation]:
    """Return explanations of the inputs with the largest scores by their positions, the largest score first."""
    if not count:
        return {}
    chosen = np.argsort(-scores, kind="stable")[:count]
    ordered = np.sort(chosen)  # a stream is read in order
    with show_spinner("explaining"):
        explained = detector.explain(select(source, ordered))
    by_position = dict(zip(ordered.tolist(), explained, strict=True))
    return {i: by_position[i] for i in chosen.tolist()}
