"""Stochastic-gradient MCMC: the posterior itself, its minibatches, verdicts, and going on from a checkpoint."""

import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_methods import pictures, vectors
from torch import Generator, Tensor
from torch.distributions import Normal

import onefold
from onefold import metrics
from onefold.bench.grid import PRESETS
from onefold.bench.rows import chain_length
from onefold.core import storage
from onefold.data import digits
from onefold.detectors import SGMCMC, sgmcmc
from onefold.detectors._langevin import Posterior, palindromic_batches, prior_variances
from onefold.detectors.base import KIND
from onefold.errors import FileError, InputError, MissingExtraError, OnefoldWarning, TrainingError
from onefold.inputs.samples import read_train_data
from onefold.nn import train
from onefold.nn.nets import backbone
from onefold.nn.train import Update

CPU = torch.device("cpu")
POINTS = np.random.default_rng(0).normal(size=(60, 1)).astype(np.float32)
SIDES = (np.random.default_rng(1).random(60) < 1 / (1 + np.exp(0.5 - 1.5 * POINTS[:, 0]))).astype(int)


def weights(chain: SGMCMC) -> np.ndarray:
    """Of every member, in a row."""
    nets: Any = chain.state.scorer.members
    return torch.stack([torch.cat([p.flatten() for p in net.parameters()]) for net in nets.nets]).numpy()


def few(**keywords: Any) -> SGMCMC:
    """A short chain of small networks."""
    sizes = {"epochs": 2, "burn_in": 4, "lr": 0.01, "batch": 16, "channels": (4,), "hidden": (8,), "device": "cpu"}
    return SGMCMC(**{"samples": 4, **sizes, **keywords})


# --- the posterior ----------------------------------------------------------------------------------------------------


def exact_moments(temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of slope and offset of the logistic regression of SIDES on POINTS, on a dense grid.

    Two classes have a slope and an offset each, with prior variance 1; what matters is their differences, which have 2.
    """
    x = (POINTS[:, 0].astype(float) - POINTS.mean()) / POINTS.std()
    grid = np.stack(np.meshgrid(np.linspace(-7, 9, 641), np.linspace(-8, 7, 601), indexing="ij")).reshape(2, -1)
    potential = (grid**2).sum(0) / 4
    for point, side in zip(x, SIDES, strict=True):
        potential += np.logaddexp(0, (1 - 2 * side) * (grid[0] * point + grid[1]))
    p = np.exp((potential.min() - potential) / temperature)
    return np.average(grid, axis=1, weights=p), np.cov(grid, aweights=p, ddof=0)


def differences(theta: np.ndarray) -> np.ndarray:
    """Slope and offset [n, 2], given those of each of the two classes of a linear network."""
    return theta[:, [1, 3]] - theta[:, [0, 2]]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_the_posterior_of_a_logistic_regression(temperature: float) -> None:
    """From halves of the data, in steps so large that a quarter of the trajectories is rejected."""
    settings: dict[str, Any] = {"epochs": 1, "burn_in": 10, "lr": 6.0, "momentum": 0.7, "batch": 30, "hidden": ()}
    chains = [SGMCMC(200, temperature=temperature, seed=seed, device="cpu", **settings) for seed in range(4)]
    assert all(0.6 < chain.fit(POINTS, SIDES).acceptance < 0.9 for chain in chains)
    mean, ((a, c), (_, b)) = exact_moments(temperature)
    theta = np.concatenate([weights(chain) for chain in chains])
    off = differences(theta) - mean
    products = np.column_stack([off, off**2, off.prod(1)]) - [0, 0, a, b, c]
    blocks = products.reshape(16, 50, 5).mean(1)  # a chain forgets in much less than 50 samples
    error = blocks.std(0, ddof=1) / math.sqrt(len(blocks))
    assert np.abs(blocks.mean(0) / error).max() < 4
    assert error[2:].max() < 0.13 * a, "enough samples to see variances that are wrong by half"
    undetermined = theta[:, [1, 3]] + theta[:, [0, 2]]  # of which the data know nothing, so that it forgets slowly
    assert np.abs(undetermined.mean(0)).max() < 0.6 * math.sqrt(2 * temperature)
    assert np.abs(undetermined.var(0) / (2 * temperature) - 1).max() < 0.6


def test_what_is_not_corrected_is_too_wide() -> None:
    _, covariance = exact_moments(1.0)
    settings: dict[str, Any] = {"epochs": 4 / 3, "burn_in": 10, "lr": 3.0, "momentum": 0.7, "batch": 20, "hidden": ()}
    chain = SGMCMC(300, sampler="baoa", device="cpu", **settings).fit(POINTS, SIDES)
    assert not chain.corrected
    assert chain.acceptance == -1
    found = np.cov(differences(weights(chain)).T)
    assert found[0, 0] > 1.3 * covariance[0, 0]
    assert found[1, 1] > 1.3 * covariance[1, 1]


def posterior(shape: tuple[int, ...], count: int = 30, batch: int = 6, **sizes: Any) -> Posterior:
    """Of a small network for images or vectors."""
    x = pictures(count, *shape) if len(shape) > 1 else vectors(count, *shape)
    learned, labels = read_train_data(x, CPU, 0), torch.arange(count) % 3
    sizes = {"channels": (4,), "hidden": (5,), "outputs": 3, **sizes}
    tower = backbone(learned.reader.sample_shape, generator=Generator().manual_seed(0), **sizes)
    return Posterior(learned.standardise, tower, learned, labels, batch, "none")


@pytest.mark.parametrize("shape", [(5,), (1, 8, 8)])
def test_the_potential_is_minus_the_log_of_likelihood_and_prior(shape: tuple[int, ...], generator: Generator) -> None:
    """Against torch.distributions, a network of its own, and the mean over minibatches of all data."""
    u = posterior(shape)
    thetas = [u.start, u.start + 0.3 * torch.randn(u.start.shape, generator=generator)]

    def expected(theta: Tensor) -> float:
        net, total = u.network(theta).double(), 0.0
        for p, variance in zip(net.parameters(), prior_variances(u.net[1]), strict=True):  # pyright: ignore[reportArgumentType]
            total -= float(Normal(0.0, math.sqrt(variance)).log_prob(p).sum())
        outputs = net(u.samples[torch.arange(u.count)].double())
        return total - float(torch.distributions.Categorical(logits=outputs).log_prob(u.labels).sum())

    wholes = [float(u.full_potential(theta)) for theta in thetas]
    assert wholes[1] - wholes[0] == pytest.approx(expected(thetas[1]) - expected(thetas[0]), rel=1e-6, abs=1e-4)
    assert abs(wholes[1] - wholes[0]) > 1
    parts = []
    for index in torch.arange(u.count).split(6):
        u.set_batch(index, generator)
        parts.append(float(u.potential([thetas[1]])))
    assert np.mean(parts) == pytest.approx(wholes[1], rel=1e-5)
    assert np.std(parts) > 0.1


def test_the_prior_is_what_the_initialisation_draws_from() -> None:
    """Where a layer does not widen, and but for biases, which start at 0."""
    wide = backbone((200,), channels=(), hidden=(200, 100), outputs=50, generator=Generator().manual_seed(0))
    variances = prior_variances(wide)
    assert variances == [2 / 200, 1, 2 / 200, 1, 1 / 100, 1]
    for p, variance in zip(wide.parameters(), variances, strict=True):
        if p.ndim > 1:
            assert float(p.detach().square().mean()) == pytest.approx(variance, rel=1e-4)
    images = backbone((3, 8, 8), channels=(4, 6), hidden=(5,), outputs=2, generator=None)
    found = dict(zip([name for name, _ in images.named_parameters()], prior_variances(images), strict=True))
    assert found["trunk.0.weight"] == 2 / 27
    assert found["trunk.4.weight"] == 2 / 36
    assert found["mlp.hidden.0.weight"] == 2 / 24
    assert found["mlp.head.weight"] == 1 / 5
    assert {value for name, value in found.items() if name.endswith("bias")} == {1.0}


@pytest.mark.parametrize(("count", "batch", "length"), [(30, 10, 7), (31, 10, 6), (25, 10, 12), (9, 9, 2), (9, 4, 3)])
def test_minibatches_are_disjoint_and_the_same_from_both_ends(count: int, batch: int, length: int) -> None:
    generator, seen = Generator().manual_seed(0), set()
    for _ in range(60):
        rows = palindromic_batches(count, batch, length, generator)
        assert rows.shape == (length, batch)
        assert torch.equal(rows, rows.flip(0))
        for arrangement in rows[: -(-length // 2)].split(count // batch):
            assert len(arrangement.unique()) == arrangement.numel()
        seen |= set(rows.flatten().tolist())
    assert seen == set(range(count)), "nobody is left out for ever"


# --- the chain --------------------------------------------------------------------------------------------------------


def test_acceptance_falls_with_the_learning_rate() -> None:
    x, y = vectors(80, 3), np.arange(80) % 2
    found = [few(samples=40, lr=lr, seed=1).fit(x, y).acceptance for lr in (1e-4, 0.1, 0.5, 3.0)]
    assert found[0] > 0.9
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.3


def test_a_rejected_trajectory_repeats_the_network_before_it() -> None:
    x, y = vectors(80, 3), np.arange(80) % 2
    chain = few(samples=30, lr=0.3, hidden=(4,)).fit(x, y)
    theta = weights(chain)
    changes = (theta[1:] != theta[:-1]).any(1).sum()
    assert 0.1 < chain.acceptance < 0.9
    assert changes in (
        round(30 * chain.acceptance),
        round(30 * chain.acceptance) - 1,
    )  # the first one has none before it
    with pytest.warns(OnefoldWarning, match="0% of the trajectories were accepted: the members are few networks"):
        stuck = few(burn_in=0, lr=500.0).fit(x, y)
    assert (weights(stuck) == weights(stuck)[0]).all()
    assert not stuck.diagnose(show=False)["acceptance"].ok


def test_a_chain_without_verdicts_that_runs_off_is_an_error() -> None:
    with pytest.raises(TrainingError, match=r"diverged at learning rate 1e\+12\. Use a smaller one"):
        few(sampler="baoa", lr=1e12, epochs=8).fit(vectors(), np.arange(60) % 2)


def test_augmented_chains_are_not_corrected_and_differ() -> None:
    x, y = pictures(40, 8, 8), np.arange(40) % 3
    plain, augmented = few().fit(x, y), few(augment="flips").fit(x, y)
    assert (plain.corrected, augmented.corrected) == (True, False)
    assert 0 <= plain.acceptance <= 1
    assert augmented.acceptance == -1
    assert np.abs(plain.score(x) - augmented.score(x)).max() > 0
    assert "acceptance" not in {finding.name for finding in augmented.diagnose(show=False)}
    with pytest.raises(InputError, match="augment='flips' is for images"):
        few(augment="flips").fit(vectors(), np.arange(60) % 3)


def test_the_package_draws_from_our_seed_and_leaves_the_global_one_alone() -> None:
    x, y, state = vectors(), np.arange(60) % 3, torch.get_rng_state()
    first, second, other = (few(sampler="baoa", seed=seed).fit(x, y).score(x) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_fewer_samples_than_a_minibatch_still_take_a_step() -> None:
    chain = few(batch=1000, epochs=0.01, burn_in=0, lr=0.1).fit(vectors(10), np.arange(10) % 2)
    assert (np.abs(np.diff(weights(chain), axis=0)).max(1) > 0).any()


def test_digits_are_told_apart() -> None:
    data = digits()
    chain = SGMCMC(6, burn_in=80, channels=(8,), hidden=(64,), device="cpu").fit(data.x_train, data.y_train)
    assert metrics.accuracy(chain.predict(data.x_test), data.y_test) > 0.93
    assert chain.acceptance > 0.2


# --- going on, files, refusals ----------------------------------------------------------------------------------------


class Killed(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("sampler", ["obabo", "baoa"])
def test_a_killed_fit_goes_on_as_if_nothing_had_happened(
    sampler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every one of its six trajectories, in the burn-in and later, with verdicts of both kinds."""
    x, y = vectors(), np.arange(60) % 3
    calm = few(sampler=sampler, lr=0.3).fit(x, y)
    assert sampler == "baoa" or 0 < calm.acceptance < 1
    monkeypatch.setattr(sgmcmc, "save_checkpoints", functools.partial(train.save_checkpoints, every=0.0))
    path = tmp_path / "fit.ckpt"
    for stop in range(1, 7):
        path.unlink(missing_ok=True)
        steps = []

        def watched(updates: Iterator[Update], *_: Any, last: int, steps: list[int] = steps) -> Iterator[Update]:
            for update in updates:
                steps.append(update.step)
                if update.step == last:
                    raise Killed
                yield update

        monkeypatch.setattr(sgmcmc, "show_updates", functools.partial(watched, last=stop))
        with pytest.raises(Killed):
            few(sampler=sampler, lr=0.3).fit(x, y, checkpoint=path)
        monkeypatch.setattr(sgmcmc, "show_updates", functools.partial(watched, last=0))
        again = few(sampler=sampler, lr=0.3).fit(x, y, checkpoint=path)
        assert steps == [1, 2, 3, 4, 5, 6], "nothing was done twice"
        np.testing.assert_array_equal(weights(again), weights(calm))
        assert again.acceptance == calm.acceptance
    for other in ({"seed": 1}, {"lr": 0.2}, {"temperature": 2.0}):
        with pytest.raises(FileError, match=r"fit.ckpt: belongs to a run on other data or settings"):
            few(**{"sampler": sampler, "lr": 0.3, **other}).fit(x, y, checkpoint=path)
    with pytest.raises(FileError, match="other data or settings"):
        few(sampler=sampler, lr=0.3).fit(x, 1 - y % 2, checkpoint=path)


def test_a_file_says_how_the_chain_fared_and_lies_are_refused(tmp_path: Path) -> None:
    x, path = vectors(), tmp_path / "chain.onefold"
    chain = few(lr=0.3).fit(x, np.arange(60) % 3)
    chain.save(path)
    again = onefold.load(path)
    assert isinstance(again, SGMCMC)
    assert again.acceptance == chain.acceptance
    np.testing.assert_array_equal(again.score(x), chain.score(x))
    tensors, header = storage.load(path, KIND)
    lies: list[tuple[str, str, Any]] = [
        ("summary", "acceptance", 1.5), ("summary", "acceptance", -1.0), ("spec", "samples", 1000),
        ("spec", "epochs", 1e300), ("spec", "momentum", 1.0), ("spec", "sampler", "nuts"),
        ("spec", "augment", "flips"), ("spec", "hidden", [2**20] * 50),
    ]  # fmt: skip
    for part, key, value in lies:
        storage.save(path, KIND, tensors, {**header, part: {**header[part], key: value}})
        with pytest.raises(FileError, match=r"chain.onefold: damaged"):
            onefold.load(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"samples": 1}, "samples: must be an integer from 2 to 1,000, not 1"), ({"epochs": 0.0}, "epochs: must"),
     ({"burn_in": -1.0}, "burn_in"), ({"lr": 0.0}, "lr: must be a positive number"),
     ({"momentum": 1.0}, r"momentum: must be a number in \[0, 1\)"), ({"temperature": math.nan}, "temperature"),
     ({"batch": 0}, "batch: must be an integer from 1 to 16,777,216, not 0")],
)  # fmt: skip
def test_impossible_chains_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SGMCMC(**bad)


def test_real_targets_are_refused() -> None:
    with pytest.raises(InputError, match=r"not whole numbers\. Pass class labels"):
        few().fit(vectors(), np.linspace(0, 1, 60))


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "posteriors.sgmcmc", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onefold\[mcmc\]'"):
        few(sampler="baoa").fit(vectors(), np.arange(60) % 3)
    few().fit(vectors(), np.arange(60) % 3)


@pytest.mark.parametrize(("name", "count"), [("paper", 60_000), ("quick", 10_000), ("smoke", 1000)])
def test_benchmark_chains_are_the_papers_or_as_long_as_the_preset_says(name: str, count: int) -> None:
    preset = PRESETS[name]
    chain = chain_length(preset, count)
    if name == "paper":
        assert chain == {"samples": 30, "epochs": 2.0, "burn_in": 10.0}
        return
    schedule = SGMCMC(lr=1e-3, batch=preset.batch, **chain)._schedule(count, preset.batch)
    assert schedule.samples == preset.samples
    assert schedule.steps * (schedule.samples + schedule.burn_in) == pytest.approx(preset.steps, rel=0.1)
