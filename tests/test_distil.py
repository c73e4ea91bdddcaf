"""CSD against the closed forms that apply to it: Eq. 9–10 for known queries, Eq. 26 for the contextual model."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from torch import Generator, Tensor, nn

from onefold.distil import (
    Architecture,
    AugmentedContexts,
    Chain,
    CopiedContexts,
    ExtraContexts,
    Mixture,
    PairKernel,
    Similarity,
    TrainContexts,
    all_pairs,
    augment,
    contextual_limit,
    distil_known_queries,
    distillation,
    similarity_loss,
    similarity_model,
)
from onefold.distil.fit import Labels
from onefold.distil.loss import random_pairs_loss
from onefold.distil.wide import distil_wide, wide_similarity
from onefold.errors import InputError
from onefold.exact import ntk_gp
from onefold.kernels import Features, empirical_ntk, infinite
from onefold.metrics import rank_correlation
from onefold.nn.augment import UNIFORMS
from onefold.nn.nets import NTKMLP
from onefold.nn.train import Recipe

LAW = infinite(1, activation="erf", w_std=2.0, b_std=1.0)


def error(found: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.norm(found - exact) / torch.linalg.norm(exact))


def known_query_errors(width: int, seeds: int = 3) -> tuple[float, float]:
    """Relative error of Eq. 10 by training: against the network's own tangent kernel, and against the infinite one."""
    own, limit = [], []
    for seed in range(seeds):
        generator = Generator().manual_seed(seed)
        x, query = torch.randn(6, 2, generator=generator), torch.randn(5, 2, generator=generator)
        net = NTKMLP(2, [width], activation="erf", w_std=2.0, b_std=1.0, generator=generator)
        kernel = empirical_ntk(net)
        found = distil_known_queries(net, kernel, x, query, steps=600, shrink=0.02)
        own.append(error(found.variance, ntk_gp(kernel, x, torch.zeros(6), query).variance))
        found = distil_known_queries(net, LAW, x, query, steps=600, shrink=0.02)
        limit.append(error(found.variance, ntk_gp(LAW, x, torch.zeros(6), query).variance))
    return float(np.mean(own)), float(np.mean(limit))


def test_known_queries_recover_the_exact_variance() -> None:
    """Both errors fall with width: against the network's own NTK-GP and against the infinite one."""
    narrow, wide = known_query_errors(256), known_query_errors(4096)
    assert wide[0] < 0.02, wide
    assert wide[1] < 0.05, wide
    assert narrow[0] > 1.5 * wide[0], (narrow, wide)
    assert narrow[1] > 2 * wide[1], (narrow, wide)


def test_known_queries_leave_the_network_alone_and_start_from_zero(generator: Generator) -> None:
    net = NTKMLP(2, [64], activation="erf", generator=generator)
    before = [p.clone() for p in net.parameters()]
    x, query = torch.randn(4, 2, generator=generator), torch.randn(3, 2, generator=generator)
    untrained = distil_known_queries(net, LAW, x, query, steps=0)
    torch.testing.assert_close(untrained.variance, LAW.diag(query).float())
    assert untrained.unlearned == pytest.approx(1)
    assert float(untrained.regression.abs().max()) < 1e-5
    distil_known_queries(net, LAW, x, query, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


class PairModule(nn.Module):
    """g(x, c) row by row, so that its tangent kernel can be computed by autograd."""

    def __init__(self, model: Similarity) -> None:
        super().__init__()
        self.phi, self.psi, self.scale = model.phi, model.psi, model.scale

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.scale * (self.phi(x) * self.psi(c)).sum(1)


def test_pair_kernel_is_the_limit_of_the_tangent_kernel_of_g() -> None:
    """Θ_g = Θ_φ κ_ψ + κ_φ Θ_ψ, approached at the rate 1/√width (a factor of 4 from 32 to 512)."""
    generator = Generator().manual_seed(0)
    x, c = torch.randn(5, 2, generator=generator), torch.randn(5, 2, generator=generator)
    limit = PairKernel(LAW, LAW)
    torch.testing.assert_close(limit.diag((x, c)), limit((x, c), (x, c)).diagonal())

    def distance(width: int) -> float:
        models = [wide_similarity(2, LAW, width, generator) for _ in range(6)]
        kernels = [empirical_ntk(PairModule(m), ["phi.*", "psi.*"])((x, c), (x, c)) for m in models]
        return float(np.mean([error(k.double(), limit((x, c), (x, c))) for k in kernels]))

    narrow, wide = distance(32), distance(512)
    assert wide < 0.1
    assert 2 < narrow / wide < 8, (narrow, wide)


def test_a_wide_contextual_model_agrees_with_equation_26_on_queries_it_never_saw() -> None:
    """Rank correlation of Θ(x, x) − g(x, x) with the closed form: at least 0.95 at width 512, rising with width."""
    generator = Generator().manual_seed(0)
    x = torch.randn(8, 2, generator=generator)
    c = torch.cat([x, 2 * torch.randn(12, 2, generator=generator)])
    query = 1.5 * torch.randn(150, 2, generator=generator)
    pair_kernel = PairKernel(LAW, LAW)
    pairs = all_pairs(x, c)
    limit = LAW.diag(query) - contextual_limit(pair_kernel, LAW(x, c).reshape(-1), pairs, (query, query))

    def agreement(width: int) -> float:
        found = []
        for seed in range(2):
            model = wide_similarity(2, LAW, width, Generator().manual_seed(seed))
            left = distil_wide(model, pair_kernel, LAW, x, c, steps=1000, shrink=0.01)
            assert left < 0.05, "not converged"
            with torch.no_grad():
                found.append(rank_correlation(LAW.diag(query) - model.confidence(query) / 0.01, limit))
        return float(np.mean(found))

    narrow, wide = agreement(32), agreement(512)
    assert wide >= 0.95, wide
    assert wide > narrow, (narrow, wide)


def test_equation_26_reproduces_its_labels_and_approaches_equation_11(generator: Generator) -> None:
    x, c = torch.randn(6, 2, generator=generator), torch.randn(9, 2, generator=generator)
    labels = LAW(x, c).reshape(-1)
    pairs = all_pairs(x, c)
    g = contextual_limit(PairKernel(LAW, LAW), labels, pairs, pairs)
    torch.testing.assert_close(g, labels, rtol=1e-6, atol=1e-6)
    assert float(contextual_limit(PairKernel(LAW, LAW), labels, pairs, pairs, time=0.0).abs().max()) == 0
    c, query = torch.randn(60, 2, generator=generator), torch.randn(60, 2, generator=generator)
    pairs, labels = all_pairs(x, c), LAW(x, c).reshape(-1)  # with many contexts it comes near the exact variance
    exact = ntk_gp(LAW, x, torch.zeros(6), query).variance
    variance = LAW.diag(query) - contextual_limit(PairKernel(LAW, LAW), labels, pairs, (query, query))
    assert rank_correlation(variance, exact) > 0.95


def test_loss_by_hand() -> None:
    g = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    labels = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    assert float(similarity_loss(g, labels)) == (0.5 * 1 + 0.5 * 9) / 2 + (0.0 + 0.5 * 4) / 2


def test_the_loss_over_random_pairs_by_hand() -> None:
    g, labels = torch.tensor([[9.0, 1.0, 9.0], [9.0, 9.0, 2.0], [4.0, 9.0, 9.0]]), torch.zeros(3, 3)
    assert float(random_pairs_loss(g, labels)) == pytest.approx(0.5 * (1 + 4 + 16) / 3)


def test_random_pairs_train_another_model() -> None:
    x = torch.randn(64, 3, generator=Generator().manual_seed(0))
    found = []
    for pairs in ("all", "random"):
        sizes = Architecture(hidden=(16,), outputs=8, pairs=pairs)  # pyright: ignore[reportArgumentType]
        model = similarity_model((3,), nn.Identity(), sizes, Generator().manual_seed(1))
        for _ in distillation(model, x, Features(lambda z: z), TrainContexts(), Recipe(steps=20, batch=16), 0):
            pass
        found.append(model(x, x).detach())
    assert not torch.allclose(*found)


def test_gap_survives_where_the_plain_difference_cancels() -> None:
    """φ̄ and ψ̄ that differ by an angle of 1e-5: 1 − cos is 5e-11, below float32's resolution at 1."""

    class Turn(nn.Module):
        def __init__(self, angle: float) -> None:
            super().__init__()
            self.angle = angle

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([torch.ones(len(x)), torch.full((len(x),), self.angle)], 1)

    model = Similarity(Turn(0.0), Turn(1e-5))
    x = torch.zeros(3, 2)
    torch.testing.assert_close(model.gap(x), torch.full((3,), 5e-11), rtol=1e-3, atol=0)
    assert float(1 - model(x, x)[0, 0]) == 0


def towers(generator: Generator) -> tuple[nn.Module, nn.Module]:
    return NTKMLP(3, [16], 8, generator=generator), NTKMLP(3, [16], 8, generator=generator)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("small_init", [True, False])
def test_confidence_is_the_diagonal_of_all_pairs(normalise: bool, small_init: bool, generator: Generator) -> None:
    model = Similarity(*towers(generator), normalise=normalise, small_init=small_init, scale=1.0 if normalise else 0.3)
    x = torch.randn(7, 3, generator=generator)
    if small_init:
        assert float(model(x, x).abs().max().detach()) < 1e-6, "ĝ is zero at the start"
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=generator) * p.requires_grad)
    torch.testing.assert_close(model.confidence(x), model(x, x).diagonal(), rtol=1e-5, atol=1e-5)
    if normalise:
        torch.testing.assert_close(model.gap(x), 1 - model(x, x).diagonal(), rtol=1e-4, atol=1e-5)


def test_labels_are_cached_similarities(generator: Generator) -> None:
    x, c = torch.rand(9, 3, generator=generator), torch.rand(4, 3, generator=generator)
    features = Features(lambda t: torch.cat([t, t.square()], 1))
    index = torch.tensor([3, 1, 7, 7])
    plain = Labels(features, x, normalise=False)(index, x[index], c)
    torch.testing.assert_close(plain, features(x[index], c))
    unit = Labels(features, x, normalise=True)
    torch.testing.assert_close(unit(index, x[index], x[index]).diagonal(), torch.ones(4))
    cosine = features(x[index], c) / (features.diag(x[index])[:, None] * features.diag(c)).sqrt()
    torch.testing.assert_close(unit(index, x[index], c), cosine)
    ntk = Labels(LAW, x, normalise=True)(index, x[index], c)
    torch.testing.assert_close(ntk, (LAW(x[index], c) / (LAW.diag(x[index])[:, None] * LAW.diag(c)).sqrt()).float())
    own = x[index]
    torch.testing.assert_close(
        Labels(LAW, x, normalise=True)(index, own, own), Labels(LAW, x, normalise=True)(index, own, own.clone())
    )


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("small_init", [True, False])
def test_the_training_loss_by_hand(normalise: bool, small_init: bool, generator: Generator) -> None:
    """What `distillation` minimises, from the draws on, once more in NumPy, with contexts that are not x."""
    x, extra = torch.rand(9, 3, generator=generator), torch.rand(5, 3, generator=generator)
    model = similarity_model(
        (3,), nn.Identity(), Architecture(hidden=(8,), outputs=4, normalise=normalise, small_init=small_init), generator
    )
    start = copy.deepcopy((model.phi, model.psi))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator) * p.requires_grad)
    kernel = Features(lambda t: torch.cat([t, t.square()], 1))
    training = distillation(model, x, kernel, ExtraContexts(extra), Recipe(steps=1, batch=6), 0)
    training.draws.refill()
    integers, uniforms = training.draws.integers, training.draws.uniforms
    found = float(training.losses[0](integers, uniforms).detach())

    def vectors(net: nn.Module, t: Tensor) -> np.ndarray:
        z = net(t).detach().double().numpy()
        return z / np.linalg.norm(z, axis=1, keepdims=True) if normalise else z

    xb, cb = x[integers[:, 0] % 9], extra[integers[:, 1] % 5]
    g = vectors(model.phi, xb) @ vectors(model.psi, cb).T
    if small_init:
        g = g - vectors(start[0], xb) @ vectors(start[1], cb).T
    theta = kernel(xb, cb).double().numpy()
    if normalise:
        theta = theta / np.sqrt(np.outer(kernel.diag(xb).numpy(), kernel.diag(cb).numpy()))
    squares = 0.5 * (g - theta) ** 2
    expected = np.diag(squares).mean() + squares[~np.eye(6, dtype=bool)].mean()
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_chain_is_the_papers_table() -> None:
    assert Chain() == Chain(
        apply=0.25, flip_horizontal=0.25, flip_vertical=0.25, rotate=0.25, blur=0.25, blur_sigma=1.0, crop_aspect=4 / 3,
        crop_area=(0.75, 1.0), brightness=0.5, brightness_range=1.0, contrast=0.5, contrast_range=1.0,
    )  # fmt: skip
    assert Architecture() == Architecture(channels=(32,), hidden=(256, 256), outputs=256, normalise=True)


# --- contexts and augmentations -----------------------------------------------------------------------------------


def draws(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 2**62, (n,), generator=generator), torch.rand(n, UNIFORMS, generator=generator)


def test_mixture_takes_fixed_shares_from_each_source(generator: Generator) -> None:
    x = torch.zeros(100, 2)
    mixture = Mixture(
        (TrainContexts(), ExtraContexts(torch.ones(5, 2)), ExtraContexts(2 * torch.ones(3, 2))), (2, 1, 1)
    )
    c = mixture(x, torch.arange(100), *draws(100, generator))
    assert [int((c[:, 0] == value).sum()) for value in (0, 1, 2)] == [50, 25, 25]
    for shares in ((1.0,), (1.0, 0.0)):
        with pytest.raises(InputError, match="one positive share"):
            Mixture((TrainContexts(), TrainContexts()), shares)


def test_copies_take_the_place_of_their_own_samples(generator: Generator) -> None:
    x, index = torch.arange(900.0)[:, None].expand(-1, 3), torch.randperm(900, generator=generator)
    c = CopiedContexts(-x - 1, 0.25)(x[index], index, *draws(900, generator))
    copied = c[:, 0] < 0
    assert abs(float(copied.double().mean()) - 0.25) < 0.05
    torch.testing.assert_close(c, torch.where(copied[:, None], -x[index] - 1, x[index]))


def test_stored_features_of_copies_give_the_labels_of_computed_ones(generator: Generator) -> None:
    x, copies = torch.randn(40, 3, generator=generator), torch.randn(40, 3, generator=generator)
    contexts, index = CopiedContexts(copies, 0.5), torch.randperm(40, generator=generator)[:12]
    numbers = draws(12, generator)
    labels = Labels(Features(torch.relu), x, normalise=True, contexts=contexts)
    c = contexts(x[index], index, *numbers)
    stored = labels.context_features(index, *numbers)
    assert stored is not None
    torch.testing.assert_close(labels(index, x[index], c, stored), labels(index, x[index], c))
    assert Labels(Features(torch.relu), x, normalise=True).context_features(index, *numbers) is None


def test_extra_contexts_use_all_of_the_data(generator: Generator) -> None:
    c = ExtraContexts(torch.arange(7.0)[:, None])(torch.zeros(700, 1), torch.arange(700), *draws(700, generator))
    counts = torch.bincount(c[:, 0].long(), minlength=7).double()
    assert float(((counts - 100) ** 2 / 100).sum()) < 22.5  # chi-square with 6 degrees of freedom, p = 0.001


NOTHING = Chain(
    apply=1, flip_horizontal=0, flip_vertical=0, rotate=0, blur=0, crop_area=(1.0, 1.0), brightness=0, contrast=0
)


def only(**settings: Any) -> Chain:
    from dataclasses import replace

    return replace(NOTHING, **settings)


def uniforms(n: int, **columns: float) -> Tensor:
    """Half-way draws (no crop offset, square crops, probabilities below one half fire not), with some columns set."""
    u = torch.full((n, UNIFORMS), 0.5)
    for name, value in columns.items():
        u[:, int(name[1:])] = value
    return u


@pytest.fixture
def images(generator: Generator) -> Tensor:
    return torch.rand(4, 2, 9, 9, generator=generator)


def test_flips_mirror_exactly(images: Tensor) -> None:
    still = augment(images, uniforms(4), NOTHING)
    torch.testing.assert_close(still, images, rtol=1e-5, atol=1e-5)
    sideways = augment(images, uniforms(4), only(flip_horizontal=1))
    torch.testing.assert_close(sideways, images.flip(3), rtol=1e-5, atol=1e-5)
    upside_down = augment(images, uniforms(4), only(flip_vertical=1))
    torch.testing.assert_close(upside_down, images.flip(2), rtol=1e-5, atol=1e-5)


def test_quarter_turns_are_exact_and_other_angles_match_scipy(images: Tensor) -> None:
    quarter = augment(images, uniforms(4, u7=0.75), only(rotate=1))
    turned = torch.rot90(images, 1, (2, 3))
    assert torch.allclose(quarter, turned, atol=1e-4) or torch.allclose(
        quarter, torch.rot90(images, -1, (2, 3)), atol=1e-4
    )
    smooth = torch.zeros(1, 1, 21, 21)
    smooth[0, 0] = torch.exp(-((torch.arange(21.0)[:, None] - 7) ** 2 + (torch.arange(21.0) - 12) ** 2) / 12)
    for u7 in (0.6, 0.31):
        angle = (2 * u7 - 1) * 180
        expected = ndimage.rotate(smooth[0, 0].numpy(), angle, reshape=False, order=1)
        found = augment(smooth, uniforms(1, u7=u7), only(rotate=1))[0, 0].numpy()
        np.testing.assert_allclose(found, expected, atol=0.02)


def test_blur_is_a_gaussian(images: Tensor) -> None:
    found = augment(images, uniforms(4), only(blur=1))
    expected = ndimage.gaussian_filter(images.numpy(), (0, 0, 1, 1), mode="nearest", truncate=3)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_crop_zooms_into_the_asked_area() -> None:
    ramp = torch.linspace(0, 1, 33).expand(1, 1, 33, 33)
    found = augment(ramp, uniforms(1), only(crop_area=(0.25, 0.25)))  # half of each side, centred, square
    torch.testing.assert_close(found[0, 0, 16, 16], torch.tensor(0.5), atol=1e-3, rtol=0)
    slope = float(found[0, 0, 16, 20] - found[0, 0, 16, 12]) / 8 * 32
    assert math.isclose(slope, 0.5, rel_tol=0.01)


def test_brightness_and_contrast_by_hand(images: Tensor) -> None:
    brighter = augment(images, uniforms(4, u10=0.6), only(brightness=1))
    torch.testing.assert_close(brighter, (images + 0.2).clamp(0, 1), rtol=1e-5, atol=1e-5)
    mean = images.mean((1, 2, 3), keepdim=True)
    flatter = augment(images, uniforms(4, u12=0.25), only(contrast=1))
    torch.testing.assert_close(flatter, mean + 0.5 * (images - mean), rtol=1e-5, atol=1e-5)


@given(low=st.floats(-3, 3), span=st.floats(0.1, 10))
def test_any_range_is_treated_like_the_unit_range(low: float, span: float) -> None:
    generator = Generator().manual_seed(1)
    x, (_, u) = torch.rand(6, 1, 7, 5, generator=generator), draws(6, generator)
    chain = Chain(apply=1)
    unit = augment(x, u, chain)
    other = augment(low + span * x, u, chain, low, low + span)
    torch.testing.assert_close((other - low) / span, unit, rtol=1e-3, atol=1e-3)
    assert float(unit.min()) >= 0
    assert float(unit.max()) <= 1


def test_each_sample_has_its_own_draw_and_the_share_is_kept(generator: Generator) -> None:
    x = torch.rand(1, 1, 8, 8, generator=generator).expand(2000, -1, -1, -1)
    _, u = draws(2000, generator)
    contexts = AugmentedContexts(Chain(apply=0.25), 0.0, 1.0)
    c = contexts(x, torch.arange(2000), torch.zeros(2000, dtype=torch.int64), u)
    changed = (c != x).flatten(1).any(1)
    assert abs(float(changed.double().mean()) - 0.25) < 0.03
    assert len(torch.unique(c[changed].flatten(1), dim=0)) > 0.9 * int(changed.sum())
    torch.testing.assert_close(contexts(x, torch.arange(2000), torch.zeros(2000, dtype=torch.int64), u), c)


def test_turns_of_pictures_that_are_not_square_match_scipy() -> None:
    smooth = torch.zeros(1, 1, 21, 33)
    smooth[0, 0] = torch.exp(-((torch.arange(21.0)[:, None] - 7) ** 2 + (torch.arange(33.0) - 20) ** 2) / 12)
    for u7 in (0.6, 0.31):
        expected = ndimage.rotate(smooth[0, 0].numpy(), (2 * u7 - 1) * 180, reshape=False, order=1)
        found = augment(smooth, uniforms(1, u7=u7), only(rotate=1))[0, 0].numpy()
        np.testing.assert_allclose(found, expected, atol=0.02)


def test_crops_have_the_asked_aspect_and_place() -> None:
    middles = (2 * torch.arange(32.0) + 1) / 32 - 1
    where = torch.stack(torch.meshgrid(middles, middles, indexing="xy"))[None]  # every pixel shows where it is
    chain = only(crop_area=(0.5, 0.5), crop_aspect=4 / 3)
    found = augment(where, uniforms(1, u1=1.0, u2=0.9, u3=0.2), chain, -1, 1)[0]
    across, down = math.sqrt(0.5) * math.sqrt(4 / 3), math.sqrt(0.5) / math.sqrt(4 / 3)
    torch.testing.assert_close(found[0, 16], across * middles + (1 - across) * 0.8, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1, :, 16], down * middles - (1 - down) * 0.6, rtol=0, atol=1e-4)


def test_a_mixture_gives_every_source_its_own_rows(generator: Generator) -> None:
    x = torch.arange(100.0)[:, None]
    c = Mixture((ExtraContexts(-torch.ones(5, 1)), TrainContexts()), (1, 1))(
        x, torch.arange(100), *draws(100, generator)
    )
    torch.testing.assert_close(c, torch.cat([-torch.ones(50, 1), x[50:]]))
