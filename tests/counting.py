"""An environment whose outcomes are a hash of its seed and actions, and which can be made to fail."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

LONGEST = 30  # steps of an episode


class Counting(gymnasium.Env[np.ndarray, np.int64]):
    """Observes its index, its seed and a running hash of its actions.

    A file in `trouble` named after an environment and a failure makes it hang, raise or die once, at its next step. A
    file named after the failure alone makes every environment fail at every step.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, number: int, trouble: Path | None = None, slow: float = 0.0) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (3, 4), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(5)
        self.number, self.trouble, self.slow = number, trouble, slow

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.seed, self.hash, self.steps = seed or 0, (seed or 0) & 0xFFFFFFFF, 0
        return self.observe()

    def step(self, action: int | np.integer) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.trouble is not None:
            self.fail(self.trouble)
        time.sleep(self.slow)
        self.hash = (self.hash * 69069 + int(action) + 1) & 0xFFFFFFFF
        self.steps += 1
        frame, info = self.observe()
        return frame, self.hash % 1000 / 8, self.hash % 17 == 0, self.steps == LONGEST, info

    def observe(self) -> tuple[np.ndarray, dict]:
        frame = np.array([self.number, self.seed & 0xFFFFFFFF, self.hash], np.uint32).view(np.uint8).reshape(3, 4)
        return frame, {"position": np.array([self.hash % 100, self.steps], np.float32)} if self.number else {}

    def fail(self, trouble: Path) -> None:
        failures = {"hang": lambda: time.sleep(1000), "raise": complain, "die": lambda: os._exit(3), "exit": sys.exit}
        for failure, act in failures.items():
            once = trouble / f"{self.number}-{failure}"
            if once.exists() or (trouble / failure).exists():
                once.unlink(missing_ok=True)
                act()


def complain() -> None:
    raise ValueError("no\nsuch\nmove")


def fails_on_start(number: int, first: int) -> Counting:
    """Raise for environments from `first` on."""
    if number >= first:
        raise LookupError(f"no\nenvironment {number}")
    return Counting(number)


def exits_on_start(number: int) -> Counting:
    """Raise SystemExit."""
    sys.exit(f"no licence for {number}")


def hangs_on_start(number: int, index: int) -> Counting:
    """Hang in the environment with this index."""
    if number == index:
        time.sleep(1000)
    return Counting(number)


class FileClosing(Counting):
    """Closes every file of its process at the first step."""

    def step(self, action: int | np.integer) -> tuple[np.ndarray, float, bool, bool, dict]:
        os.closerange(3, 256)
        time.sleep(100)
        return super().step(action)


def make_file_closing(number: int) -> Counting:
    return FileClosing(number)
