"""Value networks, temporal-difference losses and action values, as pure functions of tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.rl.agents import Agent, Learning
from onefold.rl.networks import Heads, make_trunk

IDS_EPSILON = 1e-5  # ε₁ and ε₂ of Nikolov et al. (2019)
IDS_NOISE_FLOOR = 0.25  # of the normalised return variance


class QOutputs(NamedTuple):
    """Outputs for n states: values of the members, and logits of the categorical heads, Q's and then U's."""

    values: Float[Tensor, "m n actions"] | None
    logits: Float[Tensor, "heads n actions atoms"] | None


class QNetwork(nn.Module):
    """A trunk with the heads of an agent.

    Random priors are frozen heads on the trunk's features; no gradient flows through them into the trunk.
    """

    def __init__(
        self, agent: Agent, learning: Learning, shape: tuple[int, ...], actions: int, generator: Generator
    ) -> None:
        super().__init__()
        self.agent = agent
        self.trunk = make_trunk(shape, learning.channels, learning.hidden, generator)

        def make_heads(heads: int, atoms: int) -> Heads:
            return Heads(
                self.trunk.width, learning.hidden, actions, generator,
                heads=heads, atoms=atoms, dueling=agent.dueling,
            )  # fmt: skip

        self.members = make_heads(agent.members, 1) if agent.members else None
        self.categorical = make_heads(len(agent.bounds), agent.atoms) if agent.atoms else None
        if self.categorical is not None:
            self.categorical.initialise_output(initial_logits(agent.atoms))
        with_prior = agent.prior_scale > 0 and agent.members
        self.prior = make_heads(agent.members, 1).requires_grad_(False) if with_prior else None

    def forward(self, x: Tensor) -> QOutputs:
        features = self.trunk(x)
        values = None if self.members is None else self.members(features).squeeze(-1)
        if values is not None and self.prior is not None:
            values = values + self.agent.prior_scale * self.prior(features.detach()).squeeze(-1)
        return QOutputs(values, None if self.categorical is None else self.categorical(features))


def atom_values(bounds: Sequence[float], atoms: int, like: Tensor) -> Float[Tensor, "heads atoms"]:
    """Return the atoms of each head's support, from −bound to bound."""
    return torch.stack([torch.linspace(-b, b, atoms, device=like.device, dtype=torch.float32) for b in bounds])


def initial_logits(atoms: int) -> Float[Tensor, " atoms"]:
    """Return logits of a narrow distribution around 0, with 1 % spread over all atoms.

    A uniform distribution would narrow by γⁿ with every copy to the target network: for a hundred copies its width
    would hide the differences between actions.
    """
    values, width = torch.linspace(-1, 1, atoms), 1 / 20
    return (0.99 * torch.softmax(-0.5 * (values / width).square(), 0) + 0.01 / atoms).log()


def categorical_mean(logits: Float[Tensor, "heads *n atoms"], bounds: Sequence[float]) -> Float[Tensor, "heads *n"]:
    """Return the means of categorical distributions."""
    values = atom_values(bounds, logits.shape[-1], logits)
    return torch.einsum("h...a,ha->h...", logits.float().softmax(-1), values)


def categorical_variance(logits: Float[Tensor, "*n atoms"], bound: float) -> Float[Tensor, "*n"]:
    """Return the variances of categorical distributions on ±bound."""
    chances, values = logits.float().softmax(-1), atom_values([bound], logits.shape[-1], logits)[0]
    mean = (chances * values).sum(-1, keepdim=True)
    return (chances * (values - mean).square()).sum(-1)


def project(
    chances: Float[Tensor, "heads n atoms"],
    rewards: Float[Tensor, "heads n"],
    discounts: Float[Tensor, " n"],
    bounds: Sequence[float],
) -> tuple[Float[Tensor, "heads n atoms"], Float[Tensor, " heads"]]:
    """Return the distributions of r + γz projected onto the supports (Bellemare et al., 2017), and the mass clipped.

    Each shifted atom's mass goes to its two neighbours in proportion to their distance: atom i receives
    Σ_j p_j · max(0, 1 − |clip(r + γ z_j) − z_i| / Δz), as a matrix product, without scattering.
    """
    values = atom_values(bounds, chances.shape[-1], chances)
    step, highest = (values[:, 1] - values[:, 0])[:, None, None], values[:, -1, None, None]
    shifted = rewards[..., None] + discounts[:, None] * values[:, None]
    clipped = shifted.clamp(-highest, highest)
    distance = (clipped[:, :, None, :] - values[:, None, :, None]).abs() / step[..., None]
    projected = torch.einsum("hnij,hnj->hni", (1 - distance).clamp(min=0), chances)
    return projected, (chances * ((shifted - clipped).abs() > 1e-3 * step)).sum(2).mean(1)


def select(values: Float[Tensor, "... n actions k"], actions: Int[Tensor, "... n"]) -> Float[Tensor, "... n k"]:
    """Return the values of these actions."""
    index = actions[..., None, None].expand(*actions.shape, 1, values.shape[-1])
    return values.gather(-2, index).squeeze(-2)


class TDLoss(NamedTuple):
    """Loss of each transition, |TD error| of Q, and the share of each categorical target outside its support."""

    loss: Float[Tensor, " n"]
    td_error: Float[Tensor, " n"]
    clipped: Float[Tensor, " heads"]


def td_loss(
    agent: Agent,
    online: QOutputs,
    next_online: QOutputs,
    next_target: QOutputs,
    actions: Int[Tensor, " n"],
    rewards: Float[Tensor, "heads n"],
    discounts: Float[Tensor, " n"],
    bonus_weight: float | Tensor,
    u_share: float | Tensor = 1.0,
    next_bonus: Float[Tensor, "n actions"] | None = None,
) -> TDLoss:
    """Return the double-Q temporal-difference loss of a batch (van Hasselt et al., 2016).

    The online network selects the next action and the target network evaluates it. Ensemble members use the Huber loss
    against their own targets, averaged over members. Categorical heads use the cross-entropy against the projected
    target: Q's next action is greedy in Q alone, U's maximises Q + bonus_weight · U.

    Args:
        agent: Heads, supports and policy.
        online: Outputs for the states, with gradients.
        next_online: Outputs of the online network for the next states; selects actions.
        next_target: Outputs of the target network for the next states; evaluates them.
        actions: Actions taken.
        rewards: n-step rewards and, with a bonus head, the bonuses at the end of the n-step windows.
        discounts: Discounts of the next states; 0 after a terminal step.
        bonus_weight: Current weight of U in action selection.
        u_share: 1 once U learns, 0 before.
        next_bonus: Bonus of each next action, added to its value (optimistic agents).

    Returns:
        The loss and |TD error of Q| of each transition, and the clipped share of each categorical target.
    """
    n, heads = len(actions), len(agent.bounds)
    clipped = rewards.new_zeros(heads)
    losses: list[Tensor] = []
    td_error = rewards.new_zeros(n)
    if online.logits is not None:
        assert next_online.logits is not None
        assert next_target.logits is not None
        means = categorical_mean(next_online.logits, agent.bounds)
        greedy = means[0] if next_bonus is None else means[0] + next_bonus
        next_actions = [greedy.argmax(-1)]
        if agent.bonus_head:
            next_actions.append((means[0] + bonus_weight * means[1]).argmax(-1))
        if next_bonus is not None:
            rewards = rewards + discounts * next_bonus.gather(-1, next_actions[0][:, None]).squeeze(-1)
        chances = select(next_target.logits, torch.stack(next_actions)).float().softmax(-1)
        target, clipped = project(chances, rewards, discounts, agent.bounds)
        logits = select(online.logits, actions.expand(heads, n)).float()
        losses.extend((-(target * F.log_softmax(logits, -1)).sum(-1)).unbind())
        values = atom_values(agent.bounds, agent.atoms, logits)[0]
        td_error = ((logits[0].detach().softmax(-1) - target[0]) * values).sum(-1).abs()
    if online.values is not None:
        assert next_online.values is not None
        assert next_target.values is not None
        next_action = next_online.values.argmax(-1, keepdim=True)
        targets = rewards[0] + discounts * next_target.values.gather(-1, next_action).squeeze(-1)
        index = actions[None, :, None].expand(len(online.values), -1, 1)
        predictions = online.values.gather(-1, index).squeeze(-1)
        losses.append(F.huber_loss(predictions, targets, reduction="none").mean(0))
        td_error = (predictions - targets).detach().mean(0).abs()
    return TDLoss(_combine(agent, losses, u_share), td_error, clipped)


def _combine(agent: Agent, losses: list[Tensor], u_share: float | Tensor) -> Float[Tensor, " n"]:
    """Return the losses of one or two heads as one; before U learns, Q's alone with full weight."""
    if len(losses) == 1:
        return losses[0]
    second = u_share if agent.bonus_head else 1.0
    total = losses[0] + second * losses[1]
    return total / (1 + second) if agent.head_losses == "mean" else total


def action_values(
    agent: Agent, outputs: QOutputs, member: Int[Tensor, " n"], bonus_weight: float | Tensor
) -> Float[Tensor, "n actions"]:
    """Return the values whose maximum the agent's policy takes.

    Args:
        agent: Heads, supports and policy.
        outputs: Outputs for the states.
        member: Member that each environment follows in this episode ("thompson").
        bonus_weight: Current weight of U, or confidence scale ("ids").
    """
    if agent.policy == "ids":
        assert outputs.values is not None
        assert outputs.logits is not None
        deviations = outputs.values.std(0, correction=0)
        noise = categorical_variance(outputs.logits[0], agent.q_bound)
        return -regret_information_ratio(outputs.values.mean(0), deviations, noise, bonus_weight)
    if agent.policy == "thompson":
        assert outputs.values is not None
        return outputs.values[member, torch.arange(len(member), device=member.device)]
    q, u = q_and_u(agent, outputs)
    return q if u is None else q + bonus_weight * u


def q_and_u(agent: Agent, outputs: QOutputs) -> tuple[Float[Tensor, "n actions"], Float[Tensor, "n actions"] | None]:
    """Return Q, the mean over members or the mean of its distribution, and U if the agent has a bonus head."""
    if outputs.values is not None:
        return outputs.values.mean(0), None
    assert outputs.logits is not None
    means = categorical_mean(outputs.logits, agent.bounds)
    return means[0], means[1] if agent.bonus_head else None


def regret_information_ratio(
    means: Float[Tensor, "n actions"],
    deviations: Float[Tensor, "n actions"],
    variances: Float[Tensor, "n actions"],
    confidence: float | Tensor,
) -> Float[Tensor, "n actions"]:
    """Return Δ(a)² / I(a) of information-directed sampling (Nikolov et al., 2019); the smallest is best.

    Δ(a) = max_b (μ(b) + λσ(b)) − (μ(a) − λσ(a)) bounds the regret of a, and I(a) = log(1 + σ(a)²/ρ(a)²) + ε₂ is the
    information gain. μ and σ are the members' mean and deviation, ρ² the variance of returns over its mean over
    actions, at least 0.25.
    """
    highest = (means + confidence * deviations).amax(1, keepdim=True)
    regret = highest - (means - confidence * deviations)
    noise = variances / (variances.mean(1, keepdim=True) + IDS_EPSILON)
    information = torch.log1p(deviations.square() / noise.clamp(min=IDS_NOISE_FLOOR)) + IDS_EPSILON
    return regret.square() / information
