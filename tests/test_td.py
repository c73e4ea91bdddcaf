"""Networks, losses and action values against hand computations and independent implementations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm

from onefold.rl.agents import AGENTS, Agent, Learning, LinearSchedule
from onefold.rl.networks import Heads, Trunk
from onefold.rl.td import (
    QNetwork,
    QOutputs,
    action_values,
    atom_values,
    categorical_mean,
    categorical_variance,
    initial_logits,
    project,
    q_and_u,
    regret_information_ratio,
    select,
    td_loss,
)

SMALL = Learning(channels=(4, 4), hidden=8)


def generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def certain(*returns: tuple[float, ...], bound: float = 2.0) -> Tensor:
    """Return logits [heads, 1, actions, 9] of certain returns on ±bound; one tuple of returns per head."""
    atoms = torch.tensor(returns)[:, None].mul(4 / bound).add(4).round().long()
    return F.one_hot(atoms, 9).float() * 100 - 50


# Categorical distributions


def project_slowly(chances: np.ndarray, reward: float, discount: float, bound: float) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. (2017), atom by atom."""
    atoms = len(chances)
    projected, step = np.zeros(atoms), 2 * bound / (atoms - 1)
    for j, chance in enumerate(chances):
        shifted = min(bound, max(-bound, reward + discount * (-bound + j * step)))
        place = (shifted + bound) / step
        low, high = math.floor(place + 1e-9), math.ceil(place - 1e-9)
        if low == high:
            projected[low] += chance
        else:
            projected[low] += chance * (high - place)
            projected[high] += chance * (place - low)
    return projected


def test_projections_of_two_heads_by_hand() -> None:
    """Head 0 has the atoms -1, -½, 0, ½, 1; head 1 has twice those, other rewards, and the same discounts."""
    certain_zero, uniform, high = [0.0, 0.0, 1.0, 0.0, 0.0], [0.2] * 5, [0.0, 0.0, 0.0, 0.5, 0.5]
    chances = torch.tensor([[certain_zero, uniform, high], [uniform, high, certain_zero]])
    rewards, discounts = torch.tensor([[0.3, 0.0, 0.75], [0.0, 0.5, -3.0]]), torch.tensor([0.9, 0.5, 1.0])
    projected, clipped = project(chances, rewards, discounts, (1.0, 2.0))
    torch.testing.assert_close(
        projected[0], torch.tensor([[0.0, 0.0, 0.4, 0.6, 0.0], [0.0, 0.3, 0.4, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    )
    exact = [[0.16, 0.22, 0.24, 0.22, 0.16], [0.0, 0.0, 0.0, 0.75, 0.25], [1.0, 0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(projected[1], torch.tensor(exact))
    assert clipped.tolist() == pytest.approx([1 / 3, 1 / 3])  # a target's share of mass beyond the support, averaged


@given(seed=st.integers(0, 2**31), reward=st.floats(-3, 3), discount=st.floats(0, 1))
def test_projections_equal_the_published_algorithm(seed: int, reward: float, discount: float) -> None:
    chances = np.random.default_rng(seed).dirichlet(np.ones(11))
    projected, clipped = project(
        torch.from_numpy(chances).float()[None, None], torch.tensor([[reward]]), torch.tensor([discount]), (2.5,)
    )
    np.testing.assert_allclose(projected[0, 0].numpy(), project_slowly(chances, reward, discount, 2.5), atol=2e-5)
    mean = float((projected * atom_values((2.5,), 11, projected)).sum())
    if abs(reward) + 2.5 * discount < 2.5:  # nothing is clipped, so the mean is kept
        assert mean == pytest.approx(reward + discount * float(chances @ np.linspace(-2.5, 2.5, 11)), abs=1e-4)
        assert float(clipped) == 0


def test_means_and_variances_by_hand() -> None:
    first, second = [0.1, 0.2, 0.3, 0.2, 0.2], [0.0001, 0.0001, 0.9996, 0.0001, 0.0001]
    logits = torch.tensor([[first, second], [first, second]]).log()
    means = categorical_mean(logits, (1.0, 4.0))
    torch.testing.assert_close(means, torch.tensor([[0.1, 0.0], [0.4, 0.0]]), atol=1e-5, rtol=0)
    assert float(categorical_variance(logits[0], 1.0)[0]) == pytest.approx(0.1 + 0.2 / 4 + 0.2 / 4 + 0.2 - 0.01)
    assert float(categorical_variance(logits[0], 4.0)[0]) == pytest.approx(16 * (0.1 + 0.2 / 4 + 0.2 / 4 + 0.2 - 0.01))


def test_means_of_a_batch_of_actions_keep_their_places() -> None:
    logits = torch.randn(2, 5, 3, 7, generator=generator(0))
    means = categorical_mean(logits, (1.0, 3.0))
    assert means.shape == (2, 5, 3)
    for head, bound in enumerate((1.0, 3.0)):
        exact = (logits[head].softmax(-1) * torch.linspace(-bound, bound, 7)).sum(-1)
        torch.testing.assert_close(means[head], exact)


@pytest.mark.parametrize("atoms", [11, 101])
def test_returns_start_near_zero_and_leave_everything_possible(atoms: int) -> None:
    """A bell of width 1/20 of the bound, with 1 % of the mass spread evenly."""
    chances = initial_logits(atoms).softmax(0)
    bell = np.exp(-0.5 * (np.linspace(-1, 1, atoms) * 20) ** 2)
    np.testing.assert_allclose(chances.numpy(), 0.99 * bell / bell.sum() + 0.01 / atoms, rtol=1e-4)


def test_values_of_the_given_actions_are_selected() -> None:
    values = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).float()
    actions = torch.tensor([[0, 3, 1], [2, 2, 0]])
    for m in range(2):
        for n in range(3):
            assert torch.equal(select(values, actions)[m, n], values[m, n, actions[m, n]])


# Losses


def test_double_q_targets_of_members_by_hand() -> None:
    """Each member selects by its own online values and is evaluated by its own target; errors have opposite signs."""
    agent = Agent(members=2)
    online = QOutputs(torch.tensor([[[1.0, 2.0, 3.0]], [[0.0, 8.0, 1.0]]]), None)
    next_online = QOutputs(torch.tensor([[[0.0, 9.0, 1.0]], [[5.0, 1.0, 1.0]]]), None)
    next_target = QOutputs(torch.tensor([[[10.0, 20.0, 30.0]], [[1.0, 2.0, 3.0]]]), None)
    rewards, discounts = torch.tensor([[0.5]]), torch.tensor([0.9])
    td = td_loss(agent, online, next_online, next_target, torch.tensor([1]), rewards, discounts, 0.0)
    errors = [2.0 - (0.5 + 0.9 * 20), 8.0 - (0.5 + 0.9 * 1)]
    assert float(td.loss[0]) == pytest.approx(sum(abs(error) - 0.5 for error in errors) / 2)
    assert float(td.td_error[0]) == pytest.approx(abs(sum(errors)) / 2)  # of the members' mean
    small = QOutputs(torch.tensor([[[0.0, 18.9, 0.0]], [[0.0, 1.0, 0.0]]]), None)
    td = td_loss(agent, small, next_online, next_target, torch.tensor([1]), rewards, discounts, 0.0)
    assert float(td.loss[0]) == pytest.approx((0.5 * 0.4**2 + 0.5 * 0.4**2) / 2, rel=1e-4)  # quadratic below 1
    assert float(td.td_error[0]) == pytest.approx(0, abs=1e-5)


def test_a_distribution_moves_towards_that_of_the_action_that_is_best_online() -> None:
    agent = Agent(members=0, atoms=3, q_bound=1.0)
    zero = torch.tensor([[-50.0, 0.0, -50.0]])  # a certain return of 0
    next_online = QOutputs(None, torch.stack([torch.tensor([[0.0, -50.0, -50.0]]), zero], 1)[None])
    next_target = QOutputs(None, torch.stack([torch.tensor([[-50.0, -50.0, 0.0]]), zero], 1)[None])
    online = QOutputs(None, torch.log(torch.tensor([[[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]]])))
    rewards, discounts = torch.tensor([[-0.25]]), torch.tensor([0.5])
    td = td_loss(agent, online, next_online, next_target, torch.tensor([0]), rewards, discounts, 0.0)
    assert float(td.loss[0]) == pytest.approx(-0.25 * math.log(0.2) - 0.75 * math.log(0.5), rel=1e-5)
    assert float(td.td_error[0]) == pytest.approx(0.1 - -0.25)
    assert td.clipped.tolist() == [0.0]


TWO_HEADS = Agent(members=0, atoms=9, q_bound=2.0, u_bound=4.0, bonus="rnd", bonus_head=True)


@pytest.mark.parametrize("losses", ["mean", "sum"])
@pytest.mark.parametrize(("bonus_weight", "u_action"), [(1.0, 1), (0.2, 0)])
def test_q_ignores_the_bonus_and_u_follows_the_weighted_sum(bonus_weight: float, u_action: int, losses: Any) -> None:
    """Q is 1 and 0, U is 0 and 4 online: Q's next action is always 0; U's is 1 with the large weight only.

    By the targets, Q of the actions is 1 and -1, U is -2 and 2. The rewards are 0.5 and -1, the discount is ½.
    """
    agent = replace(TWO_HEADS, head_losses=losses)

    def outputs(q: tuple[float, float], u: tuple[float, float]) -> QOutputs:
        return QOutputs(None, torch.cat([certain(q, bound=2.0), certain(u, bound=4.0)]))

    next_online, next_target = outputs((1.0, 0.0), (0.0, 4.0)), outputs((1.0, -1.0), (-2.0, 2.0))
    targets = 0.5 + 0.5 * 1.0, -1.0 + 0.5 * (-2.0, 2.0)[u_action]
    logits = torch.randn(2, 1, 2, 9, generator=generator(0)).requires_grad_()
    arguments: tuple[Any, ...] = (
        agent, QOutputs(None, logits), next_online, next_target, torch.tensor([1]), torch.tensor([[0.5], [-1.0]]),
        torch.tensor([0.5]), bonus_weight,
    )  # fmt: skip
    td = td_loss(*arguments)
    steps = 0.5, 1.0  # between two atoms
    q_loss, u_loss = (-F.log_softmax(logits[h, 0, 1], 0)[round(targets[h] / steps[h]) + 4] for h in (0, 1))
    torch.testing.assert_close(td.loss[0], (q_loss + u_loss) / (2 if losses == "mean" else 1))
    q = float((logits[0, 0, 1].detach().softmax(0) * torch.linspace(-2, 2, 9)).sum())
    assert float(td.td_error[0]) == pytest.approx(abs(q - targets[0]), rel=1e-5)  # U's error does not count
    before_u = td_loss(*arguments, u_share=torch.tensor(0.0))
    torch.testing.assert_close(before_u.loss[0], q_loss)  # with full weight
    (gradient,) = torch.autograd.grad(before_u.loss.sum(), logits)
    assert not gradient[1].any()


def test_the_share_of_clipped_targets_is_counted_for_each_head() -> None:
    next_outputs = QOutputs(None, torch.cat([certain((2.0, 0.0)), certain((4.0, 0.0), bound=4.0)]))
    logits, rewards = torch.zeros(2, 1, 2, 9), torch.tensor([[1.5], [0.5]])
    arguments = torch.tensor([0]), rewards, torch.tensor([0.5]), 0.1
    td = td_loss(TWO_HEADS, QOutputs(None, logits), next_outputs, next_outputs, *arguments)
    assert td.clipped.tolist() == pytest.approx([1.0, 0.0])  # 1.5 + 1 > 2, and 0.5 + 2 < 4


def test_ids_adds_both_losses_and_takes_its_td_error_from_the_members() -> None:
    agent = Agent(members=2, atoms=9, policy="ids", q_bound=2.0, head_losses="sum")
    logits = torch.randn(1, 1, 2, 9, generator=generator(0))
    online = QOutputs(torch.tensor([[[1.0, 2.0]], [[0.0, 0.5]]]), logits)
    next_outputs = QOutputs(torch.tensor([[[1.0, 0.0]], [[0.0, 0.5]]]), certain((0.0, 1.0)))
    arguments = torch.tensor([1]), torch.tensor([[0.5]]), torch.tensor([1.0]), 0.1
    td = td_loss(agent, online, next_outputs, next_outputs, *arguments)
    errors = [2.0 - 1.5, 0.5 - 1.0]
    cross_entropy = -float(logits[0, 0, 1].log_softmax(0)[7])  # the atom of 0.5 + 1
    assert float(td.loss[0]) == pytest.approx(cross_entropy + (0.5 * 0.5**2 + 0.5 * 0.5**2) / 2, rel=1e-5)
    assert float(td.td_error[0]) == pytest.approx(abs(sum(errors)) / 2)


def test_the_bonus_of_the_next_action_selects_it_and_is_part_of_its_value() -> None:
    """Two actions with returns of 1 and 0. Bonuses of 0 and 3 make the second one better, worth 3."""
    agent = Agent(members=0, atoms=9, q_bound=4.0)
    next_outputs = QOutputs(None, certain((1.0, 0.0), bound=4.0))
    logits = torch.zeros(1, 1, 2, 9, requires_grad=True)
    arguments = torch.tensor([0]), torch.tensor([[0.5]]), torch.tensor([0.5]), 0.0
    for next_bonus, target_return in ((None, 1.0), (torch.tensor([[0.0, 3.0]]), 2.0)):
        td = td_loss(agent, QOutputs(None, logits), next_outputs, next_outputs, *arguments, next_bonus=next_bonus)
        target = torch.zeros(9)
        target[4 + int(target_return)] = 1.0
        (gradient,) = torch.autograd.grad(td.loss.sum(), logits)
        torch.testing.assert_close(gradient[0, 0, 0], torch.full((9,), 1 / 9) - target)


# Action values


def test_information_directed_sampling_by_hand() -> None:
    """Two states. ρ² is a variance over the mean of that state's actions, at least ¼."""
    means, deviations = [[1.0, 0.9, 0.0], [0.2, 0.3, 0.1]], [[0.0, 0.5, 0.1], [0.4, 0.2, 0.6]]
    variances = [[0.2, 0.2, 0.2], [0.02, 0.78, 0.4]]  # 0.02 / 0.4 is below ¼
    highest = [1.0, 0.3 + 0.1 * 0.2]  # 0.9 + 0.05 and 0.2 + 0.04 are less
    ratio = regret_information_ratio(torch.tensor(means), torch.tensor(deviations), torch.tensor(variances), 0.1)
    for n, mean_variance in enumerate((0.2, 0.4)):
        for a, (mean, deviation, spread) in enumerate(zip(means[n], deviations[n], variances[n], strict=True)):
            regret, noise = highest[n] - (mean - 0.1 * deviation), max(0.25, spread / (mean_variance + 1e-5))
            information = math.log(1 + deviation**2 / noise) + 1e-5
            assert float(ratio[n, a]) == pytest.approx(regret**2 / information, rel=1e-4, abs=1e-6)
    assert ratio[0].argmin() == 0  # certainly the best: no regret
    ratio = regret_information_ratio(torch.tensor([[1.0, 0.99]]), torch.tensor([[0.3, 0.6]]), torch.ones(1, 2), 0.1)
    assert ratio.argmin(1).tolist() == [1]  # almost as good, and more informative


def test_action_values_of_information_directed_sampling() -> None:
    """The members' mean and population deviation, and the variance of the return distribution on Q's support."""
    agent = Agent(members=3, atoms=5, policy="ids", q_bound=3.0)
    values, logits = torch.randn(3, 4, 2, generator=generator(0)), torch.randn(1, 4, 2, 5, generator=generator(1))
    deviations = torch.from_numpy(values.numpy().std(0))
    chances, atoms = logits[0].softmax(-1), torch.linspace(-3, 3, 5)
    variances = (chances * atoms**2).sum(-1) - (chances * atoms).sum(-1) ** 2
    exact = -regret_information_ratio(values.mean(0), deviations, variances, 0.3)
    preferences = action_values(agent, QOutputs(values, logits), torch.zeros(4, dtype=torch.int64), 0.3)
    torch.testing.assert_close(preferences, exact, rtol=1e-4, atol=1e-5)


def test_actions_maximise_q_plus_the_weighted_bonus_return() -> None:
    outputs = QOutputs(None, torch.cat([certain((1.0, 0.0)), certain((0.0, 4.0), bound=4.0)]))
    q, u = q_and_u(TWO_HEADS, outputs)
    assert u is not None
    torch.testing.assert_close((q, u), (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    for bonus_weight in (0.1, torch.tensor(0.5)):
        values = action_values(TWO_HEADS, outputs, torch.tensor([0]), bonus_weight)
        assert values[0].tolist() == pytest.approx([1.0, 4 * float(bonus_weight)])
    one_head = replace(TWO_HEADS, bonus_head=False)
    assert q_and_u(one_head, QOutputs(None, certain((1.0, 0.0))))[1] is None


# Networks


def test_residual_convolutions_are_normalised_like_those_of_torch() -> None:
    trunk = Trunk((2, 12, 10), (4, 6), generator(0))
    for _ in range(200):
        trunk.power_iteration()
    for unit, normal in zip(trunk.units, trunk.normalised_weights(), strict=True):
        for k in range(4):
            exact = unit[k] / torch.linalg.matrix_norm(unit[k].flatten(1), 2)
            torch.testing.assert_close(normal[k], exact, rtol=1e-3, atol=1e-4)
            layer = torch.nn.Conv2d(unit.shape[2], unit.shape[1], 3)
            layer.weight.data.copy_(unit[k].data)
            layer = spectral_norm(layer, n_power_iterations=200)
            torch.testing.assert_close(normal[k], layer.weight, rtol=1e-3, atol=1e-4)
    before = trunk(torch.rand(3, 2, 12, 10, generator=generator(1)))
    with torch.no_grad():
        trunk.units[1].mul_(3)
    torch.testing.assert_close(trunk(torch.rand(3, 2, 12, 10, generator=generator(1))), before)


def test_gradients_pass_through_the_normalisation() -> None:
    """d(W/σ)/dW in the direction of W is zero: its length does not matter."""
    trunk = Trunk((1, 8, 8), (3,), generator(0))
    for _ in range(300):
        trunk.power_iteration()
    trunk(torch.rand(2, 1, 8, 8, generator=generator(1))).square().sum().backward()
    gradient = trunk.units[0].grad
    assert gradient is not None
    along = (gradient * trunk.units[0]).sum((1, 2, 3, 4)).abs()
    assert torch.all(along < 1e-2 * gradient.flatten(1).norm(dim=1) * trunk.units[0].flatten(1).norm(dim=1))


@pytest.mark.parametrize("dueling", [True, False])
def test_heads_are_independent(dueling: bool) -> None:
    heads = Heads(7, 5, 3, generator(0), heads=4, atoms=2, dueling=dueling)
    features = torch.rand(6, 7, generator=generator(1))
    values = heads(features)
    assert values.shape == (4, 6, 3, 2)
    for m in range(4):
        hidden = F.relu(features @ heads.hidden.weight[m] + heads.hidden.bias[m])
        if not dueling:
            torch.testing.assert_close(values[m], (hidden @ heads.advantage.weight[m]).view(6, 3, 2))
            continue
        assert heads.value is not None
        state_value = hidden[:, :5] @ heads.value.weight[m]
        advantage = (hidden[:, 5:] @ heads.advantage.weight[m]).view(6, 3, 2)
        torch.testing.assert_close(values[m], state_value[:, None] + advantage - advantage.mean(1, keepdim=True))


@pytest.mark.parametrize("dueling", [True, False])
def test_last_layers_compute_in_float32_beside_bfloat16(dueling: bool) -> None:
    """Actions differ by a thousandth; bfloat16 has 256 numbers between 1 and 2."""
    heads = Heads(7, 5, 3, generator(0), heads=1, atoms=1, dueling=dueling)
    features = torch.rand(6, 7, generator=generator(1))
    with torch.no_grad():
        (heads.advantage if heads.value is None else heads.value).bias.fill_(100.0)
        with torch.autocast("cpu", torch.bfloat16):
            values = heads(features)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values - 100, heads(features) - 100, rtol=0, atol=0.1)
    assert (values - 100).unique().numel() == 18


def test_schedules_are_linear_and_then_constant() -> None:
    schedule = LinearSchedule(start=1.0, end=0.01, frames=100)
    assert [schedule.at(frames) for frames in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.505, 0.01, 0.01])
    assert schedule.at(torch.tensor([0, 50, 1000])).tolist() == pytest.approx([1.0, 0.505, 0.01])


@pytest.mark.parametrize("name", ["rnd", "csd", "ids"])
def test_return_distributions_start_alike_for_all_states_and_actions(name: str) -> None:
    """Random last layers would differ between actions far more than true returns do."""
    agent = AGENTS[name]
    logits = QNetwork(agent, SMALL, (2, 12, 12), 3, generator(0))(torch.rand(5, 2, 12, 12)).logits
    assert logits is not None
    assert logits.shape == (2 if name == "csd" else 1, 5, 3, 101)
    assert torch.equal(logits, initial_logits(101).expand_as(logits))


@pytest.mark.parametrize("name", AGENTS)
def test_the_papers_agents_have_the_parts_that_they_need(name: str) -> None:
    agent = AGENTS[name]
    network = QNetwork(agent, SMALL, (2, 12, 12), 3, generator(0))
    outputs = network(torch.rand(5, 2, 12, 12))
    assert (outputs.values is None) == (name in ("rnd", "csd"))
    assert (outputs.logits is None) == (name in ("dqn", "bdqn"))
    assert outputs.logits is None or len(outputs.logits) == (2 if name == "csd" else 1)
    if outputs.values is not None:
        assert outputs.values.shape == (1 if name == "dqn" else 10, 5, 3)
    assert action_values(agent, outputs, torch.arange(5) % max(1, agent.members), 0.1).shape == (5, 3)
    q, u = q_and_u(agent, outputs)
    if outputs.values is not None:
        torch.testing.assert_close(q, outputs.values.mean(0))
    else:
        assert outputs.logits is not None
        torch.testing.assert_close(q, categorical_mean(outputs.logits, agent.bounds)[0])
    assert (u is not None) == (name == "csd")
    assert (network.prior is not None) == (name in ("bdqn", "ids"))
    duels = [heads.value is not None for heads in (network.members, network.categorical) if heads is not None]
    assert duels == [name == "dqn"] * len(duels)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_random_priors_are_frozen_heads_on_the_trunks_features(scale: float) -> None:
    """No gradient flows through the priors into the trunk."""
    agent = replace(AGENTS["bdqn"], prior_scale=scale)
    network = QNetwork(agent, SMALL, (4,), 3, generator(0))
    x = torch.rand(5, 4, generator=generator(1))
    assert network.members is not None
    assert network.prior is not None
    assert not any(parameter.requires_grad for parameter in network.prior.parameters())
    assert network.prior.heads == 10
    features = network.trunk(x)
    trained = network.members(features).squeeze(-1)
    outputs = network(x)
    torch.testing.assert_close(outputs.values, trained + scale * network.prior(features).squeeze(-1))
    weights = list(network.trunk.parameters())
    for with_prior, without in zip(
        torch.autograd.grad(outputs.values.sum(), weights), torch.autograd.grad(trained.sum(), weights), strict=True
    ):
        torch.testing.assert_close(with_prior, without)


def test_thompson_sampling_follows_the_member_of_the_episode() -> None:
    outputs = QNetwork(AGENTS["bdqn"], SMALL, (4,), 3, generator(0))(torch.rand(5, 4, generator=generator(1)))
    member = torch.tensor([3, 0, 9, 1, 1])
    values = action_values(AGENTS["bdqn"], outputs, member, 0.0)
    assert outputs.values is not None
    for i, m in enumerate(member):
        assert torch.equal(values[i], outputs.values[m, i])
