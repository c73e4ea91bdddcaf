"""The variance on nearest points is the exact Gaussian process where all points are neighbours."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onefold.exact.local import RIDGE, conjugate_gradients, local_bandwidth, local_variance, unit_vectors


def points(n: int, d: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return unit_vectors(torch.randn(n, d, generator=generator, dtype=dtype) + 0.7)


def gaussian_process(query: Tensor, bank: Tensor, tau: float, ridge: float) -> Tensor:
    """Eq. 7 with noise, one query after the other, by an explicit inverse."""
    gram = torch.tensor([[math.exp((float(a @ b) - 1) / tau) for b in bank] for a in bank], dtype=torch.float64)
    inverse = torch.linalg.inv(gram + ridge * torch.eye(len(bank), dtype=torch.float64))
    variances = []
    for u in query:
        b = torch.tensor([math.exp((float(u @ v) - 1) / tau) for v in bank], dtype=torch.float64)
        variances.append(1 - float(b @ inverse @ b))
    return torch.tensor(variances, dtype=torch.float64)


@pytest.mark.parametrize("ridge", [RIDGE, 0.1])
def test_with_all_points_it_is_the_exact_gaussian_process(ridge: float) -> None:
    bank, query = points(40), points(15, seed=1)
    tau = local_bandwidth(bank.mean(0), len(bank))
    expected = gaussian_process(query, bank, tau, ridge)
    direct = local_variance(query, bank, tau, neighbours=40, ridge=ridge, steps=None)
    torch.testing.assert_close(direct, expected, rtol=0, atol=1e-12)
    iterated = local_variance(query, bank, tau, neighbours=40, ridge=ridge, steps=60)
    torch.testing.assert_close(iterated, expected, rtol=0, atol=1e-10)


def test_with_some_points_it_is_the_gaussian_process_of_the_nearest() -> None:
    bank, query = points(60), points(7, seed=2)
    for i, u in enumerate(query):
        order = (bank @ u).argsort(descending=True)[:9]
        expected = gaussian_process(query[i : i + 1], bank[order], 0.4, RIDGE)
        torch.testing.assert_close(local_variance(u[None], bank, 0.4, neighbours=9, steps=None), expected)


def test_the_bandwidth_is_half_of_the_mean_dissimilarity_of_pairs() -> None:
    bank = points(30)
    similarity = bank @ bank.T
    pairs = [1 - float(similarity[i, j]) for i in range(30) for j in range(30) if i != j]
    assert local_bandwidth(bank.mean(0), 30) == pytest.approx(sum(pairs) / len(pairs) / 2, rel=1e-12)


def test_ten_steps_in_float32_rank_like_a_direct_solve() -> None:
    bank, query = points(400, dtype=torch.float32), points(200, seed=3, dtype=torch.float32)
    query = unit_vectors(
        query + torch.linspace(0, 2, 200)[:, None] * torch.randn(6, generator=torch.Generator().manual_seed(0))
    )
    tau = local_bandwidth(bank.mean(0), len(bank))
    steps, direct = local_variance(query, bank, tau), local_variance(query, bank, tau, steps=None)
    assert torch.corrcoef(torch.stack([steps.argsort().argsort(), direct.argsort().argsort()]).double())[0, 1] > 0.99
    assert (steps >= direct - 1e-4).all()


def test_repeated_points_and_zeros_are_finite() -> None:
    bank = points(3, dtype=torch.float32).repeat(30, 1)
    query = torch.cat([bank[:2], torch.zeros(1, 6)])
    variance = local_variance(query, bank, 0.3)
    assert variance.isfinite().all()
    assert (variance[:2] < 0.01).all()  # noise of 0.01 seen 30 times
    assert variance[2] > 0.5


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_variance_is_a_share_and_falls_with_more_points(seed: int, count: int) -> None:
    bank, query = points(12, seed=seed), points(4, seed=seed + 1)
    variances = local_variance(query, bank, 0.5, neighbours=count, steps=None)
    assert ((variances >= 0) & (variances <= 1)).all()
    if count < 12:
        assert (local_variance(query, bank, 0.5, neighbours=count + 1, steps=None) <= variances + 1e-12).all()


def test_conjugate_gradients_are_exact_after_as_many_steps_as_dimensions() -> None:
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    matrix, vector = root @ root.mT, torch.randn(3, 5, generator=generator, dtype=torch.float64)
    expected = torch.linalg.solve(matrix + 0.5 * torch.eye(5, dtype=torch.float64), vector)
    torch.testing.assert_close(conjugate_gradients(matrix, vector, 0.5, 5), expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(conjugate_gradients(matrix, vector, 0.5, 2), expected, rtol=1e-3)
