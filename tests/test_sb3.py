"""Bonuses in stable-baselines3 itself: what its algorithms are given, and that they learn from it."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv
from test_bonus import Counting, Steps

from onefold.errors import InputError
from onefold.rl.bonus import CSDBonus
from onefold.rl.sb3 import IntrinsicCallback, IntrinsicDictReplayBuffer, IntrinsicReplayBuffer

NETS = {"net_arch": [8]}


class Dicts(gymnasium.ObservationWrapper[dict[str, Any], int, np.ndarray]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Dict({"at": env.observation_space})

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"at": observation}


class After(BaseCallback):
    """Keeps what a rollout was given, as PPO will train on it."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.locals["rollout_buffer"]
        self.kept = buffer.rewards.copy(), buffer.returns.copy(), buffer.advantages.copy(), buffer.values.copy()


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_rollouts_are_rewarded_for_where_steps_led(algorithm: Any) -> None:
    """Episodes show 10, 11, 12, 13 and end there: the last step's bonus is that of 13, not of the next episode's 10."""
    bonus, after = Counting(), After()
    how: dict[str, Any] = {"batch_size": 7} if algorithm is PPO else {}
    model = algorithm(
        "MlpPolicy", DummyVecEnv([Steps, Steps]), n_steps=7, seed=0, policy_kwargs=NETS, device="cpu", **how
    )
    model.learn(14, callback=[IntrinsicCallback(bonus, beta=0.5), after])
    rewards, returns, advantages, values = after.kept
    np.testing.assert_array_equal(rewards[:, 0], [2 + 0.5 * news for news in (11, 12, 13, 11, 12, 13, 11)])
    lam = model.gae_lambda
    last = rewards[5] - values[5]  # an episode's end: nothing follows
    np.testing.assert_allclose(advantages[5], last, rtol=1e-5)
    step = rewards[4] + model.gamma * values[5] - values[4]
    np.testing.assert_allclose(advantages[4], step + model.gamma * lam * last, rtol=1e-5)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-5)
    assert [len(part) for part in bonus.learned] == [14]


def test_a_callback_for_rollouts_refuses_an_algorithm_that_has_none() -> None:
    model = DQN("MlpPolicy", Steps(), policy_kwargs=NETS, device="cpu", buffer_size=100)
    with pytest.raises(InputError, match="IntrinsicReplayBuffer"):
        model.learn(10, callback=IntrinsicCallback(Counting()))


@pytest.mark.parametrize("dicts", [False, True])
def test_what_is_sampled_has_the_bonus_of_now(dicts: bool) -> None:
    """The same transition is worth what it is worth when it is sampled."""

    class Fading(Counting):
        def __call__(self, observations: Any) -> torch.Tensor:
            return super().__call__(observations["at"] if dicts else observations) / (1 + len(self.learned))

        def update(self, observations: Any) -> float:
            return super().update(observations["at"] if dicts else observations)

    bonus, kind = Fading(), IntrinsicDictReplayBuffer if dicts else IntrinsicReplayBuffer
    make = (lambda: Dicts(Steps())) if dicts else Steps
    policy = "MultiInputPolicy" if dicts else "MlpPolicy"
    model = DQN(
        policy, make(), buffer_size=50, learning_starts=100, seed=0, device="cpu", policy_kwargs=NETS,
        replay_buffer_class=kind, replay_buffer_kwargs={"bonus": bonus, "beta": 0.5},
    )  # fmt: skip
    model.learn(40)
    for round_ in (1, 2):
        found: Any = model.replay_buffer.sample(16)  # pyright: ignore[reportOptionalMemberAccess]
        at = found.next_observations["at"] if dicts else found.next_observations
        torch.testing.assert_close(found.rewards, 2 + 0.5 * at / round_)


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_off_policy_algorithms_learn_save_and_load(algorithm: Any, tmp_path: Path) -> None:
    env = Steps() if algorithm is DQN else gymnasium.make("Pendulum-v1")
    bonus = CSDBonus(hidden=(16,), outputs=8, device="cpu")
    model = algorithm(
        "MlpPolicy", env, buffer_size=200, learning_starts=20, seed=0, device="cpu", policy_kwargs=NETS, batch_size=16,
        replay_buffer_class=IntrinsicReplayBuffer, replay_buffer_kwargs={"bonus": bonus, "beta": 0.1},
    )  # fmt: skip
    model.learn(60)
    assert not bonus.scale.empty
    model.save(tmp_path / "model")
    seen = env.observation_space.sample()
    again = algorithm.load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(
        model.predict(seen, deterministic=True)[0], again.predict(seen, deterministic=True)[0]
    )
    with pytest.raises(InputError):
        IntrinsicReplayBuffer(10, env.observation_space, env.action_space, bonus=bonus, beta=float("inf"))
