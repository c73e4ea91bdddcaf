"""The same on a GPU: compiled steps and graph replays train like plain ones, and agree with the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, nn
from torch._inductor import config as inductor

import onefold
import onefold.rl.fused
from onefold.data import digits, letters
from onefold.detectors import _langevin
from onefold.distil import Architecture, AugmentedContexts, Chain, distillation, similarity_model
from onefold.exact import PrimalGP
from onefold.kernels import Features, empirical_ntk, from_model, last_layer
from onefold.metrics import auroc, rank_correlation
from onefold.nn.nets import MLP, Prior, Standardise, random_network
from onefold.nn.train import Recipe, Training
from onefold.rl.agents import AGENTS, Learning, ReplaySettings
from onefold.rl.learner import Learner
from onefold.rl.vector_env import Steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


MODES = ("plain", "captured", "compiled")


def csd_training(mode: str, steps: int = 60) -> Training:
    generator = Generator().manual_seed(0)
    x = torch.from_numpy(digits().x_train)[:, None].cuda()
    first = Standardise.of(x)
    prior = random_network((1, 8, 8), generator, channels=(16,), hidden=(64,)).cuda()
    model = similarity_model((1, 8, 8), first, Architecture(channels=(16,), hidden=(64,), outputs=32), generator).cuda()
    contexts = AugmentedContexts(Chain(apply=0.5), 0.0, 1.0)
    recipe = Recipe(steps=steps, batch=64, lr=1e-3)
    kernel, compiled = Features(Prior(first, prior)), mode == "compiled"
    return distillation(model, x, kernel, contexts, recipe, 0, compiled=compiled, capturable=mode != "plain")


def losses(training: Training) -> np.ndarray:
    return np.array([float(update.loss) for update in training])


@pytest.mark.parametrize("mode", MODES[1:])
def test_graph_replays_train_like_plain_steps(mode: str) -> None:
    assert csd_training(mode).captured
    assert not csd_training("plain").captured
    plain, graphed = losses(csd_training("plain")), losses(csd_training(mode))
    np.testing.assert_allclose(graphed[:10], plain[:10], rtol=0.05)
    np.testing.assert_allclose(graphed[-20:].mean(), plain[-20:].mean(), rtol=0.1)
    assert plain[-20:].mean() < 0.5 * plain[:3].mean()


@pytest.mark.parametrize("mode", MODES)
def test_resume_on_the_gpu(mode: str) -> None:
    whole = losses(csd_training(mode))
    first = csd_training(mode)
    for update in first:
        if update.step == 30:
            break
    state = {name: tensor.cpu().clone() for name, tensor in first.state().items()}
    second = csd_training(mode)
    second.restore(state)
    rest = losses(second)
    assert len(rest) == 30
    np.testing.assert_allclose(rest, whole[30:], rtol=0.05)


def test_methods_agree_with_the_cpu() -> None:
    data, strange = digits(), letters(200)
    recipe = Recipe(steps=600, batch=64, lr=3e-3, warmup=100)
    makers = {
        "CSD": lambda device: onefold.CSD(score="relative", augment=0.5, recipe=recipe, device=device),
        "RND": lambda device: onefold.RND(recipe=recipe, device=device),
        "LastLayerGP": lambda device: onefold.LastLayerGP(width=512, score="relative", device=device),
    }
    for name, make in makers.items():
        scores = {}
        for device in ("cpu", "cuda"):
            method = make(device).fit(data.x_train)
            scores[device] = np.concatenate([method.score(data.x_test), method.score(strange)])
        found = {device: auroc(s[:500], s[500:]) for device, s in scores.items()}
        assert abs(found["cpu"] - found["cuda"]) < 0.03, (name, found)
        assert rank_correlation(scores["cpu"], scores["cuda"]) > (0.999 if name == "LastLayerGP" else 0.9), name


def test_short_fits_are_captured_but_not_compiled() -> None:
    assert not csd_training("captured").compiled
    training = csd_training("compiled", steps=40_000)
    assert Training(training.parameters, training.losses, training.recipe, training.draws).compiled


@pytest.mark.parametrize("name", ["CSD", "RND", "LastLayerGP", "KNN"])
def test_a_file_from_the_gpu_scores_alike_on_the_cpu(name: str, tmp_path: Path) -> None:
    data, recipe = digits(), Recipe(steps=300, batch=64, lr=3e-3)
    keywords = {"recipe": recipe} if name in ("CSD", "RND") else {}
    detector = getattr(onefold, name)(device="cuda", **keywords).fit(data.x_train).calibrate(data.x_test[:200])
    detector.save(tmp_path / "d.onefold")
    here, there = (onefold.load(tmp_path / "d.onefold", device=device) for device in ("cpu", "cuda"))
    np.testing.assert_array_equal(there.score(data.x_test), detector.score(data.x_test))
    scale = np.abs(detector.score(data.x_test)).max()
    difference = np.abs(here.score(data.x_test) - there.score(data.x_test)).max() / scale
    print(f"{name}: largest difference between CPU and GPU {difference:.1e} of the largest score")
    assert difference < 1e-5
    detector.export(tmp_path / "d.pt2")
    exported = torch.export.load(tmp_path / "d.pt2").module()(torch.from_numpy(data.x_test))[0].detach().numpy()
    np.testing.assert_allclose(exported / scale, here.score(data.x_test) / scale, atol=1e-5)
    detector.update(data.x_test) if name != "RND" else None
    assert np.isfinite(detector.score(data.x_test)).all()


def test_ensemble_on_the_gpu() -> None:
    data = digits()
    recipe = Recipe(steps=300, batch=64)
    ensemble = onefold.DeepEnsemble(3, channels=(8, 16), recipe=recipe, device="cuda").fit(data.x_train, data.y_train)
    assert np.mean(ensemble.predict(data.x_test) == data.y_test) > 0.95


@pytest.mark.parametrize("keywords", [{}, {"augment": "crops"}, {"sampler": "baoa"}])
def test_captured_chains_walk_like_plain_ones(keywords: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits()

    def fitted(seed: int = 0) -> onefold.SGMCMC:
        sizes: dict[str, Any] = {"channels": (8,), "hidden": (64,), "batch": 64, "burn_in": 20}
        chain = onefold.SGMCMC(8, lr=1e-4, seed=seed, device="cuda", **sizes, **keywords)
        return chain.fit(data.x_train, data.y_train)

    state = torch.cuda.get_rng_state()
    graphed = fitted()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    graphs: list[None] = []
    monkeypatch.setattr(_langevin, "replayed", lambda step, *_: graphs.append(None) or step)
    plain, other = fitted(), fitted(seed=1)
    assert len(graphs) == 2
    assert np.mean(graphed.predict(data.x_test) == data.y_test) > 0.7
    near, far = (np.abs(graphed.probabilities(data.x_test) - c.probabilities(data.x_test)) for c in (plain, other))
    print(f"{keywords}: acceptance {graphed.acceptance:.2f}, plain {plain.acceptance:.2f}, apart {near.mean():.1e}")
    assert near.mean() < 0.2 * far.mean(), "the same noise and minibatches"


def test_a_chain_on_the_gpu_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    data, path = digits(), tmp_path / "chain.ckpt"

    def chain() -> onefold.SGMCMC:
        return onefold.SGMCMC(4, burn_in=4, channels=(8,), hidden=(64,), device="cuda")

    first = chain().fit(data.x_train, data.y_train, checkpoint=path).score(data.x_test)
    np.testing.assert_array_equal(chain().fit(data.x_train, data.y_train, checkpoint=path).score(data.x_test), first)


def test_a_users_model_may_stay_on_the_cpu() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 1))
    x = digits().x_train[:100]
    recipe = Recipe(steps=10, batch=8)
    for kernel in (last_layer(net), from_model(net, width=32), empirical_ntk(net)):
        for augment in (0.0, 0.5):
            scores = onefold.CSD(kernel, augment=augment, recipe=recipe, device="cuda").fit(x).score(x)
            assert np.isfinite(scores).all()
    assert np.isfinite(onefold.LastLayerGP(last_layer(net), device="cuda").fit(x).score(x)).all()
    assert all(p.device.type == "cpu" for p in net.parameters())


def test_kernels_and_solves_on_the_gpu() -> None:
    net, x = MLP(3, [20], 2), torch.randn(12, 3)
    expected = empirical_ntk(net)(x, x)
    torch.testing.assert_close(empirical_ntk(net.cuda())(x.cuda(), x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-4)
    z, query = torch.randn(50, 20, dtype=torch.float64), torch.randn(5, 20, dtype=torch.float64)
    here, there = (PrimalGP(20, 0.1, device=d).add(z).variance(query).cpu() for d in ("cpu", "cuda"))
    torch.testing.assert_close(here, there)


@pytest.fixture
def random_numbers_of_eager_code() -> Iterator[None]:
    """Compiled code draws what plain code draws, not numbers of its own."""
    with inductor.patch(fallback_random=True):
        yield


def _actor_is_synced(learner: Learner) -> bool:
    """Return True if the actor is a separate, equal copy of the online networks."""
    actor, online = learner._actor.state_dict(), learner.online.state_dict()
    return learner._actor is not learner.online and all(torch.equal(actor[name], online[name]) for name in online)


@pytest.mark.usefixtures("random_numbers_of_eager_code")
@pytest.mark.parametrize(
    ("name", "compiled", "channels"),
    [*((name, False, 8) for name in AGENTS), ("csd", True, 8), ("csd", False, 16), ("csd", True, 16)],
)
def test_captured_agents_learn_like_plain_ones(name: str, compiled: bool, channels: int) -> None:
    """The same steps, drawn and learned from with the same random numbers: replays are equal, networks nearly.

    Stages of 16 channels are fused, and compared with what cuDNN makes of them. Fused or compiled code rounds in
    another way, and by priorities every draw would soon be another: there all transitions are as likely.
    """
    alpha = 0.5 if channels == 8 and not compiled else 0.0
    replay = ReplaySettings(capacity=800, stack=3, n_step=3, alpha=alpha)
    learning = Learning(replay=replay, batch_size=32, channels=(channels,) * 2, hidden=32, bonus_learning_starts=0)
    minds = [
        Learner(
            AGENTS[name], learning, environments=4, frame=(12, 12), dtype=torch.uint8, actions=3, seed=0,
            device=torch.device("cuda"), captured=captured, compiled=captured and compiled,
            fused=captured and channels == 16,
        )
        for captured in (True, False)
    ]  # fmt: skip
    assert [minds[i].online.trunk.fused for i in (0, 1)] == [channels == 16, False]
    start = [p.detach().clone() for p in minds[0].online.parameters()]
    rng, no = np.random.default_rng(0), np.zeros(4, bool)
    for step in range(60):
        ended = rng.random(4) < 0.1
        frames, rewards = rng.integers(0, 256, (4, 12, 12), np.uint8), rng.random(4).astype(np.float32)
        steps = Steps(frames, rewards, no, ended, no | (step == 0), no, np.zeros((4, 2), np.float32))
        for mind in minds:
            mind.observe(steps)
        first, second = (mind.selected_actions() for mind in minds)
        np.testing.assert_array_equal(first, second)  # nearly all are random, by the same numbers
        if step >= 20:
            for mind in minds:
                mind.learn()
        if step == 40:
            for mind in minds:
                mind.copy_target()
    for one, other in zip(minds[0].replay.tensors().items(), minds[1].replay.tensors().items(), strict=True):
        if one[0] not in ("priority", "highest"):
            assert torch.equal(one[1], other[1]), one[0]
    near = torch.isclose(minds[0].replay.priority, minds[1].replay.priority, rtol=0.1, atol=0.02)
    assert near.float().mean() > 0.98  # sums are rounded: a draw at the edge of two transitions may fall on either
    assert all(_actor_is_synced(mind) for mind in minds)
    ends = [[p.detach() for p in mind.online.parameters()] for mind in minds]
    far, apart = (
        sum(float((p - q).square().sum()) for p, q in zip(ends[0], others, strict=True)) for others in (start, ends[1])
    )
    print(f"{name}, compiled {compiled}: apart {apart:.2e}, moved {far:.2e}")
    assert apart < 0.05 * far
    assert all(np.isfinite(value) for mind in minds for value in mind.report().values())
