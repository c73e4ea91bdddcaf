"""Exploration bonuses inside stable-baselines3: a callback for PPO and A2C, replay buffers for DQN, SAC and TD3.

model = PPO("MlpPolicy", env)
model.learn(1_000_000, callback=IntrinsicCallback(CSDBonus(), beta=0.1))

model = DQN("MlpPolicy", env, replay_buffer_class=IntrinsicReplayBuffer,
            replay_buffer_kwargs={"bonus": CSDBonus(), "beta": 10.0})
model.learn(100_000)
"""

from typing import Any

import numpy as np

from onefold.errors import InputError, MissingExtraError
from onefold.rl.bonus import Curious
from onefold.rl.observations import copied, joined

try:
    from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError:
    raise MissingExtraError("this needs stable-baselines3: pip install 'onefold[sb3]'") from None


class IntrinsicCallback(BaseCallback):
    """For on-policy algorithms: after a rollout, `beta` times the bonus of what a step led to is added to its reward,
    advantages and returns are computed anew, and the bonus learns from the rollout.

    What is logged of episodes stays the environment's own reward. `intrinsic/bonus`, `intrinsic/loss` go to the logger.
    """

    def __init__(self, bonus: Curious, *, beta: float = 0.01, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.bonus, self.beta = bonus, _checked(beta)
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
    and the bonus learns from what was sampled."""

    def __init__(self, *args: Any, bonus: Curious, beta: float = 1.0, **how: Any) -> None:
        super().__init__(*args, **how)
        self.bonus, self.beta = bonus, _checked(beta)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        return _rewarded(super()._get_samples(batch_inds, env), self.bonus, self.beta)


class IntrinsicDictReplayBuffer(DictReplayBuffer):
    """The same for observations that are dicts."""

    def __init__(self, *args: Any, bonus: Curious, beta: float = 1.0, **how: Any) -> None:
        super().__init__(*args, **how)
        self.bonus, self.beta = bonus, _checked(beta)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rewarded(super()._get_samples(batch_inds, env), self.bonus, self.beta)


def _rewarded(samples: Any, bonus: Curious, beta: float) -> Any:
    news = bonus(samples.next_observations)
    bonus.update(samples.next_observations)
    return samples._replace(rewards=samples.rewards + beta * news[:, None].to(samples.rewards))


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
