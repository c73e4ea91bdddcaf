"""Act, send, learn, collect: an agent in its environments, as a generator that can be stopped and gone on with."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onefold.rl.learner import Learner
from onefold.rl.vector_env import Steps, VectorEnv

GOAL_REWARD = 0.5  # a reward of so much comes at a goal


class Episode(NamedTuple):
    """One that ended: when (in frames of all environments), whose, how long, its reward, and whether at a goal."""

    frames: int
    environment: int
    length: int
    reward: float
    reached: bool


class LoopStep(NamedTuple):
    """After a step of all environments."""

    frames: int
    steps: Steps
    ended: list[Episode]


class TrainingLoop:
    """While the environments make a step, the learner makes an update. It starts where `restore` left it.

    A GPU is asked for the update before the host waits for the actions, so that it never waits for the host.
    """

    def __init__(self, learner: Learner, environments: VectorEnv, frames: int, goal: float = GOAL_REWARD) -> None:
        self.learner, self.environments, self.total, self.goal = learner, environments, frames, goal
        self.frames = 0
        self.actions: NDArray[np.int64] = np.zeros(environments.count, np.int64)
        """What was done last."""
        self.done: list[list[int]] = [[] for _ in range(environments.count)]
        """What was done in the episodes that are under way, so that they can be begun again."""
        self.rewards, self.reached = np.zeros(environments.count), np.zeros(environments.count, bool)

    def __iter__(self) -> Iterator[LoopStep]:
        if self.frames == 0:
            yield self._observed(self.environments.reset())
        ahead = self.learner.device.type == "cuda"
        while self.frames < self.total:
            if ahead:
                self._learn()
            self.actions = self.learner.answer()
            self.environments.send(self.actions)
            if not ahead:
                self._learn()
            yield self._observed(self.environments.collect())

    def tensors(self) -> dict[str, Tensor]:
        """What the next step depends on besides the learner."""
        return {
            "frames": torch.tensor(self.frames),
            "episodes": torch.from_numpy(self.environments.episodes()),
            "lengths": torch.tensor([len(actions) for actions in self.done]),
            "done": torch.tensor([action for actions in self.done for action in actions], dtype=torch.int64),
            "rewards": torch.from_numpy(self.rewards.copy()),
            "reached": torch.from_numpy(self.reached.copy()),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from `tensors()`, the learner having been restored: episodes are begun again and played up to here."""
        self.frames = int(tensors["frames"])
        if self.frames == 0:
            return  # nothing had begun
        self.done = [part.tolist() for part in tensors["done"].split(tensors["lengths"].tolist())]
        self.rewards, self.reached = tensors["rewards"].numpy().copy(), tensors["reached"].numpy().copy()
        self.environments.restore(tensors["episodes"].numpy(), self.done)

    def _learn(self) -> None:
        learning, count = self.learner.learning, self.environments.count
        if self.frames < max(
            learning.learning_starts, (learning.replay.n_step + 1) * count
        ):  # nothing could be drawn before
            return
        self.learner.learn()
        if self.frames % learning.target_period < count:
            self.learner.copy_target()
        every = self.learner.agent.bonus_reset_every
        if every and self.frames >= every and self.frames % every < count:
            self.learner.reset_bonus(self.frames // every)

    def _observed(self, steps: Steps) -> LoopStep:
        self.frames += self.environments.count
        ended = []
        for e in range(self.environments.count):
            if steps.began[e]:
                self.done[e], self.rewards[e], self.reached[e] = [], 0.0, False
                continue
            self.done[e].append(int(self.actions[e]))
            self.rewards[e] += steps.rewards[e]
            self.reached[e] |= steps.rewards[e] >= self.goal
            if steps.terminated[e] or steps.truncated[e]:
                ended.append(Episode(self.frames, e, len(self.done[e]), float(self.rewards[e]), bool(self.reached[e])))
        self.learner.observe(steps)
        return LoopStep(self.frames, steps, ended)
