"""An agent's values: one trunk, the heads that it has, and the target that they are moved towards."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.rl.agents import Agent, Learning
from onefold.rl.networks import Heads, trunk
from onefold.rl.returns import divergence, expected, picked, projected, regret_over_information, spread


class Said(NamedTuple):
    """What a network says of states: values [M, n, actions] of its members, logits [S, n, actions, atoms] of returns,
    two of them where those of the bonus are apart."""

    values: Float[Tensor, "m n actions"] | None
    logits: Float[Tensor, "s n actions atoms"] | None


class Values(nn.Module):
    """A trunk and the heads that an agent has. Random priors are networks of their own, which never learn."""

    def __init__(
        self, agent: Agent, learning: Learning, shape: tuple[int, ...], actions: int, generator: Generator
    ) -> None:
        super().__init__()
        self.agent = agent

        def heads(width: int, members: int, atoms: int) -> Heads:
            return Heads(width, learning.hidden, actions, generator, members=members, atoms=atoms)

        self.trunk = trunk(shape, learning.channels, learning.hidden, generator)
        self.members = heads(self.trunk.width, agent.members, 1) if agent.members else None
        self.returns = heads(self.trunk.width, 1 + agent.apart, agent.atoms) if agent.atoms else None
        if self.returns is not None:
            self.returns.begin_at(agent.support.first())
        self.prior: nn.Sequential | None = None
        if agent.prior > 0 and agent.members:
            other = trunk(shape, learning.channels, learning.hidden, generator)
            self.prior = nn.Sequential(other, heads(other.width, agent.members, 1)).requires_grad_(False)

    def forward(self, x: Tensor) -> Said:
        z = self.trunk(x)
        values = None if self.members is None else self.members(z).squeeze(-1)
        if values is not None and self.prior is not None:
            values = values + self.agent.prior * self.prior(x).squeeze(-1)
        return Said(values, None if self.returns is None else self.returns(z))


class Judged(NamedTuple):
    """A loss for every transition, its priority, and the share of a target that lay off the support."""

    loss: Float[Tensor, " n"]
    error: Float[Tensor, " n"]
    outside: Float[Tensor, ""]


def judged(
    agent: Agent,
    said: Said,
    actions: Int[Tensor, " n"],
    rewards: Float[Tensor, "s n"],
    discounts: Float[Tensor, " n"],
    after: Said,
    target: Said,
    weight: float | Tensor,
    hopes: Float[Tensor, "n actions"] | None = None,
) -> Judged:
    """Double Q-learning (van Hasselt et al., 2016): `after` chooses the next action, `target` says what it is worth.

    Members learn each from its own target by Huber's loss, distributions by cross-entropy; the error is the members'
    mean |δ| or, without members, the divergence from the target. Where a bonus has returns of its own, `rewards` are
    two rows, and both returns are of the action that is best by `weight`. `hopes` is what next actions are worth
    beyond their values, when one of them is chosen and in what the next state is worth (Rashid et al., 2020).
    """
    n = len(actions)
    loss, error, outside = rewards.new_zeros(n), rewards.new_zeros(n), rewards.new_zeros(())
    if said.logits is not None:
        assert after.logits is not None
        assert target.logits is not None
        means = _means(agent, after.logits, weight)
        best = (means if hopes is None else means + hopes).argmax(-1)
        if hopes is not None:
            rewards = rewards + discounts * hopes.gather(-1, best[:, None]).squeeze(-1)
        streams = len(said.logits)
        chances = picked(target.logits, best.expand(streams, n)).softmax(-1).flatten(0, 1)
        aim, outside = projected(chances, rewards.flatten(), discounts.repeat(streams), agent.support)
        losses, errors = divergence(picked(said.logits, actions.expand(streams, n)).flatten(0, 1), aim)
        loss, error = losses.view(streams, n).sum(0), errors.view(streams, n).sum(0)
    if said.values is not None:
        assert after.values is not None
        assert target.values is not None
        best = after.values.argmax(-1, keepdim=True)
        aims = rewards + discounts * target.values.gather(-1, best).squeeze(-1)
        found = said.values.gather(-1, actions[None, :, None].expand(len(said.values), -1, 1)).squeeze(-1)
        loss = loss + F.huber_loss(found, aims, reduction="none").mean(0)
        error = (found - aims).detach().abs().mean(0)
    return Judged(loss, error, outside)


def preferences(
    agent: Agent, said: Said, member: Int[Tensor, " n"], weight: float | Tensor
) -> Float[Tensor, "n actions"]:
    """How much each action is to be preferred; the largest is what to do. `weight` is the bonus's at this moment."""
    if agent.choice == "information":
        assert said.values is not None
        assert said.logits is not None
        deviations = said.values.std(0, correction=0)
        return -regret_over_information(said.values.mean(0), deviations, spread(said.logits[0], agent.support), weight)
    if agent.choice == "member":
        assert said.values is not None
        return said.values[member, torch.arange(len(member), device=member.device)]
    return worth(agent, said, weight)


def worth(agent: Agent, said: Said, weight: float | Tensor) -> Float[Tensor, "n actions"]:
    """What each action is worth: the mean over members or, without any, of distributions."""
    if said.values is not None:
        return said.values.mean(0)
    assert said.logits is not None
    return _means(agent, said.logits, weight)


def _means(
    agent: Agent, logits: Float[Tensor, "s n actions atoms"], weight: float | Tensor
) -> Float[Tensor, "n actions"]:
    """What is expected of each action: of rewards, and of bonuses with the share of their weight that is left."""
    means = expected(logits, agent.support)
    return means[0] + means[1] * (weight / agent.weight.first) if agent.apart else means[0]
