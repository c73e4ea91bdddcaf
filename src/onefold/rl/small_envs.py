"""Two small worlds in which only those who keep trying the unfamiliar find the reward."""

from typing import Any

import numpy as np
from jaxtyping import Float32

from onefold.errors import InputError
from onefold.rl.gymnasium_import import gymnasium

MOVE_COST = 0.01  # of a whole dive to the right
SMALL, LARGE = 0.001, 1.0  # rewards at the near and the far end of the chain


class DeepSea(gymnasium.Env[Float32[np.ndarray, " n"], np.int64]):
    """A dive of N steps through N × N cells, left or right at each, to the treasure in the far corner (bsuite's).

    Every step to the right costs 0.01 / N; only N of them in a row find the treasure, worth 1. Which of the two actions
    is "right" is drawn for each cell from `mapping_seed`, once; None: it is action 1 everywhere. What is seen is the
    cell, one-hot, row after row; nothing at the bottom.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, size: int, mapping_seed: int | None = 0) -> None:
        if size < 1:
            raise InputError(f"a deep sea has at least one row, not {size}")
        self.size = size
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (size * size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        shape = (size, size)
        self._right = (
            np.ones(shape, np.int64)
            if mapping_seed is None
            else np.random.default_rng(mapping_seed).integers(2, size=shape)
        )
        self._row = self._column = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._row = self._column = 0
        return self._look()

    def step(self, action: int | np.integer) -> tuple[Float32[np.ndarray, " n"], float, bool, bool, dict[str, Any]]:
        if self._row == self.size:
            raise InputError("the episode is over: reset() comes first")
        right = action == self._right[self._row, self._column]
        found = right and self._column == self.size - 1
        self._column = min(self._column + 1, self.size - 1) if right else max(self._column - 1, 0)
        self._row += 1
        reward = float(found) - (MOVE_COST / self.size if right else 0.0)
        frame, info = self._look()
        return frame, reward, self._row == self.size, False, info

    def _look(self) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        frame = np.zeros(self.size**2, np.float32)
        if self._row < self.size:
            frame[self._row * self.size + self._column] = 1.0
        return frame, {"position": np.array([self._column, self.size - self._row], np.float32)}  # down is down


class Chain(gymnasium.Env[Float32[np.ndarray, " n"], np.int64]):
    """States in a row, of which the far end is worth 1 a step and the near end, next to the start, a misleading 0.001.

    Osband et al. (2016): a step to the left in the first state gives 0.001, one to the right in the last gives 1, all
    others nothing. An episode starts in the second state and is cut off after N + 9 steps, so the best return is 11.
    What is seen is a thermometer: ones up to the state, zeros beyond.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, length: int) -> None:
        if length < 3:
            raise InputError(f"a chain has at least three states, not {length}")
        self.length = length
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._state, self._steps_left = 1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._state, self._steps_left = 1, self.length + 9
        return self._look()

    def step(self, action: int | np.integer) -> tuple[Float32[np.ndarray, " n"], float, bool, bool, dict[str, Any]]:
        if self._steps_left == 0:
            raise InputError("the episode is over, or none has begun: reset() comes first")
        state, last = self._state, self.length - 1
        if action == 1:
            reward, self._state = LARGE if state == last else 0.0, min(state + 1, last)
        else:
            reward, self._state = SMALL if state == 0 else 0.0, max(state - 1, 0)
        self._steps_left -= 1
        frame, info = self._look()
        return frame, reward, False, self._steps_left == 0, info

    def _look(self) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        frame = (np.arange(self.length) <= self._state).astype(np.float32)
        return frame, {"position": np.array([self._state, 0], np.float32)}
