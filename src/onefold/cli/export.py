"""`onefold export`: write a detector as a model that runs without onefold, and its model card."""

from onefold.cli.console import print_lines
from onefold.cli.files import check_outputs, load_detector
from onefold.cli.jobs import Export
from onefold.cli.parity import compare
from onefold.detectors.base import ExportMixin
from onefold.detectors.card import write_card
from onefold.detectors.export import describe_inputs
from onefold.errors import InputError, renamed_argument


def run(job: Export) -> int:
    """Export the detector, compare decisions if asked to, and write the card; return 1 if decisions differ."""
    check_outputs([job.out], [job.detector, job.model])
    detector = load_detector(job.detector, job.model, "cpu")
    if not isinstance(detector, ExportMixin):
        raise InputError(f"{job.detector}: a {type(detector).__name__} cannot be exported")
    detector.export(job.out, inputs=job.inputs)
    checks, status = [], 0
    if job.check is not None:
        with renamed_argument("x", job.check):
            parity = compare(detector, job.out, job.check)
        checks, status = [f"{parity} (on {job.check})"], 0 if parity.ok else 1
    card = job.out.with_name("README.md")
    written = write_card(detector, job.out, describe_inputs(detector.reader, job.inputs, job.out.suffix), checks)
    lines = [f"Exported: {job.out}", *(f"Check: {check}" for check in checks)]
    print_lines(*lines, f"Model card: {card}" if written else f"{card} is kept: onefold did not write it")
    return status
