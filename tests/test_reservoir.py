"""Bounded, fair memory of streams."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import InputError
from onefold.inputs.reservoir import Reservoir, shuffle_values


def numbers(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)[:, None]


def kept(reservoir: Reservoir) -> np.ndarray:
    assert isinstance(reservoir.samples, torch.Tensor)
    return reservoir.samples[:, 0].numpy()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_any_cutting_into_batches_gives_the_same_memory(sizes: list[int]) -> None:
    whole = Reservoir(20, seed=1).add(numbers(0, sum(sizes)))
    parts, start = Reservoir(20, seed=1), 0
    for size in sizes:
        parts.add(numbers(start, start + size))
        start += size
    np.testing.assert_array_equal(kept(parts), kept(whole))
    assert len(parts) == min(20, sum(sizes))
    assert parts.seen == sum(sizes)


def test_every_sample_has_the_same_chance() -> None:
    counts = np.zeros(100)
    for seed in range(3000):
        reservoir = Reservoir(10, seed)
        for start in range(0, 100, 7):
            reservoir.add(numbers(start, min(start + 7, 100)))
        counts[kept(reservoir)] += 1
    assert abs(counts / 3000 - 0.1).max() < 5 * np.sqrt(0.09 / 3000)


def test_a_half_life_halves_the_chance() -> None:
    """With few kept out of many, the chance to be kept falls by half with every half-life of age."""
    ages = np.concatenate(
        [1999 - kept(Reservoir(5, seed).add(numbers(0, 2000), half_life=100)) for seed in range(4000)]
    )
    share = [((ages >= 100 * i) & (ages < 100 * (i + 1))).mean() for i in range(4)]
    np.testing.assert_allclose(share, [0.5, 0.25, 0.125, 0.0625], atol=0.02)
    with pytest.raises(InputError, match="half_life"):
        Reservoir(5, 0).add(numbers(0, 3), half_life=0)


def test_a_half_life_forgets_even_where_there_is_room() -> None:
    reservoir = Reservoir(10_000, 0).add(numbers(0, 2000))
    assert len(reservoir) == 2000
    reservoir.add(numbers(2000, 4000), half_life=100)
    assert len(reservoir) == 145  # 100 / ln 2: what the weights of an endless stream add up to
    assert (kept(reservoir) >= 2000).all()


def test_a_fair_part_is_not_the_oldest() -> None:
    reservoir = Reservoir(1000, 0).add(numbers(0, 1000))
    few = reservoir.subsample(200)
    assert isinstance(few, torch.Tensor)
    assert 400 < few.double().mean() < 600


def test_samples_can_be_forgotten_by_value() -> None:
    reservoir = Reservoir(100, 0).add(numbers(0, 50)).remove(numbers(10, 20))
    np.testing.assert_array_equal(kept(reservoir), [*range(10), *range(20, 50)])
    assert len(reservoir.keys) == 40


def test_a_large_memory_fills_in_linear_time() -> None:
    """No part is touched again while there is room (adding one by one used to take quadratic time)."""
    reservoir = Reservoir(10**7, 0)
    for start in range(0, 200_000, 100):
        reservoir.add(numbers(start, start + 100))
    assert len(reservoir._parts) == 2000
    np.testing.assert_array_equal(kept(reservoir), np.arange(200_000))


def test_long_streams_with_forgetting_stay_finite() -> None:
    reservoir = Reservoir(8, 0)
    for start in range(0, 100_000, 1000):
        reservoir.add(numbers(start, start + 1000), half_life=3)
    assert np.isfinite(reservoir.keys).all()
    assert kept(reservoir).min() > 99_900


def test_it_round_trips_and_goes_on_alike() -> None:
    one = Reservoir(10, 3).add(numbers(0, 50), half_life=20)
    two = Reservoir.restore(one.to_json(), one.tensors("memory"), "memory")
    np.testing.assert_array_equal(kept(one.add(numbers(50, 90))), kept(two.add(numbers(50, 90))))
    copy = one.copy().add(numbers(90, 95))
    assert copy.seen == 95
    assert one.seen == 90


def test_dicts_are_kept_together() -> None:
    batch = {"a": numbers(0, 40), "b": 2 * numbers(0, 40)}
    samples = Reservoir(7, 0).add(batch).samples
    assert isinstance(samples, dict)
    assert torch.equal(2 * samples["a"], samples["b"])


def test_scrambling_takes_every_value_from_its_own_place() -> None:
    x = torch.arange(60.0).reshape(5, 4, 3)
    y = shuffle_values(x, 0)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y.sort(0).values, x)
    assert not torch.equal(x, y)


def test_a_part_of_a_memory_is_a_smaller_memory() -> None:
    few = Reservoir(200, 0).add(numbers(0, 1000), half_life=100).subsample(20)
    assert isinstance(few, torch.Tensor)
    np.testing.assert_array_equal(few[:, 0], kept(Reservoir(20, 0).add(numbers(0, 1000), half_life=100)))
