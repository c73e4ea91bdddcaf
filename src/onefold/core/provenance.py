"""Where a result comes from: version, commit, machine, date."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

import onefold


def provenance(device: torch.device) -> dict[str, str | int | None]:
    """What every result file says about its making; `device` is where the work was done."""
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
    """The commit of the source tree, with '+' if it has been changed since; None outside a repository.

    Where the tree was copied to a machine without its repository, ONEFOLD_COMMIT can say which it is.
    """
    if named := os.environ.get("ONEFOLD_COMMIT"):
        return named
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)  # installed into somebody else's repository?
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
