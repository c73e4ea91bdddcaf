"""Exploration bonuses in stable-baselines3: a callback for PPO and A2C, replay buffers for DQN, SAC and TD3.

model = PPO("MlpPolicy", env)
model.learn(1_000_000, callback=IntrinsicCallback(CSDBonus(), beta=0.1))

model = DQN("MlpPolicy", env, replay_buffer_class=IntrinsicReplayBuffer,
            replay_buffer_kwargs={"bonus": CSDBonus(), "beta": 10.0})
model.learn(100_000)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from onefold.core.arguments import check_integer, check_number
from onefold.errors import InputError, MissingExtraError
from onefold.rl.bonus import BonusLike, check_bonus
from onefold.rl.observations import Observations, concatenate_observations, copy_observations

try:
    from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
except ImportError:
    raise MissingExtraError("this needs stable-baselines3: pip install 'onefold[sb3]'") from None


class IntrinsicCallback(BaseCallback):
    """Callback for on-policy algorithms (PPO, A2C) that adds an exploration bonus to the rewards.

    After each rollout it adds `beta` times the bonus of each step's next observation to the reward, recomputes
    advantages and returns, and updates the bonus. Episode statistics in the log keep the rewards of the environment.
    The log gets `intrinsic/bonus` and `intrinsic/loss`.

    Args:
        bonus: An object with `__call__` and `update`, such as `CSDBonus()`.
        beta: Weight of the bonus in the reward.
        verbose: Verbosity of stable-baselines3's callbacks: 0, 1 or 2.

    Raises:
        InputError: `bonus` has no `__call__` or `update`, `beta` is not finite, or the algorithm has no rollout buffer.
    """

    def __init__(self, bonus: BonusLike, *, beta: float = 0.01, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.bonus, self.beta = check_bonus(bonus), check_number(beta, "beta", -np.inf)
        self._next_observations: list[Observations] = []

    def _init_callback(self) -> None:
        if not isinstance(getattr(self.model, "rollout_buffer", None), RolloutBuffer):
            raise InputError(
                f"IntrinsicCallback: {type(self.model).__name__} has no rollout buffer. Use IntrinsicReplayBuffer for "
                "DQN, SAC and TD3."
            )

    def _on_rollout_start(self) -> None:
        self._next_observations.clear()

    def _on_step(self) -> bool:
        observations = copy_observations(self.locals["new_obs"])
        for i in np.flatnonzero(self.locals["dones"]):  # these environments were reset: use their last observation
            last = self.locals["infos"][i].get("terminal_observation")
            if last is not None:
                _replace_row(observations, int(i), last)
        self._next_observations.append(observations)
        return True

    def _on_rollout_end(self) -> None:
        buffer: RolloutBuffer | DictRolloutBuffer = self.locals["rollout_buffer"]
        observations = concatenate_observations(self._next_observations)
        self._next_observations.clear()
        bonuses = self.bonus(observations).cpu().numpy()
        loss = self.bonus.update(observations)
        buffer.rewards += self.beta * bonuses.reshape(buffer.rewards.shape)
        buffer.compute_returns_and_advantage(last_values=self.locals["values"], dones=self.locals["dones"])
        self.logger.record("intrinsic/bonus", float(bonuses.mean()))
        self.logger.record("intrinsic/loss", loss)


class IntrinsicReplayBuffer(ReplayBuffer):
    """Replay buffer for off-policy algorithms (DQN, SAC, TD3) that adds an exploration bonus to sampled rewards.

    The bonus is computed when a transition is sampled, so it is always current. Each sample also updates the bonus.

    With `n_steps` > 1, returns are those of stable-baselines3's `NStepReplayBuffer`, and each step of a window adds the
    discounted bonus of its next observation. Only the first step of a window updates the bonus, so that it learns at
    the same rate as with one step.

    Args:
        *args: Arguments of `ReplayBuffer`; the algorithm passes them.
        bonus: An object with `__call__` and `update`, such as `CSDBonus()`.
        beta: Weight of the bonus in the reward.
        n_steps: Steps of a return.
        gamma: Discount of the returns; must equal the algorithm's. Used if `n_steps` > 1.
        **kwargs: Keyword arguments of `ReplayBuffer`; the algorithm passes them.

    Raises:
        InputError: `bonus` has no `__call__` or `update`; `beta`, `n_steps` or `gamma` is out of range; or
            `optimize_memory_usage` is used with `n_steps` > 1.
    """

    def __init__(
        self, *args: Any, bonus: BonusLike, beta: float = 1.0, n_steps: int = 1, gamma: float = 0.99, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.bonus, self.beta = check_bonus(bonus), check_number(beta, "beta", -np.inf)
        self.n_steps, self.gamma = check_integer(n_steps, "n_steps"), check_number(gamma, "gamma", 0, 1, closed="both")
        if self.n_steps > 1 and self.optimize_memory_usage:
            raise InputError(f"n_steps: {n_steps} needs optimize_memory_usage=False. Pass it, or use n_steps=1.")

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        if self.n_steps == 1:
            return _add_bonus(super()._get_samples(batch_inds, env), self.bonus, self.beta)
        return ReplayBufferSamples(
            *_n_step_samples(
                self,
                batch_inds,
                lambda part: self._normalize_obs(part, env),
                lambda part: self._normalize_reward(part, env),
            )
        )


class IntrinsicDictReplayBuffer(DictReplayBuffer):
    """`IntrinsicReplayBuffer` for dict observations.

    Args:
        *args: Arguments of `DictReplayBuffer`; the algorithm passes them.
        bonus: An object with `__call__` and `update`, such as `CSDBonus()`.
        beta: Weight of the bonus in the reward.
        n_steps: Steps of a return.
        gamma: Discount of the returns; must equal the algorithm's. Used if `n_steps` > 1.
        **kwargs: Keyword arguments of `DictReplayBuffer`; the algorithm passes them.

    Raises:
        InputError: `bonus` has no `__call__` or `update`, or `beta`, `n_steps` or `gamma` is out of range.
    """

    def __init__(
        self, *args: Any, bonus: BonusLike, beta: float = 1.0, n_steps: int = 1, gamma: float = 0.99, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.bonus, self.beta = check_bonus(bonus), check_number(beta, "beta", -np.inf)
        self.n_steps, self.gamma = check_integer(n_steps, "n_steps"), check_number(gamma, "gamma", 0, 1, closed="both")

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.n_steps == 1:
            return _add_bonus(super()._get_samples(batch_inds, env), self.bonus, self.beta)
        return DictReplayBufferSamples(
            *_n_step_samples(
                self,
                batch_inds,
                lambda part: self._normalize_obs(part, env),
                lambda part: self._normalize_reward(part, env),
            )
        )


def _add_bonus(samples: Any, bonus: BonusLike, beta: float) -> Any:
    """Return one-step samples with the bonus added to their rewards, and update the bonus."""
    bonuses = bonus(samples.next_observations)
    bonus.update(samples.next_observations)
    return samples._replace(rewards=samples.rewards + beta * bonuses[:, None].to(samples.rewards))


def _n_step_samples(
    buffer: IntrinsicReplayBuffer | IntrinsicDictReplayBuffer,
    times: Int[np.ndarray, " n"],
    normalise_observations: Callable[[Any], Any],
    normalise_rewards: Callable[[Any], Any],
) -> tuple[Any, ...]:
    """Return the fields of stable-baselines3's samples for windows that start at `times`, in random environments.

    A window ends after n steps, with its episode, or at the newest step. Its reward is Σ_k γᵏ (r_k + β b(s_{k+1})), and
    its discount γᵐ for m steps.
    """
    count, n = len(times), buffer.n_steps
    envs = np.random.randint(0, buffer.n_envs, size=count)  # noqa: NPY002  (stable-baselines3's generator)
    window, columns = (times[:, None] + np.arange(n)) % buffer.buffer_size, np.tile(envs[:, None], n)
    dones, timeouts = buffer.dones[window, columns] > 0, buffer.timeouts[window, columns] > 0
    ends = dones | timeouts | (window == (buffer.pos - 1) % buffer.buffer_size)
    in_window = np.cumsum(ends, 1) - ends == 0  # up to and including the first end
    steps = in_window.sum(1)

    def observations(source: Any, time: np.ndarray, env: np.ndarray) -> Any:
        if isinstance(source, dict):
            parts = normalise_observations({name: part[time, env] for name, part in source.items()})
            return {name: buffer.to_torch(part) for name, part in parts.items()}
        return buffer.to_torch(normalise_observations(source[time, env]))

    bonuses = torch.zeros(count, n, device=buffer.device)
    bonuses[torch.from_numpy(in_window).to(buffer.device)] = buffer.bonus(
        observations(buffer.next_observations, window[in_window], columns[in_window])
    ).to(bonuses)
    buffer.bonus.update(observations(buffer.next_observations, times, envs))
    powers = buffer.gamma ** np.arange(n + 1, dtype=np.float32)
    rewards = normalise_rewards(buffer.rewards[window, columns])
    returns = buffer.to_torch((rewards * powers[:n] * in_window).sum(1, keepdims=True))
    returns += buffer.beta * (bonuses * buffer.to_torch(powers[:n])).sum(1, keepdim=True)
    last = np.arange(count), steps - 1
    return (
        observations(buffer.observations, times, envs),
        buffer.to_torch(buffer.actions[times, envs]),
        observations(buffer.next_observations, window[last], envs),
        buffer.to_torch((dones & ~timeouts)[last][:, None].astype(np.float32)),
        returns,
        buffer.to_torch(powers[steps][:, None]),
    )


def _replace_row(observations: Observations, row: int, observation: Any) -> None:
    """Replace one row of a batch of observations in place."""
    if isinstance(observations, dict):
        for name, part in observations.items():
            part[row] = observation[name]
    else:
        observations[row] = observation
