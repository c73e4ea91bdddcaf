"""Provenance of a result: version, commit, machine and date."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

import onefold


def provenance(device: torch.device) -> dict[str, str | int | None]:
    """Return the provenance that every result file records; `device` is where the work was done."""
    return {
        "onefold": onefold.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
    }


def commit() -> str | None:
    """Return the commit of the source tree, with '+' if it has uncommitted changes; None outside a repository.

    The environment variable ONEFOLD_COMMIT overrides it, for a tree that was copied without its repository.
    """
    if override := os.environ.get("ONEFOLD_COMMIT"):
        return override
    folder = Path(__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)  # fails if another repository surrounds us
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--", str(folder)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command in a folder."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
