"""Whether processes have ended."""

import time
from pathlib import Path


def gone(pids: list[int], seconds: float = 10.0) -> bool:
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
