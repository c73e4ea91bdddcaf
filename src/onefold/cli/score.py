"""`onefold score`: score data, write a table, and a page if asked for."""

from pathlib import Path
from typing import Any

import numpy as np

from onefold.cli.console import print_lines
from onefold.cli.files import check_outputs, load_detector, max_count, write_skipped
from onefold.cli.jobs import Score
from onefold.core.progress import show_spinner, track_progress
from onefold.core.runtime import trim_memory
from onefold.core.storage import write_bytes
from onefold.errors import renamed_argument
from onefold.inputs import ImageFolder, open_source
from onefold.report.score_table import check_table, write_table


@trim_memory()
def run(job: Score) -> None:
    """Score the data batch by batch and write the outputs."""
    check_table(job.out)
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
        columns: dict[str, Any] = {"name": names, "score": scores}
        if detector.alarm is not None:
            columns |= {"pvalue": detector.alarm.pvalues(scores), "is_ood": scores > detector.threshold}
        write_table(job.out, columns)
        skipped = write_skipped([source], job.out)
        notes = [f"{len(scores):,} scored: {job.out}", *skipped]
        if detector.alarm is not None:
            flagged, expected = int(columns["is_ood"].sum()), detector.alarm.fpr * len(scores)
            notes.append(f"{flagged:,} flagged; of as many familiar inputs, about {expected:,.0f} would be")
        if job.report is not None:
            from onefold.report.score_page import render, score_page

            with show_spinner("drawing the page"):
                title = Path(job.data).name
                page = score_page(detector, source, names, scores, title=title, notes=skipped, inputs=inputs)
                write_bytes(job.report, render(page).encode())
            notes.append(f"Page: {job.report}")
    print_lines(*notes)
