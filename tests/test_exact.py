"""Closed forms against each other, against trained networks, and on degenerate data."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct
from torch import Generator, Tensor

from onefold.errors import InputError, NotEnoughMemoryError, TrainingError
from onefold.exact import Gram, PrimalGP, ntk_gp, reference_ensemble
from onefold.exact.ensemble import initial_members, prior_correction
from onefold.kernels import Features, infinite
from onefold.nn.nets import NTKMLP

KERNEL = infinite(1, activation="erf", w_std=1.5, b_std=0.3)
NNGP = replace(KERNEL, kind="nngp")


def linear_features(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1).to(x)], 1).double()


def problem(generator: Generator, n: int = 10, q: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    x, query = torch.randn(n, 2, generator=generator), 1.5 * torch.randn(q, 2, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + x[:, 1], query


def test_against_scikit_learn(generator: Generator) -> None:
    x, y, query = problem(generator)
    x, y, query = x.double(), y.double(), query.double()
    judge = GaussianProcessRegressor(DotProduct(1.0, "fixed"), alpha=0.01, optimizer=None)  # pyright: ignore[reportArgumentType]
    judge.fit(x.numpy(), y.numpy())
    mean, covariance = judge.predict(query.numpy(), return_cov=True)
    noisy = PrimalGP(3, noise=0.01).add(linear_features(x), y[:, None])
    z = linear_features(query)
    torch.testing.assert_close(noisy.mean(z)[:, 0], torch.tensor(mean), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(noisy.covariance(z), torch.tensor(covariance), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(noisy.variance(z), noisy.covariance(z).diagonal())


def test_primal_and_dual_agree(generator: Generator) -> None:
    """The same kernel, once with its features (10 points, 3 of them) and once as a black box."""
    x, y, query = problem(generator)
    features = Features(linear_features)

    class BlackBox:
        def __call__(self, a: Tensor, b: Tensor) -> Tensor:
            return features(a, b)

        def diag(self, a: Tensor) -> Tensor:
            return features.diag(a)

    primal, dual = ntk_gp(features, x, y, query), ntk_gp(BlackBox(), x, y, query)
    torch.testing.assert_close(primal.mean, dual.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(primal.covariance, dual.covariance, rtol=1e-8, atol=1e-8)
    few = ntk_gp(features, x[:2], y[:2], query)  # fewer points than features: the dual is taken for both
    torch.testing.assert_close(few.covariance, ntk_gp(BlackBox(), x[:2], y[:2], query).covariance)
    assert float(few.variance.max()) > 0.1


@given(cuts=st.lists(st.integers(1, 59), max_size=4, unique=True), noise=st.sampled_from([0.0, 0.3]))
def test_batches_give_the_answer_of_all_at_once(cuts: list[int], noise: float) -> None:
    generator = Generator().manual_seed(3)
    z = torch.randn(60, 12, generator=generator).double() @ torch.randn(12, 20, generator=generator).double()
    y, query = torch.randn(60, 2, generator=generator), torch.randn(30, 20, generator=generator).double()
    whole, parts = PrimalGP(20, noise).add(z, y), PrimalGP(20, noise)
    edges = [0, *sorted(cuts), 60]
    for a, b in itertools.pairwise(edges):
        parts.add(z[a:b], y[a:b])
    assert parts.count == 60
    torch.testing.assert_close(parts.variance(query), whole.variance(query), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(parts.mean(query), whole.mean(query), rtol=1e-8, atol=1e-8)


def test_train_points_are_certain_and_reproduced(generator: Generator) -> None:
    x, y, _ = problem(generator)
    law = ntk_gp(KERNEL, x, y, x)
    torch.testing.assert_close(law.mean[:, 0], y.double(), rtol=1e-6, atol=1e-6)
    assert float(law.variance.max()) < 1e-9


@given(n=st.integers(1, 8), seed=st.integers(0, 20))
def test_more_data_never_adds_variance(n: int, seed: int) -> None:
    x, y, query = problem(Generator().manual_seed(seed), n=9)
    less, more = ntk_gp(KERNEL, x[:n], y[:n], query).variance, ntk_gp(KERNEL, x[: n + 1], y[: n + 1], query).variance
    assert bool((more <= less + 1e-8).all())
    assert bool((less <= KERNEL.diag(query) + 1e-8).all())


def test_general_covariance_is_the_ntk_gp_when_the_kernels_are_equal(generator: Generator) -> None:
    x, y, query = problem(generator)
    special, general = ntk_gp(KERNEL, x, y, query), ntk_gp(KERNEL, x, y, query, nngp=KERNEL)
    torch.testing.assert_close(special.covariance, general.covariance, rtol=1e-7, atol=1e-7)


def test_time_runs_from_the_prior_to_the_limit(generator: Generator) -> None:
    x, y, query = problem(generator)
    start = ntk_gp(KERNEL, x, y, query, nngp=NNGP, time=0.0)
    torch.testing.assert_close(start.covariance, NNGP(query, query))
    assert float(start.mean.abs().max()) == 0
    late = ntk_gp(KERNEL, x, y, query, nngp=NNGP, time=1e6)
    torch.testing.assert_close(late.covariance, ntk_gp(KERNEL, x, y, query, nngp=NNGP).covariance, rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match="Use zero or a positive number"):
        ntk_gp(KERNEL, x, y, query, time=-1.0)


def test_time_solves_the_differential_equation(generator: Generator) -> None:
    """Eq. 18 integrated in many small steps, on train points and queries together."""
    x, y, query = problem(generator, n=5, q=4)
    points = torch.cat([query, x])
    theta = KERNEL(points, x)
    f, steps, time = torch.zeros(len(points)).double(), 20_000, 2.0
    for _ in range(steps):
        f = f - time / steps * theta @ (f[len(query) :] - y.double())
    law = ntk_gp(KERNEL, x, y, query, time=time)
    torch.testing.assert_close(law.mean[:, 0], f[: len(query)], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["duplicates", "constant features", "zero features", "fewer points than features"])
def test_singular_gram_matrices(kind: str, generator: Generator) -> None:
    x, y, query = problem(generator, n=8)
    if kind == "duplicates":
        law = ntk_gp(KERNEL, torch.cat([x, x]), torch.cat([y, y]), query)
        expected = ntk_gp(KERNEL, x, y, query)
        torch.testing.assert_close(law.mean, expected.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(law.covariance, expected.covariance, rtol=1e-5, atol=1e-5)
        return
    feature_map = {
        "constant features": lambda a: torch.ones(len(a), 4).double(),
        "zero features": lambda a: torch.zeros(len(a), 4).double(),
        "fewer points than features": lambda a: torch.cat([linear_features(a)] * 7, 1),
    }[kind]
    law = ntk_gp(Features(feature_map), x, y, query)
    assert bool(law.mean.isfinite().all())
    torch.testing.assert_close(law.variance, torch.zeros(len(query)).double(), rtol=0, atol=1e-6)
    if kind == "constant features":
        torch.testing.assert_close(law.mean[:, 0], y.double().mean().expand(len(query)))


def test_negative_variances_are_clamped_and_counted(generator: Generator) -> None:
    x, y, _ = problem(generator, n=40)
    law = ntk_gp(
        infinite(1, activation="erf", w_std=0.5, b_std=0.1), x, y, x
    )  # rounding is all there is on train points
    assert bool((law.variance >= 0).all())
    assert 0 < law.clamped < 1
    assert ntk_gp(KERNEL, x[:5], y[:5], 3 + x).clamped == 0


def test_float32_kernels_are_not_trusted_beyond_their_precision(generator: Generator) -> None:
    x, y, query = problem(generator)
    single = Gram(KERNEL(x, x).float().repeat(2, 2))
    assert single.cutoff > 1e6 * Gram(KERNEL(x, x)).cutoff
    double = Gram(KERNEL(x, x)).weights(KERNEL(query, x)) @ y.double()
    weights = single.weights(KERNEL(query, x).float().repeat(1, 2))
    torch.testing.assert_close(weights @ torch.cat([y, y]).double(), double, rtol=0.05, atol=0.05)


def test_bad_targets_and_sizes_are_refused(generator: Generator) -> None:
    x, y, query = problem(generator)
    with pytest.raises(InputError, match="9 targets, but there are 10 train points"):
        ntk_gp(KERNEL, x, y[:9], query)
    with pytest.raises(InputError, match="NaN"):
        ntk_gp(KERNEL, x, torch.full((10,), math.nan), query)
    with pytest.raises(InputError, match="NaN or infinity for the train points"):
        ntk_gp(KERNEL, x * math.inf, y, query)
    with pytest.raises(NotEnoughMemoryError, match=r"1,000,000 train points.*kernels.last_layer"):
        ntk_gp(KERNEL, torch.zeros(1_000_000, 2), torch.zeros(1_000_000), query)
    with pytest.raises(NotEnoughMemoryError, match=r"1,000,000 features.*width="):
        PrimalGP(1_000_000)
    with pytest.raises(InputError, match="no targets"):
        PrimalGP(3).add(torch.zeros(2, 3)).mean(torch.zeros(1, 3))


def test_prior_correction_has_the_covariance_that_is_missing(generator: Generator) -> None:
    """Cov δ = Θ − κ (He et al., 2020): 4,000 draws on three points."""
    net = NTKMLP(2, [256], activation="erf", w_std=1.5, b_std=0.3, generator=generator)
    x = torch.randn(3, 2, generator=generator)
    members = initial_members(net, 4000, generator)
    sampled = torch.cov(prior_correction(net, members, x, generator).T.double())
    both = KERNEL.both(x, x)
    torch.testing.assert_close(sampled, both.ntk - both.nngp, rtol=0.1, atol=0.15)


@pytest.mark.parametrize("hidden", [[512], [128, 128]], ids=["one of 512", "two of 128"])
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
def test_trained_networks_follow_the_law(hidden: list[int], corrected: bool, generator: Generator) -> None:
    """Mean and covariance of 512 networks after 100 steps of gradient descent, against theory at time 100 · rate.

    With M = 512 the sampling error of a covariance matrix is about 10 % in norm; finite width adds a few per cent.
    """
    x, y, query = problem(generator)
    steps, members = 100, 512
    net = NTKMLP(2, hidden, activation="erf", w_std=1.5, b_std=0.3, generator=generator)
    predictions, rate = reference_ensemble(
        net, x, y, query, members=members, steps=steps, generator=generator, corrected=corrected
    )
    kernel = replace(KERNEL, hidden_layers=len(hidden))
    nngp = None if corrected else replace(kernel, kind="nngp")
    law = ntk_gp(kernel, x, y, query, nngp=nngp, time=steps * rate)
    sample = predictions.double()
    covariance = torch.cov(sample.T)
    z = (sample.mean(0) - law.mean[:, 0]) / (covariance.diagonal() / members).sqrt()
    assert float(z.abs().mean()) < 2.0
    assert float(torch.linalg.norm(covariance - law.covariance) / torch.linalg.norm(law.covariance)) < 0.2
    if not corrected:
        weights = Gram(kernel(x, x)).weights(kernel(query, x), steps * rate)
        assert nngp is not None
        printed = law.covariance - 2 * weights @ nngp(x, x) @ weights.T  # Eq. 25 with the sign that the paper prints
        assert float(torch.linalg.norm(covariance - printed) / torch.linalg.norm(law.covariance)) > 1.0
        assert float(printed.diagonal().min()) < 0, "as printed, it is not even a covariance"
        wrong = ntk_gp(kernel, x, y, query, time=steps * rate)  # the NTK-GP is not the law of plain networks
        assert float(torch.linalg.norm(covariance - wrong.covariance) / torch.linalg.norm(law.covariance)) > 0.4


def test_divergence_is_an_error(generator: Generator) -> None:
    x, y, query = problem(generator)
    net = NTKMLP(2, [32], activation="relu", generator=generator)
    with pytest.raises(TrainingError, match="diverged at learning rate 1e"):
        reference_ensemble(net, x, y, query, members=3, steps=300, generator=generator, lr=1e3)
