"""Running moments, against NumPy on all samples at once and against a loop over the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from onefold.core.moments import DecayingMoments, Moments


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([0.0, 1e9]), st.integers(0, 9))
def test_merged_batches_have_the_moments_of_all_samples(sizes: list[int], shift: float, seed: int) -> None:
    x = shift + np.random.default_rng(seed).normal(size=(sum(sizes), 3))
    parts = [Moments.of(part) for part in torch.from_numpy(x).split(sizes)]
    merged = Moments(0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    for part in parts:
        merged = merged.merge(part)
    assert merged.count == len(x)
    np.testing.assert_allclose(merged.mean, x.mean(0), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(merged.variance, x.var(0), rtol=1e-5 if shift else 1e-12, atol=1e-15)


def test_single_precision_samples_are_summed_in_double_precision() -> None:
    x = 1000 + torch.rand(5000, 2, generator=Generator().manual_seed(0))
    moments = Moments.of(x[:4000]).merge(Moments.of(x[4000:]))
    assert moments.mean.dtype == moments.squares.dtype == torch.float64
    torch.testing.assert_close(moments.variance, x.double().var(0, correction=0), rtol=1e-9, atol=0)


def test_decaying_moments_weight_minibatches_exponentially() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(5, 2, size=16) for _ in range(40)]
    moments = DecayingMoments(memory=10)
    assert moments.is_empty
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    weights = np.repeat([0.9 ** (39 - i) for i in range(40)], 16)
    values = np.concatenate(batches)
    mean = np.average(values, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    assert not moments.is_empty
    assert float(moments.mean()) == pytest.approx(mean, rel=1e-12)
    assert float(moments.std()) == pytest.approx(std, rel=1e-10)
    x = torch.tensor([1.0, 7.0])
    torch.testing.assert_close(moments.centre(x), x - float(mean))
    torch.testing.assert_close(moments.standardise(x), (x - float(mean)) / float(std))


def test_the_state_of_decaying_moments_round_trips() -> None:
    moments, copy = DecayingMoments(), DecayingMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    copy.load_state_dict(moments.state_dict())
    assert float(copy.mean()) == 2
    assert float(copy.std()) == pytest.approx(1)
