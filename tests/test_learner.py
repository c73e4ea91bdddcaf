"""A whole update of every agent against a slow reference: samples, targets, losses, priorities, new weights."""

import copy
import gc
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from onefold.rl.agents import AGENTS, Agent, Learning, LinearSchedule, ReplaySettings
from onefold.rl.learner import STATISTICS, Learner
from onefold.rl.loop import TrainingLoop
from onefold.rl.replay import Replay
from onefold.rl.runs import train
from onefold.rl.settings import make_run
from onefold.rl.small_envs import DeceptiveChain
from onefold.rl.vector_env import LocalVectorEnv, Steps

SIDE, ENVIRONMENTS, ACTIONS, BATCH = 9, 4, 3, 16
LEARNING = Learning(
    replay=ReplaySettings(capacity=400, stack=2, n_step=3, discount=0.9, alpha=0.5),
    batch_size=BATCH, max_grad_norm=0.05, channels=(3, 4), hidden=6, bonus_learning_starts=0,
    epsilon=LinearSchedule(start=0.3, end=0.3, frames=1), per_beta=LinearSchedule(start=0.4, end=1.0, frames=400),
)  # fmt: skip


def learner_of(agent: Agent, learning: Learning = LEARNING, *, compiled: bool = False) -> Learner:
    return Learner(
        agent, learning, environments=ENVIRONMENTS, frame=(SIDE, SIDE), dtype=torch.uint8, actions=ACTIONS, seed=3,
        device=torch.device("cpu"), compiled=compiled,
    )  # fmt: skip


def random_steps(rng: np.random.Generator, *, began: bool) -> Steps:
    """Return random steps with rewards; about one in ten episodes ends."""
    e, no = ENVIRONMENTS, np.zeros(ENVIRONMENTS, bool)
    ends = no if began else rng.random(e) < 0.1
    frames, rewards = rng.integers(0, 256, (e, SIDE, SIDE), np.uint8), rng.normal(size=e).astype(np.float32)
    return Steps(frames, rewards * (not began), ends & (rewards > 0), ends & (rewards <= 0), no | began, no,
                 np.zeros((e, 2), np.float32))  # fmt: skip


def trained_learner(agent: Agent, learning: Learning = LEARNING) -> Learner:
    """Return a learner after 40 steps and one update, with random weights, target weights and priorities."""
    learner, rng = learner_of(agent, learning), np.random.default_rng(0)
    over = np.ones(ENVIRONMENTS, bool)
    for step in range(40):
        seen = random_steps(rng, began=step == 0)
        began = over.copy()
        seen = seen._replace(
            began=began, rewards=np.where(began, 0, seen.rewards).astype(np.float32),
            terminated=seen.terminated & ~began, truncated=seen.truncated & ~began,
        )  # fmt: skip
        over = seen.terminated | seen.truncated
        learner.observe(seen)
    generator = Generator().manual_seed(1)
    with torch.no_grad():
        for network in (learner.target, learner.online):
            for parameter in network.parameters():
                if parameter.requires_grad or network is learner.target:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        ready = learner.replay.priority > 0
        learner.replay.priority[ready] = torch.rand(int(ready.sum()), generator=generator) + 0.1
    learner.learn()
    return learner


def reference_sample(learner: Learner, uniforms: Tensor) -> tuple[list[int], list[float]]:
    """Return the sampled slots and their importance weights."""
    priorities = learner.replay.priority.flatten().double().tolist()
    total, count = sum(priorities), sum(priority > 0 for priority in priorities)
    beta = 0.4 + 0.6 * min(1.0, int(learner.frames) / 400)
    slots, weights = [], []
    for i, u in enumerate(uniforms.tolist()):
        left, slot = (i + u) / BATCH * total, 0
        while left >= priorities[slot]:
            left, slot = left - priorities[slot], slot + 1
        slots.append(slot)
        weights.append((count * priorities[slot] / total) ** -beta)
    return slots, [weight / max(weights) for weight in weights]


def reference_projection(chances: list[float], reward: float, discount: float, bound: float) -> list[float]:
    """Project by Algorithm 1 of Bellemare et al. (2017)."""
    atoms = len(chances)
    step, projected = 2 * bound / (atoms - 1), [0.0] * atoms
    for j, chance in enumerate(chances):
        place = (min(bound, max(-bound, reward + discount * (j * step - bound))) + bound) / step
        below = min(math.floor(place + 1e-9), atoms - 1)
        share = max(0.0, place - below)
        projected[below] += chance * (1 - share)
        if share > 0:
            projected[below + 1] += chance * share
    return projected


def reference_standardise(learner: Learner, bonuses: Tensor) -> Tensor:
    """Standardise by the running mean and deviation, after adding these bonuses to them."""
    ones, first, second = learner.bonus_moments.state_dict()["sums"].tolist()
    ones, first = 0.999 * ones + 0.001, 0.999 * first + 0.001 * float(bonuses.double().mean())
    second = 0.999 * second + 0.001 * float(bonuses.double().square().mean())
    mean = first / ones
    return (bonuses - mean) / math.sqrt(second / ones - mean**2)


class ReferenceUpdate:
    """The loss of an update with gradients for `parameters`, new priorities by slot, and gradients of the bonus."""

    def __init__(self, learner: Learner, uniforms: Tensor) -> None:
        self.agent, self.online, self.priorities = learner.agent, copy.deepcopy(learner.online), dict[int, float]()
        self.parameters = [parameter for parameter in self.online.parameters() if parameter.requires_grad]
        self.u_learns = int(learner.frames) >= learner.learning.bonus_learning_starts
        self.bonus_weight = float(learner.agent.bonus_weight.at(int(learner.frames)))
        slots, weights = reference_sample(learner, uniforms[:, 0])
        batch = learner.replay.fetch(torch.tensor(slots), torch.tensor(weights))
        x, y = batch.states / 255, batch.next_states / 255
        bonuses = (
            torch.zeros(BATCH) if learner.bonus is None else reference_standardise(learner, learner.bonus.value(y))
        )
        self.online.trunk.power_iteration()
        self.outputs, self.loss = self.online(x), torch.zeros(())
        with torch.no_grad():
            self.next_online, self.next_target = self.online(y), learner.target(y)
        self.per_weight = sum(weights) / BATCH
        for i, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
            step = int(batch.actions[i]), float(batch.rewards[i]), float(batch.discounts[i])
            bonus = self.agent.bonus_scale * float(bonuses[i])
            losses, td_error = self.categorical(i, *step, bonus)
            if self.agent.members:  # with members, the TD error is theirs
                loss, td_error = self.members(i, *step)
                losses.append(loss)
            self.loss = self.loss + weight * self.combined(losses) / BATCH
            self.priorities[slot] = (td_error + 1e-6) ** 0.5
        self.bonus_parameters: list[Tensor] = []
        self.bonus_gradients: tuple[Tensor, ...] = ()
        if learner.bonus is not None:
            networks = copy.deepcopy(learner.bonus)
            self.bonus_parameters = [parameter for parameter in networks.parameters() if parameter.requires_grad]
            loss = networks.value_and_loss(y, uniforms[:, 1:])[1]
            self.bonus_gradients = torch.autograd.grad(loss, self.bonus_parameters)

    def combined(self, losses: list[Any]) -> Any:
        if self.agent.bonus_head and not self.u_learns:
            return losses[0] + 0 * losses[1]
        return sum(losses) / (len(losses) if self.agent.head_losses == "mean" else 1)

    def categorical(self, i: int, action: int, reward: float, discount: float, bonus: float) -> tuple[list[Any], float]:
        """Return the losses of Q (rewards, its greedy action) and U (bonuses, the action that maximises Q + βU)."""
        agent, losses, td_error = self.agent, [], 0.0
        if not agent.atoms:
            return losses, td_error
        atoms = [torch.linspace(-bound, bound, agent.atoms) for bound in (agent.q_bound, agent.u_bound)]
        count = 2 if agent.bonus_head else 1
        means = [(self.next_online.logits[h, i].softmax(-1) * atoms[h]).sum(-1) for h in range(count)]
        best = [int(means[0].argmax())]
        rewards = [reward + self.bonus_weight * bonus]
        if agent.bonus_head:
            best.append(int((means[0] + self.bonus_weight * means[1]).argmax()))
            rewards = [reward, bonus]
        for h in range(count):
            chances = self.next_target.logits[h, i, best[h]].softmax(-1).tolist()
            target = torch.tensor(reference_projection(chances, rewards[h], discount, float(atoms[h][-1])))
            logits = self.outputs.logits[h, i, action]
            losses.append(-(target * logits.log_softmax(-1)).sum())
            if h == 0:
                td_error = abs(float((target * atoms[0]).sum() - (logits.detach().softmax(-1) * atoms[0]).sum()))
        return losses, td_error

    def members(self, i: int, action: int, reward: float, discount: float) -> tuple[Any, float]:
        loss, gaps, count = torch.zeros(()), [], self.agent.members
        for m in range(count):
            best = int(self.next_online.values[m, i].argmax())
            gap = self.outputs.values[m, i, action] - (reward + discount * float(self.next_target.values[m, i, best]))
            gaps.append(gap.item())
            loss = loss + (0.5 * gap**2 if abs(gaps[-1]) < 1 else gap.abs() - 0.5) / count
        return loss, abs(sum(gaps)) / count


def reference_adam(before: dict[str, Tensor], number: int, old: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """Return a parameter after one step of Adam from the moments in a checkpoint."""
    count = int(before[f"adam.{number}.step"]) + 1
    first = 0.9 * before[f"adam.{number}.exp_avg"] + 0.1 * gradient
    second = 0.999 * before[f"adam.{number}.exp_avg_sq"] + 0.001 * gradient**2
    return old - rate * (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + LEARNING.adam_eps)


WEIGHT = LinearSchedule(start=1.0, end=0.5, frames=400)  # so that U often changes the best action
FORMS = {name: replace(agent, bonus_weight=WEIGHT) for name, agent in AGENTS.items()}
FORMS["csd centred"] = replace(FORMS["csd"], bonus_form="centred")
FORMS["rnd with a bonus head"] = replace(FORMS["rnd"], bonus_head=True, q_bound=2.0)
FORMS["rnd with large bonuses"] = replace(FORMS["rnd"], bonus_scale=1.0)
BEFORE_U = [(name, False) for name, agent in FORMS.items() if agent.bonus_head]


@pytest.mark.parametrize(("name", "u_learns"), [*((name, True) for name in FORMS), *BEFORE_U])
def test_an_update_equals_the_reference(name: str, u_learns: bool) -> None:
    agent = replace(FORMS[name], members=min(3, FORMS[name].members), atoms=min(11, FORMS[name].atoms))
    learning = LEARNING if u_learns else replace(LEARNING, bonus_learning_starts=10_000)
    learner = trained_learner(agent, learning)
    before = {key: tensor.clone() for key, tensor in learner.tensors().items()}
    learner.statistics.zero_()
    generator = Generator()
    generator.set_state(learner.generator.get_state())
    uniforms = torch.zeros_like(learner._uniforms).uniform_(generator=generator)
    reference = ReferenceUpdate(learner, uniforms)
    gradients = torch.autograd.grad(reference.loss, reference.parameters)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm > 2 * LEARNING.max_grad_norm  # so that clipping matters

    learner.learn()

    statistics = dict(zip(STATISTICS, learner.statistics.tolist(), strict=False))
    assert statistics["loss"] == pytest.approx(reference.loss.item(), rel=1e-4)
    assert statistics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert statistics["per_weight"] == pytest.approx(reference.per_weight, rel=1e-4)
    flat = learner.replay.priority.flatten()
    assert {slot: float(flat[slot]) for slot in reference.priorities} == pytest.approx(
        reference.priorities, rel=2e-3, abs=1e-5
    )
    clipped = [
        (old, gradient * LEARNING.max_grad_norm / norm, agent.lr)
        for old, gradient in zip(reference.parameters, gradients, strict=True)
    ]
    bonus = [
        (old, g, agent.bonus_lr) for old, g in zip(reference.bonus_parameters, reference.bonus_gradients, strict=True)
    ]
    trained = [p for optimiser in learner.optimisers for p in optimiser.param_groups[0]["params"]]
    for number, ((old, gradient, rate), new) in enumerate(zip(clipped + bonus, trained, strict=True)):
        target = reference_adam(before, number, old.detach(), gradient, rate)
        torch.testing.assert_close(new.detach(), target, rtol=1e-4, atol=2e-6)
    kept = {key for key in before if key.startswith(("target.", "online.prior."))}
    assert all(torch.equal(learner.tensors()[key], before[key]) for key in kept)


def test_copy_target_copies_all_networks_and_priors() -> None:
    learner = trained_learner(replace(AGENTS["bdqn"], members=3))
    names = dict(learner.target.named_parameters())
    assert any(name.startswith("prior.") for name in names)
    assert not any(torch.equal(names[name], online) for name, online in learner.online.named_parameters())
    learner.copy_target()
    assert all(torch.equal(names[name], online) for name, online in learner.online.named_parameters())


def test_a_member_is_kept_for_an_episode() -> None:
    learner, rng = learner_of(AGENTS["bdqn"]), np.random.default_rng(0)
    learner.observe(random_steps(rng, began=True))
    seen = set()
    for _ in range(60):
        before, began = learner.member.clone(), rng.random(ENVIRONMENTS) < 0.2
        learner.observe(random_steps(rng, began=False)._replace(began=began))
        assert torch.equal(learner.member[~torch.from_numpy(began)], before[~torch.from_numpy(began)])
        seen |= set(learner.member.tolist())
    assert seen == set(range(10))


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_actions_are_greedy_except_for_the_random_share(epsilon: float) -> None:
    learning = replace(LEARNING, epsilon=LinearSchedule(start=1.0, end=epsilon, frames=40))
    learner, rng = learner_of(AGENTS["dqn"], learning), np.random.default_rng(0)
    same = []
    for step in range(300):
        learner.observe(random_steps(rng, began=step == 0))
        values = learner.online(learner.replay.newest_stacks() / 255).values
        assert values is not None
        same += (values.mean(0).argmax(1).numpy() == learner.selected_actions()).tolist() if step >= 10 else []
    assert np.mean(same) == pytest.approx(1 - epsilon * 2 / 3, abs=0.06 if epsilon else 0)


def test_targets_are_copied_every_target_period() -> None:
    run = make_run("dqn", "chain-5", 900, 0)
    learning = replace(run.learning, learning_starts=100, target_period=120, batch_size=8)
    env = LocalVectorEnv(lambda _: DeceptiveChain(5), 4, 0)
    learner = Learner(
        run.agent, learning, environments=4, frame=env.frame, dtype=torch.float32, actions=env.actions, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    copied, last = [], None
    for progress in TrainingLoop(learner, env, 900):
        now = [parameter.clone() for parameter in learner.target.parameters()]
        if last is not None and not all(map(torch.equal, now, last)):
            assert all(map(torch.equal, now, learner.online.parameters()))
            copied.append(progress.frames - 4)  # the copy comes before the frames of this step
        last = now
    env.close()
    assert copied == [120 * k for k in range(1, 8)]


def test_a_finished_run_frees_its_memory(tmp_path: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        for seed in (0, 1):
            for _ in train(make_run("csd", "chain-8", 600, seed), tmp_path / str(seed), device="cpu"):
                pass
        assert not any(type(each) is Replay for each in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["csd", pytest.param("ids", marks=pytest.mark.slow)])
def test_an_update_can_be_compiled(name: str) -> None:
    """No other test without a GPU compiles the update. jaxtyping is disabled: its checks would break the trace."""
    code = f"""
import torch, test_learner as t
compile = torch.compile
torch.compile = lambda part, dynamic, options: compile(part, dynamic=dynamic, backend="eager")
reports = []
for compiled in (True, False):
    learner = t.learner_of(t.AGENTS[{name!r}], compiled=compiled)
    rng = t.np.random.default_rng(0)
    for step in range(12):
        learner.observe(t.random_steps(rng, began=step == 0))
    learner.learn()
    reports.append(learner.report())
assert reports[0] == t.pytest.approx(reports[1], rel=1e-5), reports
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "JAXTYPING_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
