"""Environments of a user's own module, which registers them with Gymnasium when it is imported."""

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

if "IMPORTED" in os.environ:
    Path(os.environ["IMPORTED"]).touch()

DISCRETE = spaces.Discrete(2)
SPACES: dict[str, tuple[spaces.Space, spaces.Space]] = {
    "Vector": (spaces.Box(-1.0, 1.0, (3,), np.float64), DISCRETE),
    "Image": (spaces.Box(0, 255, (20, 24), np.uint8), DISCRETE),
    "Colour": (spaces.Box(0, 255, (20, 24, 3), np.uint8), DISCRETE),
    "Number": (spaces.Box(0.0, 1.0, (), np.float32), DISCRETE),
    "Empty": (spaces.Box(0.0, 1.0, (0,), np.float32), DISCRETE),
    "Dict": (spaces.Dict({"a": spaces.Box(0.0, 1.0, (3,), np.float32)}), DISCRETE),
    "Tuple": (spaces.Tuple((DISCRETE, DISCRETE)), DISCRETE),
    "State": (DISCRETE, DISCRETE),
    "Continuous": (spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Box(-1.0, 1.0, (2,), np.float32)),
    "Shifted": (spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(3, start=1)),
}


class Random(gymnasium.Env[Any, Any]):
    """Random observations; action 1 has a reward of 1. Positions are text or three numbers, which are not a map."""

    def __init__(self, kind: str) -> None:
        self.observation_space, self.action_space = SPACES[kind]
        self.kind = kind

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {"position": "start"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation_space.sample(), float(action), self.steps == 9, False, {"position": np.zeros(3)}


for kind in SPACES:
    gymnasium.register(f"{kind}-v0", "users_environments:Random", kwargs={"kind": kind})
