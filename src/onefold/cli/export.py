"""`onefold export`: write a detector as a model that runs without onefold."""

from onefold.cli.console import print_lines
from onefold.cli.files import check_outputs, load_detector
from onefold.cli.jobs import Export
from onefold.detectors.base import ExportMixin
from onefold.errors import InputError


def run(job: Export) -> None:
    """Export the detector; the suffix of the output selects the format."""
    check_outputs([job.out], [job.detector, job.model])
    detector = load_detector(job.detector, job.model, "cpu")
    if not isinstance(detector, ExportMixin):
        raise InputError(f"{job.detector}: a {type(detector).__name__} cannot be exported")
    detector.export(job.out)
    print_lines(f"Exported: {job.out}")
