"""A wrapper that adds an exploration bonus to the rewards of any Gymnasium vector environment."""

from typing import Any

import numpy as np
from jaxtyping import Bool

from onefold.core.arguments import check_integer, check_number
from onefold.rl.bonus import BonusLike, check_bonus
from onefold.rl.gymnasium_import import gymnasium
from onefold.rl.observations import Observations, concatenate_observations, copy_observations

AutoresetMode = gymnasium.vector.AutoresetMode


class IntrinsicReward(gymnasium.vector.VectorWrapper):
    """Vector environment whose rewards include `beta` times the bonus of the next observation.

    `info["extrinsic_reward"]` has the rewards of the environment and `info["intrinsic_reward"]` the bonuses, one per
    environment. A step that only starts the next episode has no bonus.

    Args:
        env: A Gymnasium vector environment.
        bonus: An object with `__call__` and `update`, such as `CSDBonus()`.
        beta: Weight of the bonus in the reward.
        learn_every: Number of observations between two updates of the bonus. With 0 the bonus is never updated, which
            suits evaluation.

    Raises:
        InputError: `bonus` has no `__call__` or `update`, `beta` is not finite, or `learn_every` is negative.
    """

    def __init__(self, env: Any, bonus: BonusLike, *, beta: float = 0.1, learn_every: int = 256) -> None:
        super().__init__(env)
        self.bonus, self.beta = check_bonus(bonus), check_number(beta, "beta", -np.inf)
        self.learn_every = check_integer(learn_every, "learn_every", 0)
        self._batches: list[Observations] = []  # since the last update of the bonus
        self._starts_episode = np.zeros(self.num_envs, bool)  # the next step only resets the environment

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Observations, dict[str, Any]]:
        """Reset the environments. The bonus also learns from the first observations.

        Args:
            seed: None, an integer, or a list with one per environment.
            options: Options for the environments. `reset_mask` selects those to reset.

        Returns:
            The first observations and the info of the environments.
        """
        observations, info = self.env.reset(seed=seed, options=options)
        reset_mask = (options or {}).get("reset_mask")
        self._starts_episode &= False if reset_mask is None else ~np.asarray(reset_mask, bool)
        self._record(observations)
        return observations, info

    def step(self, actions: Any) -> tuple[Observations, Any, Any, Any, dict[str, Any]]:
        """Step the environments, add the bonus to the rewards, and update the bonus when it is due.

        Args:
            actions: One action per environment.

        Returns:
            Observations, rewards with the bonus, terminated, truncated, and info.
        """
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        ended = np.asarray(terminated | truncated)
        next_observations = self._next_observations(observations, info, ended)
        bonuses = self.bonus(next_observations).cpu().numpy().astype(np.float64)
        bonuses[self._starts_episode] = 0.0
        self._record(next_observations)
        mode = self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._starts_episode = ended if mode == AutoresetMode.NEXT_STEP else np.zeros_like(ended)
        info = {**info, "extrinsic_reward": np.asarray(rewards), "intrinsic_reward": bonuses}
        return observations, np.asarray(rewards + self.beta * bonuses, np.float64), terminated, truncated, info

    def _next_observations(
        self, observations: Observations, info: dict[str, Any], ended: Bool[np.ndarray, " e"]
    ) -> Any:
        """Return the next observations; where an episode has ended, its last instead of the first of the next."""
        final = info.get("final_obs")
        if final is None or not ended.any():
            return observations
        space = self.single_observation_space
        parts = list(gymnasium.vector.utils.iterate(space, observations))
        parts = [final[i] if ended[i] and final[i] is not None else part for i, part in enumerate(parts)]
        return gymnasium.vector.utils.concatenate(
            space, parts, gymnasium.vector.utils.create_empty_array(space, self.num_envs)
        )

    def _record(self, observations: Observations) -> None:
        """Keep observations for the next update of the bonus, and update it when there are `learn_every`."""
        if self.learn_every == 0:
            return
        self._batches.append(copy_observations(observations))
        if len(self._batches) * self.num_envs >= self.learn_every:
            self.bonus.update(concatenate_observations(self._batches))
            self._batches.clear()
