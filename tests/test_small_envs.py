"""DeepSea and the chain: exact returns and observations, and Gymnasium's checks."""

import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from onefold.errors import InputError
from onefold.rl.small_envs import DeceptiveChain, DeepSea


def play(env: gymnasium.Env, actions: list[int]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return rewards and positions of an episode that ends with the last of these actions."""
    _, info = env.reset(seed=0)
    rewards, positions = [], [tuple(info["position"].tolist())]
    for i, action in enumerate(actions):
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        positions.append(tuple(info["position"].tolist()))
        assert (terminated or truncated) == (i == len(actions) - 1)
    return rewards, positions


@pytest.mark.parametrize("env", [DeepSea(5), DeepSea(1), DeepSea(4, None), DeceptiveChain(3), DeceptiveChain(10)])
@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes")
def test_follows_gymnasiums_rules(env: gymnasium.Env) -> None:
    check_env(env)


def test_one_sequence_of_actions_reaches_the_reward() -> None:
    size, returns = 4, {}
    for actions in itertools.product((0, 1), repeat=size):
        rewards, positions = play(DeepSea(size, None), list(actions))
        returns[actions] = sum(rewards)
        assert positions[-1][1] == 0
        assert returns[actions] == pytest.approx(all(actions) - 0.01 / size * sum(actions))
    assert max(returns.values()) == pytest.approx(0.99)


def test_actions_are_mapped_once() -> None:
    """With a mapping seed, exactly one sequence of actions reaches the reward, in every episode."""
    for seed in range(5):
        env, size = DeepSea(4, seed), 4
        best = [a for a in itertools.product((0, 1), repeat=size) if sum(play(env, list(a))[0]) > 0.5]
        assert len(best) == 1
        assert best == [
            a for a in itertools.product((0, 1), repeat=size) if sum(play(DeepSea(4, seed), list(a))[0]) > 0.5
        ]
    mappings = {DeepSea(6, seed)._right.tobytes() for seed in range(5)}
    assert len(mappings) == 5


def test_deep_sea_observes_the_cell() -> None:
    env = DeepSea(3, None)
    frame, _ = env.reset(seed=0)
    assert frame.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert env.step(1)[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert env.step(0)[0].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert env.step(0)[0].tolist() == [0] * 9
    with pytest.raises(InputError, match="over"):
        env.step(0)


def test_chain_has_rewards_at_both_ends() -> None:
    n = 8
    right, places = play(DeceptiveChain(n), [1] * (n + 9))
    assert right == [0.0] * (n - 2) + [1.0] * 11
    assert places[: n - 1] == [(i, 0) for i in range(1, n)]
    left, _ = play(DeceptiveChain(n), [0] * (n + 9))
    assert left == [0.0] + [0.001] * (n + 8)
    mixed, places = play(DeceptiveChain(n), [0, 1, 0, 0] + [1] * (n + 5))
    assert mixed == [0.0, 0.0, 0.0, 0.001] + [0.0] * (n - 1) + [1.0] * 6
    assert places[:5] == [(1, 0), (0, 0), (1, 0), (0, 0), (0, 0)]


def test_chain_observes_a_thermometer_code() -> None:
    env = DeceptiveChain(4)
    frame, _ = env.reset(seed=0)
    assert frame.tolist() == [1, 1, 0, 0]
    assert frame.dtype == np.float32
    assert env.step(1)[0].tolist() == [1, 1, 1, 0]
    with pytest.raises(InputError, match="reset"):
        DeceptiveChain(4).step(0)


@pytest.mark.parametrize("make", [lambda: DeepSea(0), lambda: DeceptiveChain(2)])
def test_sizes_are_checked(make: type) -> None:
    with pytest.raises(InputError, match="at least"):
        make()
