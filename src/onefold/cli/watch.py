"""`onefold watch`: watch a stream, print the evidence after each batch, and stop when it has changed if asked for."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onefold.cli.files import check_outputs, load_detector
from onefold.cli.jobs import WatchStream
from onefold.core.arguments import check_integer
from onefold.core.runtime import trim_memory
from onefold.core.storage import write_bytes
from onefold.detectors.base import Detector
from onefold.errors import InputError, renamed_argument
from onefold.inputs import ImageFolder, LineStream, Source, Table, open_source
from onefold.monitor import Evidence, Monitor
from onefold.types import Batch, Scores

CHANGED = 3  # exit status
STDIN = "-"


@trim_memory()
def run(job: WatchStream) -> int:
    """Watch the data; return 3 if the stream has changed, else 0. The page is also written if the watch is stopped."""
    check_integer(job.batch, "batch")
    standard_input = job.data == STDIN
    outputs = [path for path in (job.state, job.report) if path is not None]
    check_outputs(outputs, [job.detector, None if standard_input else job.data, job.model])
    detector = load_detector(job.detector, job.model, job.device)
    monitor = Monitor(detector, job.alpha)
    if job.state is not None and job.state.exists():
        monitor.load(job.state)
    name = "standard input" if standard_input else job.data
    with renamed_argument("x", name):
        source = (
            open_stream(detector) if standard_input else open_source(job.data, form=detector.reader.form, name=name)
        )
        record = _page_record(detector, monitor) if job.report is not None else None
        try:
            for raw, scores, evidence in watch(detector, monitor, source, job.batch):
                if job.state is not None:
                    monitor.save(job.state)
                if record is not None:
                    record.add(raw, scores, evidence)
                print(json.dumps(asdict(evidence)), flush=True)
                if evidence.crossed and job.stop:
                    break
        finally:
            if record is not None and job.report is not None and len(record.evidence) > 1:
                write_page(record, source, job.report, name, job.alpha)
    return CHANGED if monitor.evidence.crossed else 0


def watch(detector: Detector, monitor: Monitor, source: Source, batch: int) -> Iterator[tuple[Batch, Scores, Evidence]]:
    """Yield batches of raw inputs, their scores, and the evidence after each."""
    state = detector.state
    for raw in state.reader.batches(source, size=batch, device=state.device, ordered=True):
        scores = state.evaluate(raw)
        yield raw, scores, monitor.update_scores(scores)


def open_stream(detector: Detector) -> LineStream:
    """Return the rows of standard input in the form of the detector's data."""
    reader = detector.reader
    if reader.kind not in ("table", "vectors", "as given") or len(reader.shapes["x"]) != 1:
        raise InputError(
            "only rows of numbers or of a table can be read from it", argument="x", hint="Pass a folder or a file."
        )
    if sys.stdin is None or sys.stdin.closed:
        raise InputError("closed", argument="x", hint="Pipe rows into the command.")
    table = reader.form if isinstance(reader.form, Table) else None
    return LineStream(_as_text(sys.stdin), table, "standard input")


def _as_text(file: Any) -> io.TextIOWrapper:
    """Return standard input as UTF-8 text without a byte-order mark, whatever the locale."""
    return io.TextIOWrapper(file.buffer, encoding="utf-8-sig", newline="")


def _page_record(detector: Detector, monitor: Monitor) -> Any:
    from onefold.report.watch_page import WatchRecord  # needs jinja2 and matplotlib

    return WatchRecord(detector, monitor.evidence)


def write_page(record: Any, source: Source, path: Path, title: str, alpha: float) -> None:
    """Write the page of a watched stream."""
    from onefold.report.watch_page import render

    def name(number: int) -> str:
        return source.names[number] if isinstance(source, ImageFolder) else f"{record.first + number + 1:,}"

    write_bytes(path, render(record, title=Path(title).name, alpha=alpha, names=name).encode())
