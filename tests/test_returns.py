"""Targets and choices against what is computed by hand or in another way."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm

from onefold.rl.networks import Heads, Trunk
from onefold.rl.returns import Support, divergence, expected, picked, projected, regret_over_information, spread

FIVE = Support(-1.0, 1.0, 5)  # atoms −1, −½, 0, ½, 1


def slow_projection(chances: np.ndarray, reward: float, discount: float, support: Support) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. (2017), atom by atom."""
    found, step = np.zeros(support.atoms), (support.high - support.low) / (support.atoms - 1)
    for j, chance in enumerate(chances):
        moved = min(support.high, max(support.low, reward + discount * (support.low + j * step)))
        place = (moved - support.low) / step
        low, high = math.floor(place + 1e-9), math.ceil(place - 1e-9)
        if low == high:
            found[low] += chance
        else:
            found[low] += chance * (high - place)
            found[high] += chance * (place - low)
    return found


def test_a_projection_by_hand() -> None:
    chances = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.5, 0.5]])
    found, outside = projected(chances, torch.tensor([0.3, 0.0, 0.75]), torch.tensor([0.9, 0.5, 1.0]), FIVE)
    exact = [[0.0, 0.0, 0.4, 0.6, 0.0], [0.0, 0.3, 0.4, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    torch.testing.assert_close(found, torch.tensor(exact))
    assert float(outside) == pytest.approx(1 / 3)


@given(seed=st.integers(0, 2**31), reward=st.floats(-3, 3), discount=st.floats(0, 1))
def test_projections_are_those_of_the_algorithm(seed: int, reward: float, discount: float) -> None:
    support = Support(-2.0, 3.0, 11)
    chances = np.random.default_rng(seed).dirichlet(np.ones(11))
    found, _ = projected(
        torch.from_numpy(chances).float()[None], torch.tensor([reward]), torch.tensor([discount]), support
    )
    np.testing.assert_allclose(found[0].numpy(), slow_projection(chances, reward, discount, support), atol=2e-5)
    mean = float((found * support.values(found)).sum())
    if abs(reward) + 3 * discount < 2:  # nothing is cut off: the mean is kept
        assert mean == pytest.approx(reward + discount * float((chances * np.linspace(-2, 3, 11)).sum()), abs=1e-4)


def test_moments_and_divergence() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2], [0.0001, 0.0001, 0.9996, 0.0001, 0.0001]]).log()
    torch.testing.assert_close(expected(logits, FIVE), torch.tensor([0.1, 0.0]), atol=1e-6, rtol=0)
    assert float(spread(logits, FIVE)[0]) == pytest.approx(0.1 + 0.2 / 4 + 0.2 / 4 + 0.2 - 0.01)
    target = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2], [0.0, 0.0, 1.0, 0.0, 0.0]])
    cross, gap = divergence(logits, target)
    assert float(gap[0]) == pytest.approx(0, abs=1e-6)
    assert float(cross[0]) == pytest.approx(float(-(target[0] * target[0].log()).sum()))
    assert float(gap[1]) == pytest.approx(-math.log(0.9996), rel=1e-3)


@pytest.mark.parametrize("support", [Support(-10, 10, 101), Support(0, 10, 51)])
def test_returns_are_near_zero_at_first_and_anything_is_possible(support: Support) -> None:
    chances = support.first().softmax(0)
    values, width = support.values(chances), (support.high - support.low) / 40
    assert float(chances[values.abs() <= 3 * width].sum()) > 0.98
    assert abs(float(expected(support.first(), support))) < width
    assert float(chances.min()) > 0.5 * 0.01 / support.atoms


def test_the_values_of_actions_are_picked() -> None:
    values = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).float()
    actions = torch.tensor([[0, 3, 1], [2, 2, 0]])
    for m in range(2):
        for n in range(3):
            assert torch.equal(picked(values, actions)[m, n], values[m, n, actions[m, n]])


def test_information_directed_choices_by_hand() -> None:
    """Two states at once; ρ² is an action's variance over the mean of that state's."""
    means, deviations = [[1.0, 0.9, 0.0], [0.2, 0.3, 0.1]], [[0.0, 0.5, 0.1], [0.4, 0.2, 0.6]]
    variances = [[0.2, 0.2, 0.2], [0.1, 0.7, 0.4]]
    highest = [1.0, 0.3 + 0.1 * 0.2]  # 0.9 + 0.05 and 0.2 + 0.04 are less
    found = regret_over_information(torch.tensor(means), torch.tensor(deviations), torch.tensor(variances), 0.1)
    for n, mean_variance in enumerate((0.2, 0.4)):
        for a, (mean, deviation, variance) in enumerate(zip(means[n], deviations[n], variances[n], strict=True)):
            regret, noise = highest[n] - (mean - 0.1 * deviation), variance / (mean_variance + 1e-5)
            information = math.log(1 + deviation**2 / noise) + 1e-5
            assert float(found[n, a]) == pytest.approx(regret**2 / information, rel=1e-4, abs=1e-6)
    assert found[0].argmin() == 0  # known to be best: no regret
    surer = regret_over_information(torch.tensor([[1.0, 0.99]]), torch.tensor([[0.3, 0.6]]), torch.ones(1, 2), 0.1)
    assert surer.argmin(1).tolist() == [1]  # as good as best, and tells more


def test_residual_convolutions_are_normalised_as_torch_does_it() -> None:
    trunk = Trunk((2, 12, 10), (4, 6), Generator().manual_seed(0))
    for _ in range(200):
        trunk.sharpen()
    for unit, normal in zip(trunk.units, trunk.normalised(), strict=True):
        for k in range(4):
            exact = unit[k] / torch.linalg.matrix_norm(unit[k].flatten(1), 2)
            torch.testing.assert_close(normal[k], exact, rtol=1e-3, atol=1e-4)
            layer = torch.nn.Conv2d(unit.shape[2], unit.shape[1], 3)
            layer.weight.data.copy_(unit[k].data)
            layer = spectral_norm(layer, n_power_iterations=200)
            torch.testing.assert_close(normal[k], layer.weight, rtol=1e-3, atol=1e-4)
    first = trunk(torch.rand(3, 2, 12, 10, generator=Generator().manual_seed(1)))
    with torch.no_grad():
        trunk.units[1].mul_(3)
    torch.testing.assert_close(trunk(torch.rand(3, 2, 12, 10, generator=Generator().manual_seed(1))), first)


def test_the_gradient_knows_of_the_normalisation() -> None:
    """d(W/σ)/dW in the direction of W is zero: its length does not matter."""
    trunk = Trunk((1, 8, 8), (3,), Generator().manual_seed(0))
    for _ in range(300):
        trunk.sharpen()
    trunk(torch.rand(2, 1, 8, 8, generator=Generator().manual_seed(1))).square().sum().backward()
    gradient = trunk.units[0].grad
    assert gradient is not None
    along = (gradient * trunk.units[0]).sum((1, 2, 3, 4)).abs()
    assert torch.all(along < 1e-2 * gradient.flatten(1).norm(dim=1) * trunk.units[0].flatten(1).norm(dim=1))


def test_members_are_independent_and_duel() -> None:
    heads = Heads(7, 5, 3, Generator().manual_seed(0), members=4, atoms=2)
    features = torch.rand(6, 7, generator=Generator().manual_seed(1))
    found = heads(features)
    assert found.shape == (4, 6, 3, 2)
    for m in range(4):
        hidden = F.relu(features @ heads.hidden.weight[m] + heads.hidden.bias[m])
        value = hidden[:, :5] @ heads.value.weight[m]
        advantage = (hidden[:, 5:] @ heads.advantage.weight[m]).view(6, 3, 2)
        torch.testing.assert_close(found[m], value[:, None] + advantage - advantage.mean(1, keepdim=True))


def test_last_layers_have_all_their_digits_beside_convolutions_that_have_not() -> None:
    """Actions differ by a thousandth; bfloat16 has 256 numbers between 1 and 2."""
    heads = Heads(7, 5, 3, Generator().manual_seed(0))
    features = torch.rand(6, 7, generator=Generator().manual_seed(1))
    with torch.no_grad():
        heads.value.bias.fill_(100.0)
        with torch.autocast("cpu", torch.bfloat16):
            found = heads(features)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found - 100, heads(features) - 100, rtol=0, atol=0.1)
    assert (found - 100).unique().numel() == 18
