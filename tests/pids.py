"""Checks that processes have ended, and lists of their children."""

import time
from pathlib import Path


def gone(pids: list[int], seconds: float = 300.0) -> bool:
    """Return True if all processes end within this time."""
    until = time.monotonic() + seconds
    while alive := [pid for pid in pids if running(pid)]:
        if time.monotonic() > until:
            return not alive
        time.sleep(0.05)
    return True


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def family(pid: int) -> list[int]:
    """Return the child processes of a process, and theirs."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(stat.parent.name)
            pids += [child, *family(child)]
    return pids
