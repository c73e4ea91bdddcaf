"""How much memory there is, and a refusal in words before a job that would not fit."""

from pathlib import Path

import torch

from onefold.errors import NotEnoughMemoryError


def available(device: torch.device) -> int:
    """Bytes that a new job can take on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30  # no /proc (macOS, Windows): a machine of ordinary size
    try:  # a container may have less than its host
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        return min(free, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return free


def require(needed: int, limit: int, *, what: str, way_out: str) -> None:
    """Refuse a job that needs more than `limit` bytes, with the sizes and the way out."""
    if needed > limit:
        raise NotEnoughMemoryError(f"{what} needs {human(needed)} of memory, {human(limit)} can be used: {way_out}")


def ran_out(error: BaseException) -> bool:
    """Whether it was for want of memory. torch has no type for that on a CPU, only words."""
    words = "not enough memory", "can't allocate memory", "out of memory"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in words)
    )


def human(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
