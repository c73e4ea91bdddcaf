"""Exploration bonuses in the algorithms of stable-baselines3."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from test_bonus import CountingEnv, FakeBonus

from onefold.errors import InputError
from onefold.rl.bonus import CSDBonus
from onefold.rl.sb3 import IntrinsicCallback, IntrinsicDictReplayBuffer, IntrinsicReplayBuffer

NETS = {"net_arch": [8]}


class DictObservations(gymnasium.ObservationWrapper[dict[str, Any], int, np.ndarray]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Dict({"at": env.observation_space})

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"at": observation}


class RecordRollout(BaseCallback):
    """Record the rollout that PPO trains on."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.locals["rollout_buffer"]
        self.values = buffer.rewards.copy(), buffer.returns.copy(), buffer.advantages.copy(), buffer.values.copy()


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_rollouts_have_the_bonus_of_the_next_observation(algorithm: Any) -> None:
    """Episodes show 10, 11, 12, 13 and end there: the last step's bonus is that of 13, not of the next episode's 10."""
    bonus, recorder = FakeBonus(), RecordRollout()
    kwargs: dict[str, Any] = {"batch_size": 7} if algorithm is PPO else {}
    model = algorithm(
        "MlpPolicy",
        DummyVecEnv([CountingEnv, CountingEnv]),
        n_steps=7,
        seed=0,
        policy_kwargs=NETS,
        device="cpu",
        **kwargs,
    )
    model.learn(14, callback=[IntrinsicCallback(bonus, beta=0.5), recorder])
    rewards, returns, advantages, values = recorder.values
    np.testing.assert_array_equal(rewards[:, 0], [2 + 0.5 * value for value in (11, 12, 13, 11, 12, 13, 11)])
    lam = model.gae_lambda
    last = rewards[5] - values[5]  # an episode's end: nothing follows
    np.testing.assert_allclose(advantages[5], last, rtol=1e-5)
    step = rewards[4] + model.gamma * values[5] - values[4]
    np.testing.assert_allclose(advantages[4], step + model.gamma * lam * last, rtol=1e-5)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-5)
    assert [len(part) for part in bonus.learned] == [14]


def test_the_callback_refuses_algorithms_without_rollouts() -> None:
    model = DQN("MlpPolicy", CountingEnv(), policy_kwargs=NETS, device="cpu", buffer_size=100)
    with pytest.raises(InputError, match="IntrinsicReplayBuffer"):
        model.learn(10, callback=IntrinsicCallback(FakeBonus()))


@pytest.mark.parametrize("dicts", [False, True])
def test_samples_have_the_current_bonus(dicts: bool) -> None:
    """The bonus of a transition changes between two samples."""

    class Fading(FakeBonus):
        def __call__(self, observations: Any) -> torch.Tensor:
            return super().__call__(observations["at"] if dicts else observations) / (1 + len(self.learned))

        def update(self, observations: Any) -> float:
            return super().update(observations["at"] if dicts else observations)

    bonus, kind = Fading(), IntrinsicDictReplayBuffer if dicts else IntrinsicReplayBuffer
    make = (lambda: DictObservations(CountingEnv())) if dicts else CountingEnv
    policy = "MultiInputPolicy" if dicts else "MlpPolicy"
    model = DQN(
        policy, make(), buffer_size=50, learning_starts=100, seed=0, device="cpu", policy_kwargs=NETS,
        replay_buffer_class=kind, replay_buffer_kwargs={"bonus": bonus, "beta": 0.5},
    )  # fmt: skip
    model.learn(40)
    for round_ in (1, 2):
        samples: Any = model.replay_buffer.sample(16)  # pyright: ignore[reportOptionalMemberAccess]
        at = samples.next_observations["at"] if dicts else samples.next_observations
        torch.testing.assert_close(samples.rewards, 2 + 0.5 * at / round_)


def filled(kind: Any, times: int, **kwargs: Any) -> Any:
    """Return a buffer of 12 time steps for two environments; an observation is its time and its environment."""
    rng = np.random.default_rng(0)
    box: Any = gymnasium.spaces.Box(-1e4, 1e4, (2,), np.float32)
    space = gymnasium.spaces.Dict({"at": box}) if kind is IntrinsicDictReplayBuffer else box
    buffer = kind(24, space, gymnasium.spaces.Discrete(3), "cpu", 2, **kwargs)
    for time in range(times):
        before, after = (np.array([[t, 0], [t, 1]], np.float32) for t in (time, time + 0.5))
        done = rng.random(2) < 0.3
        infos = [{"TimeLimit.truncated": bool(rng.random() < 0.5 and over)} for over in done]
        seen: Any = ({"at": before}, {"at": after}) if space is not box else (before, after)
        buffer.add(seen[0], seen[1], rng.integers(0, 3, (2, 1)), rng.normal(size=2), done, infos)
    return buffer


def at(observations: Any) -> torch.Tensor:
    return observations["at"] if isinstance(observations, dict) else observations


class Squares(FakeBonus):
    """A bonus of the squared time, which halves with every update."""

    def __call__(self, observations: Any) -> torch.Tensor:
        return at(observations)[:, 0] ** 2 * 0.5 ** len(self.learned)

    def update(self, observations: Any) -> float:
        return super().update(at(observations))


@pytest.mark.parametrize("times", [5, 12, 31])
@pytest.mark.parametrize("normalised", [False, True])
def test_windows_are_those_of_stable_baselines(times: int, normalised: bool) -> None:
    """Without a bonus: ends and truncations within the window, the newest step, and a full buffer."""
    env = VecNormalize(DummyVecEnv([CountingEnv])) if normalised else None
    if env is not None:
        rms: Any = env.obs_rms
        rms.mean, rms.var, env.ret_rms.var = np.array([3.0, 1.0]), np.array([4.0, 9.0]), np.array(2.0)
    kwargs: dict[str, Any] = {"n_steps": 4, "gamma": 0.9}
    theirs = filled(NStepReplayBuffer, times, **kwargs)
    ours = filled(IntrinsicReplayBuffer, times, bonus=Squares(), beta=0.0, **kwargs)
    samples = []
    for buffer in (theirs, ours):
        np.random.seed(3)  # noqa: NPY002
        samples.append(buffer.sample(300, env))
    for expected, actual in zip(*samples, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("times", [5, 12, 31])
@pytest.mark.parametrize("kind", [IntrinsicReplayBuffer, IntrinsicDictReplayBuffer])
def test_every_step_of_a_window_has_the_bonus_of_its_next_observation(kind: Any, times: int) -> None:
    """Step by step from the content of the buffer, with the bonus at the time of sampling."""
    n, gamma, beta, bonus = 4, 0.9, 0.3, Squares()
    buffer = filled(kind, times, bonus=bonus, beta=beta, n_steps=n, gamma=gamma)
    starts, lengths = [], set()
    for fade in (1.0, 0.5):
        samples = buffer.sample(200)
        for i, (time, who) in enumerate(at(samples.observations).int().tolist()):
            total, steps, over, slot, reached = 0.0, 0, False, 0, 0.0
            while steps < n and time + steps < times and not over:
                slot = (time + steps) % 12
                reached = float(at(buffer.next_observations)[slot, who, 0])
                total += gamma**steps * (float(buffer.rewards[slot, who]) + beta * fade * reached**2)
                steps, over = steps + 1, bool(buffer.dones[slot, who])
            terminated = over and not buffer.timeouts[slot, who]
            assert float(samples.rewards[i, 0]) == pytest.approx(total, rel=1e-5)
            assert at(samples.next_observations)[i].tolist() == [reached, who]
            assert bool(samples.dones[i, 0]) == terminated
            assert float(samples.discounts[i, 0]) == pytest.approx(gamma**steps)
            lengths.add((steps, over))
        starts.append(at(samples.observations).numpy() + np.array([0.5, 0], np.float32))
    assert {steps for steps, _ in lengths} == {1, 2, 3, 4}
    assert {(1, True), (2, True)} <= lengths
    assert {steps for steps, over in lengths if not over} & {1, 2, 3}  # some are cut by the newest step
    np.testing.assert_array_equal(bonus.learned, starts)  # of each window the first step


def test_dqn_learns_from_returns_of_several_steps() -> None:
    """With the arguments that stable-baselines3 recommends. Episodes are 10, 11, 12, 13; each reward is 2."""
    bonus, gamma = FakeBonus(), 0.5
    model = DQN(
        "MlpPolicy", CountingEnv(), buffer_size=60, learning_starts=100, seed=0, device="cpu", policy_kwargs=NETS,
        replay_buffer_class=IntrinsicReplayBuffer, gamma=gamma, train_freq=1,
        replay_buffer_kwargs={"bonus": bonus, "beta": 0.5, "n_steps": 3, "gamma": gamma},
    )  # fmt: skip
    model.learn(30)
    samples: Any = model.replay_buffer.sample(64)  # pyright: ignore[reportOptionalMemberAccess]
    expected = {13: 0.0}
    for position in (12, 11, 10):
        expected[position] = 2 + 0.5 * (position + 1) + gamma * expected[position + 1]
    assert samples.rewards[:, 0].tolist() == [expected[int(position)] for position in samples.observations[:, 0]]
    assert bool((samples.dones == 1).all())
    assert samples.discounts[:, 0].tolist() == [
        gamma ** (13 - int(position)) for position in samples.observations[:, 0]
    ]
    model.train(gradient_steps=2, batch_size=16)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_steps": 0}, "n_steps: must be an integer of at least 1, not 0"), ({"gamma": 1.5}, "gamma: must be"),
        ({"n_steps": 2, "optimize_memory_usage": True, "handle_timeout_termination": False}, "optimize_memory_usage"),
        ({"bonus": CSDBonus}, r"^bonus: CSDBonus is a class\. Pass an object: CSDBonus\(\)\.$"),
    ],
)  # fmt: skip
def test_buffers_refuse_settings_out_of_range(kwargs: dict[str, Any], message: str) -> None:
    box = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    with pytest.raises(InputError, match=message):
        IntrinsicReplayBuffer(24, box, gymnasium.spaces.Discrete(3), **{"bonus": FakeBonus(), **kwargs})
    small = IntrinsicReplayBuffer(
        24, box, gymnasium.spaces.Discrete(3), bonus=FakeBonus(), optimize_memory_usage=True,
        handle_timeout_termination=False,
    )  # fmt: skip
    assert small.n_steps == 1


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_off_policy_algorithms_learn_save_and_load(algorithm: Any, tmp_path: Path) -> None:
    env = CountingEnv() if algorithm is DQN else gymnasium.make("Pendulum-v1")
    bonus = CSDBonus(hidden=(16,), outputs=8, device="cpu")
    model = algorithm(
        "MlpPolicy", env, buffer_size=200, learning_starts=20, seed=0, device="cpu", policy_kwargs=NETS, batch_size=16,
        replay_buffer_class=IntrinsicReplayBuffer, replay_buffer_kwargs={"bonus": bonus, "beta": 0.1},
    )  # fmt: skip
    model.learn(60)
    assert not bonus.moments.is_empty
    model.save(tmp_path / "model")
    seen = env.observation_space.sample()
    again = algorithm.load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(
        model.predict(seen, deterministic=True)[0], again.predict(seen, deterministic=True)[0]
    )
    with pytest.raises(InputError):
        IntrinsicReplayBuffer(10, env.observation_space, env.action_space, bonus=bonus, beta=float("inf"))
