"""What comes in wrong is refused in one line, and what is only unusual is read right."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Generator, Tensor, nn

import onefold
from onefold import cli
from onefold.core.batches import check_seed
from onefold.core.storage import fingerprint
from onefold.data import letters
from onefold.distil import Architecture, TrainContexts, contextual_limit, distillation, similarity_model
from onefold.distil.wide import _largest_eigenvalue
from onefold.errors import InputError, LayerError, NotEnoughMemoryError, TrainingError
from onefold.exact import PrimalGP, ntk_gp, reference_ensemble
from onefold.inputs.reader import Reader
from onefold.inputs.samples import read_train_data
from onefold.kernels import EmpiricalNTK, Features, empirical_ntk, from_model, infinite, last_layer
from onefold.metrics import accuracy, rank_correlation
from onefold.nn.nets import NTKMLP, Prior, Residual, Standardise, backbone, random_network
from onefold.nn.train import Recipe, Training

SHORT = Recipe(steps=20, batch=16)


def vectors(n: int = 40, d: int = 4) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)


# --- reading ---------------------------------------------------------------------------------------------------------


def learned(x: Any) -> tuple[Reader, Tensor]:
    """The form of the data, and all of it as networks see it."""
    found = read_train_data(x, torch.device("cpu"), 0)
    return found.reader, found.samples[torch.arange(len(found.samples))]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ma.masked_array(vectors(), vectors() > 2), "masked values"),
        ([torch.zeros(2, requires_grad=True), torch.zeros(3)], "ragged or mixed"),
        (torch.zeros(3, 3).to_sparse(), "sparse"),
        (torch.zeros(3, 3, device="meta"), "plain real numbers"),
        ("digits", "digits: does not exist"),
        (np.array(["2020-01-01"] * 4, dtype="datetime64[D]"), "dtype datetime64.* is not supported. Pass numbers"),
    ],
)
def test_what_is_not_numbers_is_refused(x: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        learned(x)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dok", "lil", "dia", "bsr"])
def test_sparse_matrices_are_refused_in_one_line(form: str) -> None:
    x = vectors() * (vectors() > 0)
    detector = onefold.KNN().fit(x)
    for sparse in (scipy.sparse.csr_matrix(x).asformat(form), scipy.sparse.csr_array(x).asformat(form)):
        message = rf"^x: a sparse {type(sparse).__name__} is not supported\. Pass x\.toarray\(\)\.$"
        for take in (onefold.KNN().fit, detector.score, detector.calibrate):
            with pytest.raises(InputError, match=message):
                take(sparse)
        with pytest.raises(InputError, match=r"^y: a \w+ is not supported\. Pass a NumPy array"):
            onefold.DeepEnsemble().fit(x, sparse)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[::-1][::-1],
        lambda x: np.asfortranarray(x),
        lambda x: x.astype(np.longdouble),
        lambda x: np.array(x, dtype=">f4"),
        lambda x: torch.from_numpy(x).requires_grad_(),
        lambda x: [torch.from_numpy(row) for row in x],
        lambda x: tuple(map(tuple, x)),
    ],
    ids=["reversed", "fortran", "longdouble", "big-endian", "requires grad", "tensors", "tuples"],
)
def test_unusual_arrays_are_read_right(make) -> None:
    x = vectors()
    np.testing.assert_allclose(learned(make(x))[1].numpy(), x, rtol=1e-6)


def test_read_only_and_reversed_slices_are_read_right() -> None:
    x = vectors()
    x.flags.writeable = False
    reader, data = learned(x)
    np.testing.assert_array_equal(data.numpy(), x)
    (batch,) = reader.batches(x[::-1][:1])
    np.testing.assert_array_equal(np.asarray(batch), x[-1:])
    large = np.full((2, 2), 2**63 + 5, dtype=np.uint64)
    assert float(learned(large)[1].min()) == pytest.approx(2**63, rel=1e-6)


def test_images_are_understood_in_three_layouts() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    reader, data = learned(colours)
    assert reader.sample_shape == (3, 6, 5)
    np.testing.assert_allclose(data.numpy(), colours.transpose(0, 3, 1, 2) / 255, rtol=1e-6)
    assert learned(colours.transpose(0, 3, 1, 2))[0].sample_shape == (3, 6, 5)
    assert learned(colours[..., 0])[0].sample_shape == (1, 6, 5)
    assert learned(np.zeros((4, 6, 42, 42)))[0].sample_shape == (6, 42, 42)
    with pytest.raises(InputError, match=r"numpy.moveaxis\(x, -1, 1\)"):
        learned(np.zeros((4, 32, 32, 5)))


def test_arrays_that_could_be_time_series_are_not_taken_for_images() -> None:
    floats = np.random.default_rng(0).random((12, 100, 3))
    pixels = (255 * floats).astype(np.uint8)
    for x in (
        floats,
        floats.transpose(0, 2, 1),
        np.rint(9 * floats).astype(int),
        pixels,
        pixels[:, :, :1],
        floats > 0.5,
    ):
        message = re.escape(f"x: samples of shape {x.shape[1:]} could be grey images or time series. For images")
        for data in (x, torch.from_numpy(x), torch.utils.data.TensorDataset(torch.from_numpy(x))):
            with pytest.raises(InputError, match=message) as caught:
                onefold.KNN().fit(data)
            assert "x[:, None]" in str(caught.value)
            assert "x.reshape(len(x), -1)" in str(caught.value)
        assert learned(x[:, None])[0].sample_shape == (1, *x.shape[1:])
        assert learned(x.reshape(len(x), -1))[0].kind == "vectors"
    for x in (floats[:, :28, :1].repeat(28, 2), pixels[:, :40, :1].repeat(30, 2), pixels[:, :4, :1].repeat(4, 2)):
        assert learned(x)[0].sample_shape == (1, *x.shape[1:])
    net = nn.Sequential(nn.Flatten(), nn.Linear(300, 4))  # a model says itself what it takes
    for x in (floats, pixels):
        assert np.isfinite(onefold.KNN(from_model(net)).fit(x).score(x)).all()
    before = Reader("images", {"x": (100, 3)}, {"x": "float32"})  # of a file from before series were refused
    assert Reader.from_json(before.to_json()) == before


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "0"])
def test_seeds_that_no_generator_takes_are_refused(seed, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="seed"):
        check_seed(seed)
    if isinstance(seed, int) and not isinstance(seed, bool):
        with pytest.raises(InputError, match="seed"):
            onefold.CSD(seed=seed)
        assert cli.main(["demo", "--seed", str(seed)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# --- numbers that run away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [onefold.CSD(recipe=SHORT), onefold.LastLayerGP(width=64)], ids=["CSD", "LastLayerGP"]
)
def test_the_farthest_inputs_are_the_strangest(method) -> None:
    """At 1e20 standard deviations norms would overflow; scores must stay finite, and not fall back to zero."""
    x = vectors()
    method.fit(x)
    for scores in (method.relative, method.variance):
        assert scores(np.full((1, 4), 1e20)).item() > np.median(scores(x))


def test_diverged_training_is_an_error_not_a_nan() -> None:
    with pytest.raises(TrainingError, match="CSD: training diverged at learning rate 1e\\+30"):
        onefold.CSD(recipe=Recipe(steps=20, lr=1e30)).fit(vectors())


def test_kernels_that_give_nan_are_refused() -> None:
    broken = Features(lambda x: x * np.nan)
    with pytest.raises(InputError, match="NaN, infinite, or all zero"):
        onefold.CSD(broken, recipe=SHORT).fit(vectors())
    with pytest.raises(InputError, match="NaN"):
        onefold.LastLayerGP(broken).fit(vectors())
    with pytest.raises(InputError, match="no finite score"):
        onefold.CSD(Features(lambda x: x), recipe=SHORT).fit(vectors()).score(np.full((2, 4), 1e30))


def test_a_zero_row_is_no_trouble_for_a_kernel_without_biases() -> None:
    x = vectors()
    x[3] = 0
    assert np.isfinite(onefold.CSD(infinite(1), recipe=SHORT).fit(x).score(x)).all()


def test_a_failed_update_leaves_the_detector_as_it_was() -> None:
    def fragile(x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 100, torch.nan, torch.cat([x, x.square()], 1))

    x = vectors(60)
    gp = onefold.LastLayerGP(Features(fragile)).fit(x)
    before = gp.score(x)
    bad = np.repeat(x, 100, axis=0)
    bad[-1] = 1000  # in the second slice: the first has been added by then
    with pytest.raises(InputError, match="NaN"):
        gp.update(bad)
    np.testing.assert_array_equal(gp.score(x), before)


# --- resume, on what the vectors in test_train hide ------------------------------------------------------------------


def image_training() -> tuple[nn.Module, Training]:
    generator = Generator().manual_seed(0)
    x = torch.rand(30, 3, 8, 8, generator=generator)
    first = Standardise.of(x)
    model = similarity_model((3, 8, 8), first, Architecture(channels=(4,), hidden=(8,), outputs=4), generator)
    prior = Features(Prior(first, random_network((3, 8, 8), generator, channels=(4,), hidden=(8,))))
    return model, distillation(model, x, prior, TrainContexts(), Recipe(steps=20, batch=8, lr=0.01), 0)


def test_resuming_convolutions_from_a_file_is_exact(tmp_path) -> None:
    """Weights are kept channels last, files are not: Adam's moments must come back in the layout of their weights."""
    from onefold.core.storage import load, save

    whole, uninterrupted = image_training()
    for _ in uninterrupted:
        pass
    _, stopped = image_training()
    for update in stopped:
        if update.step == 10:
            break
    save(tmp_path / "x", "test", stopped.state(), {})
    model, resumed = image_training()
    resumed.restore(load(tmp_path / "x", "test")[0])
    for _ in resumed:
        pass
    for (name, a), b in zip(whole.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(resumed.tail, uninterrupted.tail)


# --- models and kernels -----------------------------------------------------------------------------------------------


class WithFeatures(nn.Module):
    """A user's model that has a method of the same name as ours, and a state that running it would change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def test_last_layer_leaves_a_model_with_a_features_method_alone() -> None:
    net = WithFeatures().train()
    mean = net.norm.running_mean
    assert mean is not None
    before = mean.clone()
    x = torch.from_numpy(vectors()) + 5
    z = last_layer(net).features(x)
    assert torch.equal(mean, before)
    torch.testing.assert_close(z, x / (1 + 1e-5) ** 0.5)


def test_layers_that_do_not_count_samples_first_are_refused() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Identity(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(x.transpose(0, 1)).mean(0))

    with pytest.raises(LayerError, match=r"shape \(7, 2, 3\) for 2 samples"):
        from_model(SequenceFirst(), "inner").features(torch.zeros(5, 7, 3))


@pytest.mark.parametrize("bad", [(), torch.tensor(1.0), torch.zeros(0, 4)], ids=["nothing", "scalar", "empty"])
def test_batches_without_samples_are_refused(bad: Any) -> None:
    net = nn.Linear(4, 2)
    for kernel in (from_model(net, width=None), empirical_ntk(net)):
        with pytest.raises(InputError, match=r"samples first|batch is empty"):
            kernel.diag(bad)


def test_layers_before_an_in_place_layer_are_read_in_time() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    x = torch.from_numpy(vectors())
    torch.testing.assert_close(from_model(net, "0", width=None).features(x), net[0](x).detach())
    assert float(from_model(net, "0", width=None).features(x).min()) < 0


def test_parameters_are_named_by_list_or_alone() -> None:
    with pytest.raises(LayerError, match="called"):
        EmpiricalNTK(nn.Linear(4, 2), [])
    assert empirical_ntk(nn.Linear(4, 2), ["weight"]).diag(torch.ones(1, 4)).item() == 4


def test_queries_and_targets_are_checked() -> None:
    x, y = torch.from_numpy(vectors(20)), torch.zeros(20)
    bad = torch.full((2, 4), torch.nan)
    for kernel in (infinite(1), Features(lambda t: t.double())):
        with pytest.raises(InputError, match="NaN or infinity for the queries"):
            ntk_gp(kernel, x, y, bad)
    with pytest.raises(InputError, match="Use zero or a positive number"):
        ntk_gp(infinite(1), x, y, x, time=float("nan"))
    gp = PrimalGP(4).add(x, y[:, None])
    with pytest.raises(InputError, match="every batch or with none"):
        gp.add(x)
    with pytest.raises(InputError, match="targets: NaN or infinity"):
        gp.add(x, y[:, None] * torch.nan)
    with pytest.raises(InputError, match=r"targets: shape \(20, 2\)\. Pass \[20, 1\]"):
        gp.add(x, torch.zeros(20, 2))
    with pytest.raises(InputError, match=r"features: shape \(20, 1\)\. Pass \[N, 4\]"):
        gp.add(x[:, :1], y[:, None])
    assert gp.count == 20
    generator = Generator().manual_seed(0)
    two_outputs = NTKMLP(4, [8], 2, generator=generator)
    with pytest.raises(InputError, match="Use an NTKMLP with one output"):
        reference_ensemble(two_outputs, x, y, x, members=2, steps=1, generator=generator)
    with pytest.raises(InputError, match="but there are 4 pairs"):
        contextual_limit(infinite(1), torch.zeros(3), (x[:4], x[:4]), (x, x))
    with pytest.raises(NotEnoughMemoryError, match="250,000 queries"):
        ntk_gp(Features(lambda t: t), x, y, torch.zeros(250_000, 4))


def test_dual_solves_of_float32_features_are_done_in_float64() -> None:
    """63 points and 64 features: nearly as many directions as there are, so rounding in float32 would show."""
    generator = Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))
    x, query = torch.randn(63, 3, generator=generator), torch.randn(9, 3, generator=generator)
    z, w = (last_layer(net).features(t).double() for t in (x, query))
    rest = w - w @ torch.linalg.pinv(z) @ z
    found = ntk_gp(last_layer(net), x, torch.zeros(63), query).variance
    torch.testing.assert_close(found, rest.square().sum(1), rtol=1e-3, atol=1e-9)


def test_duplicates_with_different_targets_meet_in_the_middle() -> None:
    for seed in range(30):
        generator = Generator().manual_seed(seed)
        x, query = torch.randn(33, 7, generator=generator), torch.randn(5, 7, generator=generator)
        y = torch.randn(33, generator=generator)
        kernel = infinite(1, b_std=0.1)
        twice = ntk_gp(kernel, torch.cat([x, x]), torch.cat([y, y + 1]), query).mean
        torch.testing.assert_close(twice, ntk_gp(kernel, x, y + 0.5, query).mean, rtol=1e-4, atol=1e-4)


def test_too_little_noise_for_a_cholesky_factor() -> None:
    z = torch.ones(5, 3, dtype=torch.float64)
    found = PrimalGP(3, noise=1e-25).add(z).variance(torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(found, torch.full((3,), 2 / 3, dtype=torch.float64))


def test_tangent_kernels_of_many_outputs_need_no_matrix_per_pair() -> None:
    net = nn.Linear(5, 200)
    x = torch.from_numpy(vectors(50, 5))
    kernel = empirical_ntk(net, memory=2**26)  # all pairs of outputs would take 760 MiB
    torch.testing.assert_close(kernel(x, x), (x @ x.T + 1).double(), rtol=1e-5, atol=1e-5)


def test_memory_of_the_activations_is_counted() -> None:
    net = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1))
    x = torch.zeros(40, 1, 64, 64)
    with pytest.raises(MemoryError, match="needs"):
        empirical_ntk(net, memory=2**20)(x, x)
    _, rows = empirical_ntk(net, memory=2**24)._plan(x, lambda _: 1600)
    assert rows < 10


def test_networks_for_large_images_stay_small(generator: Generator) -> None:
    def parameters(*shape: int) -> int:
        net = backbone(shape, channels=(8,), hidden=(16,), outputs=2, generator=generator)
        assert net(torch.zeros(2, *shape)).shape == (2, 2)
        return sum(p.numel() for p in net.parameters())

    assert parameters(1, 28, 28) > 8 * 14 * 14 * 16, "the paper's one stage is kept where it is enough"
    assert parameters(3, 200, 300) < 8 * 16 * 16 * 16 + 20_000
    assert parameters(3, 1, 1) < 8 * 16 + 5_000
    with pytest.raises(InputError, match="at least one stage"):
        backbone((1, 8, 8), channels=(), hidden=(4,), outputs=1, generator=generator)


def test_the_parts_of_the_networks(generator: Generator) -> None:
    unit, x = Residual(3), torch.randn(2, 3, 5, 5, generator=generator)
    for p in unit.second.parameters():
        nn.init.zeros_(p)
    torch.testing.assert_close(unit(x), x)
    table = torch.from_numpy(vectors(200)) * torch.tensor([1.0, 10.0, 100.0, 0.0]) + 5
    z = Standardise.of(table)(table)
    torch.testing.assert_close(z[:, :3].std(0, correction=0), torch.ones(3), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(z.mean(0), torch.zeros(4), rtol=0, atol=1e-3)
    images = torch.randn(50, 2, 4, 4, generator=generator) * 7 + 3
    assert float(Standardise.of(images)(images).std()) == pytest.approx(1, rel=1e-2)


def test_the_memory_cap_holds_for_many_small_parameters() -> None:
    """Peak memory of a real process: 82 parameter tensors, 1,200 points, a cap of 128 MiB."""
    code = """
import resource, torch
from torch import nn
from onefold.kernels import empirical_ntk
net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)], nn.Linear(4, 1))
x = torch.randn(1200, 4)
kernel = empirical_ntk(net, memory=2**27)
kernel(x[:2], x[:2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kernel(x, x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 192


# --- small tools ------------------------------------------------------------------------------------------------------


def test_small_tools_check_what_they_get() -> None:
    with pytest.raises(InputError, match=r"different lengths \(3 and 2\)"):
        rank_correlation([1, 2, 3], [1, 2])
    with pytest.raises(InputError, match="finite"):
        rank_correlation([1, 2, np.nan], [1, 2, 3])
    with pytest.raises(InputError, match=r"shape \(2, 1\)"):
        accuracy([[1], [2]], [1, 2])
    with pytest.raises(InputError, match="not a divisor of 32"):
        letters(3, size=28)
    assert fingerprint(1, 2) != fingerprint(12)
    assert fingerprint([1, 2]) == fingerprint([1, 2])
    for make in (lambda: Recipe(warmup=4000), lambda: Recipe(warmup=-1), lambda: Recipe(adam_eps=-1.0)):
        with pytest.raises(InputError):
            make()
    x = infinite(1, activation="erf", b_std=0.0)(torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [-1.0]]))
    assert _largest_eigenvalue(x) == pytest.approx(float(torch.linalg.eigvalsh(x)[-1]))


@pytest.mark.parametrize("labels", [np.full(40, 3), np.r_[np.zeros(39), 1e13], np.r_[np.zeros(39), np.inf]])
def test_labels_that_no_classifier_can_use_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"one class only|Number the classes|whole numbers"):
        onefold.DeepEnsemble(2, recipe=SHORT).fit(vectors(), labels)


def test_fitting_works_in_any_torch_surroundings() -> None:
    x = vectors()
    expected = onefold.CSD(recipe=SHORT).fit(x).score(x)
    with torch.no_grad():
        np.testing.assert_array_equal(onefold.CSD(recipe=SHORT).fit(x).score(x), expected)
    torch.set_default_dtype(torch.float64)
    try:
        np.testing.assert_array_equal(onefold.CSD(recipe=SHORT).fit(x).score(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)
