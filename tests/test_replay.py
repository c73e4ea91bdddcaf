"""The replay against a slow and obvious one: whole episodes in lists."""

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
    """What happened from a first frame on: the frames, and for each step its action, its reward."""

    frames: list[float]
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    end: str = ""


@dataclass
class World:
    """An environment whose frames are numbers of their own, and everything that it ever did."""

    name: int
    told: int = 0
    episodes: list[Episode] = field(default_factory=list)

    def frame(self) -> float:
        self.told += 1
        return self.name + self.told / 1000


def drive(replay: Replay, worlds: list[World], rng: np.random.Generator, steps: int) -> None:
    """Random episodes with random ends, as a vector environment would tell them."""
    first = not worlds[0].episodes
    for world in worlds if first else []:
        world.episodes.append(Episode([world.frame()]))
    if first:
        tell(replay, worlds, [{"began": True}] * len(worlds))
    for _ in range(steps):
        actions = rng.integers(0, 4, len(worlds))
        replay.act(torch.from_numpy(actions))
        answers = []
        for world, action in zip(worlds, actions, strict=True):
            episode = world.episodes[-1]
            if episode.end or rng.random() < 0.02:
                episode.end = episode.end or "lost"
                world.episodes.append(Episode([world.frame()]))
                answers.append({"began": True, "lost": episode.end == "lost"})
                continue
            reward = float(np.float32(rng.normal()))
            episode.end = str(rng.choice(["", "terminated", "truncated"], p=[0.8, 0.1, 0.1]))
            episode.frames.append(world.frame())
            episode.actions.append(int(action))
            episode.rewards.append(reward)
            answers.append({"rewards": reward, **({episode.end: True} if episode.end else {})})
        tell(replay, worlds, answers)


def tell(replay: Replay, worlds: list[World], answers: list[dict[str, Any]]) -> None:
    frames = torch.tensor([world.episodes[-1].frames[-1] for world in worlds])[:, None]
    rewards = torch.tensor([answer.get("rewards", 0.0) for answer in answers])
    flags = (
        torch.tensor([bool(answer.get(key, False)) for answer in answers])
        for key in ("terminated", "truncated", "began", "lost")
    )
    replay.add(frames, rewards, *flags)


def expected(worlds: list[World], settings: ReplaySettings) -> dict[float, tuple[Any, ...]]:
    """By a state's newest frame: stack, action, return, discount and next stack of every step ever made."""
    found = {}
    for world in worlds:
        for episode in world.episodes:
            for t in range(len(episode.actions)):
                steps = min(settings.n_step, len(episode.actions) - t)
                total = sum(settings.discount**k * episode.rewards[t + k] for k in range(steps))
                over = t + steps == len(episode.actions)
                bootstraps = not (over and episode.end == "terminated")
                found[episode.frames[t]] = (
                    stack(episode, t, settings.stack), episode.actions[t], total,
                    settings.discount**steps if bootstraps else 0.0, stack(episode, t + steps, settings.stack),
                )  # fmt: skip
    return found


def stack(episode: Episode, t: int, size: int) -> list[float]:
    return [episode.frames[max(0, t - k)] for k in range(size - 1, -1, -1)]


def allowed(worlds: list[World], settings: ReplaySettings, length: int) -> set[float]:
    """Newest frames of the states that may be drawn: complete, of an unbroken step, their stack still there."""
    found = set()
    for world in worlds:
        slots = [(episode, t) for episode in world.episodes for t in range(len(episode.frames))]
        for place, (episode, t) in enumerate(slots):
            complete = place + settings.n_step <= len(slots) - 1
            there = place - (settings.stack - 1) > len(slots) - 1 - length
            if t < len(episode.actions) and complete and there:
                found.add(episode.frames[t])
    return found


def check(replay: Replay, worlds: list[World]) -> None:
    may = allowed(worlds, replay.settings, replay.length)
    index = replay.priority.flatten().nonzero().flatten()
    drawn = replay.fetch(index, torch.ones(len(index)))
    reference = {np.float32(key): value for key, value in expected(worlds, replay.settings).items()}
    assert {np.float32(f) for f in may} == {np.float32(s[-1]) for s in drawn.states.numpy()}
    for i in range(len(index)):
        states, action, total, discount, after = reference[np.float32(drawn.states[i, -1])]
        np.testing.assert_array_equal(drawn.states[i], np.float32(states))
        np.testing.assert_array_equal(drawn.next_states[i], np.float32(after))
        assert int(drawn.actions[i]) == action
        assert float(drawn.rewards[i]) == pytest.approx(total, abs=1e-5)
        assert float(drawn.discounts[i]) == pytest.approx(discount)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    stack=st.integers(1, 5),
    n_step=st.integers(1, 6),
    environments=st.integers(1, 3),
    spare=st.integers(2, 30),
    steps=st.integers(0, 120),
)
def test_whatever_may_be_drawn_is_what_happened(
    seed: int, stack: int, n_step: int, environments: int, spare: int, steps: int
) -> None:
    settings = ReplaySettings(
        capacity=environments * (stack + n_step + spare), stack=stack, n_step=n_step, discount=0.9
    )
    replay, rng = Replay(settings, environments, (1,), torch.float32, CPU), np.random.default_rng(seed)
    worlds = [World(name) for name in range(environments)]
    drive(replay, worlds, rng, steps)
    check(replay, worlds)
    drive(replay, worlds, rng, 7)
    check(replay, worlds)


def filled(steps: int = 300, **keywords: Any) -> tuple[Replay, list[World]]:
    replay = Replay(
        ReplaySettings(capacity=200, stack=3, n_step=4, discount=0.9, **keywords), 2, (1,), torch.float32, CPU
    )
    worlds = [World(0), World(1)]
    drive(replay, worlds, np.random.default_rng(0), steps)
    return replay, worlds


def test_frequencies_are_proportional_to_priorities_and_weights_undo_them() -> None:
    replay, _ = filled(alpha=0.5)
    may = replay.priority.flatten().nonzero().flatten()
    errors = torch.rand(len(may), generator=Generator().manual_seed(0)).double() * 3
    replay.reprioritise(may, errors)
    chance = (errors + 1e-6).sqrt() / (errors + 1e-6).sqrt().sum()
    generator = Generator().manual_seed(1)
    drawn = replay.fetch(*replay.pick(torch.rand(40_000, generator=generator), 0.7))
    counts = torch.bincount(drawn.slots, minlength=200)[may]
    assert (counts - 40_000 * chance).abs().max() <= 2  # one from each of 40,000 equal parts
    weight = dict(zip(drawn.slots.tolist(), drawn.weights.tolist(), strict=True))
    exact = (chance * len(may)) ** -0.7
    assert weight == pytest.approx(dict(zip(may.tolist(), (exact / exact.max()).tolist(), strict=True)), rel=1e-4)

    singles = torch.cat([replay.pick(torch.rand(1, generator=generator), 1.0)[0] for _ in range(5000)])
    counts = torch.bincount(singles, minlength=200)[may].double()
    assert counts.sum() == 5000
    assert stats.chisquare(counts.numpy(), (5000 * chance).numpy()).pvalue > 0.01


def test_each_of_a_million_slots_can_be_drawn() -> None:
    """Places have more digits than float32 has: just before a slot's end it is still that slot."""
    replay = Replay(ReplaySettings(capacity=2**20, stack=1, n_step=1), 16, (1,), torch.uint8, torch.device("cpu"))
    replay.priority.fill_(0.3)
    within = torch.arange(256) * 16 + 7
    index, weights = replay.pick((within + 1) / 4096 - 2**-20, 0.5)
    assert index.tolist() == [4096 * part + int(slot) for part, slot in enumerate(within)]
    assert weights.tolist() == [1.0] * 256


def test_what_is_new_has_the_highest_priority() -> None:
    replay, worlds = filled()
    index = replay.priority.flatten().nonzero().flatten()[:5]
    replay.reprioritise(index, torch.tensor([0.0, 1.0, 8.0, 2.0, 3.0]))
    assert replay.priority.flatten()[index].tolist() == pytest.approx([0.001, 1, 8**0.5, 2**0.5, 3**0.5], rel=1e-3)
    before = replay.priority.clone()
    drive(replay, worlds, np.random.default_rng(5), 1)
    changed = replay.priority[(replay.priority != before) & (replay.priority > 0)]
    assert changed.tolist() == pytest.approx([8**0.5] * len(changed))


def test_a_checkpoint_brings_everything_back(tmp_path: Any) -> None:
    replay, worlds = filled()
    storage.save(tmp_path / "r", "replay", replay.tensors(), {})
    other = Replay(replay.settings, 2, (1,), torch.float32, CPU)
    other.restore(storage.load(tmp_path / "r", "replay")[0])
    twins = [
        World(w.name, w.told, [Episode(list(e.frames), list(e.actions), list(e.rewards), e.end) for e in w.episodes])
        for w in worlds
    ]
    for each, its in ((replay, worlds), (other, twins)):
        drive(each, its, np.random.default_rng(3), 40)
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
        assert replay.newest().shape == shape
        assert replay.newest()[0].flatten()[[0, -1]].tolist() == [1, 3]


def test_networks_are_given_the_shape_that_stacks_have() -> None:
    assert ReplaySettings(stack=6).shape((42, 40)) == (6, 42, 40)
    assert ReplaySettings(stack=3).shape((7,)) == (21,)
    with pytest.raises(InputError, match=r"seen as vectors or as grey images, not in frames of shape \(96, 96, 3\)"):
        ReplaySettings().shape((96, 96, 3))


def test_replays_that_hold_too_little_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"capacity: too small \(160\). 16 environments, stacks of 6 frames and 10-step .* at least 288$",
    ):
        Replay(ReplaySettings(capacity=160), 16, (1,), torch.float32, CPU)
    with pytest.raises(InputError, match="stacks have 1 to 64 frames"):
        ReplaySettings(stack=0)
    with pytest.raises(InputError, match="discount and alpha are between 0 and 1"):
        ReplaySettings(alpha=1.5)


def test_a_million_frames_take_less_than_two_and_a_half_gigabytes() -> None:
    """Stacks and returns are built by index: every frame is there once."""
    replay = Replay(ReplaySettings(), 16, (42, 42), torch.uint8, torch.device("meta"))
    assert replay.length * replay.environments == 1_000_000
    size = sum(tensor.nbytes for tensor in vars(replay).values() if isinstance(tensor, torch.Tensor))
    assert 1e6 * 42 * 42 < size < 1.8e9
