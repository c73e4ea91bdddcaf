"""An environment for tests whose every answer follows from its seed and its actions, and which can be told to fail."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

LONGEST = 30  # steps of an episode


class Counting(gymnasium.Env[np.ndarray, np.int64]):
    """Shows its number, its seed and a running hash of its actions. A file in `trouble` named after an environment and
    a misdeed has it hang, raise or die at its next step, once; or, named after the misdeed alone, all of them always.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, number: int, trouble: Path | None = None, slow: float = 0.0) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (3, 4), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(5)
        self.number, self.trouble, self.slow = number, trouble, slow

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.seed, self.hash, self.steps = seed or 0, (seed or 0) & 0xFFFFFFFF, 0
        return self.look()

    def step(self, action: int | np.integer) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.trouble is not None:
            self.misbehave(self.trouble)
        time.sleep(self.slow)
        self.hash = (self.hash * 69069 + int(action) + 1) & 0xFFFFFFFF
        self.steps += 1
        frame, info = self.look()
        return frame, self.hash % 1000 / 8, self.hash % 17 == 0, self.steps == LONGEST, info

    def look(self) -> tuple[np.ndarray, dict]:
        frame = np.array([self.number, self.seed & 0xFFFFFFFF, self.hash], np.uint32).view(np.uint8).reshape(3, 4)
        return frame, {"position": np.array([self.hash % 100, self.steps], np.float32)} if self.number else {}

    def misbehave(self, trouble: Path) -> None:
        misdeeds = {"hang": lambda: time.sleep(1000), "raise": complain, "die": lambda: os._exit(3), "exit": sys.exit}
        for misdeed, act in misdeeds.items():
            once = trouble / f"{self.number}-{misdeed}"
            if once.exists() or (trouble / misdeed).exists():
                once.unlink(missing_ok=True)
                act()


def complain() -> None:
    raise ValueError("no\nsuch\nmove")


def fragile(number: int, broken: int) -> Counting:
    """A world that some numbers do not have."""
    if number >= broken:
        raise LookupError(f"no world\nhas the number {number}")
    return Counting(number)


def leaving(number: int) -> Counting:
    """A world that ends the program that makes it."""
    sys.exit(f"no licence for {number}")


def sleepy(number: int, tired: int) -> Counting:
    """A world that takes its time, if it has this number."""
    if number == tired:
        time.sleep(1000)
    return Counting(number)


class Deaf(Counting):
    """Closes every file of its process at the first step."""

    def step(self, action: int | np.integer) -> tuple[np.ndarray, float, bool, bool, dict]:
        os.closerange(3, 256)
        time.sleep(100)
        return super().step(action)


def deaf(number: int) -> Counting:
    return Deaf(number)
