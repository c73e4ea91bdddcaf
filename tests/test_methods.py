"""One contract over one list of methods, then what each promises beyond it."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, nn

import onefold
from onefold import metrics
from onefold.detectors import METHODS
from onefold.detectors.csd_scorer import CSDScorer
from onefold.detectors.members import entropy, mutual_information, variance
from onefold.detectors.registry import by_command
from onefold.distil import Architecture, Chain
from onefold.errors import InputError, NotFittedError
from onefold.inputs.samples import InMemorySamples
from onefold.kernels import from_model, infinite, last_layer
from onefold.nn.train import Recipe

SHORT = Recipe(steps=25, batch=16, lr=3e-3)
SMALL = Architecture(channels=(4,), hidden=(32,), outputs=16)


class Classifier(nn.Module):
    """Somebody's classifier, for inputs of any shape."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 3, generator=Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float().flatten(1)
        return rows @ self.weight[: rows.shape[1]]


MAKERS: dict[str, Callable[..., Any]] = {
    "CSD": lambda **k: onefold.CSD(recipe=SHORT, architecture=SMALL, **k),
    "LastLayerGP": lambda **k: onefold.LastLayerGP(width=64, **k),
    "LocalGP": lambda **k: onefold.LocalGP(k=10, **k),
    "RND": lambda **k: onefold.RND(recipe=SHORT, channels=(4,), hidden=(32,), target_hidden=(32,), width=16, **k),
    "DeepEnsemble": lambda **k: onefold.DeepEnsemble(2, recipe=SHORT, channels=(4,), hidden=(32,), **k),
    "MCDropout": lambda **k: onefold.MCDropout(8, recipe=SHORT, channels=(4,), hidden=(32,), **k),
    "Laplace": lambda **k: onefold.Laplace(4, recipe=SHORT, channels=(4,), hidden=(32,), **k),
    "SGMCMC": lambda **k: onefold.SGMCMC(4, epochs=2, burn_in=4, lr=0.01, batch=16, channels=(4,), hidden=(32,), **k),
    "KNN": lambda **k: onefold.KNN(k=3, **k),
    "Energy": lambda **k: onefold.Energy(Classifier(k.get("seed", 0)), **k),
}
LABELLED = ("DeepEnsemble", "MCDropout", "Laplace", "SGMCMC")
every_method = pytest.mark.parametrize("name", METHODS)


def fit(name: str, x: Any, **keywords: Any) -> Any:
    labels = (np.arange(len(x)) % 3,) if name in LABELLED else ()
    return MAKERS[name](**keywords).fit(x, *labels)


def vectors(n: int = 60, d: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def pictures(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# --- the registry ----------------------------------------------------------------------------------------------------


@every_method
def test_the_registry_describes_the_class(name: str) -> None:
    method = METHODS[name]
    kind: Any = method.detector_class
    assert kind is getattr(onefold.detectors, name)
    assert kind.__name__ == name
    arguments, settings = (inspect.signature(function).parameters for function in (kind.fit, kind))
    assert method.needs_labels == ("y" in arguments)
    assert method.trains == ("checkpoint" in arguments)
    assert method.accepts_kernel == ("kernel" in settings)
    assert method.needs_classifier == (method.accepts_kernel and settings["kernel"].default is inspect.Parameter.empty)
    for flag, verb in ((method.updates, "update"), (method.exports, "export"), (method.has_variance, "variance")):
        assert flag == hasattr(kind, verb)


def test_methods_have_names_of_their_own_on_the_command_line() -> None:
    assert {name: by_command(method.command).name for name, method in METHODS.items()} == {
        name: name for name in METHODS
    }
    with pytest.raises(KeyError):
        by_command("CSD")


def test_the_registry_loads_neither_torch_nor_any_method() -> None:
    code = (
        "import sys, onefold.detectors.registry; print([name for name in sys.modules if name == 'torch'"
        " or name.startswith('onefold.detectors.') and name != 'onefold.detectors.registry'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the contract ----------------------------------------------------------------------------------------------------


def test_every_method_is_covered() -> None:
    assert set(MAKERS) == set(METHODS)


@every_method
@pytest.mark.parametrize(
    "x",
    [vectors(), vectors().astype(np.float64), torch.from_numpy(vectors()), pictures(40, 9, 7), pictures(40, 3, 8, 8),
     pictures(40, 8, 8, 3), vectors().astype(np.float16), vectors()[:, ::-1], vectors().astype(">f8"),
     (vectors() > 0), (10 * vectors()).astype(np.int64), vectors().tolist()],
    ids=["float32", "float64", "tensor", "grey", "channels first", "channels last", "float16", "reversed view",
         "big-endian", "bool", "int64", "lists"],
)  # fmt: skip
def test_scores_are_finite_and_one_for_each_sample(name: str, x: Any) -> None:
    scores = fit(name, x).score(x[:10])
    assert scores.shape == (10,)
    assert scores.dtype == np.float64
    assert np.isfinite(scores).all()
    if name in ("RND", "KNN", *LABELLED):
        assert (scores >= 0).all()


def global_numpy_state() -> np.ndarray:
    return np.array(np.random.get_state(legacy=False)["state"]["key"])  # type: ignore[index]  # noqa: NPY002


@every_method
def test_same_seed_same_scores_and_the_global_state_is_left_alone(name: str) -> None:
    x, torch_state, numpy_state = vectors(), torch.get_rng_state(), global_numpy_state()
    first, second = fit(name, x, seed=3).score(x), fit(name, x, seed=3).score(x)
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, fit(name, x, seed=4).score(x))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(global_numpy_state(), numpy_state)


@every_method
def test_scores_do_not_depend_on_batch_or_order(name: str) -> None:
    method, x = fit(name, vectors()), vectors(1500, seed=1)
    scores, order = method.score(x), np.random.default_rng(2).permutation(1500)
    np.testing.assert_allclose(method.score(x[order]), scores[order], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(method.score(x[700:703]), scores[700:703], rtol=1e-4, atol=1e-7)


@every_method
def test_scoring_changes_nothing(name: str) -> None:
    method, x = fit(name, vectors()), vectors(20, seed=1)
    copy = x.copy()
    first = method.score(x)
    np.testing.assert_array_equal(method.score(x), first)
    np.testing.assert_array_equal(x, copy)


@every_method
def test_scoring_before_fitting_is_refused(name: str) -> None:
    with pytest.raises(NotFittedError, match=f"{name} is not fitted yet"):
        MAKERS[name]().score(vectors())


BAD = {
    "NaN": (np.array([[1.0, np.nan], [0, 1]]), "NaN"),
    "infinity": (np.array([[1.0, np.inf], [0, 1]]), "infinite"),
    "too large": (np.array([[1.0, 1e300], [0, 1]]), "too large"),
    "empty": (np.zeros((0, 4)), r"empty \(shape \(0, 4\)\)"),
    "no features": (np.zeros((4, 0)), "empty"),
    "one sample": (np.zeros((1, 4)), "one sample"),
    "no samples axis": (np.zeros(4), r"samples of shape \(\)"),
    "five axes": (np.zeros((2, 2, 2, 2, 2)), "kernels.from_model"),
    "strings": (np.array([["a", "b"], ["c", "d"]]), "dtype <U1 is not supported. Pass numbers"),
    "mixed": (np.array([[1, "b"], [2.0, None]], dtype=object), "mixed columns"),
    "ragged": ([[1.0, 2.0], [3.0]], "ragged"),
    "complex": (np.zeros((3, 2), dtype=complex), "complex"),
    "nothing": (None, "x: a NoneType is not supported. Pass an array, a tensor"),
}


@every_method
@pytest.mark.parametrize("case", BAD)
def test_bad_train_data_is_refused_in_one_line(name: str, case: str) -> None:
    x, message = BAD[case]
    if (name, case) == ("Energy", "five axes"):
        return  # a model of the user's own may take them
    with pytest.raises(InputError, match=message) as error:
        MAKERS[name]().fit(x, *([[0, 1]] if name in LABELLED else []))
    assert "\n" not in str(error.value)


@every_method
def test_bad_queries_are_refused_and_nothing_is_lost(name: str) -> None:
    method = fit(name, pictures(30, 8, 8))
    before = method.score(pictures(5, 8, 8))
    for query, message in (
        (pictures(5, 8, 9), r"samples of shape \(8, 9\), but the model was fitted on \(8, 8\)"),
        (pictures(5, 8, 8) / 255, "fitted on uint8"),
        (np.full((2, 8, 8), np.nan), "uint8"),
        (np.zeros((0, 8, 8), np.uint8), "empty"),
    ):
        with pytest.raises(InputError, match=message):
            method.score(query)
    with pytest.raises(InputError):
        method.fit(np.full((4, 8, 8), np.nan), *([np.zeros(4)] if name in LABELLED else []))
    np.testing.assert_array_equal(method.score(pictures(5, 8, 8)), before)


@every_method
def test_constant_and_duplicated_data_are_no_trouble(name: str) -> None:
    for x in (np.ones((20, 3)), np.repeat(vectors(2, 3), 10, axis=0), np.repeat(pictures(2, 6, 6), 9, axis=0)):
        assert np.isfinite(fit(name, x).score(x)).all()
    blank = np.zeros((12, 6, 6))
    if name in ("CSD", "LastLayerGP", "LocalGP", "KNN"):  # networks without biases see nothing at all in it
        with pytest.raises(InputError, match=r"is the data constant|Check for constant data"):
            fit(name, blank)
    else:
        assert np.isfinite(fit(name, blank).score(blank)).all()


@every_method
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="unknown"):
        MAKERS[name](device="abacus")
    with pytest.raises(
        InputError, match=r"^device: 'mps' is not supported, as Apple's GPU has no float64\. Use 'cpu'\.$"
    ):
        MAKERS[name](device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="torch sees 0 CUDA devices"):
            MAKERS[name](device="cuda")


@pytest.mark.parametrize("name", ["CSD", "LastLayerGP"])
def test_one_pass_gives_score_variance_and_relative_variance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = vectors(80)
    detector = fit(name, x)
    separate = {key: getattr(detector, key)(x) for key in ("score", "variance", "relative")}
    passes: list[int] = []
    scorer = type(detector.state.scorer)
    parts = scorer.parts
    monkeypatch.setattr(scorer, "parts", lambda self, batch: (passes.append(len(batch)), parts(self, batch))[1])
    together = detector.outputs(x)
    assert list(together) == ["score", "variance", "relative"]
    assert passes == [80]
    for key, values in separate.items():
        np.testing.assert_array_equal(together[key], values)


@pytest.mark.parametrize("name", ["CSD", "LastLayerGP", "RND"])
def test_half_of_a_ring_makes_the_other_half_strange(name: str) -> None:
    """Training must make the seen half familiar, and leave the other, of the same size and shape, strange."""
    rng = np.random.default_rng(0)

    def arc(n: int, start: float, end: float) -> np.ndarray:
        angle = np.pi * rng.uniform(start, end, n)
        x = np.stack([np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)], 1)
        return x + 0.1 * rng.normal(size=x.shape)

    train, familiar, strange = arc(500, 0, 1), arc(200, 0, 1), arc(200, 1.1, 1.9)

    def scores(steps: int) -> tuple[np.ndarray, np.ndarray]:
        recipe = Recipe(steps=steps, batch=64, lr=3e-3)
        method = {
            "CSD": onefold.CSD(score="relative", recipe=recipe),
            "LastLayerGP": onefold.LastLayerGP(score="relative", width=256),
            "RND": onefold.RND(recipe=recipe),
        }[name].fit(train)
        return method.score(familiar), method.score(strange)

    low, high = scores(600)
    assert metrics.auroc(low, high) > 0.95
    assert high.mean() > 2 * low.mean()
    if name != "LastLayerGP":
        assert low.mean() < 0.05 * scores(1)[0].mean()


# --- CSD -----------------------------------------------------------------------------------------------------------


def test_variance_is_the_prior_times_the_relative_variance() -> None:
    kernel = infinite(1, b_std=0.5)
    x = vectors(50, 3)
    csd = onefold.CSD(kernel, recipe=SHORT, architecture=SMALL).fit(x)
    prior = kernel.diag(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(csd.variance(x), prior * csd.relative(x), rtol=1e-5)
    raw = onefold.CSD(kernel, recipe=SHORT, architecture=Architecture(hidden=(32,), normalise=False)).fit(x)
    positive = raw.variance(x) > 0
    np.testing.assert_allclose((raw.variance(x) / prior)[positive], raw.relative(x)[positive], rtol=1e-5)


def test_the_score_is_the_one_asked_for() -> None:
    x = vectors()
    relative = MAKERS["CSD"](score="relative").fit(x)
    np.testing.assert_array_equal(relative.score(x), relative.relative(x))
    plain = MAKERS["CSD"](score="variance").fit(x)
    np.testing.assert_array_equal(plain.score(x), plain.variance(x))


def test_context_data_of_the_target_domain_teaches_that_it_is_strange() -> None:
    """Section 3.2, "Finetuning": with unlabelled target data as contexts, the same budget separates it better."""
    x, target = vectors(300, 6), vectors(200, 6, seed=1) * 0.6 + 0.9
    recipe = Recipe(steps=300, batch=64, lr=3e-3)

    def auroc(**keywords: Any) -> float:
        csd = onefold.CSD(score="relative", recipe=recipe).fit(x, **keywords)
        return metrics.auroc(csd.score(vectors(200, 6, seed=2)), csd.score(vectors(200, 6, seed=3) * 0.6 + 0.9))

    assert auroc(context=target) > auroc() + 0.02


def test_contexts_of_another_shape_or_kind_are_refused() -> None:
    csd = MAKERS["CSD"]()
    with pytest.raises(InputError, match=r"context: samples of shape \(4,\)"):
        csd.fit(vectors(), context=vectors(10, 4))
    with pytest.raises(InputError, match="augmented contexts are for images"):
        MAKERS["CSD"](augment=0.5).fit(vectors())
    with pytest.raises(InputError, match="augment: must be"):
        MAKERS["CSD"](augment=2.0)


def test_augmented_contexts_change_the_fit() -> None:
    x = pictures(40, 8, 8)
    plain, augmented = (fit("CSD", x, augment=share).relative(x) for share in (0.0, 0.5))
    assert not np.allclose(plain, augmented)
    np.testing.assert_array_equal(fit("CSD", x).relative(x), augmented)  # the default for images


def test_what_all_encodings_have_in_common_does_not_count() -> None:
    """Nor does the unit they are in: times any number, scores stay; plus any vector, samples do not become alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator).numpy()
    weights = torch.randn(4, 6, generator=generator)

    class Moved(nn.Module):
        def __init__(self, times: float, plus: float) -> None:
            super().__init__()
            self.times, self.plus, self.head = times, plus, nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.times * (torch.tanh(x @ weights) + self.plus))

    def fitted(times: float, plus: float, centred: bool | None = None) -> onefold.CSD:
        kernel = from_model(Moved(times, plus), width=128)
        csd = onefold.CSD(kernel, centred=centred, score="combined", recipe=SHORT, architecture=SMALL, device="cpu")
        return csd.fit(x)

    def alike(detector: onefold.CSD) -> float:
        scorer = detector.state.scorer
        assert isinstance(scorer, CSDScorer)
        features = scorer.map
        unit = torch.nn.functional.normalize(features.features(features.encode(torch.from_numpy(x))), dim=1)
        return float((unit @ unit.T).mean())

    one, other = fitted(1, 0), fitted(7, 0)
    for how, times in (("score", 1), ("variance", 49), ("relative", 1)):
        expected = times * getattr(one, how)(x + 1)
        np.testing.assert_allclose(getattr(other, how)(x + 1), expected, rtol=1e-3, atol=1e-4 * times)
    assert alike(fitted(1, 30, centred=False)) > 0.99
    assert alike(fitted(1, 30)) < 0.5


def test_images_are_seen_from_the_mean_of_their_features(tmp_path: Path) -> None:
    """The labels are those of features less their mean over train data; without it all images are alike."""
    x = pictures(60, 8, 8)
    default, plain = (onefold.CSD(centred=how, recipe=SHORT, architecture=SMALL, device="cpu") for how in (None, False))
    maps: list[Any] = [detector.fit(x).state.scorer.map for detector in (default, plain)]
    assert maps[1].centre is None
    kept = default.state.reservoir.samples  # a tenth is held out
    assert isinstance(kept, torch.Tensor)
    raw, seen = (one.features(default.state.prepare(kept)) for one in reversed(maps))
    torch.testing.assert_close(maps[0].centre, raw.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen, raw - raw.mean(0), rtol=1e-4, atol=1e-5)
    summaries: list[Any] = [detector.state.summary for detector in (default, plain)]
    assert summaries[0].dissimilarity > 2 * summaries[1].dissimilarity
    default.save(tmp_path / "d.onefold")
    np.testing.assert_array_equal(onefold.load(tmp_path / "d.onefold", device="cpu").score(x), default.score(x))
    with pytest.raises(InputError, match="used as it is"):
        onefold.CSD(last_layer(nn.Linear(4, 2)), centred=True)


def test_post_hoc_on_a_users_model() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 3)).train()
    x = pictures(50, 8, 8)
    for method in (onefold.CSD(from_model(net, width=128), recipe=SHORT, architecture=SMALL),
                   onefold.LastLayerGP(from_model(net, "1"))):  # fmt: skip
        assert np.isfinite(method.fit(x).score(x)).all()
    assert net.training


# --- LastLayerGP -----------------------------------------------------------------------------------------------------


def test_last_layer_gp_is_its_formula() -> None:
    x, query = vectors(80, 3), vectors(20, 3, seed=1)
    net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    gp = onefold.LastLayerGP(from_model(net, width=None), noise=1e-2).fit(x)

    def unit(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = torch.tanh(net[0](torch.from_numpy(a))).detach().double().numpy()
        norm = np.linalg.norm(z, axis=1, keepdims=True)
        return z / norm, norm[:, 0] ** 2

    (phi, _), (z, scale) = unit(x), unit(query)
    noise = 1e-2 * 80 / 12
    relative = noise * np.einsum("ij,jk,ik->i", z, np.linalg.inv(phi.T @ phi + noise * np.eye(12)), z)
    np.testing.assert_allclose(gp.relative(query), relative, rtol=1e-5)
    np.testing.assert_allclose(gp.variance(query), relative * scale, rtol=1e-5)


@given(cut=st.integers(2, 79))
def test_updating_is_fitting_on_all(cut: int) -> None:
    x, query = vectors(80, 3), vectors(20, 3, seed=1)
    kernel = from_model(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1)), width=30)
    whole = onefold.LastLayerGP(kernel).fit(x)
    parts = onefold.LastLayerGP(kernel).fit(x[:cut]).update(x[cut:])
    np.testing.assert_allclose(parts.relative(query), whole.relative(query), rtol=1e-6)  # features are float32


# --- DeepEnsemble ----------------------------------------------------------------------------------------------------


def test_ensemble_learns_and_its_accuracy_is_measured(generator: Generator) -> None:
    x = torch.randn(300, 2, generator=generator).numpy()
    y = (x[:, 0] > 0).astype(int) + 2 * (x[:, 1] > 0)
    ensemble = onefold.DeepEnsemble(3, recipe=Recipe(steps=150, batch=32)).fit(x[:200], y[:200])
    assert metrics.accuracy(ensemble.predict(x[200:]), y[200:]) > 0.9
    p = ensemble.probabilities(x)
    assert p.shape == (3, 300, 4)
    np.testing.assert_allclose(p.sum(-1), 1)
    assert np.abs(p[0] - p[1]).max() > 0.01


def test_members_see_their_own_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members from the same initialisation can differ only by the data they saw."""
    from onefold.detectors import ensemble

    monkeypatch.setattr(ensemble, "generators", lambda _, count: [Generator().manual_seed(5) for _ in range(count)])
    p = MAKERS["DeepEnsemble"]().fit(vectors(), np.arange(60) % 3).probabilities(vectors())
    assert np.abs(p[0] - p[1]).max() > 1e-3


def test_disagreements_by_hand() -> None:
    agree = torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]])
    dispute = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    np.testing.assert_allclose(entropy(agree), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(entropy(dispute), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(mutual_information(agree), 0, atol=1e-7)
    np.testing.assert_allclose(mutual_information(dispute), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(variance(dispute), 0.5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 1], "one class label for each of the 60"), (np.linspace(0, 1, 59), "a finite target for each of the 60"),
     (-np.ones(60), "negative"), (["cat"] * 60, "dtype <U3 is not supported. Pass numbers")],
)  # fmt: skip
def test_bad_labels_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MAKERS["DeepEnsemble"]().fit(vectors(), labels)
    with pytest.raises(InputError, match="members: must be"):
        onefold.DeepEnsemble(1)


# --- how the labelled methods learn -----------------------------------------------------------------------------------


def members_of(method: Any) -> Any:
    return method.state.scorer.members


def quadrants(generator: Generator, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    x = torch.randn(n, 2, generator=generator).numpy()
    return x, (x[:, 0] > 0).astype(int) + 2 * (x[:, 1] > 0)


@pytest.mark.parametrize("name", ["MCDropout", "Laplace"])
def test_labelled_methods_learn(name: str, generator: Generator) -> None:
    x, y = quadrants(generator)
    method = getattr(onefold, name)(10, hidden=(64,), recipe=Recipe(steps=300, batch=32, lr=3e-3)).fit(x[:200], y[:200])
    assert metrics.accuracy(method.predict(x[200:]), y[200:]) > 0.85
    said = method.disagreements(x)
    np.testing.assert_array_equal(said["predicted"], method.predict(x))
    np.testing.assert_array_equal(said["mutual_information"], method.score(x))
    p = torch.from_numpy(method.probabilities(x))
    np.testing.assert_allclose(said["entropy"], entropy(p))
    np.testing.assert_allclose(said["variance"], variance(p))
    boundary = np.abs(x).min(1) < 0.1
    assert said["entropy"][boundary].mean() > 2 * said["entropy"][~boundary].mean()


def test_dropped_units_are_the_asked_share_and_the_same_for_every_input() -> None:
    method = onefold.MCDropout(200, rate=0.3, channels=(4,), hidden=(32,), recipe=SHORT)
    net = members_of(method.fit(pictures(40, 8, 8), np.arange(40) % 2))
    assert net.kept.shape == (200, 4 * 4 * 4 + 32)
    assert float(net.kept.float().mean()) == pytest.approx(0.7, abs=0.02)
    assert [size.numel() for size in net.sizes] == [64, 32]
    x = torch.rand(3, 1, 8, 8)
    by_hand = []
    for kept in net.kept[:5]:
        z = torch.relu(net.net.trunk(net.first(x))).flatten(1) * kept[:64] / 0.7
        z = torch.relu(net.net.mlp.hidden[0](z)) * kept[64:] / 0.7
        by_hand.append(net.net.mlp.head(z))
    torch.testing.assert_close(net(x)[:5], torch.stack(by_hand), rtol=1e-4, atol=1e-5)


def test_a_strong_prior_leaves_no_doubt_and_a_weak_one_leaves_more(generator: Generator) -> None:
    x, y = quadrants(generator)
    found = {
        precision: onefold.Laplace(20, prior_precision=precision, hidden=(16,), recipe=SHORT).fit(x, y).score(x).mean()
        for precision in (1e12, 1e3, 1e1)
    }
    assert found[1e12] < 1e-8
    assert found[1e12] < found[1e3] < found[1e1]


def test_laplace_of_biases_alone_is_the_textbooks() -> None:
    """Inputs of zero leave the biases b: their posterior is N(MAP, (Σ diag(p) − p pᵀ + precision · I)⁻¹), p ≈ ½."""
    method = onefold.Laplace(1000, prior_precision=1.0, hidden=(), recipe=Recipe(steps=1, batch=2, lr=1e-6))
    movements = members_of(method.fit(np.zeros((4, 2), np.float32), np.arange(4) % 2)).displacements
    biases = torch.stack([net.head.bias.detach() for net in movements])
    exact = torch.linalg.inv(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) + torch.eye(2))  # [[⅔, ⅓], [⅓, ⅔]]
    torch.testing.assert_close(torch.cov(biases.T), exact, rtol=0, atol=0.1)
    weights = torch.stack([net.head.weight.detach().flatten() for net in movements])
    torch.testing.assert_close(torch.cov(weights.T), torch.eye(4), rtol=0, atol=0.15)  # of which the data know nothing


def test_laplace_spreads_as_laplace_torch_says(generator: Generator) -> None:
    """The covariance of the members' logits is J Σ Jᵀ, as laplace-torch itself computes it for the linear model."""
    from laplace import KronLaplace

    x, y = quadrants(generator, 60)
    recipe = Recipe(steps=200, batch=32, lr=3e-3)
    method = onefold.Laplace(1000, prior_precision=10.0, hidden=(8,), recipe=recipe).fit(x, y)
    members, queries = members_of(method), torch.from_numpy(x[:4])
    said = members(queries).detach()
    net = nn.Sequential(members.first, members.net.requires_grad_(True))
    reference = KronLaplace(net, "classification", prior_precision=10.0)
    reference.fit(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 60)
    )
    mean, covariance = reference._glm_predictive_distribution(queries)
    torch.testing.assert_close(said.mean(0).float(), mean.detach(), rtol=0, atol=0.15)
    for i in range(4):
        exact = covariance[i].detach()
        assert float((torch.cov(said[:, i].T.float()) - exact).norm() / exact.norm()) < 0.15


def test_without_laplace_torch_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(onefold.OnefoldError, match=r"pip install 'onefold\[laplace\]' and then pip install --no-deps"):
        MAKERS["Laplace"]().fit(vectors(), np.arange(60) % 3)


@pytest.mark.parametrize("kind", ["crops", "flips"])
def test_train_images_are_cropped_and_flipped_as_asked(kind: str) -> None:
    from onefold.detectors.members import CHAINS
    from onefold.nn.augment import augment

    chain = CHAINS[kind]
    assert chain is not None
    image = torch.zeros(1, 1, 9, 9)
    image[..., 4, 6] = 1.0  # right of the middle
    u = torch.rand(4000, 14, generator=Generator().manual_seed(0))
    found = augment(image.expand(4000, -1, -1, -1), u, chain)[:, 0]
    columns = (found.sum(1) * torch.arange(9.0)).sum(1) / found.sum((1, 2)).clamp(min=1e-6)
    mirrored = float((columns[found.sum((1, 2)) > 0.05] < 4).float().mean())
    assert mirrored == pytest.approx(0.5 if kind == "flips" else 0.0, abs=0.05)
    narrowest = (1 / 1.69) ** 0.5
    spread = columns[columns > 4] - 4
    assert float(spread.max()) < 2 / narrowest + 2 * (1 - narrowest) * 4 / narrowest


def test_augmented_training_is_for_images() -> None:
    with pytest.raises(InputError, match="augment='crops' is for images"):
        MAKERS["DeepEnsemble"](augment="crops").fit(vectors(), np.arange(60) % 3)
    plain, changed = (
        MAKERS["DeepEnsemble"](augment=kind).fit(pictures(40, 8, 8), np.arange(40) % 3).score(pictures(5, 8, 8))
        for kind in ("none", "flips")
    )
    assert not np.allclose(plain, changed)


def test_knn_is_the_distance_to_the_kth_nearest() -> None:
    x, query = vectors(80, 3), vectors(20, 3, seed=1)
    net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    sight = [torch.tanh(net[0](torch.from_numpy(a))) for a in (x, query)]
    z, q = (nn.functional.normalize(each, dim=1).detach().numpy() for each in sight)
    exact = np.sort(0.5 * ((q[:, None] - z) ** 2).sum(2), axis=1)[:, 2]
    np.testing.assert_allclose(onefold.KNN(from_model(net), k=3).fit(x).score(query), exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_energy_is_its_formula(temperature: float) -> None:
    query = vectors(9, seed=1)
    energy = onefold.Energy(Classifier(), temperature=temperature).fit(vectors())
    logits = query @ Classifier().weight[:5].detach().numpy()
    exact = -temperature * np.log(np.exp(logits / temperature).sum(1))
    np.testing.assert_allclose(energy.score(query), exact, rtol=1e-4, atol=1e-5)


def test_rnd_is_its_formula() -> None:
    x = vectors()
    rnd = fit("RND", x)
    scorer = rnd.state.scorer
    error = (scorer.predictor(torch.from_numpy(x)) - scorer.target(torch.from_numpy(x))).detach().numpy()
    np.testing.assert_allclose(rnd.score(x), 0.5 * (error**2).mean(1), rtol=1e-4)


@pytest.mark.parametrize("x", [vectors(), pictures(40, 8, 8)], ids=["vectors", "pictures"])
def test_the_scale_of_the_variance_is_that_of_the_features(x: np.ndarray) -> None:
    csd = fit("CSD", x)
    state = csd.state
    features = state.scorer.map.features(state.prepare(torch.from_numpy(x))).double().numpy()
    np.testing.assert_allclose(csd.variance(x), (features**2).sum(1) * csd.relative(x), rtol=1e-4, atol=1e-6)


def test_the_share_of_augmented_contexts_is_the_one_asked_for() -> None:
    csd = fit("CSD", pictures(40, 8, 8), augment=0.7)
    state = csd.state
    train = InMemorySamples(state.reservoir.samples, state.prepare)
    problem = csd._problem(state.scorer, train, state, None)
    assert problem.contexts.chain == Chain(apply=0.7)


def test_training_drops_other_units_for_every_sample() -> None:
    method = onefold.MCDropout(2, rate=0.3, channels=(4,), hidden=(32,), recipe=SHORT)
    net = members_of(method.fit(pictures(40, 8, 8), np.arange(40) % 2))
    x, u = torch.rand(3, 1, 8, 8), torch.rand(3, 96, generator=Generator().manual_seed(0))
    kept = u >= 0.3
    z = torch.relu(net.net.trunk(net.first(x))).flatten(1) * kept[:, :64] / 0.7
    z = torch.relu(net.net.mlp.hidden[0](z)) * kept[:, 64:] / 0.7
    torch.testing.assert_close(net.thinned(x, u), net.net.mlp.head(z), rtol=1e-4, atol=1e-5)
