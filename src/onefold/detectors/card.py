"""Model cards: a README.md in the Hugging Face format beside an exported detector."""

import importlib.metadata
import platform
from pathlib import Path

from onefold import __version__
from onefold.core.files import write_bytes
from onefold.detectors.base import Detector
from onefold.detectors.registry import METHODS
from onefold.errors import visible
from onefold.inputs import Picture, Table

MARK = "# written by onefold; delete this line to keep your changes"
SHOWN_COLUMNS = 20
VERSIONS = ("torch", "onnx", "onnxscript")

LIMITS = """\
- A low score means that an input resembles the training data. It does not mean that a model's answer is right.
- The false-alarm rate holds on average over calibration sets, for inputs from the same source as the calibration data.
  It is not a rate of missed unfamiliar inputs: how many are missed depends on what they are.
- If the familiar inputs change, for example by a new camera or season, calibrate again and export again.
- Nothing was measured about fairness between groups of people."""


def write_card(detector: Detector, path: Path, inputs: str, checks: list[str]) -> bool:
    """Write README.md beside an exported detector, atomically; return False if somebody else wrote one.

    Args:
        detector: Exported detector.
        path: File that it was exported to.
        inputs: What the exported model takes, as one sentence.
        checks: Further lines about the file, such as its agreement with the detector.
    """
    card = path.with_name("README.md")
    if card.exists() and MARK not in card.read_text("utf-8", "replace").splitlines()[:4]:
        return False
    write_bytes(card, model_card(detector, path.name, inputs, checks).encode("utf-8", "backslashreplace"))
    return True


def model_card(detector: Detector, name: str, inputs: str, checks: list[str]) -> str:
    """Return the card: metadata in YAML, then what the detector was fitted on, its rates, diagnosis and limits."""
    method = METHODS[type(detector).__name__]
    library = "onnx" if name.endswith(".onnx") else "pytorch"
    versions = [f"onefold {__version__}", f"Python {platform.python_version()}"]
    versions += [f"{package} {importlib.metadata.version(package)}" for package in VERSIONS if _is_installed(package)]
    diagnosis = detector.diagnose(show=False)
    parts = [
        f"---\n{MARK}\nlibrary_name: {library}\ntags:\n- onefold\n- out-of-distribution-detection\n- uncertainty\n---",
        f"# {_escape(name)}",
        f"A detector of unfamiliar inputs, made by onefold. Method: {method.title} ({method.summary}).",
        "## Use",
        f"{inputs} The outputs are `score` (bigger is more unfamiliar)"
        + (", `pvalue` and `is_ood`." if detector.alarm else "."),
        *(f"    onefold serve {line}" for line in [_escape(name)] if library == "onnx" and detector.alarm),
        "## Fitted on",
        "\n".join(f"- {line}" for line in _describe_data(detector)),
        "## Rates",
        _describe_rates(detector),
        "## Diagnosis",
        "\n".join(f"- {'WARNING: ' if f.ok is False else ''}{f.name}: {_escape(f.message)}" for f in diagnosis),
        *(["## Checks", "\n".join(f"- {_escape(line)}" for line in checks)] if checks else []),
        "## Limits",
        LIMITS,
        "## Training data in this file",
        _describe_contents(detector),
        "## Versions",
        ", ".join(versions) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _describe_data(detector: Detector) -> list[str]:
    reader, seen = detector.reader, detector.state.samples_seen
    count = f"{seen:,} samples" if seen else "an unrecorded number of samples (saved without samples)"
    if isinstance(reader.form, Table):
        columns = reader.form.columns
        numbers = sum(column.kind == "number" for column in columns)
        names = ", ".join(_code(column.name) for column in columns[:SHOWN_COLUMNS])
        more = f" and {len(columns) - SHOWN_COLUMNS:,} more" if len(columns) > SHOWN_COLUMNS else ""
        return [
            f"{count}: table with {numbers:,} columns of numbers and {len(columns) - numbers:,} of categories",
            f"Columns: {names}{more}",
        ]
    if isinstance(reader.form, Picture):
        kind = "grey" if reader.form.channels == 1 else "colour"
        size = f"{reader.form.height} × {reader.form.width} pixels"
        return [f"{count}: {kind} image files, cropped at the centre and scaled to {size}"]
    shapes = [f"{key} {list(shape)} in {reader.dtypes[key]}" for key, shape in reader.shapes.items()]
    return [f"{count}: {reader.kind}, {', '.join(map(_escape, shapes))}"]


def _describe_rates(detector: Detector) -> str:
    alarm = detector.alarm
    if alarm is None:
        return "Not calibrated: this file has scores, and no threshold."
    rows = {
        "false-alarm rate asked for": f"{alarm.fpr:g}",
        "calibration samples": f"{len(alarm.scores):,}",
        "share of calibration samples above the threshold": f"{alarm.flagged_share:.4g}",
        "threshold": f"{alarm.threshold:.6g}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _describe_contents(detector: Detector) -> str:
    """Return what an exported file holds of the training data; raw samples stay in the detector's own file."""
    stored = detector.state.stored_features
    parts = ["This file holds no raw training samples."]
    if stored:
        parts.append(f"It holds the features of {stored:,} training samples.")
    if detector.kernel is not None or hasattr(detector, "model"):
        parts.append("It holds the trained model that the detector was fitted on.")
    if isinstance(detector.reader.form, Table):
        parts.append("It holds the names of the columns and the categories in them.")
    return " ".join(parts)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _escape(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return "".join(f"\\{character}" if character in r"\`*_[]<>|#" else character for character in visible(text))


def _code(text: str) -> str:
    return f"`{visible(text).replace('`', chr(39))}`"
