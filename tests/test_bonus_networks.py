"""Frame augmentation, bonus networks and bonus rewards against independent computations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Generator
from torch.nn import functional as F  # noqa: N812

from onefold.core.moments import DecayingMoments
from onefold.distil import similarity_loss
from onefold.nn.nets import Standardise
from onefold.rl.agents import AGENTS, Agent
from onefold.rl.augmentation import UNIFORMS, FrameAugmentation, _inverse_perspective, augment_frames
from onefold.rl.bonus_networks import CSDNetworks, RNDNetworks, WarmupStandardise, bonus_rewards

STILL = FrameAugmentation(apply=1, perspective=0, flip=0, crop_area=(1, 1), crop_aspect=1)


def uniforms(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, UNIFORMS, generator=Generator().manual_seed(seed))


def test_inverse_perspectives_equal_a_linear_solve() -> None:
    """Homographies from four points to the square, against a solve for their eight coefficients."""
    u = uniforms(20)[:, 5:14]
    u[:, 8] = 0.0
    homographies = _inverse_perspective(u, FrameAugmentation()).double().numpy()
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    for i in range(20):
        pulled = corners * (1 - 0.5 * u[i, :8].reshape(4, 2).double().numpy())
        rows, right = [], []
        for (a, b), (x, y) in zip(pulled, corners, strict=True):
            rows += [[a, b, 1, 0, 0, 0, -x * a, -x * b], [0, 0, 0, a, b, 1, -y * a, -y * b]]
            right += [x, y]
        exact = np.append(np.linalg.solve(np.array(rows), np.array(right)), 1).reshape(3, 3)
        np.testing.assert_allclose(homographies[i] / homographies[i, 2, 2], exact, rtol=1e-3, atol=1e-4)


def test_a_share_of_stacks_is_augmented_and_all_frames_alike() -> None:
    x = torch.rand(400, 1, 12, 12, generator=Generator().manual_seed(0)).expand(-1, 3, -1, -1)
    y = augment_frames(x, uniforms(400), FrameAugmentation(apply=0.25))
    changed = (y != x).any((1, 2, 3))
    assert 0.15 < float(changed.float().mean()) < 0.35
    assert torch.equal(y[:, 0], y[:, 2])
    torch.testing.assert_close(augment_frames(x, uniforms(400), STILL), x, rtol=0, atol=1e-5)
    flipped = augment_frames(x, uniforms(400), replace(STILL, flip=1))
    torch.testing.assert_close(flipped, x.flip(-1), rtol=0, atol=1e-5)


def test_crops_have_the_requested_area() -> None:
    size = 64
    x = torch.linspace(-1, 1, size).expand(200, 1, size, size) * 0.5 + 0.5
    y = augment_frames(x, uniforms(200), FrameAugmentation(apply=1, perspective=0, flip=0, crop_area=(0.75, 1.0)))
    widths = (y[:, 0, 0, -2] - y[:, 0, 0, 1]) / (x[0, 0, 0, -2] - x[0, 0, 0, 1])
    assert float(widths.min()) > math.sqrt(0.75 / (4 / 3)) - 0.01
    assert float(widths.max()) <= 1 + 1e-4
    assert float(widths.std()) > 0.05


@pytest.mark.parametrize("shape", [(5,), (3, 16, 16)])
def test_inputs_are_standardised_by_the_first_observations(shape: tuple[int, ...]) -> None:
    first, x = WarmupStandardise(shape, 60), 3 + 2 * torch.randn(90, *shape, generator=Generator().manual_seed(0))
    for part in (x[:7], x[7:40], x[40:60], 100 * x[60:]):
        first.update(part)
    axes = (0,) if len(shape) == 1 else (0, 2, 3)
    std, mean = torch.std_mean(x[:60], dim=axes, correction=0, keepdim=True)
    exact = ((x - mean) / std).clamp(-5, 5)
    torch.testing.assert_close(first(x), exact)
    assert first(1000 * x).abs().max() == 5


def test_running_moments_follow_the_values() -> None:
    scale, generator = DecayingMoments(memory=50), Generator().manual_seed(0)
    for _ in range(400):
        scale.update(3 + 2 * torch.randn(64, generator=generator))
    assert float(scale.std()) == pytest.approx(2, rel=0.05)
    assert scale.standardise(torch.tensor([3.0, 5.0])).tolist() == pytest.approx([0, 1], abs=0.1)
    for _ in range(800):
        scale.update(0.1 * torch.randn(64, generator=generator))
    assert float(scale.std()) == pytest.approx(0.1, rel=0.1)


# Bonus networks


@pytest.mark.parametrize("kind", [CSDNetworks, RNDNetworks])
@pytest.mark.parametrize("shape", [(6,), (2, 12, 12)])
def test_training_lowers_the_bonus(kind: Any, shape: tuple[int, ...]) -> None:
    generator = Generator().manual_seed(0)
    networks = kind(shape, generator, channels=(4, 4), hidden=(64,), outputs=32)
    seen = torch.randn(64, *shape, generator=generator) * 0.3 + 1
    unseen = torch.randn(64, *shape, generator=generator) * 0.3 - 1
    before = networks.value(seen).mean() / networks.value(unseen).mean()
    optimiser = torch.optim.Adam([p for p in networks.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        value, loss = networks.value_and_loss(seen, torch.rand(64, networks.uniforms, generator=generator))
        torch.testing.assert_close(value, networks.value(seen))
        loss.backward()
        optimiser.step()
    after = networks.value(seen).mean() / networks.value(unseen).mean()
    assert after < 0.5
    assert after < 0.6 * before
    assert networks.value(seen).shape == (64,)


def test_the_variance_form_is_equation_27() -> None:
    networks = CSDNetworks((5,), Generator().manual_seed(0), hidden=(16,), outputs=8)
    x = torch.randn(9, 5, generator=Generator().manual_seed(1))
    phi, psi = (F.normalize(net(x), dim=1) for net in (networks.model.phi, networks.model.psi))
    exact = networks.prior(x).square().sum(1) * (1 - (phi * psi).sum(1))
    torch.testing.assert_close(networks.value(x), exact.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 12, 12), (6,)])
def test_the_relative_form_ignores_the_prior_variance(shape: tuple[int, ...]) -> None:
    generator = Generator().manual_seed(0)
    networks = CSDNetworks(shape, generator, channels=(4, 4), hidden=(16,), outputs=8, form="relative")
    x = torch.rand(5, *shape, generator=generator)
    torch.testing.assert_close(networks.value(x), networks.model.gap(x))
    value, _ = networks.value_and_loss(x, torch.rand(5, networks.uniforms, generator=generator))
    torch.testing.assert_close(value, networks.value(x), rtol=1e-3, atol=1e-4)


def test_the_centred_form_equals_its_definition() -> None:
    """Labels and lengths are those of φ₀ minus its mean; the variance is divided by the length plus its mean."""
    networks = CSDNetworks(
        (2, 12, 12), Generator().manual_seed(0), channels=(4, 4), hidden=(16,), outputs=8, form="centred"
    )
    x = torch.rand(600, 2, 12, 12, generator=Generator().manual_seed(1))
    uniforms_ = torch.rand(5, networks.uniforms, generator=Generator().manual_seed(2))
    features = networks.prior(x)
    networks.set_centre(x)
    length = (features - features.mean(0)).square().sum(1)
    assert length.mean() < 0.2 * features.square().sum(1).mean()  # a random network maps all images close together
    share = length / (length + length.mean())
    torch.testing.assert_close(networks.value(x), share * networks.model.gap(x), rtol=1e-3, atol=1e-4)
    value, loss = networks.value_and_loss(x[:5], uniforms_)
    torch.testing.assert_close(value, networks.value(x[:5]), rtol=1e-3, atol=1e-4)
    contexts = networks._contexts(x[:5], uniforms_)
    left, right = (F.normalize(networks.prior(z) - features.mean(0), dim=1) for z in (x[:5], contexts))
    torch.testing.assert_close(loss, similarity_loss(networks.model(x[:5], contexts), left @ right.T))


def test_joint_passes_equal_separate_ones() -> None:
    """On a GPU, images go through φ, ψ and φ₀ in two passes instead of five: same vectors, same gradients."""
    networks = CSDNetworks((6, 20, 14), torch.Generator().manual_seed(0), channels=(4, 8), hidden=(16,), outputs=8)
    x, contexts = torch.rand(2, 5, 6, 20, 14, generator=torch.Generator().manual_seed(1)).unbind()
    results = []
    for passes in (networks._separate_passes, networks._joint_passes):
        networks.zero_grad()
        outputs = passes(x, contexts)
        assert [z.requires_grad for z in outputs] == [True, True, False, False, False]
        (outputs[0] @ outputs[1].T).square().sum().backward()
        results.append([*outputs, *(p.grad for p in networks.model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [CSDNetworks, RNDNetworks])
@pytest.mark.parametrize("shape", [(6,), (2, 12, 12)])
def test_a_reset_changes_only_the_trained_networks(kind: Any, shape: tuple[int, ...]) -> None:
    networks = kind(shape, Generator().manual_seed(0), channels=(4, 4), hidden=(16,), outputs=8)
    networks.standardise.mean.fill_(0.3)
    before = {name: tensor.clone() for name, tensor in networks.state_dict().items()}
    networks.reset(Generator().manual_seed(1))
    trained = {name for name, parameter in networks.named_parameters() if parameter.requires_grad}
    weights = {name for name in trained if before[name].ndim > 1}
    after = networks.state_dict()
    assert weights
    assert not any(torch.equal(after[name], before[name]) for name in weights)
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - trained)
    again = kind(shape, Generator().manual_seed(7), channels=(4, 4), hidden=(16,), outputs=8)
    again.reset(Generator().manual_seed(1))
    assert all(torch.equal(again.state_dict()[name], after[name]) for name in trained)  # by the generator alone


# Bonus rewards


def test_rewards_and_bonuses_have_separate_rows_with_a_bonus_head() -> None:
    """Bonuses of 1, 2 and 6 are standardised by their mean 3 and deviation, and scaled; their weight does not count."""
    bonuses, rewards = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 1.0, 0.0])
    agent = Agent(members=0, atoms=9, bonus="rnd", bonus_head=True, bonus_scale=0.1)
    standardised = (bonuses - 3) / bonuses.std(correction=0)
    both = bonus_rewards(agent, DecayingMoments(), bonuses, torch.tensor(0.5), rewards)
    torch.testing.assert_close(both, torch.stack([rewards, 0.1 * standardised]))
    added = bonus_rewards(replace(agent, bonus_head=False), DecayingMoments(), bonuses, torch.tensor(0.5), rewards)
    torch.testing.assert_close(added, (rewards + 0.5 * 0.1 * standardised)[None])
    optimistic = Agent(members=0, atoms=9, bonus="csd", optimistic=True, bonus_form="relative")
    plain = bonus_rewards(optimistic, DecayingMoments(), bonuses, torch.tensor(0.5), rewards)
    torch.testing.assert_close(plain, (rewards + 0.5 * bonuses)[None])  # relative values are not rescaled


def test_a_constant_bonus_has_a_return_of_one() -> None:
    """U ← b + γⁿ U with b = 1 − γⁿ converges to 1, so U of standardised bonuses is of order 1."""
    scale, value = AGENTS["csd"].bonus_scale, 0.0
    for _ in range(3000):
        value = scale + 0.997**10 * value
    assert scale == pytest.approx(0.0296, abs=5e-5)
    assert value == pytest.approx(1, rel=1e-6)


def test_half_of_the_vector_contexts_have_noise() -> None:
    generator, std = Generator().manual_seed(0), torch.tensor([1.0, 10.0, 0.1])
    first = Standardise(torch.zeros(3), std)
    bonus = CSDNetworks((3,), generator, hidden=(8,), outputs=4, noise=4.0, standardise=first)
    x = torch.randn(4000, 3, generator=generator)
    moved = bonus._contexts(x, torch.rand(4000, bonus.uniforms, generator=generator)) - x
    noisy = moved.any(1)
    assert float(noisy.float().mean()) == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(moved[noisy].std(0), 4 * std, rtol=0.1, atol=0)


def test_augmented_frames_equal_a_crop_and_a_perspective_by_scipy() -> None:
    """For each pixel of a frame that is wider than high."""
    x, u = torch.rand(6, 1, 10, 14, generator=Generator().manual_seed(0)), uniforms(6)
    augmentation = FrameAugmentation(apply=1, perspective=1)
    augmented, inverse = (
        augment_frames(x, u, augmentation),
        _inverse_perspective(u[:, 5:14], augmentation).double().numpy(),
    )
    columns, rows = ((2 * np.arange(n) + 1) / n - 1 for n in (14, 10))
    for i, (area, aspect, left, top, flip) in enumerate(u[:, :5].double().numpy()):
        side, stretch = np.sqrt(0.75 + 0.25 * area), (4 / 3) ** (aspect - 0.5)
        across, down = min(side * stretch, 1), min(side / stretch, 1)
        seen_x = (-across if flip < 0.5 else across) * columns + (1 - across) * (2 * left - 1)
        seen_y = down * rows + (1 - down) * (2 * top - 1)
        points = np.stack([*np.meshgrid(seen_x, seen_y), np.ones((10, 14))])
        a, b, depth = np.einsum("ij,jhw->ihw", inverse[i], points)
        where = [((b / depth + 1) * 10 - 1) / 2, ((a / depth + 1) * 14 - 1) / 2]
        exact = ndimage.map_coordinates(x[i, 0].numpy(), where, order=1, mode="grid-constant")
        np.testing.assert_allclose(augmented[i, 0].numpy(), exact, atol=1e-3)
