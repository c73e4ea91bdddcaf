"""Detectors fitted on parts of the data: merged, they are those of one fit on all of it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_methods import MAKERS, METHODS, fit, pictures, vectors
from torch import nn
from users_models import regressor

import onefold
from onefold.errors import InputError, NotFittedError
from onefold.inputs.reservoir import Reservoir
from onefold.kernels import from_model

MERGED: dict[str, Callable[..., Any]] = {
    "LastLayerGP": lambda **k: onefold.LastLayerGP(width=64, **k),
    "LocalGP": lambda **k: onefold.LocalGP(k=10, **k),
    "KNN": lambda **k: onefold.KNN(**k),
}
every_method = pytest.mark.parametrize("name", MERGED)


def table(count: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"a": rng.normal(seed, 1, count), "b": rng.choice(["x", "y"], count)})


SHARDS = {
    "vectors": [vectors(n, seed=n) + n / 50 for n in (90, 40, 61)],
    "images": [pictures(n, 9, 9, seed=n) for n in (30, 41, 20)],
    "tables": [table(n, n) for n in (50, 30, 21)],
}


def fit_shards(name: str, shards: list[Any], **options: Any) -> Any:
    """One fit on each shard, like the first, merged."""
    first, *others = shards
    merged = MERGED[name](**options).fit(first)
    parts = [MERGED[name](**options).fit(shard, like=merged) for shard in others]
    for part in parts:
        merged.merge(part)
    return merged


def joined(shards: list[Any]) -> Any:
    return pd.concat(shards) if isinstance(shards[0], pd.DataFrame) else np.concatenate(shards)


# --- equal to one process ---------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("kind", SHARDS)
def test_merged_parts_score_as_one_process_that_read_them_in_turn(name: str, kind: str) -> None:
    shards = SHARDS[kind]
    one = MERGED[name]().fit(shards[0])
    for shard in shards[1:]:
        one.update(shard)
    merged, query = fit_shards(name, shards), shards[-1][:20]
    np.testing.assert_allclose(merged.score(query), one.score(query), rtol=1e-9)
    assert merged.state.samples_seen == one.state.samples_seen == sum(map(len, shards))
    np.testing.assert_array_equal(merged.remembered, one.remembered)
    assert merged.state.stored_features == one.state.stored_features
    assert merged.alarm is None


@every_method
def test_parts_in_features_of_a_model_are_those_of_one_fit(name: str) -> None:
    kernel: Any = from_model(regressor(), width=32) if name == "LastLayerGP" else from_model(regressor())
    maker = getattr(onefold, name)
    shards = SHARDS["vectors"]
    first = maker(kernel).fit(shards[0])
    parts = [maker(kernel).fit(shard, like=first) for shard in shards[1:]]
    for part in parts:
        first.merge(part)
    one = maker(kernel).fit(np.concatenate(shards))
    np.testing.assert_allclose(first.score(shards[1]), one.score(shards[1]), rtol=1e-9, atol=1e-12)


def test_the_gram_matrix_is_the_sum_over_parts() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6000, 8)).astype(np.float32)
    merged = fit_shards("LastLayerGP", [x[:1000], x[1000:1500], x[1500:]])
    one = onefold.LastLayerGP(width=64).fit(x[:1000]).update(x[1000:])
    torch.testing.assert_close(merged.state.scorer.gram, one.state.scorer.gram, rtol=1e-12, atol=0)
    assert float(merged.state.scorer.count) == 6000
    query = rng.normal(size=(50, 8)).astype(np.float32)
    np.testing.assert_allclose(merged.relative(query), one.relative(query), rtol=1e-9)
    features = torch.nn.functional.normalize(merged.state.scorer.features(torch.from_numpy(x)), dim=1).double()
    torch.testing.assert_close(merged.state.scorer.gram, (features.T @ features).detach(), rtol=1e-6, atol=1e-6)


@every_method
def test_files_can_be_merged_and_merging_leaves_the_other_as_it_was(name: str, tmp_path: Path) -> None:
    first, second, query = *SHARDS["vectors"][:2], vectors(9, seed=5)
    whole = fit_shards(name, [first, second])
    start = MERGED[name]().fit(first)
    start.save(tmp_path / "first.onefold")
    part: Any = MERGED[name]().fit(second, like=onefold.load(tmp_path / "first.onefold"))
    part.save(tmp_path / "second.onefold")
    loaded: Any = onefold.load(tmp_path / "first.onefold")
    other: Any = onefold.load(tmp_path / "second.onefold")
    before = other.score(query)
    assert loaded.merge(other) is loaded
    np.testing.assert_array_equal(loaded.score(query), whole.score(query))
    np.testing.assert_array_equal(other.score(query), before)
    loaded.save(tmp_path / "merged.onefold")
    np.testing.assert_array_equal(onefold.load(tmp_path / "merged.onefold").score(query), whole.score(query))
    loaded.update(vectors(10, seed=8))


def test_a_detector_without_samples_gives_one_without_samples(tmp_path: Path) -> None:
    first, second = SHARDS["vectors"][:2]
    merged = MERGED["LastLayerGP"]().fit(first)
    part: Any = MERGED["LastLayerGP"]().fit(second, like=merged)
    part.save(tmp_path / "part.onefold", samples=False)
    merged.merge(onefold.load(tmp_path / "part.onefold"))
    assert merged.remembered is None
    assert float(merged.state.scorer.count) == len(first) + len(second)
    merged.save(tmp_path / "merged.onefold")
    np.testing.assert_array_equal(onefold.load(tmp_path / "merged.onefold").score(second), merged.score(second))


# --- reservoirs -------------------------------------------------------------------------------------------------------


def numbers(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)[:, None]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_a_merged_reservoir_keeps_the_largest_keys_of_both(first: int, second: int, capacity: int) -> None:
    a = Reservoir(capacity, 1).add(numbers(0, first))
    b = Reservoir(capacity, 1, salt=7).add(numbers(first, first + second))
    keys = np.concatenate([a.keys, b.keys])
    rows: Any = [stream.samples for stream in (a, b)]
    best = np.sort(np.argsort(-keys)[:capacity])
    merged = a.merge(b)
    np.testing.assert_array_equal(merged.keys, keys[best])
    np.testing.assert_array_equal(merged.samples, torch.cat(rows)[best])
    assert merged.seen == first + second
    assert len(a) == min(first, capacity)


def test_every_sample_of_both_has_the_same_chance() -> None:
    counts = np.zeros(100)
    for seed in range(3000):
        a, b = Reservoir(10, seed).add(numbers(0, 20)), Reservoir(10, seed, salt=3).add(numbers(20, 100))
        samples = a.merge(b).samples
        assert isinstance(samples, torch.Tensor)
        counts[samples[:, 0].numpy()] += 1
    assert abs(counts / 3000 - 0.1).max() < 5 * np.sqrt(0.09 / 3000)


def test_the_newest_samples_of_two_streams_have_the_same_age() -> None:
    """With a half-life, the longer stream does not push the other one out."""
    short, long = (
        [Reservoir(50, seed, salt=salt).add(numbers(start, stop), half_life=100) for seed in range(200)]
        for salt, start, stop in ((1, 0, 1000), (2, 1000, 6000))
    )
    shares = [(a.merge(b).samples[:, 0] < 1000).double().mean() for a, b in zip(short, long, strict=True)]  # type: ignore[index]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)


@every_method
def test_full_banks_and_reservoirs_hold_both_parts_in_proportion(name: str) -> None:
    """Of rows 0–99 and 100–499, a merged sample has a fifth from the first part, and no row twice."""
    shares, options = [], {} if name == "LastLayerGP" else {"bank": 60}
    for seed in range(8):
        x = np.random.default_rng(seed).normal(size=(500, 3)).astype(np.float32)
        merged = fit_shards(name, [x[:100], x[100:]], seed=seed, **options)
        if name == "LastLayerGP":
            assert len(merged.remembered) == 500
            return
        bank = merged.state.scorer.bank.numpy()
        rows = merged.state.scorer.features(torch.from_numpy(x)).detach().numpy()
        index = [int(np.abs(rows - row).sum(1).argmin()) for row in bank]
        assert len(set(index)) == len(bank) == 60
        shares.append(np.mean(np.array(index) < 100))
    assert np.mean(shares) == pytest.approx(0.2, abs=4 * np.sqrt(0.16 / 480))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(MERGED)))
def test_other_methods_cannot_be_merged(name: str) -> None:
    detector = fit(name, vectors())
    with pytest.raises(InputError, match=f"{name}: detectors of this method cannot be merged"):
        detector.merge(detector)


class Scaled(nn.Module):
    """A model with other features than `regressor`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@every_method
def test_detectors_that_differ_are_refused(name: str) -> None:
    x, y = SHARDS["vectors"][:2]
    first, make = MERGED[name]().fit(x), MERGED[name]
    other: Any = MAKERS["KNN" if name != "KNN" else "LocalGP"]().fit(y)
    with pytest.raises(InputError, match=r"cannot be merged. Use one method"):
        first.merge(other)
    with pytest.raises(InputError, match=r"other: fitted with another standardisation or random network. Fit one with"):
        first.merge(make().fit(y))
    with pytest.raises(InputError, match=r"differ in seed. Use the same settings"):
        first.merge(make(seed=1).fit(y))
    with pytest.raises(InputError, match="differ in seed"):
        make(seed=1).fit(y, like=first)
    with pytest.raises(InputError, match="other: fitted on data of another layout"):
        first.merge(make().fit(vectors(50, 7)))
    with pytest.raises(InputError, match="but the model was fitted on"):
        make().fit(vectors(50, 7), like=first)
    kernels = [from_model(regressor()), from_model(Scaled())]
    ours, others = (getattr(onefold, name)(kernel).fit(part) for kernel, part in zip(kernels, (x, y), strict=True))
    with pytest.raises(InputError, match=r"have different kernels. Use the same model"):
        ours.merge(others)
    with pytest.raises(InputError, match="different kernels"):
        getattr(onefold, name)(kernels[1]).fit(y, like=ours)
    with pytest.raises(NotFittedError):
        first.merge(make())
    with pytest.raises(NotFittedError):
        make().merge(first)
    with pytest.raises(NotFittedError):
        make().fit(y, like=make())


@every_method
def test_the_same_samples_are_not_counted_twice(name: str) -> None:
    first = MERGED[name]().fit(vectors())
    for other in (first, copy.deepcopy(first), copy.deepcopy(first).update(vectors(10, seed=1))):
        with pytest.raises(InputError, match="other: contains the same samples"):
            first.merge(other)
    assert first.state.samples_seen == 60
