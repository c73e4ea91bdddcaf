"""The training loop: an agent acts and learns in a vector environment, as a generator that can be resumed."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from onefold.rl.learner import Learner
from onefold.rl.vector_env import Steps, VectorEnv

GOAL_REWARD = 0.5  # a reward of at least this much means that the goal was reached


class Episode(NamedTuple):
    """An episode that has ended."""

    frames: int
    """Frames of all environments at its end."""
    environment: int
    length: int
    reward: float
    """Sum of its rewards."""
    reached: bool
    """Whether it reached the goal."""


class LoopStep(NamedTuple):
    """One step of all environments."""

    frames: int
    """Frames of all environments so far."""
    steps: Steps
    ended: list[Episode]


class TrainingLoop:
    """Steps of all environments and updates of the learner, in turn; iterate it to train.

    The learner updates while the environments step. On a GPU, the update is launched before the actions are awaited, so
    that the GPU never waits for the host.
    """

    def __init__(self, learner: Learner, environments: VectorEnv, frames: int, goal: float = GOAL_REWARD) -> None:
        self.learner, self.environments, self.total, self.goal = learner, environments, frames, goal
        self.frames = 0
        self.actions: Int64[np.ndarray, " e"] = np.zeros(environments.count, np.int64)
        """The last actions."""
        self.episode_actions: list[list[int]] = [[] for _ in range(environments.count)]
        """All actions of each current episode, from which it can be replayed."""
        self.rewards: Float64[np.ndarray, " e"] = np.zeros(environments.count)
        self.reached: Bool[np.ndarray, " e"] = np.zeros(environments.count, bool)

    def __iter__(self) -> Iterator[LoopStep]:
        if self.frames == 0:
            yield self._observe(self.environments.reset())
        on_gpu = self.learner.device.type == "cuda"
        while self.frames < self.total:
            if on_gpu:
                self._learn()
            self.actions = self.learner.selected_actions()
            self.environments.send(self.actions)
            if not on_gpu:
                self._learn()
            yield self._observe(self.environments.collect())

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that the next step depends on, except the learner's."""
        return {
            "frames": torch.tensor(self.frames),
            "episodes": torch.from_numpy(self.environments.episodes()),
            "lengths": torch.tensor([len(actions) for actions in self.episode_actions]),
            "done": torch.tensor([action for actions in self.episode_actions for action in actions], dtype=torch.int64),
            "rewards": torch.from_numpy(self.rewards.copy()),
            "reached": torch.from_numpy(self.reached.copy()),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `tensors()`: start the current episodes again and replay their actions.

        The learner must have been restored before.
        """
        self.frames = int(tensors["frames"])
        if self.frames == 0:
            return  # no episode has started
        self.episode_actions = [part.tolist() for part in tensors["done"].split(tensors["lengths"].tolist())]
        self.rewards, self.reached = tensors["rewards"].numpy().copy(), tensors["reached"].numpy().copy()
        self.environments.restore(tensors["episodes"].numpy(), self.episode_actions)

    def _learn(self) -> None:
        """Update the learner, and its target and bonus networks when they are due."""
        learning, count = self.learner.learning, self.environments.count
        first_sample = (learning.replay.n_step + 1) * count  # frames before the replay holds a transition
        if self.frames < max(learning.learning_starts, first_sample):
            return
        self.learner.learn()
        if self.frames % learning.target_period < count:
            self.learner.copy_target()
        period = self.learner.agent.bonus_reset_every
        if period and self.frames >= period and self.frames % period < count:
            self.learner.reset_bonus(self.frames // period)

    def _observe(self, steps: Steps) -> LoopStep:
        """Record the outcome of a step, and pass it to the learner."""
        self.frames += self.environments.count
        ended = []
        for e in range(self.environments.count):
            if steps.began[e]:
                self.episode_actions[e], self.rewards[e], self.reached[e] = [], 0.0, False
                continue
            self.episode_actions[e].append(int(self.actions[e]))
            self.rewards[e] += steps.rewards[e]
            self.reached[e] |= steps.rewards[e] >= self.goal
            if steps.terminated[e] or steps.truncated[e]:
                length, reward, reached = len(self.episode_actions[e]), float(self.rewards[e]), bool(self.reached[e])
                ended.append(Episode(self.frames, e, length, reward, reached))
        self.learner.observe(steps)
        return LoopStep(self.frames, steps, ended)
