"""Rewards for what is new, around any vector environment of Gymnasium's."""

from typing import Any

import numpy as np

from onefold.errors import InputError
from onefold.rl.bonus import Curious, check_bonus
from onefold.rl.gymnasium_import import gymnasium
from onefold.rl.observations import copied, joined

AutoresetMode = gymnasium.vector.AutoresetMode


class IntrinsicReward(gymnasium.vector.VectorWrapper):
    """Adds `beta` times the bonus of what a step led to; the environment's own reward is in `info`.

    `info["extrinsic_reward"]` and `info["intrinsic_reward"]` are arrays, one number an environment. The bonus learns
    from what was seen as soon as there are `learn_every` observations; 0: never (for evaluation). A step that only
    begins a new episode is no achievement, and has no bonus.
    """

    def __init__(self, env: Any, bonus: Curious, *, beta: float = 0.1, learn_every: int = 256) -> None:
        super().__init__(env)
        if not np.isfinite(beta) or learn_every < 0:
            raise InputError(f"beta is a number and learn_every at least 0, not {beta} and {learn_every}")
        self.bonus, self.beta, self.learn_every = check_bonus(bonus), float(beta), learn_every
        self._seen: list[Any] = []
        self._over = np.zeros(self.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, info = self.env.reset(seed=seed, options=options)
        again = (options or {}).get("reset_mask")  # environments that are reset by hand, some of them
        self._over &= False if again is None else ~np.asarray(again, bool)
        self._remember(observations)
        return observations, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        over = np.asarray(terminated | truncated)
        reached = self._reached(observations, info, over)
        news = self.bonus(reached).cpu().numpy().astype(np.float64)
        news[self._over] = 0.0
        self._remember(reached)
        next_step = self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP) == AutoresetMode.NEXT_STEP
        self._over = over if next_step else np.zeros_like(over)
        info = {**info, "extrinsic_reward": np.asarray(rewards), "intrinsic_reward": news}
        return observations, np.asarray(rewards + self.beta * news, np.float64), terminated, truncated, info

    def _reached(self, observations: Any, info: dict[str, Any], over: np.ndarray) -> Any:
        """Where the step led: not the first of the next episode, where that has already begun."""
        final = info.get("final_obs")
        if final is None or not over.any():
            return observations
        parts = list(gymnasium.vector.utils.iterate(self.single_observation_space, observations))
        own = [final[i] if over[i] and final[i] is not None else part for i, part in enumerate(parts)]
        empty = gymnasium.vector.utils.create_empty_array(self.single_observation_space, self.num_envs)
        return gymnasium.vector.utils.concatenate(self.single_observation_space, own, empty)

    def _remember(self, observations: Any) -> None:
        if self.learn_every == 0:
            return
        self._seen.append(copied(observations))
        if len(self._seen) * self.num_envs >= self.learn_every:
            self.bonus.update(joined(self._seen))
            self._seen.clear()
