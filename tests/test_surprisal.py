"""The default score on a trained model: every part recomputed with NumPy and SciPy, and how often the model runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from torch import Tensor, nn

from onefold import CSD, load
from onefold.detectors.csd_scorer import CSDScorer
from onefold.detectors.diagnosis import convergence
from onefold.detectors.variance_scorer import SurprisalScore, surprisal
from onefold.distil import Architecture, encodings
from onefold.errors import FileError, InputError
from onefold.kernels import from_model, logits
from onefold.nn.train import Recipe

SHORT = Recipe(steps=30, batch=32, lr=3e-3)
SMALL = Architecture(hidden=(32,), outputs=16)


class Net(nn.Module):
    """A small classifier of images that counts its calls and the samples in them; `sure` scales its logits."""

    def __init__(self, classes: int = 3, sure: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, classes)
        self.sure, self.calls, self.rows = sure, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.calls += 1
            self.rows += len(x)
        z = self.pool(torch.relu(self.first(x)))
        return self.sure * self.head(torch.relu(self.second(z)).mean((2, 3)))


class Sure(nn.Module):
    """A head that multiplies, so that logits are the output of the last dense layer."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.net, self.head = Net(6), nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(sure)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


def images(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.random((n, 1, 1, 1)) * rng.random((n, 1, 8, 8))).astype(np.float32)


def fit(net: nn.Module, x: np.ndarray | None = None, **settings: Any) -> CSD:
    settings = {"recipe": SHORT, "architecture": SMALL, "device": "cpu", **settings}
    return CSD(from_model(net, width=settings.pop("width", 256)), **settings).fit(images(300) if x is None else x)


def stages_by_hand(net: Net, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Channel means and maxima of the two maps, and logits, in float64."""
    with torch.no_grad():
        first = net.first(torch.from_numpy(x))
        second = net.second(net.pool(first.relu()))
        values = [pool.double().numpy() for z in (first, second) for pool in (z.mean((2, 3)), z.amax((2, 3)))]
        return np.concatenate(values, 1), net(torch.from_numpy(x)).double().numpy()


# --- the score --------------------------------------------------------------------------------------------------------


def test_surprisal_is_the_negative_logarithm_of_the_upper_tail() -> None:
    z = torch.linspace(-6, 80, 100_001)
    expected = -norm.logsf(z.double().numpy())
    actual = surprisal(z).double().numpy()
    positive = z.numpy() > 0
    np.testing.assert_allclose(actual[positive], expected[positive], rtol=1.2e-4)
    np.testing.assert_allclose(actual[~positive], expected[~positive], atol=1e-6)
    assert (np.diff(actual) >= 0).all()
    assert surprisal(torch.tensor([1e4])).isfinite().all()


@pytest.mark.parametrize("has_energy", [True, False])
def test_the_variance_speaks_only_where_it_alone_would_raise_an_alarm(*, has_energy: bool) -> None:
    rng = np.random.default_rng(0)
    held_out = [np.exp(rng.normal(-3, 0.5, 400)), np.exp(rng.normal(0, 0.2, 400)), rng.normal(-8, 2, 400)]
    query = [np.exp(rng.normal(-2, 1.0, 50)), np.exp(rng.normal(0, 0.2, 50)), rng.normal(-8, 4, 50)]
    used = slice(None) if has_energy else slice(2)
    score = SurprisalScore(has_energy=has_energy)
    score.set_statistics(*map(torch.from_numpy, held_out[used]))
    actual = score(*(torch.from_numpy(values).float() for values in query[used])).numpy()

    def standardised(part: Any) -> np.ndarray:
        return (part(query) - part(held_out).mean()) / part(held_out).std()

    variance = -norm.logsf(standardised(lambda values: np.log(values[0] * values[1])))
    energy = -norm.logsf(standardised(lambda values: values[2]))
    expected = energy + np.maximum(0, variance + np.log(0.05)) if has_energy else variance
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-6)
    if has_energy:
        assert 0 < (expected > energy).sum() < 50


def test_the_default_score_from_stages_and_logits_by_hand() -> None:
    net, x, query = Net(), images(300), images(40, 1) * 1.4
    csd = fit(net, role="classifier")
    held_out = csd.state.held_out.samples
    assert isinstance(held_out, Tensor)
    assert len(held_out) == 30
    stored = {row.tobytes() for row in held_out.numpy()}
    train = np.stack([row for row in x if row.tobytes() not in stored])
    assert len(train) == 270
    stages, _ = stages_by_hand(net, train)
    mean, std = stages.mean(0), stages.std(0)
    scorer = csd.state.scorer
    assert isinstance(scorer, CSDScorer)

    def parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raw, outputs = stages_by_hand(net, values)
        p = (raw - mean) / np.where(std > 1e-6 * np.abs(mean), std, 1)
        with torch.no_grad():
            phi, psi = (
                tower(torch.from_numpy(p).float()).double().numpy() for tower in (scorer.model.phi, scorer.model.psi)
            )
        cosine = (phi * psi).sum(1) / np.linalg.norm(phi, axis=1) / np.linalg.norm(psi, axis=1)
        return np.log((1 - cosine) * (p**2).mean(1)), -logsumexp(outputs, axis=1)

    (v, e), (v0, e0) = parts(query), parts(held_out.numpy())
    far, near = (-norm.logsf((q - ref.mean()) / ref.std()) for q, ref in ((v, v0), (e, e0)))
    np.testing.assert_allclose(csd.score(query), near + np.maximum(0, far + np.log(0.05)), rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(np.log(csd.variance(query)), v, rtol=1e-3, atol=1e-3)
    encoder = fit(net, role="encoder")
    np.testing.assert_allclose(encoder.variance(query), csd.variance(query))  # the same training
    np.testing.assert_allclose(encoder.score(query), far, rtol=2e-3, atol=2e-4)


def test_labels_are_those_of_a_random_layer_centred_at_its_mean() -> None:
    net = Net()
    csd = fit(net, images(90), width=2048)  # too few to hold samples out
    features: Any = csd.state.scorer.map
    stages, _ = stages_by_hand(net, images(90))
    p = torch.from_numpy((stages - stages.mean(0)) / np.where(stages.std(0) > 0, stages.std(0), 1)).float()
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(p.shape[1], 2048, generator=generator) / p.shape[1] ** 0.5
    expected = torch.relu(p @ matrix) * (2 / 2048) ** 0.5
    torch.testing.assert_close(features.centre, expected.mean(0), rtol=1e-3, atol=1e-4)
    encoded = features.encode(torch.from_numpy(images(90)))
    torch.testing.assert_close(features.features(encoded), expected - expected.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(features.features(encoded).mean(0), torch.zeros(2048), rtol=0, atol=1e-4)
    plain: Any = fit(net, images(90), centred=False).state.scorer.map
    assert plain.centre is None


def test_the_false_alarm_rate_is_the_one_asked_for() -> None:
    """Over many calibrations on familiar data, alarms on other familiar data are as frequent as asked."""
    csd = fit(Net(), role="classifier")
    rates = []
    for seed in range(20):
        data = images(500, 10 + seed)
        rates.append(csd.calibrate(data[:200], fpr=0.1).is_ood(data[200:]).mean())
    assert abs(np.mean(rates) - 0.1) < 0.02


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sure", "used"), [(0.01, False), (1e4, True)])
def test_logits_are_used_if_the_model_is_sure_of_the_training_data(*, sure: float, used: bool) -> None:
    csd = fit(Sure(sure))
    spec: Any = csd.state.spec
    summary: Any = csd.state.summary
    assert spec.classes == (3 if used else None)
    assert (summary.confidence >= 0.5) == used
    finding = csd.diagnose(show=False)["logits"]
    assert finding.value == summary.confidence
    assert ("are not used" in finding.message) != used
    with torch.no_grad():
        probabilities = Sure(sure)(torch.from_numpy(images(300))).softmax(1).amax(1)
    assert summary.confidence == pytest.approx(float(probabilities.mean()), abs=0.03)


@pytest.mark.parametrize(("role", "used"), [("classifier", 3), ("encoder", None)])
def test_the_role_decides_before_the_logits_do(role: Any, used: int | None) -> None:
    spec: Any = fit(Sure(0.01 if used else 1e4), role=role).state.spec
    assert spec.classes == used


def test_a_role_that_cannot_be_is_refused() -> None:
    headless = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert isinstance(fit(headless).score(images(5)), np.ndarray)
    with pytest.raises(InputError, match="role: the model has no logits of at least 2 classes"):
        fit(headless, role="classifier")
    with pytest.raises(InputError, match="role: the score relative does not use it"):
        CSD(from_model(Net()), role="encoder", score="relative")
    with pytest.raises(InputError, match="score: surprisal needs a model"):
        CSD(score="surprisal")


def test_the_default_score_depends_on_the_kernel() -> None:
    assert CSD().score_kind == "combined"
    assert CSD(from_model(Net())).score_kind == "surprisal"
    assert CSD(from_model(Net(), "pool")).score_kind == "combined"
    assert CSD(logits(Net())).score_kind == "combined"
    assert CSD(from_model(Net()), score="relative").score_kind == "relative"


# --- passes of the model ----------------------------------------------------------------------------------------------


def test_each_batch_is_one_pass_of_the_model() -> None:
    net = Net()
    csd = fit(net, role="classifier").calibrate(images(60, 3))
    size, x = csd.state.batch_size, images(2500, 1)
    batches = -(-len(x) // size)
    for verb in (csd.score, csd.is_ood, csd.outputs, csd.variance):
        net.calls = net.rows = 0
        verb(x)
        assert (net.calls, net.rows) == (batches, len(x))


def test_an_exported_graph_has_the_model_once(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    fit(Net(), role="classifier").export(tmp_path / "d.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "d.onnx").graph.node]
    assert operators.count("Conv") == 2


def test_a_fit_encodes_each_sample_and_one_augmented_copy() -> None:
    net, recipe = Net(), Recipe(steps=200, batch=64)
    fit(net, recipe=recipe)
    longest = net.rows
    fit(net, recipe=Recipe(steps=100, batch=64))
    assert net.rows - longest == longest  # the number of steps makes no difference
    net.rows = 0
    fit(net, augment=0.0, recipe=recipe)
    assert longest - net.rows == 270


def test_without_memory_for_encodings_the_model_runs_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    kept, few = fit(net, augment=0.0), net.rows
    monkeypatch.setattr("onefold.detectors.csd.fits_in_memory", lambda *_: False)
    monkeypatch.setattr("onefold.distil.fit.available", lambda _: 0)
    net.rows = 0
    computed = fit(net, augment=0.0)
    assert net.rows > few + SHORT.steps * SHORT.batch
    np.testing.assert_allclose(computed.score(images(50, 1)), kept.score(images(50, 1)), rtol=1e-3, atol=1e-4)
    assert np.isfinite(fit(net).score(images(5))).all()  # augmented in each step


def test_copies_are_augmented_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[encodings.Encodings] = []
    encode = encodings.encode_samples

    def keep(*args: Any, **keywords: Any) -> encodings.Encodings:
        made.append(encode(*args, **keywords))
        return made[-1]

    monkeypatch.setattr("onefold.detectors.csd.encode_samples", keep)
    fit(Net(), augment=0.3)
    assert made[0].copies is not None
    changed = (made[0].copies != made[0].samples).any(1)
    assert changed.float().mean() > 0.95  # every copy is augmented; a share of the contexts are copies
    scores = [fit(Net(), augment=share).score(images(20, 1)) for share in (0.3, 0.6)]
    assert not np.allclose(scores[0], scores[1])


# --- files, exports, updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["classifier", "encoder"])
def test_files_and_exports_decide_alike(role: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net = Net()
    csd = fit(net, role=role).calibrate(images(150, 2))
    query = np.concatenate([images(300, 3), 1 - images(50, 4), 3 * images(50, 5)])
    csd.save(tmp_path / "d.onefold")
    copy: Any = load(tmp_path / "d.onefold", model=net, device="cpu")
    np.testing.assert_array_equal(copy.score(query), csd.score(query))
    assert copy.role == role
    csd.export(tmp_path / "d.onnx")
    csd.export(tmp_path / "d.pt2")
    session = onnxruntime.InferenceSession(str(tmp_path / "d.onnx"), providers=["CPUExecutionProvider"])
    program = torch.export.load(tmp_path / "d.pt2").module()
    for scores, pvalues, alarms in (
        session.run(None, {"x": query}),
        [value.numpy() for value in program(torch.from_numpy(query))],
    ):
        np.testing.assert_allclose(scores, csd.score(query), rtol=3e-4, atol=1e-5)
        np.testing.assert_array_equal(alarms, csd.is_ood(query))
        np.testing.assert_allclose(pvalues, csd.pvalue(query), atol=0.02)
    assert csd.is_ood(query)[300:].any()
    more = images(200, 6)
    np.testing.assert_array_equal(copy.update(more).score(query), csd.update(more).score(query))


def test_another_head_is_another_model(tmp_path: Path) -> None:
    net, other = Net(), Net()
    with torch.no_grad():
        other.head.weight.mul_(-1)
    fit(net, role="classifier").save(tmp_path / "classifier.onefold")
    with pytest.raises(FileError, match="another model"):
        load(tmp_path / "classifier.onefold", model=other)
    fit(net, role="encoder").save(tmp_path / "encoder.onefold")
    load(tmp_path / "encoder.onefold", model=other)  # its logits have no part in the score


def test_updates_learn_and_resets_start_again() -> None:
    csd, new = fit(Net(), recipe=Recipe(steps=200, batch=32, lr=3e-3)), 1 - images(300, 1)
    before = csd.relative(new).mean()
    csd.update(new[:250])
    assert csd.relative(new).mean() < 0.7 * before
    phi: Any = csd.state.scorer
    centre = phi.map.centre.clone()
    csd.update(new[250:], reset_every=10)
    assert csd.state.summary.resets == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(csd.state.scorer.map.centre, centre)  # pyright: ignore


def test_contexts_of_the_target_domain_are_encoded_too() -> None:
    x, target = images(300), 1 - images(200, 1)
    recipe = Recipe(steps=300, batch=32, lr=3e-3)
    plain, with_context = (CSD(from_model(Net()), recipe=recipe, architecture=SMALL) for _ in range(2))
    plain.fit(x)
    with_context.fit(x, context=target)
    ratio = [
        csd.relative(1 - images(100, 2)).mean() / csd.relative(images(100, 3)).mean() for csd in (plain, with_context)
    ]
    assert ratio[1] > ratio[0]


def test_a_stopped_fit_resumes_to_the_same_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onefold.nn import train

    whole = fit(Net()).score(images(20, 1))
    save, file = train.storage.save, tmp_path / "fit.part"

    class StoppedError(Exception):
        pass

    def stop(path: Any, kind: str, tensors: Any, header: Any) -> None:
        save(path, kind, tensors, header)
        if header["step"] == 10:
            raise StoppedError

    ticks = iter(range(0, 10**6, 100))
    monkeypatch.setattr(train.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(train.storage, "save", stop)
    csd = CSD(from_model(Net(), width=256), recipe=SHORT, architecture=SMALL, device="cpu")
    with pytest.raises(StoppedError):
        csd.fit(images(300), checkpoint=file)
    monkeypatch.undo()
    np.testing.assert_array_equal(csd.fit(images(300), checkpoint=file).score(images(20, 1)), whole)


def test_a_regression_that_explains_nothing_names_the_detectors_that_do() -> None:
    assert convergence(0.7).ok
    assert "train longer, with smaller batches" in convergence(0.4).message
    finding = convergence(0.02)
    assert not finding.ok
    assert "cannot learn these similarities; train longer, or use LocalGP or LastLayerGP" in finding.message
