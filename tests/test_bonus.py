"""Exploration bonuses: observations, updates, files and the Gymnasium wrapper."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Generator

from onefold.core import storage
from onefold.errors import FileError, InputError
from onefold.rl import CSDBonus, IntrinsicReward, LastLayerGPBonus, RNDBonus
from onefold.rl.bonus import KIND, check_bonus, load
from onefold.rl.observations import infer_spec
from onefold.rl.small_envs import DeceptiveChain

CPU = torch.device("cpu")
SMALL: dict[Any, dict[str, Any]] = {
    CSDBonus: {"channels": (4,), "hidden": (128,), "outputs": 64},
    RNDBonus: {"channels": (4,), "hidden": (32,), "outputs": 16},
    LastLayerGPBonus: {"channels": (4,), "features": 32},
}
KINDS = pytest.mark.parametrize("kind", SMALL)


def make_bonus(kind: Any, **kwargs: Any) -> Any:
    return kind(**{**SMALL[kind], "device": "cpu", **kwargs})


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_dict(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return images that are bright on the left, or on the right if the seed is odd, and vectors."""
    image = np.random.default_rng(seed).integers(0, 100, (n, 20, 24, 3), np.uint8)
    image[:, :, 12 * (seed % 2) : 12 * (seed % 2) + 12] += 150
    return {"picture": image, "speed": numbers(n, 2, seed=seed)}


def test_observations_become_one_tensor() -> None:
    first, last = numbers(5, 3, 20, 24), numbers(5, 20, 24, 3)
    form = infer_spec(last)
    assert form.shape == infer_spec(first).shape == (3, 20, 24)
    np.testing.assert_array_equal(form.tensor(last, CPU).numpy(), last.transpose(0, 3, 1, 2))
    assert infer_spec(numbers(5, 20, 24)).shape == (1, 20, 24)
    assert infer_spec(numbers(5, 7, 7, 3)).shape == (147,)  # MiniGrid's view: too small for an image
    both = as_dict(5)
    x = infer_spec(both).tensor(both, CPU)
    assert x.shape == (5, 5, 20, 24)
    np.testing.assert_array_equal(x[:, 3:, 4, 9].numpy(), both["speed"])  # one channel per number
    np.testing.assert_array_equal(x[:, :3].numpy(), both["picture"].transpose(0, 3, 1, 2))
    plain = {"b": numbers(4, 2), "a": numbers(4, 3), "c": numbers(4, 1)}
    np.testing.assert_array_equal(infer_spec(plain, ["a", "b"]).tensor(plain, CPU), np.hstack([plain["a"], plain["b"]]))


def test_tuples_equal_dicts_with_positions_as_keys() -> None:
    pair = (numbers(4, 2), numbers(4, 20, 24, 3, seed=1))
    form = infer_spec(pair)
    assert torch.equal(form.tensor(pair, CPU), infer_spec(named := {"0": pair[0], "1": pair[1]}).tensor(named, CPU))
    assert infer_spec(pair, ["0"]).shape == (2,)


@pytest.mark.parametrize(
    ("observations", "keys", "message"),
    [
        (np.arange(5), None, "one-hot"),
        ({"mission": np.array(["go"] * 3), "x": numbers(3, 2)}, None, "'mission': not numeric"),
        ({"x": numbers(3, 2)}, ["y"], r"keys: 'y' is not in the observations\. Entries: 'x'\."),
        ((numbers(3, 2),), ["1"], r"keys: '1' is not in the observations\. Entries: '0'\."),
        ((numbers(3, 2), (numbers(3, 2), numbers(3, 2))), None, "observation '1': a nested tuple"),
        ({"x": {"y": numbers(3, 2)}}, None, "observation 'x': a nested dict"),
        ({"a": numbers(3, 20, 20, 3), "b": numbers(3, 30, 30, 3)}, None, "images of different sizes"),
        ({"a": numbers(3, 2), "b": numbers(4, 2)}, None, r"entries of length 3, 4\. Pass"),
        (numbers(0, 4), None, r"entries of length 0\. Pass"),
        (np.full((3, 4), np.nan), None, "NaN or infinite"),
    ],
)
def test_unsupported_observations_are_refused(observations: Any, keys: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_bonus(CSDBonus, keys=keys)(observations)


@KINDS
def test_refused_observations_leave_the_bonus_unchanged(kind: Any) -> None:
    bonus, x = make_bonus(kind), numbers(6, 4)
    bonus.update(x)
    before = bonus(x)
    for other in (numbers(6, 5), {"x": x}, np.full((6, 4), np.inf)):
        with pytest.raises(InputError):
            bonus.update(other)
    assert torch.equal(bonus(x), before)


@KINDS
@pytest.mark.parametrize("make", [lambda n, s: numbers(n, 6, seed=s), as_dict], ids=["vectors", "dict with an image"])
def test_updates_lower_the_bonus(kind: Any, make: Any) -> None:
    bonus, x = make_bonus(kind, normalise=False, passes=100, batch=16), make(32, 0)
    bonus.update(x)
    unfamiliar = make(32, 1) if isinstance(x, dict) else 3 * make(32, 1) + 1
    assert bonus(x).mean() < 0.7 * bonus(unfamiliar).mean()
    assert bool((bonus(x) >= 0).all())


def test_last_layer_gp_equals_the_closed_form() -> None:
    """√(λ φᵀ(ΦᵀΦ + λI)⁻¹φ) by NumPy, with a standardisation that is fixed from the first update on."""
    bonus, x, y = (
        make_bonus(LastLayerGPBonus, ridge=0.3, normalise=False, warmup=1),
        numbers(40, 5),
        numbers(7, 5, seed=1),
    )
    bonus.update(x[:10])
    bonus.update(x[10:])
    phi, query = (bonus.phi(bonus._to_tensor(z)).numpy() for z in (x, y))
    inverse = np.linalg.inv(phi.T @ phi + 0.3 * np.eye(32))
    exact = np.sqrt(0.3 * np.einsum("ni,ij,nj->n", query, inverse, query))
    np.testing.assert_allclose(bonus(y).numpy(), exact, rtol=1e-5)


@KINDS
def test_values_are_relative_to_the_running_moments(kind: Any) -> None:
    """Errors of RND are divided by their standard deviation; the other bonuses only lose their mean."""
    bonus, plain, x = make_bonus(kind), make_bonus(kind, normalise=False), numbers(64, 4)
    raw = plain(x)
    unit = raw.std(correction=0) if kind is RNDBonus else 1
    torch.testing.assert_close(bonus(x), (raw - raw.mean()) / unit, rtol=1e-4, atol=1e-4)  # the batch's moments
    for _ in range(3):
        bonus.update(x)
        plain.update(x)
    unit = plain.moments.std() if kind is RNDBonus else 1
    torch.testing.assert_close(bonus(x), ((plain(x) - plain.moments.mean()) / unit).float())


@pytest.mark.parametrize("kind", [CSDBonus, LastLayerGPBonus])
def test_relative_bonuses_fade_when_nothing_is_unfamiliar(kind: Any) -> None:
    """The value falls from about 1 to about 0, and the running mean follows it."""
    bonus, x = make_bonus(kind, warmup=64), numbers(64, 4)
    plain = make_bonus(kind, warmup=64, normalise=False)
    assert abs(float(plain(x).mean()) - 1) < 0.2
    for _ in range(400):
        bonus.update(x)
    assert float(bonus(x).abs().max()) < 0.1


@KINDS
def test_a_loaded_bonus_continues_exactly(kind: Any, tmp_path: Path) -> None:
    bonus = make_bonus(kind, seed=3)
    bonus.update(as_dict(20))
    bonus.save(tmp_path / "bonus.onefold")
    again = load(tmp_path / "bonus.onefold", device="cpu")
    for seed in (1, 2):
        assert bonus.update(as_dict(20, seed)) == again.update(as_dict(20, seed))
    assert torch.equal(bonus(as_dict(5)), again(as_dict(5)))


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path, bonus = tmp_path / "bonus.onefold", make_bonus(CSDBonus)
    with pytest.raises(InputError, match="no observations yet"):
        bonus.save(path)
    bonus.update(numbers(9, 4))
    bonus.save(path)
    tensors, header = storage.load(path, KIND)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"bonus\.onefold"):
        load(path)
    changes: list[dict[str, Any]] = [
        {"bonus": "open"}, {"settings": {**header["settings"], "hidden": [10**12]}}, {"entries": [["", [10**9]]]},
        {"settings": {**header["settings"], "hidden": [33]}},
    ]  # fmt: skip
    for change in changes:
        storage.save(path, KIND, tensors, {**header, **change})
        with pytest.raises(FileError, match="damaged, or written by another version"):
            load(path)
    name = next(name for name in tensors if name.endswith("exp_avg"))
    storage.save(path, KIND, {**tensors, name: torch.zeros(3)}, header)
    with pytest.raises(FileError, match="damaged"):
        load(path)


def test_one_observation_at_a_time_is_enough() -> None:
    bonus = make_bonus(CSDBonus)
    losses = [bonus.update(numbers(1, 4, seed=i % 3)) for i in range(60)]
    assert np.isfinite(losses).all()
    assert bonus(numbers(1, 4)).shape == (1,)


def test_settings_out_of_range_are_refused() -> None:
    for kind, kwargs in ((CSDBonus, {"lr": 0.0}), (RNDBonus, {"batch": 0}), (LastLayerGPBonus, {"ridge": -1.0})):
        with pytest.raises(InputError):
            make_bonus(kind, **kwargs)


class FakeBonus:
    """A bonus whose value is the first number of an observation, and which records its updates."""

    def __init__(self) -> None:
        self.learned: list[np.ndarray] = []

    def __call__(self, observations: Any) -> torch.Tensor:
        return torch.as_tensor(observations)[:, 0].float()

    def update(self, observations: Any) -> float:
        self.learned.append(torch.as_tensor(observations).numpy().copy())
        return 0.0


class CountingEnv(gymnasium.Env[np.ndarray, Any]):
    """An environment that counts its steps from 10; episodes end after three steps, each with a reward of 2."""

    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.count = 10
        return np.array([self.count], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        del action
        self.count += 1
        return np.array([self.count], np.float32), 2.0, self.count == 13, False, {}


class PairObservations(gymnasium.ObservationWrapper[Any, Any, np.ndarray]):
    """Observations x and (−x, −x), as a tuple or as a dict with positions as keys."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__(CountingEnv())
        self.as_dict = as_dict
        spaces = CountingEnv.observation_space, gymnasium.spaces.Box(-99, 0, (2,), np.float32)
        by_place = {str(i): space for i, space in enumerate(spaces)}
        self.observation_space = gymnasium.spaces.Dict(by_place) if as_dict else gymnasium.spaces.Tuple(spaces)

    def observation(self, observation: np.ndarray) -> Any:
        pair = observation, -np.repeat(observation, 2)
        return {str(i): part for i, part in enumerate(pair)} if self.as_dict else pair


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_bonuses_of_tuples_equal_those_of_dicts(mode: str) -> None:
    """Including those of final observations, which Gymnasium passes in the info."""
    kwargs: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode]}
    results = []
    for make in (lambda: PairObservations(as_dict=False), lambda: PairObservations(as_dict=True)):
        bonus = make_bonus(CSDBonus, hidden=(16,), outputs=8)
        env = IntrinsicReward(gymnasium.vector.SyncVectorEnv([make] * 3, **kwargs), bonus, learn_every=6)
        env.reset(seed=0)
        results.append([env.step(np.zeros(3, int))[4]["intrinsic_reward"] for _ in range(9)])
    np.testing.assert_array_equal(*results)
    assert np.ptp(results) > 0


@pytest.mark.parametrize(("mode", "bonuses"), [("NEXT_STEP", [11, 12, 13, 0, 11]), ("SAME_STEP", [11, 12, 13, 11, 12])])
def test_rewards_have_the_bonus_of_the_next_observation(mode: str, bonuses: list[int]) -> None:
    """Never that of an episode's first observation, in both autoreset modes."""
    vector_env = gymnasium.vector.SyncVectorEnv(
        [CountingEnv, CountingEnv], autoreset_mode=gymnasium.vector.AutoresetMode[mode]
    )
    env = IntrinsicReward(vector_env, FakeBonus(), beta=0.5, learn_every=6)
    env.reset(seed=0)
    for expected in bonuses:
        _, rewards, _, _, info = env.step(np.zeros(2, int))
        step_reward = 2.0 if expected else 0.0
        np.testing.assert_array_equal(info["intrinsic_reward"], [expected] * 2)
        np.testing.assert_array_equal(info["extrinsic_reward"], [step_reward] * 2)
        np.testing.assert_array_equal(rewards, [step_reward + 0.5 * expected] * 2)
    learned = env.bonus.learned  # pyright: ignore[reportAttributeAccessIssue]
    assert [len(part) for part in learned] == [6, 6]
    np.testing.assert_array_equal(learned[0][:, 0], [10, 10, 11, 11, 12, 12])


def test_a_wrapped_vector_environment_keeps_the_interface() -> None:
    """Spaces, seeds, shapes and types equal those of Gymnasium, and its wrappers accept it."""
    bonus = make_bonus(CSDBonus, hidden=(16,))
    env = gymnasium.vector.SyncVectorEnv([lambda: DeceptiveChain(6)] * 3)
    whole = gymnasium.wrappers.vector.RecordEpisodeStatistics(IntrinsicReward(env, bonus, beta=0.1, learn_every=30))
    first, _ = whole.reset(seed=1)
    assert first in whole.observation_space
    whole.action_space.seed(0)
    for _ in range(40):
        observations, rewards, terminated, truncated, info = whole.step(whole.action_space.sample())
        assert observations in whole.observation_space
        assert rewards.shape == terminated.shape == truncated.shape == info["extrinsic_reward"].shape == (3,)
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, bool, bool)
    assert whole.num_envs == 3
    again, _ = whole.reset(seed=1)
    np.testing.assert_array_equal(first, again)
    whole.close()
    with pytest.raises(InputError):
        IntrinsicReward(env, bonus, beta=float("nan"))


@pytest.mark.parametrize(
    ("bonus", "message"),
    [
        (CSDBonus, r"bonus: CSDBonus is a class\. Pass an object: CSDBonus\(\)\."),
        (None, r"bonus: a NoneType has no __call__ and update\. Pass one such as CSDBonus\(\)\."),
        (len, r"bonus: a builtin_function_or_method has no __call__ and update\."),
    ],
)
def test_objects_that_are_not_a_bonus_are_refused(bonus: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_bonus(bonus)
    if bonus is CSDBonus:
        with pytest.raises(InputError, match=message):
            IntrinsicReward(gymnasium.vector.SyncVectorEnv([CountingEnv]), bonus)  # pyright: ignore[reportArgumentType]


def test_the_global_generator_is_not_used() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    bonus = make_bonus(CSDBonus)
    bonus.update(numbers(20, 4))
    assert torch.equal(torch.rand(3), expected)
    assert isinstance(bonus.generator, Generator)


def test_relative_bonuses_have_a_short_memory() -> None:
    for kind, memory in ((CSDBonus, 20), (LastLayerGPBonus, 20), (RNDBonus, 1000)):
        bonus = make_bonus(kind)
        bonus.update(numbers(4, 5))
        assert bonus.moments.decay == 1 - 1 / memory


def test_the_first_step_after_a_reset_has_a_bonus() -> None:
    env = IntrinsicReward(gymnasium.vector.SyncVectorEnv([CountingEnv, CountingEnv]), FakeBonus())
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.zeros(2, int))
    env.reset(seed=0)
    np.testing.assert_array_equal(env.step(np.zeros(2, int))[4]["intrinsic_reward"], [11, 11])
