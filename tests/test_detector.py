"""Detectors on people's own models and data: post hoc, exported, fed by streams, honest about themselves."""

import contextlib
import copy
import itertools
import math
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_methods import LABELLED, MAKERS, SHORT, SMALL, fit, pictures, vectors
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from users_models import ResNet, TextClassifier, regressor

import onefold
from onefold import metrics
from onefold.detectors import METHODS, diagnosis
from onefold.detectors.variance_scorer import CombinedScore
from onefold.errors import InputError, MissingExtraError, OnefoldWarning
from onefold.kernels import Features, from_model
from onefold.kernels.feature_maps import encoder_centre
from onefold.nn.cudnn import exact_float32, tune_cudnn
from onefold.nn.train import Draws, Recipe, Training

LONG = Recipe(steps=600, batch=64, lr=3e-3, warmup=50)


def texts(n: int, seed: int = 0, low: int = 0, high: int = 50) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (n, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    return {"input_ids": torch.randint(low, high, (n, 12), generator=generator) * mask, "attention_mask": mask}


def users() -> dict[str, tuple[nn.Module, Any, Any]]:
    """Each user's model, familiar data and a query."""
    torch.manual_seed(0)
    return {
        "cnn": (ResNet(), pictures(60, 12, 12), pictures(9, 12, 12, seed=1)),
        "cnn on floats": (ResNet(3), np.random.default_rng(0).random((60, 3, 12, 12)), np.zeros((4, 3, 12, 12))),
        "transformer": (TextClassifier(), texts(60), texts(9, 1)),
        "mlp": (regressor(), vectors(60), vectors(9, seed=1)),
    }


USERS = list(users())
POST_HOC = {
    "CSD": lambda net: onefold.CSD(from_model(net, width=64), recipe=SHORT, architecture=SMALL),
    "LastLayerGP": lambda net: onefold.LastLayerGP(from_model(net, width=64)),
    "KNN": lambda net: onefold.KNN(from_model(net)),
}


# --- post hoc ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", POST_HOC)
def test_a_users_model_comes_back_exactly_as_it_was(user: str, name: str) -> None:
    net, x, query = users()[user]
    net.train()
    next(iter(net.children())).eval()  # a frozen stem
    next(net.parameters()).requires_grad_(False)
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    grads = [p.requires_grad for p in net.parameters()]
    detector = POST_HOC[name](net).fit(x)
    scores = detector.score(query)
    assert np.isfinite(scores).all()
    assert len(scores) == len(query if not isinstance(query, dict) else query["input_ids"])
    assert [m.training for m in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == grads
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    np.testing.assert_array_equal(detector.score(query), scores)


@pytest.mark.parametrize("name", POST_HOC)
def test_a_model_that_works_in_place_changes_nobodys_data(name: str) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.sub_(3).div_(2))

    x = vectors(150)
    before = x.copy()
    detector = POST_HOC[name](InPlace()).fit(x)
    remembered = detector.remembered
    assert isinstance(remembered, torch.Tensor)
    np.testing.assert_array_equal(detector.score(x), detector.score(x))
    np.testing.assert_array_equal(x, before)
    rows = {row.tobytes() for row in before}
    assert all(row.numpy().tobytes() in rows for row in remembered)


def test_a_diagnosis_shows_a_model_only_values_that_it_may_see() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small, self.fc = nn.Embedding(1000, 8), nn.Embedding(5, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.large(x[:, 0]) + self.small(x[:, 1]))

    x = np.stack([np.random.default_rng(0).integers(0, high, 100) for high in (1000, 5)], 1)
    assert np.isfinite(onefold.KNN(from_model(Tokens())).fit(x).score(x)).all()


@pytest.mark.parametrize(("user", "width"), [("cnn", 24), ("transformer", 16), ("mlp", 32)])
def test_features_are_what_enters_the_classifier_head(user: str, width: int) -> None:
    net, _, query = users()[user]
    x = dict(query) if isinstance(query, dict) else torch.as_tensor(query, dtype=torch.float32)
    x = x[:, None] / 255 if user == "cnn" and isinstance(x, torch.Tensor) else x
    assert from_model(net).encode(x).shape == (9, width)


def test_the_scale_of_a_wide_random_layer_is_known_beforehand() -> None:
    kernel, x = from_model(nn.Linear(6, 2), width=2**17), torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kernel.scale(kernel.encode(x)), kernel.diag(x), rtol=0.03, atol=0)


def test_encodings_are_seen_from_half_way_to_their_mean() -> None:
    z = torch.tensor([[-2.0, 6.0], [6.0, -2.0], [-2.0, -2.0], [6.0, 6.0]])
    torch.testing.assert_close(encoder_centre(z), torch.tensor([1.0, 1.0]))
    far = encoder_centre(z + 1000)  # what is kept of a large vector that all share is half as long as they spread, √32
    torch.testing.assert_close(far, torch.tensor([1000.0, 1000.0]), rtol=0, atol=1e-3)
    torch.testing.assert_close(encoder_centre(torch.zeros(3, 2)), torch.zeros(2))
    torch.testing.assert_close(encoder_centre(7 * z), 7 * encoder_centre(z))


def test_what_says_little_to_a_model_lies_opposite_to_the_familiar() -> None:
    """After a ReLU, as most encodings are: seen from the mean, weak inputs would be as near to some as to others."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(500, 64, generator=generator).relu()
    weak = 0.1 * torch.randn(50, 64, generator=generator).relu()
    alike = torch.nn.functional.cosine_similarity((weak - encoder_centre(z))[:, None], z - encoder_centre(z), dim=2)
    assert alike.mean() < -0.25
    central = torch.nn.functional.cosine_similarity((weak - z.mean(0))[:, None], z - z.mean(0), dim=2)
    assert abs(central.mean()) < 0.05


def test_a_named_map_is_flattened() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 20), nn.ReLU(), nn.Linear(20, 3))
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(from_model(net, "1").encode(x), net[:3](x).detach())
    torch.testing.assert_close(from_model(net).encode(x), net[:5](x).detach())


def test_features_of_the_train_set_are_computed_once_if_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += len(x)
            return self.fc(x)

    def rows_seen() -> int:
        nonlocal calls
        calls = 0
        recipe = Recipe(steps=40, batch=16)
        onefold.CSD(from_model(Counting(), width=8), score="relative", recipe=recipe, architecture=SMALL).fit(vectors())
        return calls

    few = rows_seen()
    monkeypatch.setattr("onefold.distil.fit.available", lambda _: 0)
    assert rows_seen() > few + 500  # now every step asks the model


def test_an_exported_program_gives_the_same_features(tmp_path: Path) -> None:
    net, x, query = users()["cnn"]
    example = torch.rand(2, 1, 12, 12)
    batch = torch.export.Dim("batch")
    program = torch.export.export(net.eval(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")
    torch.testing.assert_close(from_model(program).encode(example), net(example).detach())
    torch.testing.assert_close(from_model(program, "layer1").encode(example), from_model(net, "layer1").encode(example))
    with pytest.raises(onefold.OnefoldError, match="no layer 'layer9': did you mean 'layer"):
        from_model(program, "layer9")
    a, b = (onefold.LastLayerGP(from_model(m, "layer1", width=64)).fit(x).score(query) for m in (net, program))
    np.testing.assert_allclose(a, b, rtol=1e-4)


def trained_classifier(x: np.ndarray, y: np.ndarray) -> nn.Module:
    torch.manual_seed(0)
    net, data, labels = ResNet(classes=10), torch.from_numpy(x)[:, None], torch.from_numpy(y)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(300):
        i = torch.randint(len(data), (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(data[i]), labels[i])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


@pytest.mark.slow
def test_post_hoc_beats_its_rivals_on_little_data() -> None:
    """Digits against letters, 1,297 train images: CSD on a trained model against kNN, energy and an ensemble."""
    known = onefold.data.digits()
    strange = onefold.data.letters(500)
    net = trained_classifier(known.x_train, known.y_train)
    x, test, letters = (a[:, None] for a in (known.x_train, known.x_test, strange))

    def auroc(detector: Any) -> float:
        return metrics.auroc(detector.score(test), detector.score(letters))

    ours = auroc(onefold.CSD(from_model(net, "layer2")).fit(x))
    assert ours > auroc(onefold.KNN(from_model(net)).fit(x))
    assert ours > auroc(onefold.Energy(net).fit(x))
    assert ours > auroc(onefold.DeepEnsemble(5).fit(x, known.y_train))


# --- every kind of input ----------------------------------------------------------------------------------------------


class Pairs(Dataset):
    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.x[i], i % 3


@pytest.mark.parametrize("name", METHODS)
def test_the_same_data_in_every_wrapping_gives_the_same_scores(name: str, tmp_path: Path) -> None:
    x = vectors(60)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", a=x, b=x[:5])
    wrappings = {
        "npy": tmp_path / "x.npy",
        "npz": f"{tmp_path / 'x.npz'}::a",
        "dataset": Pairs(x),
        "tensors": TensorDataset(torch.from_numpy(x), torch.arange(60) % 3),
        "loader": DataLoader(Pairs(x), batch_size=7),
    }
    want = fit(name, x).score(x)
    for label, wrapped in wrappings.items():
        labels = (np.arange(60) % 3,) if name in LABELLED and label in ("npy", "npz", "loader") else ()
        detector = MAKERS[name]().fit(wrapped, *labels)
        np.testing.assert_allclose(detector.score(wrapped), want, rtol=1e-4, atol=1e-6, err_msg=label)


class Stream(IterableDataset):
    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.x)


class Backwards:
    """Batches of a user's own, the last sample first."""

    def __iter__(self) -> Iterator[list[int]]:
        yield list(range(59, 29, -1))
        yield list(range(29, -1, -1))


def test_loaders_in_another_order_warn_where_the_order_matters() -> None:
    data, detector = Pairs(vectors(60)), MAKERS["DeepEnsemble"](task="regression").fit(vectors(60), np.arange(60.0))
    whole = Pairs(data.x.reshape(3, 20, 5))  # its items are batches
    shuffled = DataLoader(data, 20, shuffle=True, generator=torch.Generator().manual_seed(0))
    verbs = ("score", "pvalue", "is_ood", "neighbours", "predict", "probabilities")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(signal|familiarity): ", OnefoldWarning)
        onefold.KNN().fit(shuffled)
        detector.calibrate(shuffled)
        detector.diagnose(shuffled, show=False)
        for loader in (DataLoader(data, 20), DataLoader(whole, batch_size=None), data, data.x):
            for verb in verbs:
                getattr(detector, verb)(loader)
        detector.score(DataLoader(Stream(data.x), 20))
    message = "^x: the DataLoader shuffles or has a custom sampler, .* or a DataLoader with shuffle=False"
    for loader in (
        shuffled,
        DataLoader(data, 20, sampler=SubsetRandomSampler(range(30))),
        DataLoader(data, 20, sampler=range(59, -1, -1)),
        DataLoader(data, batch_sampler=Backwards()),  # pyright: ignore[reportArgumentType]
        DataLoader(whole, batch_size=None, shuffle=True),
        DataLoader(data, 20, num_workers=2, in_order=False),
    ):
        with pytest.warns(OnefoldWarning, match=message):
            assert next(detector.score_batches(loader)).shape in ((20,), (30,))
    for verb in verbs:
        with pytest.warns(OnefoldWarning, match=message):
            getattr(detector, verb)(shuffled)
    gp = onefold.LastLayerGP(width=64).fit(data.x)
    for verb in (gp.variance, gp.relative):
        with pytest.warns(OnefoldWarning, match=message):
            verb(shuffled)


@pytest.mark.parametrize("labels", [(), (np.arange(60) % 3,)])
def test_labels_cannot_be_matched_with_a_loader_that_shuffles(labels: tuple[Any, ...]) -> None:
    data = Pairs(vectors(60))
    for sampler in (RandomSampler(data), SubsetRandomSampler(range(60)), WeightedRandomSampler([1.0] * 60, 60)):
        for loader in (
            DataLoader(data, 16, sampler=sampler),
            DataLoader(data, batch_sampler=BatchSampler(sampler, 16, drop_last=False)),
        ):
            with pytest.raises(InputError, match=r"^x: the DataLoader shuffles, so labels cannot be matched"):
                MAKERS["DeepEnsemble"]().fit(loader, *labels)


def test_images_larger_than_the_budget_are_read_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = pictures(200, 8, 8)
    np.save(tmp_path / "x.npy", x)
    inside = fit("CSD", x)
    monkeypatch.setattr("onefold.inputs.samples.CPU_BUDGET", 1000)
    outside = MAKERS["CSD"]().fit(tmp_path / "x.npy")
    np.testing.assert_allclose(outside.score(x), inside.score(x), rtol=1e-4, atol=1e-5)
    with pytest.warns(OnefoldWarning, match="a random sample of"):
        MAKERS["CSD"]().fit(DataLoader(Pairs(x), batch_size=16))


def test_a_table_with_words_and_gaps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def write(name: str, n: int, city: list[str], shift: float) -> Path:
        rows = [
            f"{rng.normal(shift):.3f},{'' if rng.random() < 0.1 else rng.integers(90)},{rng.choice(city)}"
            for _ in range(n)
        ]
        (tmp_path / name).write_text("\n".join(["height,age,city", *rows]))
        return tmp_path / name

    known, fresh = write("known.csv", 400, ["Bern", "Rome"], 0), write("fresh.csv", 200, ["Bern", "Rome"], 0)
    for strange in (write("elsewhere.csv", 200, ["Oslo"], 0), write("taller.csv", 200, ["Bern", "Rome"], 5)):
        detector = onefold.LastLayerGP().fit(known)
        assert metrics.auroc(detector.score(fresh), detector.score(strange)) > 0.95
    (tmp_path / "other.csv").write_text("height,weight\n1,2\n")
    with pytest.raises(InputError, match="age"):
        detector.score(tmp_path / "other.csv")


def test_regressors_disagree_where_there_was_no_data() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (300, 1))
    y = np.sin(3 * x[:, 0]) * 100
    ensemble = onefold.DeepEnsemble(5, hidden=(64, 64), recipe=Recipe(steps=500, batch=64, lr=3e-3)).fit(x, y)
    assert np.abs(ensemble.predict(x)[:, 0] - y).mean() < 5
    inside, outside = ensemble.score(x), ensemble.score(x + 3)
    assert np.median(outside) > 20 * np.median(inside)


def test_sorted_data_gives_the_same_statistics_as_shuffled() -> None:
    x = np.concatenate([0.05 * vectors(1500, 3), 3 * vectors(1500, 3, seed=1) + 6])
    shuffled = x[np.random.default_rng(0).permutation(3000)]
    fresh = np.concatenate([0.05 * vectors(300, 3, seed=2), 3 * vectors(300, 3, seed=3) + 6])
    means = []
    for data in (x, shuffled):
        gp = onefold.LastLayerGP(width=256).fit(data)
        assert gp.diagnose(fresh, show=False)["likeness"].ok
        means.append(float(gp.state.scorer.combine.std[0]))  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
    assert means[0] == pytest.approx(means[1], rel=0.2)


@pytest.mark.parametrize("name", ["CSD", "RND", "KNN", "LastLayerGP"])
def test_what_fails_loses_nothing(name: str) -> None:
    detector, x = fit(name, vectors(200)).calibrate(vectors(50, seed=1)), vectors(40, seed=2)
    before, threshold = detector.score(x), detector.threshold
    bad = vectors(300).copy()
    bad[299] = np.nan  # found late
    for verb in (detector.fit, detector.update, lambda data: detector.calibrate(data, 0.1)):
        with pytest.raises(InputError):
            verb(bad)
    np.testing.assert_array_equal(detector.score(x), before)
    assert detector.threshold == threshold
    with warnings.catch_warnings():  # not even a warning that somebody turned into an error comes half-way
        warnings.simplefilter("error")
        with contextlib.suppress(OnefoldWarning):
            detector.fit(np.ones((200, 5)))
    assert np.isfinite(detector.score(x)).all()


def test_samples_that_were_held_out_are_never_trained_on() -> None:
    csd = fit("CSD", vectors(300))
    state = csd.state
    held, remembered = ({row.numpy().tobytes() for row in m.samples} for m in (state.held_out, state.reservoir))
    assert len(held) == 30
    assert len(remembered) == 270
    assert not held & remembered


def test_a_checkpoint_belongs_to_its_context(tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    MAKERS["CSD"]().fit(vectors(), checkpoint=path)
    with pytest.raises(onefold.OnefoldError, match="other data or settings"):
        MAKERS["CSD"]().fit(vectors(), context=vectors(seed=1), checkpoint=path)


def test_whole_numbers_can_be_targets_and_loaders_bring_labels() -> None:
    x, prices = vectors(100), np.random.default_rng(0).integers(1000, 2000, 100).astype(float)
    with pytest.raises(InputError, match="class label"):
        MAKERS["DeepEnsemble"]().fit(x, prices)
    assert MAKERS["DeepEnsemble"](task="regression").fit(x, prices).predict(x).shape == (100, 1)
    loader = DataLoader(Pairs(x), batch_size=16)
    np.testing.assert_array_equal(
        MAKERS["DeepEnsemble"]().fit(loader).score(x), MAKERS["DeepEnsemble"]().fit(x, np.arange(100) % 3).score(x)
    )


def test_tables_pixels_and_one_shot_streams_for_models(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("a,b,c,d,e\n" + "\n".join(",".join(map(str, row)) for row in vectors(60)))
    net = regressor()
    found = onefold.KNN(from_model(net)).fit(tmp_path / "n.csv").score(tmp_path / "n.csv")
    np.testing.assert_allclose(found, onefold.KNN(from_model(net)).fit(vectors(60)).score(vectors(60)), atol=1e-6)
    (tmp_path / "w.csv").write_text("a,b\n1,x\n2,y\n3,x\n")
    with pytest.raises(InputError, match="a table with texts or missing values"):
        onefold.KNN(from_model(net)).fit(tmp_path / "w.csv")

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNet()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            assert image.max() <= 1
            return self.net(image)

    images = {"image": pictures(30, 1, 12, 12)}
    assert np.isfinite(onefold.KNN(from_model(Named())).fit(images).score(images)).all()

    class Once(IterableDataset):
        def __init__(self) -> None:
            self.rows = iter(vectors(50))

        def __iter__(self) -> Any:
            return self.rows

    for source in (Once(), DataLoader(Once(), batch_size=10)):
        with pytest.raises(InputError, match="can be read only once"):
            onefold.KNN().fit(source)


def test_without_samples_a_diagnosis_says_less(tmp_path: Path) -> None:
    for name in ("CSD", "KNN", "LastLayerGP"):
        fit(name, vectors(150)).save(tmp_path / name, samples=False)
        detector = onefold.load(tmp_path / name).calibrate(vectors(60, seed=1))
        assert "likeness" not in [finding.name for finding in detector.diagnose(vectors(60, seed=1), show=False)]


# --- exported ---------------------------------------------------------------------------------------------------------


def onnx_scores(path: Path, x: Any) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = x if isinstance(x, dict) else {"x": x}
    return list(session.run(None, {key: np.asarray(value) for key, value in feeds.items()}))


def assert_same(found: list[Any], detector: Any, query: Any, tolerance: float) -> None:
    """Scores to a relative tolerance, above a floor of 1e-4 of their median size; alarms but at the threshold."""
    assert len(found) == 3
    scores = detector.score(query)
    np.testing.assert_allclose(found[0], scores, rtol=tolerance, atol=1e-4 * np.median(np.abs(scores)))
    sure = np.abs(scores - detector.threshold) > 1e-3 * np.abs(scores).max()
    np.testing.assert_array_equal(np.asarray(found[2])[sure], detector.is_ood(query)[sure])
    np.testing.assert_allclose(found[1], detector.alarm.pvalues(np.asarray(found[0], float)), rtol=1e-12)


EXPORTED = [name for name, method in METHODS.items() if method.exports]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] if kind == "channels last" and name != "CSD" else [])
        for kind in ("vectors", "bytes", "channels last")
        for name in EXPORTED
    ],
)
def test_exported_models_score_alike_for_any_batch(name: str, kind: str, tmp_path: Path) -> None:
    x = {"vectors": vectors(300), "bytes": pictures(200, 9, 8), "channels last": pictures(100, 8, 8, 3)}[kind]
    detector = fit(name, x).calibrate(x[:60], fpr=0.1)
    for suffix in ("onnx", "pt2"):
        detector.export(tmp_path / f"d.{suffix}")
    program = torch.export.load(tmp_path / "d.pt2").module()
    for rows in (slice(0, 1), slice(0, 60)):
        query = np.ascontiguousarray(x[rows])
        assert_same(onnx_scores(tmp_path / "d.onnx", query), detector, query, 1e-4)
        assert_same([t.detach().numpy() for t in program(torch.from_numpy(query))], detector, query, 1e-6)


@pytest.mark.parametrize("user", USERS)
def test_a_users_model_is_exported_with_the_detector(user: str, tmp_path: Path) -> None:
    net, x, query = users()[user]
    detector = POST_HOC["CSD"](net).fit(x).calibrate(query, fpr=0.5)
    detector.export(tmp_path / "d.onnx")
    inputs = {k: v.numpy() for k, v in query.items()} if isinstance(query, dict) else np.asarray(query)
    if isinstance(inputs, np.ndarray) and inputs.dtype == np.float64:
        inputs = inputs.astype(np.float32)
    assert_same(onnx_scores(tmp_path / "d.onnx", inputs), detector, query, 1e-4)


def test_scoring_without_torch_and_without_onefold(tmp_path: Path) -> None:
    """In a process where neither can be imported."""
    x = pictures(100, 8, 8)
    detector = fit("CSD", x).calibrate(x[:50], fpr=0.1)
    detector.export(tmp_path / "d.onnx")
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['onefold'] = None\n"
        "import numpy, onnxruntime\n"
        f"x = numpy.load({str(tmp_path / 'x.npy')!r})\n"
        f"score, _, is_ood = onnxruntime.InferenceSession({str(tmp_path / 'd.onnx')!r}).run(None, {{'x': x}})\n"
        f"numpy.save({str(tmp_path / 's.npy')!r}, score)\n"
        "assert not any(m.split('.')[0] in ('torch', 'onefold') and sys.modules[m] for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    np.testing.assert_allclose(np.load(tmp_path / "s.npy"), detector.score(x), rtol=1e-4, atol=1e-4)


def test_export_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = fit("LastLayerGP", vectors())
    with pytest.raises(InputError, match=r"d.pkl: unknown suffix. Export a detector as .onnx or .pt2"):
        detector.export(tmp_path / "d.pkl")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r'pip install "onefold\[onnx\]"'):
        detector.export(tmp_path / "d.onnx")
    monkeypatch.undo()

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x * float(x.sum()))  # a number that no graph can hold

    with pytest.raises(InputError, match="cannot be exported"):
        onefold.LastLayerGP(from_model(Stubborn(), width=8)).fit(vectors()).export(tmp_path / "d.onnx")
    assert list(tmp_path.iterdir()) == []


# --- torch's global state --------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn() -> Iterator[Any]:
    """cuDNN's switches, with values that are not their defaults; restored afterwards."""
    switches = torch.backends.cudnn
    with switches.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=True):
        yield switches


def switches_of(cudnn: Any) -> tuple[Any, ...]:
    precisions = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *precisions)


def test_scoring_in_overlapping_threads_leaves_cudnn_as_it_was(cudnn: Any) -> None:
    """One thread begins, another begins, the first ends, the second ends: all is exact, and then as it was."""
    first_inside, second_inside, first_done = (threading.Event() for _ in range(3))
    allowed: dict[str, list[bool]] = {"first": [], "second": []}

    def features(x: torch.Tensor) -> torch.Tensor:
        name = threading.current_thread().name
        if name == "first":
            first_inside.set()
            assert second_inside.wait(60)
        elif name == "second":
            second_inside.set()
            assert first_done.wait(60)
        allowed.setdefault(name, []).append(cudnn.allow_tf32)
        return torch.cat([x, torch.ones_like(x)], 1)

    gp, before = onefold.LastLayerGP(Features(features)).fit(vectors()), switches_of(cudnn)
    first, second = (threading.Thread(target=gp.score, args=[vectors(3)], name=name) for name in ("first", "second"))
    first.start()
    assert first_inside.wait(60)
    second.start()
    first.join(60)
    first_done.set()
    second.join(60)
    assert allowed["first"] == allowed["second"] == [False]
    assert switches_of(cudnn) == before == (True, True, True, "tf32", "tf32")


def test_a_stopped_iteration_leaves_cudnn_as_it_was(cudnn: Any) -> None:
    ensemble = fit("DeepEnsemble", vectors(60))
    before = switches_of(cudnn)
    outputs = ensemble._predictions(vectors(60))
    next(outputs)
    assert switches_of(cudnn) == before
    outputs.close()


def test_each_switch_of_cudnn_lasts_as_long_as_it_is_needed(cudnn: Any) -> None:
    cudnn.benchmark = False
    before = switches_of(cudnn)
    with tune_cudnn():
        with exact_float32():
            with exact_float32():
                assert (cudnn.benchmark, cudnn.allow_tf32) == (True, False)
            assert (cudnn.benchmark, cudnn.allow_tf32) == (True, False)
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, True)
        with pytest.raises(KeyError), exact_float32():
            raise KeyError
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, True)
    assert switches_of(cudnn) == before


def test_a_training_step_tunes_cudnn(cudnn: Any) -> None:
    cudnn.benchmark, inside = False, []
    weight = nn.Parameter(torch.ones(3))

    def loss(*_: Any) -> torch.Tensor:
        inside.append((cudnn.benchmark, cudnn.deterministic))
        return weight.square().sum()

    _ = list(Training([weight], loss, Recipe(steps=2, batch=4), Draws(4, 1, 1, 0, torch.device("cpu"))))
    assert set(inside) == {(True, True)}
    assert cudnn.benchmark is False


@pytest.mark.parametrize(("convolutions", "everything"), [("ieee", "none"), ("tf32", "tf32")])
def test_precisions_of_torchs_newer_interface_are_kept(convolutions: str, everything: str, cudnn: Any) -> None:
    """With them, torch refuses to say whether it allows TF32, so torch.backends.cudnn.flags would fail."""
    inside = []

    def features(x: torch.Tensor) -> torch.Tensor:
        inside.append("tf32" in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision))
        return x

    try:
        torch.backends.fp32_precision = everything  # pyright: ignore[reportAttributeAccessIssue]
        cudnn.conv.fp32_precision = convolutions
        before = switches_of(cudnn)
        gp = onefold.LastLayerGP(Features(features)).fit(vectors())
        inside.clear()
        gp.score(vectors(3))
        assert inside == [False]
        assert switches_of(cudnn) == before
    finally:
        torch.backends.fp32_precision = "none"  # pyright: ignore[reportAttributeAccessIssue]
        cudnn.allow_tf32 = True


# --- streams ----------------------------------------------------------------------------------------------------------


def ring(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * rng.random(n)
    x = np.stack([np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(3 * angle)], 1)
    return (x + 0.1 * rng.normal(size=x.shape)).astype(np.float32)


def sectors(n: int, seed: int, kept: bool | None) -> np.ndarray:
    """Points near a ring: of every other sixth of it, of the rest, or of all."""
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * rng.random(4 * n)
    angle = angle[:n] if kept is None else angle[(np.sin(3 * angle) > 0) == kept][:n]
    x = np.stack([np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)], 1)
    return (x + 0.05 * rng.normal(size=x.shape)).astype(np.float32)


def test_after_a_stream_csd_ranks_as_if_fitted_on_the_whole() -> None:
    stream = np.concatenate([sectors(600, 0, True), sectors(3000, 1, None)])
    recipe = Recipe(steps=1500, batch=64, lr=3e-3, warmup=100)
    whole = onefold.CSD(score="relative", recipe=recipe).fit(stream)
    online = onefold.CSD(score="relative", recipe=recipe).fit(stream[:600])
    anywhere = np.random.default_rng(2).uniform(-2, 2, (200, 4)).astype(np.float32)
    query = np.concatenate([sectors(200, 5, True), sectors(200, 6, False), anywhere])
    before = metrics.rank_correlation(online.score(query), whole.score(query))
    for start in range(600, len(stream), 500):
        online.update(stream[start : start + 500])
    after = metrics.rank_correlation(online.score(query), whole.score(query))
    assert before < 0.9
    assert after >= 0.95


def test_memory_of_a_stream_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefold.inputs.samples.RESERVOIR_SIZE", 100)
    csd = fit("CSD", vectors(150))
    for seed in range(4):
        csd.update(vectors(150, seed=seed))
    state = csd.state
    assert len(state.reservoir) == 100
    assert state.reservoir.seen == 150 + 4 * 135  # a tenth of each update is held out
    assert len(state.held_out) == 15 + 4 * 15


def test_forgetting_makes_old_data_strange_again() -> None:
    old, new = vectors(400, 4) + 4, vectors(400, 4, seed=1) - 4
    kernel = from_model(nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 1)), width=None)
    for half_life, forgotten in ((None, False), (40.0, True)):
        gp = onefold.LastLayerGP(kernel, score="relative").fit(old).update(new, half_life=half_life)
        assert (np.median(gp.score(old)) > 3 * np.median(gp.score(new))) == forgotten
        knn = onefold.KNN(kernel, bank=200).fit(old).update(new, half_life=half_life)
        assert (np.median(knn.score(old)) > 3 * np.median(knn.score(new))) == forgotten


def test_weights_of_a_half_life_by_hand() -> None:
    x = vectors(50, 3)
    kernel = from_model(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), width=None)
    gp = onefold.LastLayerGP(kernel).fit(x[:20]).update(x[20:33], half_life=7).update(x[33:], half_life=7)
    phi = torch.nn.functional.normalize(kernel.features(torch.from_numpy(x)), dim=1).double()
    weights = torch.exp2(-torch.clamp(torch.arange(49, -1, -1), max=30) / 7)  # the first 20 came without a half-life
    torch.testing.assert_close(gp.state.scorer.gram, phi.T @ (weights[:, None] * phi))  # pyright: ignore[reportArgumentType]
    assert gp.state.scorer.noise == pytest.approx(1e-3 * float(weights.sum()) / 6)


@pytest.mark.parametrize("name", ["CSD", "RND", "KNN", "LastLayerGP"])
def test_updates_make_new_data_familiar_and_keep_the_old(name: str) -> None:
    longer = Recipe(steps=1500, batch=64, lr=3e-3, warmup=100)
    makers = {"CSD": lambda: onefold.CSD(recipe=longer), "RND": lambda: onefold.RND(recipe=LONG),
              "KNN": onefold.KNN, "LastLayerGP": lambda: onefold.LastLayerGP(score="relative")}  # fmt: skip
    old, new = (vectors(700, 4, seed=seed) + shift for seed, shift in ((0, 0), (1, 3)))
    detector = makers[name]().fit(old[:500]).calibrate(old[500:])
    assert metrics.auroc(detector.score(old[500:]), detector.score(new[500:])) > 0.98
    detector.update(new[:250]).update(new[250:500])
    assert metrics.auroc(detector.score(old[500:]), detector.score(new[500:])) < 0.85
    assert metrics.auroc(detector.score(old[500:]), detector.score(old[500:] - 6)) > 0.98
    assert detector.alarm is None
    with pytest.raises(InputError, match="samples of shape"):
        detector.update(vectors(10, 3))


# --- resets of φ and ψ -----------------------------------------------------------------------------------------------


def weights_of(detector: onefold.CSD, part: str) -> dict[str, torch.Tensor]:
    state = detector.state.scorer.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if part in name}


def test_a_reset_starts_new_networks_and_keeps_the_rest() -> None:
    """At the update that completes `reset_every` samples, φ and ψ are trained anew; nothing else is lost."""
    x = vectors(200)
    detector = onefold.CSD(recipe=SHORT, architecture=SMALL).fit(x)
    fitted = detector.state
    detector.update(vectors(60, seed=1), reset_every=100)
    updated: Any = detector.state.summary
    assert (updated.since_reset, updated.resets) == (60, 0)
    biases = weights_of(detector, "model.phi.1.head.bias")
    expected = detector.state.reservoir.copy(), detector.state.held_out.copy()
    detector.update(vectors(60, seed=2), reset_every=100)
    state, summary = detector.state, detector.state.summary
    assert (summary.since_reset, summary.resets) == (0, 1)  # pyright: ignore[reportAttributeAccessIssue]
    before, after = fitted.scorer.state_dict(), state.scorer.state_dict()
    kept = [
        name
        for name in after
        if name.startswith("map.") or (name.endswith((".mean", ".std")) and "combine" not in name)
    ]
    assert len(kept) > 6
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not torch.allclose(biases["model.phi.1.head.bias"], after["model.phi.1.head.bias"])
    for reservoir, other in zip(expected, (state.reservoir, state.held_out), strict=True):
        rows = {row.numpy().tobytes() for row in other.samples}  # pyright: ignore[reportOptionalIterable, reportAttributeAccessIssue]
        assert {row.numpy().tobytes() for row in reservoir.samples} <= rows  # pyright: ignore[reportOptionalIterable, reportAttributeAccessIssue]
    assert state.samples_seen == fitted.samples_seen + 2 * 54  # every tenth sample is held out


def test_a_reset_draws_new_weights_each_time() -> None:
    """With no training to speak of, the weights are those that were drawn: new ones at every reset, not the fit's."""
    brief = Recipe(steps=1, batch=2, lr=1e-9)
    detector = onefold.CSD(recipe=brief, architecture=SMALL).fit(vectors(200))
    drawn = [weights_of(detector, "phi.1.hidden.0.weight")]
    for seed in (1, 2):
        detector.update(vectors(20, seed=seed), reset_every=20)
        drawn.append(weights_of(detector, "phi.1.hidden.0.weight"))
    matrices = [next(iter(weights.values())) for weights in drawn]
    for first, second in itertools.combinations(matrices, 2):
        assert float((first - second).abs().mean()) > 0.1
    plain = onefold.CSD(recipe=brief, architecture=SMALL).fit(vectors(200)).update(vectors(20, seed=1))
    torch.testing.assert_close(next(iter(weights_of(plain, "phi.1.hidden.0.weight").values())), matrices[0])


def test_a_reset_runs_the_recipe_of_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from onefold.detectors import csd

    recipes, sizes = [], []
    whole = csd.distillation

    def recorded(model: Any, x: Any, kernel: Any, contexts: Any, recipe: Recipe, *rest: Any, **keywords: Any) -> Any:
        recipes.append(recipe)
        sizes.append(len(x))
        return whole(model, x, kernel, contexts, recipe, *rest, **keywords)

    monkeypatch.setattr(csd, "distillation", recorded)
    recipe = Recipe(steps=80, batch=16, lr=3e-3)
    detector = onefold.CSD(recipe=recipe, architecture=SMALL).fit(vectors(200))
    detector.update(vectors(20, seed=1)).update(vectors(20, seed=2), reset_every=40)
    assert [r.steps for r in recipes] == [80, 50, 80]
    assert recipes[2] == recipe
    assert sizes[2] == 180 + 18 + 18 + 18  # stored samples, which include the new ones, and the new ones


def test_a_loaded_detector_resets_at_the_same_point(tmp_path: Path) -> None:
    here = onefold.CSD(recipe=SHORT, architecture=SMALL).fit(vectors(200)).update(vectors(30, seed=1), reset_every=50)
    here.save(tmp_path / "x")
    loaded = onefold.load(tmp_path / "x")
    assert isinstance(loaded, onefold.CSD)
    for seed in (2, 3, 4):
        for detector in (here, loaded):
            detector.update(vectors(20, seed=seed), reset_every=50)
        np.testing.assert_array_equal(here.score(vectors(9)), loaded.score(vectors(9)))
        assert here.state.summary == loaded.state.summary
    assert here.state.summary.resets == 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InputError, match="reset_every: must be"):
        here.update(vectors(20), reset_every=0)


# --- honest about itself ----------------------------------------------------------------------------------------------


def test_a_good_fit_says_so(recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]) -> None:
    detector = onefold.CSD(recipe=Recipe(steps=1500, batch=64, lr=3e-3, warmup=100)).fit(ring(1000, 0))
    diagnosis = detector.diagnose(ring(300, 1))
    assert diagnosis.ok
    assert [w for w in recwarn if issubclass(w.category, OnefoldWarning)] == []
    assert {f.name for f in diagnosis} == {"signal", "convergence", "familiarity", "agreement", "likeness"}
    assert capsys.readouterr().out.strip() == str(diagnosis)
    assert diagnosis["agreement"].value > 0.5
    assert not detector.diagnose(ring(300, 1) + 3, show=False)["likeness"].ok


def test_a_fit_that_has_not_converged_warns() -> None:
    with pytest.warns(OnefoldWarning, match="convergence: .* has not converged") as caught:
        detector = onefold.CSD(recipe=Recipe(steps=5, batch=32)).fit(ring(300, 0))
    assert not any(warning.filename.endswith(("csd.py", "diagnosis.py")) for warning in caught)  # not a line of ours
    assert not detector.diagnose(show=False)["convergence"].ok


def test_train_samples_that_are_not_familiar_warn() -> None:
    with pytest.warns(OnefoldWarning, match="familiarity: .* should be near zero"):
        onefold.CSD(recipe=Recipe(steps=2, batch=32, lr=1e-5)).fit(ring(300, 0))


def test_a_flat_variance_warns() -> None:
    """A model that sees nothing of its input: all features alike, so no input is stranger than another."""

    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.ones(len(x), 3) + 1e-9 * x[:, :1])

    with pytest.warns(OnefoldWarning, match="signal: .* they are flat, and rank nothing"):
        onefold.LastLayerGP(from_model(Blind(), width=16), score="relative").fit(vectors(100))


def test_agreement_is_the_rank_correlation_with_last_layer_gp() -> None:
    """The finding's number, computed again through the public method on the same features."""
    x = ring(400, 0)
    csd = onefold.CSD(recipe=LONG, score="relative").fit(x)
    state = csd.state
    kernel = onefold.kernels.Features(state.scorer.map.prior)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    gp = onefold.LastLayerGP(kernel, score="relative").fit(x)
    from onefold.inputs.reservoir import shuffle_values

    samples = state.reservoir.samples
    assert isinstance(samples, torch.Tensor)
    few = samples[:500]
    queries = torch.cat([few, shuffle_values(few, 0)])  # type: ignore[list-item]
    expected = metrics.rank_correlation(csd.score(queries), gp.score(queries))
    assert csd.diagnose(show=False)["agreement"].value == pytest.approx(expected, abs=1e-6)


# --- the default score ------------------------------------------------------------------------------------------------


def test_the_combined_score_is_its_formula() -> None:
    detector, x = fit("CSD", vectors(300)), vectors(50, seed=1)
    combine = detector.state.scorer.combine
    logs = np.log(np.maximum(detector.relative(x), 1e-7)), np.log(detector.variance(x))
    z = [(log - float(combine.mean[i])) / float(combine.std[i]) for i, log in enumerate(logs)]
    np.testing.assert_allclose(
        detector.score(x), np.maximum(z[0], z[1] - float(combine.handicap)), rtol=1e-4, atol=1e-4
    )


def test_the_handicap_is_what_a_second_opinion_gains_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    for correlation in (0.0, 0.5, 1.0):
        a, b = torch.randn(2, 100_000, generator=generator)
        variance = correlation * a + math.sqrt(1 - correlation**2) * b
        combine = CombinedScore()
        combine.set_statistics((a - 9).exp(), (variance - a + 9).exp())
        assert float(combine.handicap) == pytest.approx(math.sqrt((1 - correlation) / math.pi), abs=0.01)


def test_its_statistics_are_those_of_samples_that_no_training_saw() -> None:
    x = vectors(300)
    detector = fit("CSD", x)
    held = detector.state.held_out.samples.numpy()
    assert len(held) == 30
    relative = np.log(np.maximum(detector.relative(held), 1e-7))
    np.testing.assert_allclose(float(detector.state.scorer.combine.mean[0]), relative.mean(), rtol=1e-4)
    rows = {row.tobytes() for row in x}
    assert all(row.tobytes() in rows for row in held)


def test_leave_one_out_statistics_are_those_of_fits_without_the_sample() -> None:
    x = vectors(40, 3)
    kernel = from_model(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1)), width=None)
    gp = onefold.LastLayerGP(kernel).fit(x)
    share, _ = gp.leave_one_out(gp.state)
    samples = gp.state.reservoir.samples
    for i in (0, 7, 39):
        rest = np.delete(x, [j for j in range(40) if np.array_equal(x[j], samples[i].numpy())], axis=0)  # pyright: ignore
        other = onefold.LastLayerGP(kernel, noise=1e-3 * 40 / 39).fit(rest)  # the same λ = noise · N/D
        assert float(share[i]) == pytest.approx(other.relative(samples[i : i + 1])[0], rel=1e-5)  # pyright: ignore


def test_a_dark_image_cannot_hide_behind_its_small_scale() -> None:
    """The variance of an input with small features is small however strange it is; the combined score still sees it."""
    rng = np.random.default_rng(0)
    bright = (rng.integers(100, 256, (600, 8, 8)) * np.tri(8)).astype(np.uint8)
    strange = (np.rint(rng.integers(0, 60, (200, 8, 8)) * (1 - np.tri(8)))).astype(np.uint8)
    gp = onefold.LastLayerGP(width=512).fit(bright[:400])
    plain, combined = (
        metrics.auroc(getattr(gp, kind)(bright[400:]), getattr(gp, kind)(strange)) for kind in ("variance", "score")
    )
    assert combined > 0.99
    assert combined >= plain


def test_the_statistics_of_the_combined_score_by_hand() -> None:
    relative, scale = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)) + 0.1
    combine, scale = CombinedScore(), scale**3  # neither logarithm has a deviation of 1
    combine.set_statistics(relative, scale)
    logs = np.log([relative.numpy(), (relative * scale).numpy()])
    z = (logs - logs.mean(1, keepdims=True)) / logs.std(1, keepdims=True)
    handicap = z.max(0).mean()
    assert float(combine.handicap) == pytest.approx(handicap, rel=1e-4)
    found = combine(relative, scale).numpy()
    np.testing.assert_allclose(found, np.maximum(z[0], z[1] - handicap), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["CSD", "RND", "KNN", "LastLayerGP"])
def test_the_nearest_neighbour_of_a_remembered_sample_is_itself(name: str) -> None:
    detector = fit(name, vectors(200))
    np.testing.assert_array_equal(detector.neighbours(detector.remembered[:9], 3)[:, 0], np.arange(9))


def test_a_model_is_seen_from_the_middle_of_its_encodings() -> None:
    kernel = from_model(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1)), width=64)
    csd = onefold.CSD(kernel, score="combined", recipe=SHORT, architecture=SMALL)
    state: Any = csd.fit(vectors(200)).state
    torch.testing.assert_close(state.scorer.map.centre, encoder_centre(kernel.encode(state.reservoir.samples)))


def test_familiarity_is_relative_to_how_unlike_train_samples_are() -> None:
    assert diagnosis.familiarity(np.full(9, 0.1), 1.0).ok
    finding = diagnosis.familiarity(np.full(9, 0.1), 0.2)
    assert finding.value == pytest.approx(0.5)
    assert not finding.ok


def test_few_samples_may_look_unlike_by_chance() -> None:
    """Ten against ten: chance alone gives an AUROC within ½ ± 4 √(21/1200)."""
    few, many = np.arange(10.0), np.arange(1000.0) / 100
    assert diagnosis.likeness(few, "others", 0.1, few + 2).ok
    assert not diagnosis.likeness(many, "others", 0.1, many + 2).ok


def test_held_out_samples_are_forgotten_as_fast_as_the_others() -> None:
    """A tenth of the stream, so a tenth of the half-life: 20 / ln 2 stay."""
    csd = fit("CSD", vectors(300)).update(vectors(2000, seed=1), half_life=200)
    assert len(csd.state.held_out) == 29
    assert len(csd.state.reservoir) == 289
