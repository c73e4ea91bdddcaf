"""Bonuses for agents of other libraries: what they see, what they learn, files, Gymnasium and stable-baselines3."""

import subprocess
import sys
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
from onefold.rl.small_envs import Chain

CPU = torch.device("cpu")
SMALL: dict[Any, dict[str, Any]] = {
    CSDBonus: {"channels": (4,), "hidden": (128,), "outputs": 64},
    RNDBonus: {"channels": (4,), "hidden": (32,), "outputs": 16},
    LastLayerGPBonus: {"channels": (4,), "features": 32},
}
KINDS = pytest.mark.parametrize("kind", SMALL)


def made(kind: Any, **how: Any) -> Any:
    return kind(**{**SMALL[kind], "device": "cpu", **how})


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_dict(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Pictures that are bright on the left, or, if the seed is odd, on the right."""
    image = np.random.default_rng(seed).integers(0, 100, (n, 20, 24, 3), np.uint8)
    image[:, :, 12 * (seed % 2) : 12 * (seed % 2) + 12] += 150
    return {"picture": image, "speed": numbers(n, 2, seed=seed)}


def test_observations_become_one_tensor() -> None:
    first, last = numbers(5, 3, 20, 24), numbers(5, 20, 24, 3)
    form = infer_spec(last)
    assert form.shape == infer_spec(first).shape == (3, 20, 24)
    np.testing.assert_array_equal(form.tensor(last, CPU).numpy(), last.transpose(0, 3, 1, 2))
    assert infer_spec(numbers(5, 20, 24)).shape == (1, 20, 24)
    assert infer_spec(numbers(5, 7, 7, 3)).shape == (147,)  # MiniGrid's view: too small to be a picture
    both = as_dict(5)
    x = infer_spec(both).tensor(both, CPU)
    assert x.shape == (5, 5, 20, 24)
    np.testing.assert_array_equal(x[:, 3:, 4, 9].numpy(), both["speed"])  # a plane for each number
    np.testing.assert_array_equal(x[:, :3].numpy(), both["picture"].transpose(0, 3, 1, 2))
    plain = {"b": numbers(4, 2), "a": numbers(4, 3), "c": numbers(4, 1)}
    np.testing.assert_array_equal(infer_spec(plain, ["a", "b"]).tensor(plain, CPU), np.hstack([plain["a"], plain["b"]]))


def test_tuples_are_dicts_whose_keys_are_places() -> None:
    pair = (numbers(4, 2), numbers(4, 20, 24, 3, seed=1))
    form = infer_spec(pair)
    assert torch.equal(form.tensor(pair, CPU), infer_spec(named := {"0": pair[0], "1": pair[1]}).tensor(named, CPU))
    assert infer_spec(pair, ["0"]).shape == (2,)


@pytest.mark.parametrize(
    ("observations", "keys", "said"),
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
def test_observations_that_cannot_be_used_are_refused(observations: Any, keys: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        made(CSDBonus, keys=keys)(observations)


@KINDS
def test_observations_of_another_form_are_refused_and_nothing_is_lost(kind: Any) -> None:
    bonus, x = made(kind), numbers(6, 4)
    bonus.update(x)
    before = bonus(x)
    for other in (numbers(6, 5), {"x": x}, np.full((6, 4), np.inf)):
        with pytest.raises(InputError):
            bonus.update(other)
    assert torch.equal(bonus(x), before)


@KINDS
@pytest.mark.parametrize("make", [lambda n, s: numbers(n, 6, seed=s), as_dict], ids=["vectors", "dict with an image"])
def test_what_was_seen_is_less_new(kind: Any, make: Any) -> None:
    bonus, x = made(kind, normalise=False, passes=100, batch=16), make(32, 0)
    bonus.update(x)
    strange = make(32, 1) if isinstance(x, dict) else 3 * make(32, 1) + 1
    assert bonus(x).mean() < 0.7 * bonus(strange).mean()
    assert bool((bonus(x) >= 0).all())


def test_the_gps_bonus_is_the_closed_form() -> None:
    """√(λ φᵀ(ΦᵀΦ + λI)⁻¹φ), by NumPy, on features that settled before the first update."""
    bonus, x, y = made(LastLayerGPBonus, ridge=0.3, normalise=False, warmup=1), numbers(40, 5), numbers(7, 5, seed=1)
    bonus.update(x[:10])
    bonus.update(x[10:])
    phi, query = (bonus.phi(bonus._to_tensor(z)).numpy() for z in (x, y))
    inverse = np.linalg.inv(phi.T @ phi + 0.3 * np.eye(32))
    exact = np.sqrt(0.3 * np.einsum("ni,ij,nj->n", query, inverse, query))
    np.testing.assert_allclose(bonus(y).numpy(), exact, rtol=1e-5)


@KINDS
def test_values_are_above_the_mean_and_have_a_scale(kind: Any) -> None:
    """RND's errors are in standard deviations; the others are shares of what was unknown at first already."""
    bonus, plain, x = made(kind), made(kind, normalise=False), numbers(64, 4)
    raw = plain(x)
    unit = raw.std(correction=0) if kind is RNDBonus else 1
    torch.testing.assert_close(bonus(x), (raw - raw.mean()) / unit, rtol=1e-4, atol=1e-4)  # their own measure, at first
    for _ in range(3):
        bonus.update(x)
        plain.update(x)
    unit = plain.moments.std() if kind is RNDBonus else 1
    torch.testing.assert_close(bonus(x), ((plain(x) - plain.moments.mean()) / unit).float())


@pytest.mark.parametrize("kind", [CSDBonus, LastLayerGPBonus])
def test_a_share_fades_where_all_has_been_seen(kind: Any) -> None:
    """From about 1 to about 0, while its mean keeps up with it, so that familiar noise does not look like news."""
    bonus, x = made(kind, warmup=64), numbers(64, 4)
    plain = made(kind, warmup=64, normalise=False)
    assert abs(float(plain(x).mean()) - 1) < 0.2
    for _ in range(400):
        bonus.update(x)
    assert float(bonus(x).abs().max()) < 0.1


@KINDS
def test_a_saved_bonus_goes_on_as_if_nothing_had_been(kind: Any, tmp_path: Path) -> None:
    bonus = made(kind, seed=3)
    bonus.update(as_dict(20))
    bonus.save(tmp_path / "bonus.onefold")
    again = load(tmp_path / "bonus.onefold", device="cpu")
    for seed in (1, 2):
        assert bonus.update(as_dict(20, seed)) == again.update(as_dict(20, seed))
    assert torch.equal(bonus(as_dict(5)), again(as_dict(5)))


def test_files_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    path, bonus = tmp_path / "bonus.onefold", made(CSDBonus)
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
    bonus = made(CSDBonus)
    losses = [bonus.update(numbers(1, 4, seed=i % 3)) for i in range(60)]
    assert np.isfinite(losses).all()
    assert bonus(numbers(1, 4)).shape == (1,)


def test_settings_that_make_no_sense() -> None:
    for kind, how in ((CSDBonus, {"lr": 0.0}), (RNDBonus, {"batch": 0}), (LastLayerGPBonus, {"ridge": -1.0})):
        with pytest.raises(InputError):
            made(kind, **how)


class Counting:
    """Stands for a bonus: an observation's first number is how new it is, and what is learned is written down."""

    def __init__(self) -> None:
        self.learned: list[np.ndarray] = []

    def __call__(self, observations: Any) -> torch.Tensor:
        return torch.as_tensor(observations)[:, 0].float()

    def update(self, observations: Any) -> float:
        self.learned.append(torch.as_tensor(observations).numpy().copy())
        return 0.0


class Steps(gymnasium.Env[np.ndarray, Any]):
    """Shows how many steps the episode has had, from 10 on; it ends after three, each worth 2."""

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


class Pairs(gymnasium.ObservationWrapper[Any, Any, np.ndarray]):
    """An observation, and minus it twice: as a tuple, or as a dict by places."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__(Steps())
        self.as_dict = as_dict
        spaces = Steps.observation_space, gymnasium.spaces.Box(-99, 0, (2,), np.float32)
        by_place = {str(i): space for i, space in enumerate(spaces)}
        self.observation_space = gymnasium.spaces.Dict(by_place) if as_dict else gymnasium.spaces.Tuple(spaces)

    def observation(self, observation: np.ndarray) -> Any:
        pair = observation, -np.repeat(observation, 2)
        return {str(i): part for i, part in enumerate(pair)} if self.as_dict else pair


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_tuples_of_observations_are_rewarded_as_dicts_of_them(mode: str) -> None:
    """Terminal observations included, which Gymnasium hands over apart."""
    how: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode]}
    found = []
    for make in (lambda: Pairs(as_dict=False), lambda: Pairs(as_dict=True)):
        bonus = made(CSDBonus, hidden=(16,), outputs=8)
        env = IntrinsicReward(gymnasium.vector.SyncVectorEnv([make] * 3, **how), bonus, learn_every=6)
        env.reset(seed=0)
        found.append([env.step(np.zeros(3, int))[4]["intrinsic_reward"] for _ in range(9)])
    np.testing.assert_array_equal(*found)
    assert np.ptp(found) > 0


@pytest.mark.parametrize(("mode", "news"), [("NEXT_STEP", [11, 12, 13, 0, 11]), ("SAME_STEP", [11, 12, 13, 11, 12])])
def test_rewards_are_for_where_a_step_led(mode: str, news: list[int]) -> None:
    """Not for the beginning of an episode, whenever the environments begin it."""
    made_env = gymnasium.vector.SyncVectorEnv([Steps, Steps], autoreset_mode=gymnasium.vector.AutoresetMode[mode])
    env = IntrinsicReward(made_env, Counting(), beta=0.5, learn_every=6)
    env.reset(seed=0)
    for wanted in news:
        _, rewards, _, _, info = env.step(np.zeros(2, int))
        own = 2.0 if wanted else 0.0
        np.testing.assert_array_equal(info["intrinsic_reward"], [wanted] * 2)
        np.testing.assert_array_equal(info["extrinsic_reward"], [own] * 2)
        np.testing.assert_array_equal(rewards, [own + 0.5 * wanted] * 2)
    learned = env.bonus.learned  # pyright: ignore[reportAttributeAccessIssue]
    assert [len(part) for part in learned] == [6, 6]
    np.testing.assert_array_equal(learned[0][:, 0], [10, 10, 11, 11, 12, 12])


def test_a_wrapped_vector_environment_is_one() -> None:
    """Spaces, seeds, shapes and types are those of Gymnasium's own, and its wrappers go around it."""
    bonus = made(CSDBonus, hidden=(16,))
    env = gymnasium.vector.SyncVectorEnv([lambda: Chain(6)] * 3)
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
def test_what_is_no_bonus_is_refused(bonus: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_bonus(bonus)
    if bonus is CSDBonus:
        with pytest.raises(InputError, match=message):
            IntrinsicReward(gymnasium.vector.SyncVectorEnv([Steps]), bonus)  # pyright: ignore[reportArgumentType]


def test_the_generator_of_others_is_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    bonus = made(CSDBonus)
    bonus.update(numbers(20, 4))
    assert torch.equal(torch.rand(3), wanted)
    assert isinstance(bonus.generator, Generator)


def test_the_mean_of_a_share_keeps_up_and_deviations_do_not() -> None:
    for kind, memory in ((CSDBonus, 20), (LastLayerGPBonus, 20), (RNDBonus, 1000)):
        bonus = made(kind)
        bonus.update(numbers(4, 5))
        assert bonus.moments.decay == 1 - 1 / memory


def test_a_reset_by_hand_begins_an_episode_whose_first_step_counts() -> None:
    env = IntrinsicReward(gymnasium.vector.SyncVectorEnv([Steps, Steps]), Counting())
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.zeros(2, int))
    env.reset(seed=0)
    np.testing.assert_array_equal(env.step(np.zeros(2, int))[4]["intrinsic_reward"], [11, 11])


def test_importing_the_bonuses_loads_few_modules() -> None:
    """No detectors, and nothing that reads tables or exports models."""
    code = "import sys, onefold.rl.bonus; print(*sorted(name for name in sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.split(".")[0] for name in modules}
    assert sum(name.split(".")[0] == "onefold" for name in modules) <= 25
    assert not any(name.startswith(("onefold.detectors", "onefold.inputs", "onefold.kernels")) for name in modules)
    assert not packages & {"pyarrow", "pandas", "onnx", "gymnasium", "sklearn", "matplotlib"}
