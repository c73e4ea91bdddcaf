"""Whether processes have ended, and which belong together."""

import time
from pathlib import Path


def gone(pids: list[int], seconds: float = 300.0) -> bool:
    """Whether all processes end in time."""
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
    """The processes that a process has started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(stat.parent.name)
            found += [child, *family(child)]
    return found
