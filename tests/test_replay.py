"""The replay against a slow reference: whole episodes in lists."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats
from torch import Generator

from onefold.core import storage
from onefold.errors import InputError
from onefold.rl.agents import ReplaySettings
from onefold.rl.replay import Replay

CPU = torch.device("cpu")


@dataclass
class Episode:
    """Frames of an episode, and the action and reward of each step."""

    frames: list[float]
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    end: str = ""


@dataclass
class FakeEnv:
    """An environment whose frames are distinct numbers, with all its episodes."""

    name: int
    count: int = 0
    episodes: list[Episode] = field(default_factory=list)

    def frame(self) -> float:
        self.count += 1
        return self.name + self.count / 1000


def run_episodes(replay: Replay, envs: list[FakeEnv], rng: np.random.Generator, steps: int) -> None:
    """Add random episodes with random ends to the replay, as a vector environment reports them."""
    first = not envs[0].episodes
    for env in envs if first else []:
        env.episodes.append(Episode([env.frame()]))
    if first:
        add_steps(replay, envs, [{"began": True}] * len(envs))
    for _ in range(steps):
        actions = rng.integers(0, 4, len(envs))
        replay.set_actions(torch.from_numpy(actions))
        answers = []
        for env, action in zip(envs, actions, strict=True):
            episode = env.episodes[-1]
            if episode.end or rng.random() < 0.02:
                episode.end = episode.end or "lost"
                env.episodes.append(Episode([env.frame()]))
                answers.append({"began": True, "lost": episode.end == "lost"})
                continue
            reward = float(np.float32(rng.normal()))
            episode.end = str(rng.choice(["", "terminated", "truncated"], p=[0.8, 0.1, 0.1]))
            episode.frames.append(env.frame())
            episode.actions.append(int(action))
            episode.rewards.append(reward)
            answers.append({"rewards": reward, **({episode.end: True} if episode.end else {})})
        add_steps(replay, envs, answers)


def add_steps(replay: Replay, envs: list[FakeEnv], answers: list[dict[str, Any]]) -> None:
    frames = torch.tensor([env.episodes[-1].frames[-1] for env in envs])[:, None]
    rewards = torch.tensor([answer.get("rewards", 0.0) for answer in answers])
    flags = (
        torch.tensor([bool(answer.get(key, False)) for answer in answers])
        for key in ("terminated", "truncated", "began", "lost")
    )
    replay.add(frames, rewards, *flags)


def expected_transitions(envs: list[FakeEnv], settings: ReplaySettings) -> dict[float, tuple[Any, ...]]:
    """Return stack, action, return, discount and next stack of every step, by the newest frame of its state."""
    transitions = {}
    for env in envs:
        for episode in env.episodes:
            for t in range(len(episode.actions)):
                steps = min(settings.n_step, len(episode.actions) - t)
                total = sum(settings.discount**k * episode.rewards[t + k] for k in range(steps))
                over = t + steps == len(episode.actions)
                bootstraps = not (over and episode.end == "terminated")
                transitions[episode.frames[t]] = (
                    stack(episode, t, settings.stack), episode.actions[t], total,
                    settings.discount**steps if bootstraps else 0.0, stack(episode, t + steps, settings.stack),
                )  # fmt: skip
    return transitions


def stack(episode: Episode, t: int, size: int) -> list[float]:
    return [episode.frames[max(0, t - k)] for k in range(size - 1, -1, -1)]


def sampleable_frames(envs: list[FakeEnv], settings: ReplaySettings, length: int) -> set[float]:
    """Return the newest frames of all states that may be sampled: complete windows whose stack is still stored."""
    frames = set()
    for env in envs:
        slots = [(episode, t) for episode in env.episodes for t in range(len(episode.frames))]
        for place, (episode, t) in enumerate(slots):
            complete = place + settings.n_step <= len(slots) - 1
            stack_kept = place - (settings.stack - 1) > len(slots) - 1 - length
            if t < len(episode.actions) and complete and stack_kept:
                frames.add(episode.frames[t])
    return frames


def check(replay: Replay, envs: list[FakeEnv]) -> None:
    sampleable = sampleable_frames(envs, replay.settings, replay.length)
    index = replay.priority.flatten().nonzero().flatten()
    batch = replay.fetch(index, torch.ones(len(index)))
    reference = {np.float32(key): value for key, value in expected_transitions(envs, replay.settings).items()}
    assert {np.float32(f) for f in sampleable} == {np.float32(s[-1]) for s in batch.states.numpy()}
    for i in range(len(index)):
        states, action, total, discount, after = reference[np.float32(batch.states[i, -1])]
        np.testing.assert_array_equal(batch.states[i], np.float32(states))
        np.testing.assert_array_equal(batch.next_states[i], np.float32(after))
        assert int(batch.actions[i]) == action
        assert float(batch.rewards[i]) == pytest.approx(total, abs=1e-5)
        assert float(batch.discounts[i]) == pytest.approx(discount)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    stack=st.integers(1, 5),
    n_step=st.integers(1, 6),
    environments=st.integers(1, 3),
    spare=st.integers(2, 30),
    steps=st.integers(0, 120),
)
def test_samples_equal_the_episodes(
    seed: int, stack: int, n_step: int, environments: int, spare: int, steps: int
) -> None:
    settings = ReplaySettings(
        capacity=environments * (stack + n_step + spare), stack=stack, n_step=n_step, discount=0.9
    )
    replay, rng = Replay(settings, environments, (1,), torch.float32, CPU), np.random.default_rng(seed)
    envs = [FakeEnv(name) for name in range(environments)]
    run_episodes(replay, envs, rng, steps)
    check(replay, envs)
    run_episodes(replay, envs, rng, 7)
    check(replay, envs)


def filled(steps: int = 300, **keywords: Any) -> tuple[Replay, list[FakeEnv]]:
    replay = Replay(
        ReplaySettings(capacity=200, stack=3, n_step=4, discount=0.9, **keywords), 2, (1,), torch.float32, CPU
    )
    envs = [FakeEnv(0), FakeEnv(1)]
    run_episodes(replay, envs, np.random.default_rng(0), steps)
    return replay, envs


def test_samples_are_proportional_to_priorities_and_weights_correct_for_them() -> None:
    replay, _ = filled(alpha=0.5)
    slots = replay.priority.flatten().nonzero().flatten()
    errors = torch.rand(len(slots), generator=Generator().manual_seed(0)).double() * 3
    replay.update_priorities(slots, errors)
    probability = (errors + 1e-6).sqrt() / (errors + 1e-6).sqrt().sum()
    generator = Generator().manual_seed(1)
    batch = replay.fetch(*replay.sample(torch.rand(40_000, generator=generator), 0.7))
    counts = torch.bincount(batch.slots, minlength=200)[slots]
    assert (counts - 40_000 * probability).abs().max() <= 2  # one from each of 40,000 equal parts
    weight = dict(zip(batch.slots.tolist(), batch.weights.tolist(), strict=True))
    exact = (probability * len(slots)) ** -0.7
    assert weight == pytest.approx(dict(zip(slots.tolist(), (exact / exact.max()).tolist(), strict=True)), rel=1e-4)

    singles = torch.cat([replay.sample(torch.rand(1, generator=generator), 1.0)[0] for _ in range(5000)])
    counts = torch.bincount(singles, minlength=200)[slots].double()
    assert counts.sum() == 5000
    assert stats.chisquare(counts.numpy(), (5000 * probability).numpy()).pvalue > 0.01


def test_each_of_a_million_slots_can_be_sampled() -> None:
    """Cumulative priorities need more digits than float32 has."""
    replay = Replay(ReplaySettings(capacity=2**20, stack=1, n_step=1), 16, (1,), torch.uint8, torch.device("cpu"))
    replay.priority.fill_(0.3)
    within = torch.arange(256) * 16 + 7
    index, weights = replay.sample((within + 1) / 4096 - 2**-20, 0.5)
    assert index.tolist() == [4096 * part + int(slot) for part, slot in enumerate(within)]
    assert weights.tolist() == [1.0] * 256


def test_new_slots_have_the_highest_priority() -> None:
    replay, envs = filled()
    index = replay.priority.flatten().nonzero().flatten()[:5]
    replay.update_priorities(index, torch.tensor([0.0, 1.0, 8.0, 2.0, 3.0]))
    assert replay.priority.flatten()[index].tolist() == pytest.approx([0.001, 1, 8**0.5, 2**0.5, 3**0.5], rel=1e-3)
    before = replay.priority.clone()
    run_episodes(replay, envs, np.random.default_rng(5), 1)
    changed = replay.priority[(replay.priority != before) & (replay.priority > 0)]
    assert changed.tolist() == pytest.approx([8**0.5] * len(changed))


def test_a_checkpoint_restores_everything(tmp_path: Any) -> None:
    replay, envs = filled()
    storage.save(tmp_path / "r", "replay", replay.tensors(), {})
    other = Replay(replay.settings, 2, (1,), torch.float32, CPU)
    other.restore(storage.load(tmp_path / "r", "replay")[0])
    twins = [
        FakeEnv(w.name, w.count, [Episode(list(e.frames), list(e.actions), list(e.rewards), e.end) for e in w.episodes])
        for w in envs
    ]
    for each, its in ((replay, envs), (other, twins)):
        run_episodes(each, its, np.random.default_rng(3), 40)
    for name, tensor in replay.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    check(other, twins)


def test_images_are_stacked_along_their_channels() -> None:
    settings = ReplaySettings(capacity=60, stack=3, n_step=2)
    for frame, shape in (((4, 5), (2, 3, 4, 5)), ((3, 4, 5), (2, 9, 4, 5)), ((7,), (2, 21))):
        replay = Replay(settings, 2, frame, torch.uint8, CPU)
        no = torch.zeros(2, dtype=torch.bool)
        for t in range(4):
            replay.add(torch.full((2, *frame), t, dtype=torch.uint8), torch.zeros(2), no, no, ~no if t == 0 else no, no)
        assert replay.newest_stacks().shape == shape
        assert replay.newest_stacks()[0].flatten()[[0, -1]].tolist() == [1, 3]


def test_shape_of_stacks() -> None:
    assert ReplaySettings(stack=6).shape((42, 40)) == (6, 42, 40)
    assert ReplaySettings(stack=3).shape((7,)) == (21,)
    with pytest.raises(InputError, match=r"shape \(96, 96, 3\) is not supported\. Use vectors or grey images"):
        ReplaySettings().shape((96, 96, 3))


def test_too_small_replays_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"capacity: too small \(160\). 16 environments, stacks of 6 frames and 10-step .* at least 288$",
    ):
        Replay(ReplaySettings(capacity=160), 16, (1,), torch.float32, CPU)
    with pytest.raises(InputError, match="stack must be 1 to 64"):
        ReplaySettings(stack=0)
    with pytest.raises(InputError, match="discount and alpha must be between 0 and 1"):
        ReplaySettings(alpha=1.5)


def test_a_million_frames_take_less_than_two_and_a_half_gigabytes() -> None:
    """Stacks and returns are built by index: every frame is stored once."""
    replay = Replay(ReplaySettings(), 16, (42, 42), torch.uint8, torch.device("meta"))
    assert replay.length * replay.environments == 1_000_000
    size = sum(tensor.nbytes for tensor in vars(replay).values() if isinstance(tensor, torch.Tensor))
    assert 1e6 * 42 * 42 < size < 1.8e9
