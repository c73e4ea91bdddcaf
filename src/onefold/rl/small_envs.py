"""Two small environments that need directed exploration: DeepSea and a deceptive chain."""

from typing import Any

import numpy as np
from jaxtyping import Float32

from onefold.errors import InputError
from onefold.rl.gymnasium_import import gymnasium

MOVE_COST = 0.01  # of an episode that always moves right
SMALL, LARGE = 0.001, 1.0  # rewards at the near and the far end of the chain


class DeepSea(gymnasium.Env[Float32[np.ndarray, " n"], np.int64]):
    """bsuite's DeepSea: N × N cells, one row down per step, a reward of 1 in the far corner.

    A step to the right costs 0.01 / N. Only N steps to the right in a row reach the reward. The observation is
    the cell, one-hot, row after row; it is zero after the last step.

    Args:
        size: N, the number of rows and of steps in an episode.
        mapping_seed: Seed that draws for each cell which of the two actions moves right. With None, action 1 moves
            right in every cell.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, size: int, mapping_seed: int | None = 0) -> None:
        if size < 1:
            raise InputError(f"size: must be at least 1 (got {size}).")
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
        return self._observe()

    def step(self, action: int | np.integer) -> tuple[Float32[np.ndarray, " n"], float, bool, bool, dict[str, Any]]:
        if self._row == self.size:
            raise InputError("step: the episode is over. Call reset() first.")
        right = action == self._right[self._row, self._column]
        reached = right and self._column == self.size - 1
        self._column = min(self._column + 1, self.size - 1) if right else max(self._column - 1, 0)
        self._row += 1
        reward = float(reached) - (MOVE_COST / self.size if right else 0.0)
        frame, info = self._observe()
        return frame, reward, self._row == self.size, False, info

    def _observe(self) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        frame = np.zeros(self.size**2, np.float32)
        if self._row < self.size:
            frame[self._row * self.size + self._column] = 1.0
        return frame, {
            "position": np.array([self._column, self.size - self._row], np.float32)
        }  # the last row has y = 0


class DeceptiveChain(gymnasium.Env[Float32[np.ndarray, " n"], np.int64]):
    """A chain of N states with a small reward near the start and a large one at the far end (Osband et al., 2016).

    A step to the left in the first state gives 0.001, and a step to the right in the last state gives 1. An episode
    starts in the second state and is truncated after N + 9 steps, so the best return is 11. The observation is a
    thermometer code: ones up to the state, zeros beyond.

    Args:
        length: N, the number of states, at least 3.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, length: int) -> None:
        if length < 3:
            raise InputError(f"length: must be at least 3 (got {length}).")
        self.length = length
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._state, self._steps_left = 1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._state, self._steps_left = 1, self.length + 9
        return self._observe()

    def step(self, action: int | np.integer) -> tuple[Float32[np.ndarray, " n"], float, bool, bool, dict[str, Any]]:
        if self._steps_left == 0:
            raise InputError("step: no episode is running. Call reset() first.")
        state, last = self._state, self.length - 1
        if action == 1:
            reward, self._state = LARGE if state == last else 0.0, min(state + 1, last)
        else:
            reward, self._state = SMALL if state == 0 else 0.0, max(state - 1, 0)
        self._steps_left -= 1
        frame, info = self._observe()
        return frame, reward, False, self._steps_left == 0, info

    def _observe(self) -> tuple[Float32[np.ndarray, " n"], dict[str, Any]]:
        frame = (np.arange(self.length) <= self._state).astype(np.float32)
        return frame, {"position": np.array([self._state, 0], np.float32)}
