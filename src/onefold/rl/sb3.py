"""Exploration bonuses inside stable-baselines3: a callback for PPO and A2C, replay buffers for DQN, SAC and TD3.

model = PPO("MlpPolicy", env)
model.learn(1_000_000, callback=IntrinsicCallback(CSDBonus(), beta=0.1))

model = DQN("MlpPolicy", env, replay_buffer_class=IntrinsicReplayBuffer,
            replay_buffer_kwargs={"bonus": CSDBonus(), "beta": 10.0})
model.learn(100_000)
"""

from typing import Any

import numpy as np
import torch

from onefold.core.arguments import check_integer, check_number
from onefold.errors import InputError, MissingExtraError
from onefold.rl.bonus import Curious, check_bonus
from onefold.rl.observations import copied, joined

try:
    from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
except ImportError:
    raise MissingExtraError("this needs stable-baselines3: pip install 'onefold[sb3]'") from None


class IntrinsicCallback(BaseCallback):
    """For on-policy algorithms: after a rollout, `beta` times the bonus of what a step led to is added to its reward,
    advantages and returns are computed anew, and the bonus learns from the rollout.

    What is logged of episodes stays the environment's own reward. `intrinsic/bonus`, `intrinsic/loss` go to the logger.
    """

    def __init__(self, bonus: Curious, *, beta: float = 0.01, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.bonus, self.beta = check_bonus(bonus), _checked(beta)
        self._reached: list[Any] = []

    def _init_callback(self) -> None:
        if not isinstance(getattr(self.model, "rollout_buffer", None), RolloutBuffer):
            raise InputError("IntrinsicCallback is for PPO and A2C; DQN, SAC and TD3 take an IntrinsicReplayBuffer")

    def _on_rollout_start(self) -> None:
        self._reached.clear()

    def _on_step(self) -> bool:
        reached = copied(self.locals["new_obs"])
        for i in np.flatnonzero(self.locals["dones"]):
            last = self.locals["infos"][i].get("terminal_observation")
            if last is not None:
                _place(reached, i, last)
        self._reached.append(reached)
        return True

    def _on_rollout_end(self) -> None:
        buffer: RolloutBuffer | DictRolloutBuffer = self.locals["rollout_buffer"]
        reached = joined(self._reached)
        self._reached.clear()
        news = self.bonus(reached).cpu().numpy()
        loss = self.bonus.update(reached)
        buffer.rewards += self.beta * news.reshape(buffer.rewards.shape)
        buffer.compute_returns_and_advantage(last_values=self.locals["values"], dones=self.locals["dones"])
        self.logger.record("intrinsic/bonus", float(news.mean()))
        self.logger.record("intrinsic/loss", loss)


class IntrinsicReplayBuffer(ReplayBuffer):
    """For off-policy algorithms: rewards get `beta` times the bonus when they are sampled, so that it is never stale,
    and the bonus learns from what was sampled.

    With `n_steps` of 2 or more, returns are of n steps, as those of stable-baselines3's NStepReplayBuffer. Every step
    of the window has the bonus of where it led, discounted by `gamma`, which must be the algorithm's. The bonus learns
    from the first step of each window, so that it learns as quickly as with one step.
    """

    def __init__(
        self, *args: Any, bonus: Curious, beta: float = 1.0, n_steps: int = 1, gamma: float = 0.99, **how: Any
    ) -> None:
        super().__init__(*args, **how)
        self.bonus, self.beta = check_bonus(bonus), _checked(beta)
        self.n_steps, self.gamma = _checked_window(n_steps, gamma)
        if self.n_steps > 1 and self.optimize_memory_usage:
            raise InputError("n_steps: returns of several steps need optimize_memory_usage=False")

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        if self.n_steps > 1:
            return ReplayBufferSamples(*_n_step_samples(self, batch_inds, env))
        return _rewarded(super()._get_samples(batch_inds, env), self.bonus, self.beta)


class IntrinsicDictReplayBuffer(DictReplayBuffer):
    """The same for observations that are dicts."""

    def __init__(
        self, *args: Any, bonus: Curious, beta: float = 1.0, n_steps: int = 1, gamma: float = 0.99, **how: Any
    ) -> None:
        super().__init__(*args, **how)
        self.bonus, self.beta = check_bonus(bonus), _checked(beta)
        self.n_steps, self.gamma = _checked_window(n_steps, gamma)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.n_steps > 1:
            return DictReplayBufferSamples(*_n_step_samples(self, batch_inds, env))
        return _rewarded(super()._get_samples(batch_inds, env), self.bonus, self.beta)


def _rewarded(samples: Any, bonus: Curious, beta: float) -> Any:
    news = bonus(samples.next_observations)
    bonus.update(samples.next_observations)
    return samples._replace(rewards=samples.rewards + beta * news[:, None].to(samples.rewards))


def _n_step_samples(buffer: Any, times: np.ndarray, env: Any) -> tuple[Any, ...]:
    """Return the fields of stable-baselines3's samples for windows that begin at `times`, in environments by chance.

    A window ends with n steps, with its episode, or with the newest step. Σ_k γᵏ (r_k + β b(s_{k+1})) is its reward, γᵐ
    the discount after its m steps.
    """
    count, n = len(times), buffer.n_steps
    envs = np.random.randint(0, buffer.n_envs, size=count)  # noqa: NPY002  (stable-baselines3's generator)
    window, columns = (times[:, None] + np.arange(n)) % buffer.buffer_size, np.tile(envs[:, None], n)
    dones, timeouts = buffer.dones[window, columns] > 0, buffer.timeouts[window, columns] > 0
    ends = dones | timeouts | (window == (buffer.pos - 1) % buffer.buffer_size)
    within = np.cumsum(ends, 1) - ends == 0  # up to the first end, and with it
    steps = within.sum(1)

    def observed(source: Any, at: np.ndarray, who: np.ndarray) -> Any:
        if isinstance(source, dict):
            parts = buffer._normalize_obs({name: part[at, who] for name, part in source.items()}, env)
            return {name: buffer.to_torch(part) for name, part in parts.items()}
        return buffer.to_torch(buffer._normalize_obs(source[at, who], env))

    news = torch.zeros(count, n, device=buffer.device)
    news[torch.from_numpy(within).to(buffer.device)] = buffer.bonus(
        observed(buffer.next_observations, window[within], columns[within])
    ).to(news)
    buffer.bonus.update(observed(buffer.next_observations, times, envs))
    powers = buffer.gamma ** np.arange(n + 1, dtype=np.float32)
    rewards = buffer._normalize_reward(buffer.rewards[window, columns], env)
    returns = buffer.to_torch((rewards * powers[:n] * within).sum(1, keepdims=True))
    returns += buffer.beta * (news * buffer.to_torch(powers[:n])).sum(1, keepdim=True)
    last = np.arange(count), steps - 1
    return (
        observed(buffer.observations, times, envs),
        buffer.to_torch(buffer.actions[times, envs]),
        observed(buffer.next_observations, window[last], envs),
        buffer.to_torch((dones & ~timeouts)[last][:, None].astype(np.float32)),
        returns,
        buffer.to_torch(powers[steps][:, None]),
    )


def _checked_window(n_steps: int, gamma: float) -> tuple[int, float]:
    return check_integer(n_steps, "n_steps"), check_number(gamma, "gamma", 0, 1, closed="both")


def _checked(beta: float) -> float:
    if not np.isfinite(beta):
        raise InputError(f"beta is a number, not {beta}")
    return float(beta)


def _place(observations: Any, i: Any, last: Any) -> None:
    if isinstance(observations, dict):
        for name, part in observations.items():
            part[i] = last[name]
    else:
        observations[i] = last
