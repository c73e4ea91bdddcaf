"""Views, bonuses and what agents learn from, against independent computations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Generator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from onefold.distil import similarity_loss
from onefold.errors import InputError
from onefold.nets import Standardise
from onefold.rl.agents import AGENTS, Agent, Learning, Ramp
from onefold.rl.learner import Learner
from onefold.rl.novelty import CSDNovelty, RNDNovelty, Scale, Settling, rewarded
from onefold.rl.replay import Memory
from onefold.rl.returns import expected
from onefold.rl.values import Said, Values, judged, preferences, worth
from onefold.rl.vector import Steps
from onefold.rl.views import UNIFORMS, Views, _perspective, viewed

STILL = Views(apply=1, perspective=0, flip=0, crop_area=(1, 1), crop_aspect=1)


def uniforms(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, UNIFORMS, generator=Generator().manual_seed(seed))


def test_perspectives_send_the_corners_where_they_are_pulled() -> None:
    """The map back from four points to the square, against a linear solve for the eight numbers of a homography."""
    u = uniforms(20)[:, 5:14]
    u[:, 8] = 0.0
    found = _perspective(u, Views()).double().numpy()
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    for i in range(20):
        pulled = corners * (1 - 0.5 * u[i, :8].reshape(4, 2).double().numpy())
        rows, right = [], []
        for (a, b), (x, y) in zip(pulled, corners, strict=True):
            rows += [[a, b, 1, 0, 0, 0, -x * a, -x * b], [0, 0, 0, a, b, 1, -y * a, -y * b]]
            right += [x, y]
        exact = np.append(np.linalg.solve(np.array(rows), np.array(right)), 1).reshape(3, 3)
        np.testing.assert_allclose(found[i] / found[i, 2, 2], exact, rtol=1e-3, atol=1e-4)


def test_views_change_the_asked_share_and_all_frames_of_a_stack_alike() -> None:
    x = torch.rand(400, 1, 12, 12, generator=Generator().manual_seed(0)).expand(-1, 3, -1, -1)
    y = viewed(x, uniforms(400), Views(apply=0.25))
    changed = (y != x).any((1, 2, 3))
    assert 0.15 < float(changed.float().mean()) < 0.35
    assert torch.equal(y[:, 0], y[:, 2])
    torch.testing.assert_close(viewed(x, uniforms(400), STILL), x, rtol=0, atol=1e-5)
    flipped = viewed(x, uniforms(400), Views(apply=1, perspective=0, flip=1, crop_area=(1, 1), crop_aspect=1))
    torch.testing.assert_close(flipped, x.flip(-1), rtol=0, atol=1e-5)


def test_crops_keep_the_asked_area() -> None:
    size = 64
    x = torch.linspace(-1, 1, size).expand(200, 1, size, size) * 0.5 + 0.5
    y = viewed(x, uniforms(200), Views(apply=1, perspective=0, flip=0, crop_area=(0.75, 1.0)))
    widths = (y[:, 0, 0, -2] - y[:, 0, 0, 1]) / (x[0, 0, 0, -2] - x[0, 0, 0, 1])
    assert float(widths.min()) > math.sqrt(0.75 / (4 / 3)) - 0.01
    assert float(widths.max()) <= 1 + 1e-4
    assert float(widths.std()) > 0.05


@pytest.mark.parametrize("kind", [CSDNovelty, RNDNovelty])
@pytest.mark.parametrize("shape", [(6,), (2, 12, 12)])
def test_what_is_learned_is_less_new_than_what_is_not(kind: Any, shape: tuple[int, ...]) -> None:
    generator = Generator().manual_seed(0)
    bonus = kind(shape, generator, channels=(4, 4), hidden=(64,), outputs=32)
    familiar = torch.randn(64, *shape, generator=generator) * 0.3 + 1
    strange = torch.randn(64, *shape, generator=generator) * 0.3 - 1
    before = bonus.value(familiar).mean() / bonus.value(strange).mean()
    optimiser = torch.optim.Adam([p for p in bonus.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        news, loss = bonus.seen(familiar, torch.rand(64, bonus.uniforms, generator=generator))
        torch.testing.assert_close(news, bonus.value(familiar))
        loss.backward()
        optimiser.step()
    after = bonus.value(familiar).mean() / bonus.value(strange).mean()
    assert after < 0.5
    assert after < 0.6 * before
    assert bonus.value(familiar).shape == (64,)


def test_csds_bonus_is_the_ensembles_variance() -> None:
    bonus = CSDNovelty((5,), Generator().manual_seed(0), hidden=(16,), outputs=8)
    x = torch.randn(9, 5, generator=Generator().manual_seed(1))
    phi, psi = (F.normalize(net(x), dim=1) for net in (bonus.model.phi, bonus.model.psi))
    prior = bonus.prior(x)
    exact = prior.square().sum(1) * (1 - (phi * psi).sum(1))
    torch.testing.assert_close(bonus.value(x), exact.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 12, 12), (6,)])
@pytest.mark.parametrize("relative", [True, False])
def test_the_share_of_the_variance_that_is_left_has_no_scale(shape: tuple[int, ...], relative: bool) -> None:
    generator = Generator().manual_seed(0)
    bonus = CSDNovelty(shape, generator, channels=(4, 4), hidden=(16,), outputs=8, relative=relative)
    x = torch.rand(5, *shape, generator=generator)
    scale = torch.ones(5) if relative else bonus.prior(x).square().sum(1)
    torch.testing.assert_close(bonus.value(x), scale * bonus.model.gap(x))
    torch.testing.assert_close(bonus.seen(x, torch.rand(5, bonus.uniforms))[0], bonus.value(x), rtol=1e-3, atol=1e-4)


def test_features_are_seen_from_their_mean_over_what_was_seen() -> None:
    bonus = CSDNovelty((2, 12, 12), Generator().manual_seed(0), channels=(4, 4), hidden=(16,), outputs=8)
    x = torch.rand(600, 2, 12, 12, generator=Generator().manual_seed(1))
    uniforms = torch.rand(5, bonus.uniforms, generator=Generator().manual_seed(2))
    features = bonus.prior(x)
    bonus.centre_on(x)
    length = (features - features.mean(0)).square().sum(1)
    assert length.mean() < 0.2 * features.square().sum(1).mean()  # images look much alike to a random network
    share = length / (length + length.mean())  # neither long nor short features are news by themselves (docs/log.md)
    torch.testing.assert_close(bonus.value(x), share * bonus.model.gap(x), rtol=1e-3, atol=1e-4)
    value, loss = bonus.seen(x[:5], uniforms)
    torch.testing.assert_close(value, bonus.value(x[:5]), rtol=1e-3, atol=1e-4)
    contexts = bonus._contexts(x[:5], uniforms)
    own, other = (F.normalize(bonus.prior(z) - features.mean(0), dim=1) for z in (x[:5], contexts))
    torch.testing.assert_close(loss, similarity_loss(bonus.model(x[:5], contexts), own @ other.T))


def test_networks_in_one_pass_say_and_learn_what_they_do_in_turn() -> None:
    """Block-diagonal convolutions, which a GPU gets: same vectors, same gradients."""
    novelty = CSDNovelty((6, 20, 14), torch.Generator().manual_seed(0), channels=(4, 8), hidden=(16,), outputs=8)
    x, contexts = torch.rand(2, 5, 6, 20, 14, generator=torch.Generator().manual_seed(1)).unbind()
    gradients = []
    for passes in (novelty._in_turn, novelty._at_once):
        novelty.zero_grad()
        found = passes(x, contexts)
        assert [z.requires_grad for z in found] == [True, True, False, False, False]
        (found[0] @ found[1].T).square().sum().backward()
        gradients.append([*found, *(p.grad for p in novelty.model.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (3, 16, 16)])
def test_standardising_settles_on_the_statistics_of_what_came_first(shape: tuple[int, ...]) -> None:
    first, x = Settling(shape, 60), 3 + 2 * torch.randn(90, *shape, generator=Generator().manual_seed(0))
    for part in (x[:7], x[7:40], x[40:60], 100 * x[60:]):
        first.take(part)
    axes = (0,) if len(shape) == 1 else (0, 2, 3)
    std, mean = torch.std_mean(x[:60], dim=axes, correction=0, keepdim=True)
    exact = ((x - mean) / std).clamp(-5, 5)
    torch.testing.assert_close(first(x), exact)
    assert first(1000 * x).abs().max() == 5


def test_the_running_scale_is_mean_and_standard_deviation() -> None:
    scale, generator = Scale(memory=50), Generator().manual_seed(0)
    for _ in range(400):
        scale.update(3 + 2 * torch.randn(64, generator=generator))
    assert float(scale.std()) == pytest.approx(2, rel=0.05)
    assert scale(torch.tensor([3.0, 5.0])).tolist() == pytest.approx([0, 1], abs=0.1)
    for _ in range(800):
        scale.update(0.1 * torch.randn(64, generator=generator))
    assert float(scale.std()) == pytest.approx(0.1, rel=0.1)


def test_ramps() -> None:
    ramp = Ramp(first=1.0, last=0.01, frames=100)
    assert [ramp.at(frames) for frames in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.505, 0.01, 0.01])
    assert ramp.at(torch.tensor([0, 50, 1000])).tolist() == pytest.approx([1.0, 0.505, 0.01])


def test_double_q_targets_by_hand() -> None:
    """Two members, three actions: each chooses by its own online values and is judged by its own target."""
    agent = Agent(members=2)
    said = Said(torch.tensor([[[1.0, 2.0, 3.0]], [[0.0, 0.5, 1.0]]]), None)
    after = Said(torch.tensor([[[0.0, 9.0, 1.0]], [[5.0, 1.0, 1.0]]]), None)
    target = Said(torch.tensor([[[10.0, 20.0, 30.0]], [[1.0, 2.0, 3.0]]]), None)
    found = judged(agent, said, torch.tensor([1]), torch.tensor([[0.5]]), torch.tensor([0.9]), after, target, 0.0)
    errors = [2.0 - (0.5 + 0.9 * 20), 0.5 - (0.5 + 0.9 * 1)]
    huber = [0.5 * e**2 if abs(e) < 1 else abs(e) - 0.5 for e in errors]
    assert float(found.loss[0]) == pytest.approx(sum(huber) / 2)
    assert float(found.error[0]) == pytest.approx((abs(errors[0]) + abs(errors[1])) / 2)


def test_hopes_choose_the_next_action_and_are_part_of_what_it_is_worth() -> None:
    """Two actions with returns of exactly 1 and 0; hopes of 0 and 3 make the second one the better, worth 3."""
    agent = Agent(members=0, atoms=9, low=-4.0, high=4.0)
    sure = torch.full((1, 1, 2, 9), -50.0)
    sure[0, 0, 0, 5] = sure[0, 0, 1, 4] = 50.0
    logits = torch.zeros(1, 1, 2, 9, requires_grad=True)
    said = Said(None, logits)
    keywords = {"actions": torch.tensor([0]), "rewards": torch.tensor([[0.5]]), "discounts": torch.tensor([0.5])}
    networks = {"after": Said(None, sure), "target": Said(None, sure), "weight": 0.0}
    for hopes, worthwhile in ((None, 1.0), (torch.tensor([[0.0, 3.0]]), 2.0)):
        found = judged(agent, said, **keywords, **networks, hopes=hopes)
        aim = torch.zeros(9)
        aim[4 + int(worthwhile)] = 1.0
        (gradient,) = torch.autograd.grad(found.loss.sum(), logits)
        torch.testing.assert_close(gradient[0, 0, 0], torch.full((9,), 1 / 9) - aim)


def test_an_action_is_new_until_it_was_taken() -> None:
    """Nothing is gained in this world, and action 0 is all that was ever done in it: so the other one is chosen."""
    much, never = Ramp(first=5.0, last=5.0, frames=1), Ramp(first=0.0, last=0.0, frames=1)
    agent = Agent(members=0, atoms=11, bonus="csd", untried=True, weight=much, bonus_lr=1e-3)
    learning = Learning(memory=Memory(capacity=400, stack=1, n_step=1), batch=32, epsilon=never, hidden=16)
    mind = Learner(
        agent, learning, environments=4, frame=(6,), dtype=torch.float32, actions=2, seed=0, device=torch.device("cpu")
    )
    rng, no = np.random.default_rng(0), np.zeros(4, bool)
    for step in range(60):
        frames = np.eye(6, dtype=np.float32)[rng.integers(0, 6, 4)]
        mind.observe(Steps(frames, np.zeros(4, np.float32), no, no, no | (step == 0), no, np.zeros((4, 2), np.float32)))
        mind.replay.actions[int(mind.replay.head)] = 0
        if step > 10:
            mind.learn()
    hopes = mind._hopes(torch.eye(6)) / 5
    assert float(hopes[:, 0].max()) < 0.5 * float(hopes[:, 1].min())
    assert float(hopes.max()) <= 2
    assert (mind.answer() == 1).all()


def test_a_distribution_is_moved_towards_that_of_the_action_which_is_better_online() -> None:
    agent = Agent(members=0, atoms=3, low=0.0, high=2.0)
    sure = torch.tensor([[-50.0, 0.0, -50.0]])  # of 1
    after = Said(None, torch.stack([torch.tensor([[0.0, -50.0, -50.0]]), sure], 1)[None])
    target = Said(None, torch.stack([torch.tensor([[-50.0, -50.0, 0.0]]), sure], 1)[None])
    said = Said(None, torch.log(torch.tensor([[[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]]])))
    found = judged(agent, said, torch.tensor([0]), torch.tensor([[0.25]]), torch.tensor([0.5]), after, target, 0.0)
    assert float(found.loss[0]) == pytest.approx(-0.25 * math.log(0.2) - 0.75 * math.log(0.5), rel=1e-5)


def surely(*returns: tuple[float, ...]) -> torch.Tensor:
    """Logits [S, 1, actions, 9] of returns from −2 to 2 that are certain, those of a stream's actions at a time."""
    atoms = torch.tensor(returns)[:, None].mul(2).add(4).long()
    return F.one_hot(atoms, 9).float() * 100 - 50


def test_returns_of_a_bonus_that_are_apart_by_hand() -> None:
    """Rewards speak for the first action, 1 to 0, bonuses for the second, 0 to 2: by all of their weight they win, by a
    quarter of it they do not. Each stream's aim is its own reward and half of its own return of the action chosen."""
    weight = Ramp(first=0.4, last=0.1, frames=10)
    agent = Agent(members=0, atoms=9, low=-2.0, high=2.0, bonus="rnd", apart=True, weight=weight)
    online, target = Said(None, surely((1.0, 0.0), (0.0, 2.0))), Said(None, surely((1.0, -1.0), (-2.0, 2.0)))
    for left, best, aims in ((weight.at(0), 1, (0.5 - 0.5, -0.5 + 1.0)), (weight.at(10), 0, (0.5 + 0.5, -0.5 - 1.0))):
        assert preferences(agent, online, torch.tensor([0]), left).argmax().item() == best
        logits = torch.randn(2, 1, 2, 9, generator=Generator().manual_seed(0)).requires_grad_()
        rewards, discounts = torch.tensor([[0.5], [-0.5]]), torch.tensor([0.5])
        found = judged(agent, Said(None, logits), torch.tensor([1]), rewards, discounts, online, target, left)
        exact = [-F.log_softmax(logits[i, 0, 1], 0)[int(2 * aims[i]) + 4] for i in range(2)]
        torch.testing.assert_close(found.loss[0], exact[0] + exact[1])
        torch.testing.assert_close(found.error, found.loss.detach(), rtol=1e-5, atol=1e-5)


def test_rewards_and_bonuses_are_learned_apart() -> None:
    """A bonus enters the second row only, with the weight's first value however far that has fallen."""
    scale, news = Scale(), torch.tensor([1.0, 2.0, 6.0])
    weight = Ramp(first=0.5, last=0.0, frames=1)
    agent = Agent(members=0, atoms=9, bonus="rnd", apart=True, weight=weight)
    rewards = torch.tensor([0.0, 1.0, 0.0])
    found = rewarded(agent, scale, news, weight.at(torch.tensor(1.0)), rewards)
    assert torch.equal(found[0], rewards)
    torch.testing.assert_close(found[1], 0.5 * (news - 3) / news.std(correction=0))
    together = replace(agent, apart=False)
    torch.testing.assert_close(rewarded(together, Scale(), news, torch.tensor(0.1), rewards)[0], rewards + found[1] / 5)


@pytest.mark.parametrize("name", ["rnd", "csd", "ids"])
def test_returns_begin_alike_for_all_states_and_actions(name: str) -> None:
    """What random layers would say of actions is far more than these differ in, and fades with every copy only."""
    agent = AGENTS[name]
    values = Values(agent, Learning(channels=(4, 4), hidden=8), (2, 12, 12), 3, Generator().manual_seed(0))
    logits = values(torch.rand(5, 2, 12, 12)).logits
    assert logits is not None
    assert logits.shape == (1 + agent.apart, 5, 3, 101)
    assert torch.equal(logits, agent.support.first().expand_as(logits))


@pytest.mark.parametrize("name", AGENTS)
def test_the_papers_agents_have_the_parts_that_they_need(name: str) -> None:
    agent, learning = AGENTS[name], Learning(channels=(4, 4), hidden=8)
    values = Values(agent, learning, (2, 12, 12), 3, Generator().manual_seed(0))
    said = values(torch.rand(5, 2, 12, 12))
    assert (said.values is None) == (name in ("rnd", "csd"))
    assert (said.logits is None) == (name in ("dqn", "bdqn"))
    assert said.logits is None or len(said.logits) == (2 if name == "csd" else 1)
    if said.values is not None:
        assert said.values.shape == (1 if name == "dqn" else 10, 5, 3)
    assert preferences(agent, said, torch.arange(5) % max(1, agent.members), 0.1).shape == (5, 3)
    if said.values is not None:
        known = said.values.mean(0)
    else:
        assert said.logits is not None
        known = expected(said.logits, agent.support).sum(0)
    torch.testing.assert_close(worth(agent, said, agent.weight.first), known)
    assert (values.prior is not None) == (name in ("bdqn", "ids"))


def test_members_act_each_for_its_own_episode_and_differ_by_their_priors() -> None:
    values = Values(AGENTS["bdqn"], Learning(hidden=8), (4,), 3, Generator().manual_seed(0))
    x = torch.rand(5, 4, generator=Generator().manual_seed(1))
    said = values(x)
    assert said.values is not None
    member = torch.tensor([3, 0, 9, 1, 1])
    found = preferences(AGENTS["bdqn"], said, member, 0.0)
    for i, m in enumerate(member):
        assert torch.equal(found[i], said.values[m, i])
    assert values.members is not None
    assert values.prior is not None
    own = values.members(values.trunk(x)).squeeze(-1)
    torch.testing.assert_close(said.values, own + values.prior(x).squeeze(-1))
    assert not any(p.requires_grad for p in values.prior.parameters())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"members": 0}, "an agent needs members, or at least two atoms"),
        ({"choice": "member"}, "needs at least two members"),
        ({"members": 3, "choice": "information"}, "needs at least two members, and atoms"),
        ({"untried": True}, "untried actions need CSD's bonus, not apart, no members, and choice 'greedy'$"),
        ({"apart": True}, "a bonus whose returns are apart needs atoms, no members, and a weight above 0$"),
        ({"low": 1.0, "high": 0.0}, "the support goes from low to high"),
    ],
)
def test_agents_that_cannot_be_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Agent(**keywords)


def test_untried_actions_of_images_are_refused() -> None:
    agent, learning = Agent(members=0, atoms=11, bonus="csd", untried=True), Learning(channels=(4,), hidden=8)
    where: dict[str, Any] = {"environments": 2, "frame": (12, 12), "dtype": torch.uint8, "actions": 3}
    with pytest.raises(InputError, match=r"worlds of vectors only$"):
        Learner(agent, learning, **where, seed=0, device=torch.device("cpu"))


def test_an_agent_sees_features_from_their_mean_before_learning_began() -> None:
    learning = Learning(memory=Memory(capacity=200, stack=2, n_step=2), batch=4, channels=(4, 4), hidden=8)
    mind = Learner(
        AGENTS["csd"], learning, environments=2, frame=(12, 12), dtype=torch.uint8, actions=3, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    rng, no = np.random.default_rng(0), np.zeros(2, bool)
    for step in range(30):
        frames = rng.integers(0, 256, (2, 12, 12), np.uint8)
        mind.observe(Steps(frames, np.zeros(2, np.float32), no, no, no | (step == 0), no, np.zeros((2, 2), np.float32)))
    assert not mind.bonus.centre.any()
    slots = mind.replay.priority.flatten().nonzero()[:, 0]
    states = mind.replay.fetch(slots, torch.ones(len(slots))).states / 255
    mind.learn()
    features = mind.bonus.prior(states)
    lengths = (features - features.mean(0)).square().sum(1)
    torch.testing.assert_close(mind.bonus.centre, features.mean(0), rtol=0.01, atol=0.01)
    torch.testing.assert_close(mind.bonus.usual, lengths.mean(), rtol=0.1, atol=0)
    learned = mind.bonus.centre.clone(), mind.bonus.usual.clone()
    mind.learn()
    assert torch.equal(mind.bonus.centre, learned[0])
    assert torch.equal(mind.bonus.usual, learned[1])


@pytest.mark.parametrize("name", AGENTS)
def test_neither_acting_nor_learning_asks_the_host_for_a_number(name: str) -> None:
    """On tensors without values, a step that needed one would fail: what can be captured in a graph does not."""
    learning = Learning(memory=Memory(capacity=200), batch=4, channels=(4, 4), hidden=8)
    mind = Learner(
        AGENTS[name], learning, environments=2, frame=(12, 12), dtype=torch.uint8, actions=3, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    mind._remembered()
    mind._acted()
    mind.learn()  # Adam makes its state
    with FakeTensorMode(allow_non_fake_inputs=True):
        mind._remembered()
        mind._acted()
        mind._learned()


def test_every_second_context_of_vectors_has_noise_in_standard_deviations() -> None:
    generator, std = Generator().manual_seed(0), torch.tensor([1.0, 10.0, 0.1])
    first = Standardise(torch.zeros(3), std)
    bonus = CSDNovelty((3,), generator, hidden=(8,), outputs=4, noise=4.0, first=first)
    x = torch.randn(4000, 3, generator=generator)
    moved = bonus._contexts(x, torch.rand(4000, bonus.uniforms, generator=generator)) - x
    noisy = moved.any(1)
    assert float(noisy.float().mean()) == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(moved[noisy].std(0), 4 * std, rtol=0.1, atol=0)


def test_views_are_a_crop_and_a_perspective_of_the_picture() -> None:
    """Pixel by pixel by SciPy, of a picture that is wider than high."""
    x, u = torch.rand(6, 1, 10, 14, generator=Generator().manual_seed(0)), uniforms(6)
    views = Views(apply=1, perspective=1)
    found, back = viewed(x, u, views), _perspective(u[:, 5:14], views).double().numpy()
    columns, rows = ((2 * np.arange(n) + 1) / n - 1 for n in (14, 10))
    for i, (area, aspect, left, top, flip) in enumerate(u[:, :5].double().numpy()):
        side, stretch = np.sqrt(0.75 + 0.25 * area), (4 / 3) ** (aspect - 0.5)
        across, down = min(side * stretch, 1), min(side / stretch, 1)
        seen_x = (-across if flip < 0.5 else across) * columns + (1 - across) * (2 * left - 1)
        seen_y = down * rows + (1 - down) * (2 * top - 1)
        points = np.stack([*np.meshgrid(seen_x, seen_y), np.ones((10, 14))])
        a, b, depth = np.einsum("ij,jhw->ihw", back[i], points)
        where = [((b / depth + 1) * 10 - 1) / 2, ((a / depth + 1) * 14 - 1) / 2]
        exact = ndimage.map_coordinates(x[i, 0].numpy(), where, order=1, mode="grid-constant")
        np.testing.assert_allclose(found[i, 0].numpy(), exact, atol=1e-3)
