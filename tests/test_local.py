"""The variance on nearest points is the exact Gaussian process where all points are neighbours."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from onefold import KNN, LocalGP, load
from onefold.detectors import local_gp
from onefold.errors import InputError
from onefold.exact.local import RIDGE, local_bandwidth, local_variance, remaining_variance, unit_vectors


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
    actual = local_variance(query, bank, tau, neighbours=40, ridge=ridge)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    single = local_variance(query.float(), bank.float(), tau, neighbours=40, ridge=ridge)
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=5e-6)


def test_with_some_points_it_is_the_gaussian_process_of_the_nearest() -> None:
    bank, query = points(60), points(7, seed=2)
    for i, u in enumerate(query):
        order = (bank @ u).argsort(descending=True)[:9]
        expected = gaussian_process(query[i : i + 1], bank[order], 0.4, RIDGE)
        torch.testing.assert_close(local_variance(u[None], bank, 0.4, neighbours=9), expected)


def test_the_bandwidth_is_half_of_the_mean_dissimilarity_of_pairs() -> None:
    bank = points(30)
    similarity = bank @ bank.T
    pairs = [1 - float(similarity[i, j]) for i in range(30) for j in range(30) if i != j]
    assert local_bandwidth(bank.mean(0), 30) == pytest.approx(sum(pairs) / len(pairs) / 2, rel=1e-12)


@pytest.mark.parametrize(("d", "offset"), [(3, 0.0), (6, 0.0), (64, 0.0), (64, 6.0)])
def test_the_variance_does_not_depend_on_the_batch(d: int, offset: float) -> None:
    """In few dimensions K is nearly singular; with an offset all cosines are close to 1. Rounding must not matter."""
    bank, query = (
        unit_vectors(points(n, d, seed, torch.float32) * d**0.5 + offset) for n, seed in ((2000, 0), (60, 1))
    )
    tau = local_bandwidth(bank.double().mean(0), len(bank))
    variance = local_variance(query, bank, tau)
    one_by_one = torch.cat([local_variance(u[None], bank, tau) for u in query])
    torch.testing.assert_close(one_by_one, variance, rtol=0, atol=5e-6)
    torch.testing.assert_close(variance.double(), local_variance(query.double(), bank.double(), tau), rtol=0, atol=5e-6)


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
    variances = local_variance(query, bank, 0.5, neighbours=count)
    assert ((variances >= 0) & (variances <= 1)).all()
    if count < 12:
        assert (local_variance(query, bank, 0.5, neighbours=count + 1) <= variances + 1e-12).all()


def test_elimination_is_a_direct_solve() -> None:
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    gram, cross = root @ root.mT, torch.randn(3, 5, generator=generator, dtype=torch.float64) / 9
    solution = torch.linalg.solve(gram + 0.5 * torch.eye(5, dtype=torch.float64), cross[..., None])[..., 0]
    torch.testing.assert_close(remaining_variance(gram, cross, 0.5), 1 - (cross * solution).sum(1))


# --- the detector ----------------------------------------------------------------------------------------------------


class Identity(nn.Module):
    """An encoder whose embedding is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def embeddings(n: int, seed: int = 0) -> np.ndarray:
    return (points(n, seed=seed, dtype=torch.float32) * 3).numpy()


def kernel() -> Any:
    from onefold.kernels import from_model

    return from_model(Identity(), "layer", None)


def test_the_detector_is_the_exact_gaussian_process_with_all_neighbours() -> None:
    x, query = embeddings(12), embeddings(9, seed=1)
    detector = LocalGP(kernel(), k=12).fit(x)
    u, v = unit_vectors(torch.from_numpy(x).double()), unit_vectors(torch.from_numpy(query).double())
    expected = gaussian_process(v, u, local_bandwidth(u.mean(0), 12), RIDGE)
    np.testing.assert_allclose(detector.score(query), expected, atol=5e-6)
    assert (detector.variance(query) == detector.score(query)).all()
    assert (detector.relative(query) == detector.score(query)).all()


def test_encodings_are_neither_centred_nor_standardised() -> None:
    """Scores do not change with the length of an encoding, and do with an offset common to all."""
    x, query = embeddings(60), embeddings(9, seed=1)
    scores = LocalGP(kernel()).fit(x).score(query)
    np.testing.assert_allclose(LocalGP(kernel()).fit(x).score(query * 7), scores, atol=1e-5)
    assert np.abs(LocalGP(kernel()).fit(x + 5).score(query + 5) - scores).max() > 0.05


def test_many_queries_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    detector, query = LocalGP(kernel()).fit(embeddings(80)), embeddings(40, seed=1)
    expected = detector.score(query)
    monkeypatch.setattr(local_gp, "AT_ONCE", 50 * 6 * 3)
    np.testing.assert_allclose(detector.score(query), expected, atol=1e-6)


def test_updates_forget_with_a_half_life_and_keep_the_bank_bounded() -> None:
    old, new = embeddings(300), -embeddings(300, seed=1)
    detector = LocalGP(kernel(), bank=100).fit(old)
    before = detector.score(new).mean()
    detector.update(new, half_life=20)
    assert detector.state.stored_features <= 100
    assert detector.score(new).mean() < before / 2
    assert detector.score(old).mean() > detector.score(new).mean()
    fresh = LocalGP(kernel(), bank=100).fit(old).update(new)
    assert detector.score(old).mean() > fresh.score(old).mean()


@pytest.mark.parametrize("k", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_exported_decisions_are_those_of_python(k: int, tmp_path: Path) -> None:
    """The exported graph grows with k; 50 is the default."""
    onnxruntime = pytest.importorskip("onnxruntime")
    x, query = embeddings(200), np.concatenate([embeddings(200, seed=1), -embeddings(60, seed=2)])
    detector = LocalGP(kernel(), k=k).fit(x).calibrate(embeddings(150, seed=3))
    detector.export(tmp_path / "d.onnx")
    session: Any = onnxruntime.InferenceSession(str(tmp_path / "d.onnx"), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for size in (1, 7, len(query)):
        parts = [session.run(None, {name: query[i : i + size]}) for i in range(0, len(query), size)]
        scores, _, alarms = (np.concatenate(values) for values in zip(*parts, strict=True))
        np.testing.assert_allclose(scores, detector.score(query), atol=1e-4)
        np.testing.assert_array_equal(alarms, detector.is_ood(query))
    assert detector.is_ood(query)[200:].mean() > 0.7


def test_a_saved_detector_scores_and_updates_the_same(tmp_path: Path) -> None:
    x, query, net = embeddings(120), embeddings(20, seed=1), Identity()
    detector = LocalGP(kernel(), bank=90).fit(x)
    detector.save(tmp_path / "d.onefold")
    copy: Any = load(tmp_path / "d.onefold", model=net)
    np.testing.assert_array_equal(copy.score(query), detector.score(query))
    detector.update(embeddings(50, seed=4))
    np.testing.assert_array_equal(copy.update(embeddings(50, seed=4)).score(query), detector.score(query))


def test_one_sample_is_refused_and_arguments_are_checked() -> None:
    with pytest.raises(InputError, match="only one sample"):
        LocalGP(kernel()).fit(embeddings(1))
    cases: dict[str, Any] = {"k=0": {"k": 0}, "k=501": {"k": 501}, "ridge=0": {"ridge": 0.0}, "bank=1": {"bank": 1}}
    for case, arguments in cases.items():
        with pytest.raises(InputError, match=f"^{case.partition('=')[0]}: must be"):
            LocalGP(**arguments)


def test_neighbours_that_differ_say_more_than_copies_of_one() -> None:
    """KNN sees no difference: all neighbours have the same cosine, in both banks. The copies are one point with less
    noise, so their variance has a closed form."""
    axes = np.eye(8, dtype=np.float32)
    query = axes[:1]
    different, copies = axes[0] + 0.5 * axes[1:7], np.repeat(axes[:1] + 0.5 * axes[1:2], 6, axis=0)
    banks = [np.concatenate([bank, -axes[:2]]) for bank in (different, copies)]
    knn = [KNN(kernel(), k=6).fit(bank).score(query)[0] for bank in banks]
    assert knn[0] == pytest.approx(knn[1], abs=1e-6)
    detectors = [LocalGP(kernel(), k=6).fit(bank) for bank in banks]
    variances = [detector.score(query)[0] for detector in detectors]
    tau: Any = detectors[1].state.scorer.bandwidth
    similarity = math.exp((1.25**-0.5 - 1) / float(tau))
    assert variances[1] == pytest.approx(1 - 6 * similarity**2 / (6 + RIDGE), abs=1e-5)
    assert variances[0] < 0.8 * variances[1]
