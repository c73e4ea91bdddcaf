"""A whole update of every agent against a slow, obvious one: draws, targets, losses, priorities, new weights."""

import copy
import gc
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from onefold.rl.agents import AGENTS, Agent, Learning, Ramp
from onefold.rl.learner import STATISTICS, Learner
from onefold.rl.loop import Loop
from onefold.rl.replay import Memory, Replay
from onefold.rl.runs import train
from onefold.rl.settings import run_of
from onefold.rl.small import Chain
from onefold.rl.vector import Local, Steps

SIDE, ENVIRONMENTS, ACTIONS, BATCH = 9, 4, 3, 16
LEARNING = Learning(
    memory=Memory(capacity=400, stack=2, n_step=3, discount=0.9, alpha=0.5),
    batch=BATCH, clip=0.05, channels=(3, 4), hidden=6, epsilon=Ramp(first=0.3, last=0.3, frames=1),
    importance=Ramp(first=0.4, last=1.0, frames=400),
)  # fmt: skip


def learner_of(agent: Agent, learning: Learning = LEARNING) -> Learner:
    return Learner(
        agent, learning, environments=ENVIRONMENTS, frame=(SIDE, SIDE), dtype=torch.uint8, actions=ACTIONS, seed=3,
        device=torch.device("cpu"),
    )  # fmt: skip


def invented(rng: np.random.Generator, *, began: bool) -> Steps:
    """Steps with rewards, and an end now and then."""
    e, no = ENVIRONMENTS, np.zeros(ENVIRONMENTS, bool)
    ends = no if began else rng.random(e) < 0.1
    frames, rewards = rng.integers(0, 256, (e, SIDE, SIDE), np.uint8), rng.normal(size=e).astype(np.float32)
    return Steps(frames, rewards * (not began), ends & (rewards > 0), ends & (rewards <= 0), no | began, no,
                 np.zeros((e, 2), np.float32))  # fmt: skip


def practised(agent: Agent) -> Learner:
    """A learner that has seen something and learned once; its target is elsewhere, and nothing in it is zero."""
    mind, rng = learner_of(agent), np.random.default_rng(0)
    over = np.ones(ENVIRONMENTS, bool)
    for step in range(40):
        seen = invented(rng, began=step == 0)
        began = over.copy()
        seen = seen._replace(
            began=began, rewards=np.where(began, 0, seen.rewards).astype(np.float32),
            terminated=seen.terminated & ~began, truncated=seen.truncated & ~began,
        )  # fmt: skip
        over = seen.terminated | seen.truncated
        mind.observe(seen)
    chance = Generator().manual_seed(1)
    with torch.no_grad():
        for network in (mind.target, mind.values):
            for parameter in network.parameters():
                if parameter.requires_grad or network is mind.target:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=chance))
        ready = mind.replay.priority > 0
        mind.replay.priority[ready] = torch.rand(int(ready.sum()), generator=chance) + 0.1
    mind.learn()
    return mind


def drawn_by_hand(mind: Learner, luck: Tensor) -> tuple[list[int], list[float]]:
    """Slots and importance weights."""
    priorities = mind.replay.priority.flatten().double().tolist()
    total, count = sum(priorities), sum(priority > 0 for priority in priorities)
    beta = 0.4 + 0.6 * min(1.0, int(mind.frames) / 400)
    slots, weights = [], []
    for i, u in enumerate(luck.tolist()):
        left, slot = (i + u) / BATCH * total, 0
        while left >= priorities[slot]:
            left, slot = left - priorities[slot], slot + 1
        slots.append(slot)
        weights.append((count * priorities[slot] / total) ** -beta)
    return slots, [weight / max(weights) for weight in weights]


def projected_by_hand(chances: list[float], reward: float, discount: float, agent: Agent) -> list[float]:
    """Bellemare et al. (2017), Algorithm 1."""
    step, found = (agent.high - agent.low) / (agent.atoms - 1), [0.0] * agent.atoms
    for j, chance in enumerate(chances):
        place = (min(agent.high, max(agent.low, reward + discount * (agent.low + j * step))) - agent.low) / step
        below = min(math.floor(place + 1e-9), agent.atoms - 1)
        share = max(0.0, place - below)
        found[below] += chance * (1 - share)
        if share > 0:
            found[below + 1] += chance * share
    return found


def scaled_by_hand(mind: Learner, news: Tensor) -> Tensor:
    """In running deviations above the running mean, these included."""
    ones, first, second = mind.scale.state_dict()["sums"].tolist()
    ones, first = 0.999 * ones + 0.001, 0.999 * first + 0.001 * float(news.double().mean())
    second = 0.999 * second + 0.001 * float(news.double().square().mean())
    mean = first / ones
    return (news - mean) / math.sqrt(second / ones - mean**2)


class ByHand:
    """An update: its loss with gradients for `own`, the new priorities by slot, and that of the bonus."""

    def __init__(self, mind: Learner, luck: Tensor) -> None:
        self.agent, self.values, self.priorities = mind.agent, copy.deepcopy(mind.values), dict[int, float]()
        self.own = [parameter for parameter in self.values.parameters() if parameter.requires_grad]
        self.beta = float(mind.agent.weight.at(int(mind.frames)))
        slots, weights = drawn_by_hand(mind, luck[:, 0])
        drawn = mind.replay.fetch(torch.tensor(slots), torch.tensor(weights))
        x, y = drawn.states / 255, drawn.next_states / 255
        bonuses = torch.zeros(BATCH) if mind.bonus is None else scaled_by_hand(mind, mind.bonus.value(y))
        self.values.trunk.sharpen()
        self.said, self.loss = self.values(x), torch.zeros(())
        with torch.no_grad():
            self.after, self.there = self.values(y), mind.target(y)
        for i, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
            step = int(drawn.actions[i]), float(drawn.rewards[i]), float(drawn.discounts[i])
            loss, error = torch.zeros(()), 0.0
            for part in (self.distributions, self.members):  # errors are the members', where there are any
                own, gap = part(i, *step, float(bonuses[i]))
                loss, error = loss + own, error if gap is None else gap
            self.loss = self.loss + weight * loss / BATCH
            self.priorities[slot] = (error + 1e-6) ** 0.5
        self.sought: list[Tensor] = []
        self.pulls: tuple[Tensor, ...] = ()
        if mind.bonus is not None:
            curious = copy.deepcopy(mind.bonus)
            self.sought = [parameter for parameter in curious.parameters() if parameter.requires_grad]
            self.pulls = torch.autograd.grad(curious.seen(y, luck[:, 1:])[1], self.sought)

    def distributions(self, i: int, action: int, reward: float, discount: float, bonus: float) -> tuple[Any, Any]:
        agent, loss, error = self.agent, torch.zeros(()), 0.0
        if not agent.atoms:
            return 0, None
        means = (self.after.logits.softmax(-1) * torch.linspace(agent.low, agent.high, agent.atoms)).sum(-1)[:, i]
        liked = means[0] + means[1] * self.beta / agent.weight.first if agent.apart else means[0]
        both = [reward, agent.weight.first * bonus] if agent.apart else [reward + self.beta * bonus]
        for s, each in enumerate(both):
            chances = self.there.logits[s, i, int(liked.argmax())].softmax(-1).tolist()
            aim = projected_by_hand(chances, each, discount, agent)
            logs = self.said.logits[s, i, action].log_softmax(-1)
            loss = loss - (torch.tensor(aim) * logs).sum()
            error += sum(p * (math.log(p) - log) for p, log in zip(aim, logs.tolist(), strict=True) if p > 0)
        return loss, error

    def members(self, i: int, action: int, reward: float, discount: float, _: float) -> tuple[Any, Any]:
        loss, errors, count = torch.zeros(()), [], self.agent.members
        for m in range(count):
            best = int(self.after.values[m, i].argmax())
            gap = self.said.values[m, i, action] - (reward + discount * float(self.there.values[m, i, best]))
            errors.append(abs(gap.item()))
            loss = loss + (0.5 * gap**2 if errors[-1] < 1 else gap.abs() - 0.5) / count
        return loss, sum(errors) / count if count else None


def adam_by_hand(before: dict[str, Tensor], number: int, old: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """One more step of Adam from the moments that a learner has."""
    count = int(before[f"adam.{number}.step"]) + 1
    first = 0.9 * before[f"adam.{number}.exp_avg"] + 0.1 * gradient
    second = 0.999 * before[f"adam.{number}.exp_avg_sq"] + 0.001 * gradient**2
    return old - rate * (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + LEARNING.adam_eps)


FORMS = {name: replace(agent, low=-2.0, high=2.0) for name, agent in AGENTS.items()}
FORMS["csd, not apart"] = replace(FORMS["csd"], apart=False, weight=Ramp(first=1.0, last=0.1, frames=400))


@pytest.mark.parametrize("name", FORMS)
def test_an_update_is_what_it_is_by_hand(name: str) -> None:
    agent = replace(FORMS[name], members=min(3, FORMS[name].members), atoms=min(11, FORMS[name].atoms))
    mind = practised(agent)
    before = {key: tensor.clone() for key, tensor in mind.tensors().items()}
    mind.statistics.zero_()
    chance = Generator()
    chance.set_state(mind.chance.get_state())
    luck = torch.zeros_like(mind._uniforms).uniform_(generator=chance)
    hand = ByHand(mind, luck)
    gradients = torch.autograd.grad(hand.loss, hand.own)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm > 2 * LEARNING.clip  # so that clipping is seen

    mind.learn()

    said = dict(zip(STATISTICS, mind.statistics.tolist(), strict=False))
    assert said["loss"] == pytest.approx(hand.loss.item(), rel=1e-4)
    assert said["gradient"] == pytest.approx(norm, rel=1e-3)
    flat = mind.replay.priority.flatten()
    assert {slot: float(flat[slot]) for slot in hand.priorities} == pytest.approx(hand.priorities, rel=1e-3, abs=1e-5)
    clipped = [(old, pull * LEARNING.clip / norm, agent.lr) for old, pull in zip(hand.own, gradients, strict=True)]
    curious = [(old, pull, agent.bonus_lr) for old, pull in zip(hand.sought, hand.pulls, strict=True)]
    moved = [parameter for _, parameter in mind._moved()]
    for number, ((old, gradient, rate), new) in enumerate(zip(clipped + curious, moved, strict=True)):
        aim = adam_by_hand(before, number, old.detach(), gradient, rate)
        torch.testing.assert_close(new.detach(), aim, rtol=1e-4, atol=2e-6)
    kept = {key for key in before if key.startswith(("target.", "values.prior."))}
    assert all(torch.equal(mind.tensors()[key], before[key]) for key in kept)


def test_the_target_becomes_the_values_with_their_priors() -> None:
    mind = practised(replace(AGENTS["bdqn"], members=3))
    names = dict(mind.target.named_parameters())
    assert any(name.startswith("prior.") for name in names)
    assert not any(torch.equal(names[name], own) for name, own in mind.values.named_parameters())
    mind.copy_target()
    assert all(torch.equal(names[name], own) for name, own in mind.values.named_parameters())


def test_an_episode_keeps_its_member() -> None:
    mind, rng = learner_of(AGENTS["bdqn"]), np.random.default_rng(0)
    mind.observe(invented(rng, began=True))
    seen = set()
    for _ in range(60):
        before, began = mind.member.clone(), rng.random(ENVIRONMENTS) < 0.2
        mind.observe(invented(rng, began=False)._replace(began=began))
        assert torch.equal(mind.member[~torch.from_numpy(began)], before[~torch.from_numpy(began)])
        seen |= set(mind.member.tolist())
    assert seen == set(range(10))


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_actions_are_the_best_but_for_the_share_of_chance(epsilon: float) -> None:
    learning = replace(LEARNING, epsilon=Ramp(first=1.0, last=epsilon, frames=40))
    mind, rng = learner_of(AGENTS["dqn"], learning), np.random.default_rng(0)
    same = []
    for step in range(300):
        mind.observe(invented(rng, began=step == 0))
        values = mind.values(mind.replay.newest() / 255).values
        assert values is not None
        same += (values.mean(0).argmax(1).numpy() == mind.answer()).tolist() if step >= 10 else []
    assert np.mean(same) == pytest.approx(1 - epsilon * 2 / 3, abs=0.06 if epsilon else 0)


def test_targets_are_copied_when_it_is_time() -> None:
    run = run_of("dqn", "chain-5", 900, 0)
    learning = replace(run.learning, start=100, target_every=120, batch=8)
    worlds = Local(lambda _: Chain(5), 4, 0)
    mind = Learner(
        run.agent, learning, environments=4, frame=worlds.frame, dtype=torch.float32, actions=worlds.actions, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    copied, last = [], None
    for moment in Loop(mind, worlds, 900):
        now = [parameter.clone() for parameter in mind.target.parameters()]
        if last is not None and not all(map(torch.equal, now, last)):
            assert all(map(torch.equal, now, mind.values.parameters()))
            copied.append(moment.frames - 4)  # asked for before the frames of this moment came
        last = now
    worlds.close()
    assert copied == [120 * k for k in range(1, 8)]


def test_a_run_that_ended_leaves_no_memory_behind(tmp_path: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        for seed in (0, 1):
            for _ in train(run_of("csd", "chain-8", 600, seed), tmp_path / str(seed), device="cpu"):
                pass
        assert not any(type(each) is Replay for each in gc.get_objects())
    finally:
        gc.enable()
