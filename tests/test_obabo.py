"""The corrected Langevin sampler: exact laws, reversibility, verdicts, and going on from what was kept."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.core import storage
from onefold.detectors import _langevin
from onefold.detectors._langevin import ChainState, Dynamics
from onefold.errors import FileError, InputError

MEAN = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
MIX = torch.tensor([[1.0, 0, 0, 0], [0.8, 0.6, 0, 0], [-0.5, 0.3, 0.7, 0], [0.2, 0.1, -0.4, 1.2]], dtype=torch.float64)
UNMIX = torch.linalg.inv(MIX)
DATA = 200


def gaussian(parameters: Any, _: Any) -> Tensor:
    """−log N(MEAN, MIX MIXᵀ) of vectors that come in pieces [chains, n]."""
    return ((torch.cat(list(parameters), dim=-1) - MEAN) @ UNMIX.T).square().sum(-1) / 2


class Regression:
    """y = xᵀθ + noise of variance 1, θ ~ N(0, I): the posterior is Gaussian, and its gradients come in minibatches."""

    def __init__(self) -> None:
        generator = Generator().manual_seed(3)
        self.x = torch.randn(DATA, 3, dtype=torch.float64, generator=generator) @ MIX[:3, :3]
        noise = torch.randn(DATA, dtype=torch.float64, generator=generator)
        self.y = self.x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64) + noise
        precision = self.x.T @ self.x + torch.eye(3, dtype=torch.float64)
        self.mean = torch.linalg.solve(precision, self.x.T @ self.y)
        self.mix = torch.linalg.cholesky(torch.linalg.inv(precision))

    def potential(self, parameters: Any, batch: Tensor) -> Tensor:
        """U_b of parameters [chains, 3] and data [chains, batch], or of one chain without that axis."""
        (theta,) = parameters
        residuals = self.y[batch] - (self.x[batch] @ theta[..., None]).squeeze(-1)
        return DATA / batch.shape[-1] * residuals.square().sum(-1) / 2 + theta.square().sum(-1) / 2


def leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


def walk(
    parameters: list[Tensor],
    potential: _langevin.Potential,
    whole: Any,
    batches: Callable[[], list[Any]],
    dynamics: Dynamics,
    trajectories: int,
    *,
    corrected: bool = True,
    alone: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Where trajectories end [trajectory, chain, d], and their −ΔE/T. `alone`: a step has one minibatch for itself."""
    generator = Generator().manual_seed(1)
    state = _langevin.init(parameters, potential(parameters, whole), dynamics, generator)
    ends, ratios = [], []
    for _ in range(trajectories):
        first, *others = batches()
        _langevin.begin(state, first, potential, dynamics.step_size())
        for batch in others:
            if alone:
                _langevin.reopen(state, batch, potential)
            _langevin.update(state, batch, potential, dynamics, generator)
        if corrected:
            ratios.append(_langevin.finish(state, potential(parameters, whole), dynamics, generator).log_ratio.numpy())
        ends.append(torch.cat([p.detach() for p in parameters], dim=-1).numpy())
    return np.stack(ends), np.array(ratios)


def acceptance(log_ratios: np.ndarray) -> float:
    return float(np.exp(np.minimum(log_ratios, 0)).mean())


def deviations(samples: np.ndarray, mean: Tensor, mix: Tensor, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """First and second moments of (mix √T)⁻¹(θ − mean), less what they should be; and their standard errors.

    Chains are independent, so the errors are those of a mean over chains, whatever the memory within a chain.
    """
    z = (samples - mean.numpy()) @ np.linalg.inv(mix.numpy() * math.sqrt(temperature)).T
    i, j = np.triu_indices(z.shape[-1])
    moments = np.concatenate([z, z[..., i] * z[..., j] - (i == j)], axis=-1).mean(0)
    return moments.mean(0), moments.std(0, ddof=1) / math.sqrt(len(moments))


@pytest.mark.parametrize(("lr", "momentum"), [(0.1, 0.6), (0.3, 0.9)])
def test_the_law_of_a_correlated_gaussian(lr: float, momentum: float) -> None:
    dynamics = Dynamics(lr=lr, data=1, momentum=momentum, temperature=0.5)
    start = MEAN.expand(400, 4)
    samples, ratios = walk([leaf(start[:, :1]), leaf(start[:, 1:])], gaussian, None, lambda: [None] * 6, dynamics, 150)
    off, error = deviations(samples[50:], MEAN, MIX, 0.5)
    assert error.max() < 0.025, "enough samples to see a temperature that is wrong by a fifth at eight errors"
    assert np.abs(off / error).max() < 4
    assert 0.5 < acceptance(ratios) < 0.99
    worth = np.exp(ratios[50:]).mean(0)
    assert abs(worth.mean() - 1) < 4 * worth.std() / 20, "E exp(−ΔE/T) = 1"


@pytest.mark.parametrize("form", ["shared", "alone", "arranged"])
def test_noisy_gradients_are_corrected(form: str) -> None:
    """Minibatches drawn independently, shared by two steps or not; or a random arrangement of all data."""
    task, order, chains = Regression(), Generator().manual_seed(5), 250
    dynamics, whole = Dynamics(lr=0.06, data=DATA, momentum=0.9), torch.arange(DATA).expand(chains, DATA)

    def batches() -> list[Tensor]:
        if form == "arranged":
            return list(torch.rand(chains, DATA, generator=order).argsort(1).split(40, dim=1))
        return list(torch.randint(DATA, (6, chains, 50), generator=order))

    def found(corrected: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parameters, trajectories = [leaf(task.mean.expand(chains, 3))], 200 if corrected else 60
        how = {"corrected": corrected, "alone": form == "alone"}
        samples, ratios = walk(parameters, task.potential, whole, batches, dynamics, trajectories, **how)
        return *deviations(samples[trajectories // 3 :], task.mean, task.mix, 1.0), ratios

    off, error, ratios = found(corrected=True)
    assert np.abs(off / error).max() < 4
    assert error.max() < 0.04
    assert 0.3 < acceptance(ratios) < 0.8
    off, error, _ = found(corrected=False)
    variances = [3, 6, 8]  # of the three coordinates, among the moments
    least = 0.1 if form == "arranged" else 0.5  # in an arrangement of all data the noises cancel in part
    assert off[variances].min() > least, "uncorrected, the same steps find variances that are too large"
    assert (off / error)[variances].min() > 4


def test_a_double_well_with_noisy_gradients() -> None:
    """U = 2(x² − 1)²; a minibatch adds a slope of either sign, so that a gradient is right on average only."""
    order, dynamics = Generator().manual_seed(2), Dynamics(lr=0.05, data=1, momentum=0.7, temperature=1.2)
    slopes, chains = torch.tensor([-3.0, 1.0, 2.0], dtype=torch.float64), 4000  # the mean slope is 0

    def potential(parameters: Any, slope: Tensor) -> Tensor:
        x = parameters[0][:, 0]
        return 2 * (x * x - 1).square() + slope * x

    def batches() -> list[Tensor]:
        return list(slopes[torch.randint(3, (7, chains), generator=order)])

    x = leaf(torch.ones(chains, 1, dtype=torch.float64))
    ends, ratios = walk([x], potential, torch.zeros(chains, dtype=torch.float64), batches, dynamics, 120)
    assert 0.3 < acceptance(ratios) < 0.9
    grid = np.linspace(-3, 3, 60_001)
    density = np.exp(-2 * (grid**2 - 1) ** 2 / 1.2)
    edges = np.interp(np.arange(1, 20) / 20, np.cumsum(density) / density.sum(), grid)
    counts = np.bincount(np.digitize(ends[-1, :, 0], edges), minlength=20)  # one independent sample a chain
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_trajectory_runs_backwards() -> None:
    """With momentum and minibatches reversed, and each noise turned into the one that undoes its refreshment."""
    task, generator = Regression(), Generator().manual_seed(4)
    dynamics = Dynamics(lr=0.05, data=DATA, momentum=0.8, temperature=0.7)
    keep, spread = math.sqrt(0.8), math.sqrt(0.2 * 0.7)
    theta, momentum = leaf(task.mean), torch.randn(3, dtype=torch.float64, generator=generator)
    first = theta.detach().clone(), momentum.clone()
    minibatches = torch.randperm(DATA, generator=generator)[:120].view(6, 20)
    step_size, work = torch.tensor(dynamics.step_size(), dtype=torch.float64), torch.zeros((), dtype=torch.float64)

    def step(start: Tensor, end: Tensor, noise: Tensor) -> None:
        """One step whose kicks are by these minibatches."""
        gradient = _langevin.gradients(task.potential, [theta], start)[0].clone()
        ended = lambda: _langevin.gradients(task.potential, [theta], end)  # noqa: E731
        _langevin.step([theta], momentum, gradient, work, step_size, noise, ended, dynamics)

    backwards = []
    for start, end in pairwise(minibatches):
        noise = torch.randn(2, 3, dtype=torch.float64, generator=generator)
        before = momentum.clone()
        step(start, end, noise)
        after = (momentum - spread * noise[1]) / keep  # what the second refreshment found
        refreshed = keep * before + spread * noise[0]  # what the first one left
        backwards.append(torch.stack([keep * momentum - after, keep * refreshed - before]) / spread)
    forward_work = work.clone()
    assert (theta - first[0]).abs().max() > 0.02
    momentum.neg_()
    for n in reversed(range(5)):
        step(minibatches[n + 1], minibatches[n], backwards[n])
    torch.testing.assert_close(theta.detach(), first[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(momentum, -first[1], rtol=0, atol=1e-9)
    assert abs(float(forward_work)) > 0.05
    assert abs(float(work)) < 1e-9, "what was gained on the way is given back"


def test_acceptance_falls_with_the_step_size() -> None:
    found = []
    for lr in (0.0004, 0.05, 0.3, 0.7):
        parameters = [leaf(MEAN.expand(100, 4))]
        dynamics = Dynamics(lr=lr, data=1, momentum=0.5)
        found.append(acceptance(walk(parameters, gaussian, None, lambda: [None] * 11, dynamics, 20)[1]))
    assert found[0] > 0.999
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.7


@pytest.mark.parametrize("potential", [math.inf, math.nan, -math.inf])
def test_a_rejected_trajectory_goes_back_and_turns_round(potential: float) -> None:
    generator, dynamics = Generator().manual_seed(0), Dynamics(lr=0.1, data=1, momentum=0.5)
    theta = leaf(MEAN)
    state = _langevin.init([theta], gaussian([theta], None), dynamics, generator)
    before = theta.detach().clone(), state.momentum.clone(), state.potential.clone()
    _langevin.begin(state, None, gaussian, dynamics.step_size())
    for _ in range(3):
        _langevin.update(state, None, gaussian, dynamics, generator)
    there = theta.detach().clone(), state.momentum.clone()
    end = torch.tensor(potential, dtype=torch.float64)
    accepted = _langevin.finish(state, end, dynamics, generator).accepted
    assert bool(accepted) is (potential == -math.inf)
    expected = (*there, end) if accepted else (before[0], -before[1], before[2])
    for found, wanted in zip((theta.detach(), state.momentum, state.potential), expected, strict=True):
        assert torch.equal(found, wanted)


def test_work_is_the_change_of_kinetic_energy() -> None:
    """In float32 too, where the difference of two sums over a million squares would be off by a tenth."""
    generator = Generator().manual_seed(0)
    momentum, gradient = torch.randn(2, 1_000_000, generator=generator)
    before, work = momentum.double().square().sum() / 2, torch.zeros((), dtype=torch.float64)
    _langevin.kick(momentum, gradient, work, torch.tensor(0.01))
    change = momentum.double().square().sum() / 2 - before
    assert abs(float(change)) > 1
    assert float(work) == pytest.approx(float(change), abs=2e-3)


def begun(seed: int) -> tuple[ChainState, Generator, Dynamics]:
    """A chain in the middle of a trajectory, in two parameters."""
    generator, dynamics = Generator().manual_seed(seed), Dynamics(lr=0.3, data=1, momentum=0.5)
    parameters = [leaf(seed * MEAN[:1]), leaf(MEAN[1:])]
    state = _langevin.init(parameters, gaussian(parameters, None), dynamics, generator)
    _langevin.begin(state, None, gaussian, dynamics.step_size(seed / 10))
    for _ in range(3):
        _langevin.update(state, None, gaussian, dynamics, generator)
    return state, generator, dynamics


def ended(state: ChainState, generator: Generator, dynamics: Dynamics) -> Tensor:
    """All that can be seen of a chain three steps later: as it is, after a verdict, and after a sure rejection."""
    for _ in range(3):
        _langevin.update(state, None, gaussian, dynamics, generator)
    seen = [t.clone() for t in (*state.parameters, state.momentum)]
    for potential in (gaussian(state.parameters, None), torch.tensor(math.inf)):
        verdict = _langevin.finish(state, potential, dynamics, generator)
        seen += [t.clone() for t in (*state.parameters, state.momentum, state.potential, verdict.log_ratio)]
    return torch.cat([t.detach().flatten() for t in seen])


def test_going_on_from_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "chain.ckpt"
    chain = begun(1)
    storage.save(path, "chain", _langevin.state_tensors(*chain[:2]), {})
    uninterrupted = ended(*chain)
    state, generator, dynamics = begun(2)
    _langevin.restore(state, generator, storage.load(path, "chain")[0])
    assert torch.equal(ended(state, generator, dynamics), uninterrupted)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileError, match=r"chain.ckpt: damaged"):
        storage.load(path, "chain")


def test_all_that_is_kept_is_needed() -> None:
    chain = begun(1)
    kept = {name: tensor.clone() for name, tensor in _langevin.state_tensors(*chain[:2]).items()}
    uninterrupted = ended(*chain)
    lost = {name: tensor.clone() for name, tensor in _langevin.state_tensors(*begun(2)[:2]).items()}
    for name in kept:
        state, generator, dynamics = begun(2)
        _langevin.restore(state, generator, kept | {name: lost[name]})
        assert not torch.equal(ended(state, generator, dynamics), uninterrupted), name
    with pytest.raises(InputError, match="another chain"):
        _langevin.restore(*begun(2)[:2], {name: tensor for name, tensor in kept.items() if name != "work"})
    with pytest.raises(InputError, match="another chain"):
        _langevin.restore(*begun(2)[:2], kept | {"momentum": torch.zeros(5)})


def test_a_chain_begins_hot_enough_and_a_trajectory_at_its_step_size(generator: Generator) -> None:
    dynamics, theta = Dynamics(lr=0.1, data=1, momentum=0.5, temperature=0.3), leaf(torch.ones(100_000))
    state = _langevin.init([theta], torch.tensor(7.0), dynamics, generator)
    assert float(state.momentum.var()) == pytest.approx(0.3, rel=0.02)
    assert float(state.potential) == 7
    _langevin.begin(state, None, lambda parameters, _: parameters[0].square().sum(), 0.125)
    assert float(state.step_size) == 0.125
    assert torch.equal(state.gradient, 2 * theta)


def test_the_step_size_is_annealed_linearly_in_the_rate() -> None:
    dynamics = Dynamics(lr=0.02, data=50, momentum=0.9)
    found = [dynamics.step_size(i / 4) ** 2 * 50 for i in range(4)]
    np.testing.assert_allclose(found, [0.02, 0.015, 0.01, 0.005])
    with pytest.raises(InputError, match="not in"):
        dynamics.step_size(1.0)


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"data": 0}, {"momentum": 1.0}, {"temperature": 0.0}, {"lr": math.nan}])
def test_impossible_dynamics_are_refused(bad: dict) -> None:
    with pytest.raises(InputError, match=str(next(iter(bad.values())))):
        Dynamics(**{"lr": 0.1, "data": 9, "momentum": 0.5} | bad)


def test_parameters_that_cannot_move_are_refused(generator: Generator) -> None:
    potential, dynamics = torch.zeros(()), Dynamics(lr=0.1, data=9, momentum=0.5)
    for bad in ([], [torch.zeros(2)], [2 * leaf(MEAN)]):
        with pytest.raises(InputError, match="leaf tensors"):
            _langevin.init(bad, potential, dynamics, generator)
    with pytest.raises(InputError, match="first axis"):
        _langevin.init([leaf(MEAN)], torch.zeros(3), dynamics, generator)
    with pytest.raises(InputError, match="share one type"):
        _langevin.init([leaf(MEAN), leaf(MEAN.float())], potential, dynamics, generator)


class Unread(TorchDispatchMode):
    """Refuses operations whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"}, name
        return func(*args, **(kwargs or {}))


def test_a_trajectory_is_read_by_nobody_and_stays_in_its_place() -> None:
    """What a CUDA graph needs, tried without a GPU."""
    state, generator, dynamics = begun(1)
    places = {
        name: tensor.data_ptr()
        for name, tensor in _langevin.state_tensors(state, generator).items()
        if name != "generator"
    }
    with Unread():
        _langevin.begin(state, None, gaussian, dynamics.step_size())
        _langevin.update(state, None, gaussian, dynamics, generator)
        verdict = _langevin.finish(state, gaussian(state.parameters, None), dynamics, generator)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            bool(verdict.accepted)
    now = _langevin.state_tensors(state, generator)
    assert {name: now[name].data_ptr() for name in places} == places


def test_every_chain_has_its_own_verdict(generator: Generator) -> None:
    dynamics = Dynamics(lr=0.1, data=1, momentum=0.5)
    matrix, vector = leaf(torch.ones(3, 2, 2)), leaf(torch.zeros(3))

    def potential(parameters: Any, _: Any) -> Tensor:
        return parameters[0].square().sum((1, 2)) + parameters[1].square()

    state = _langevin.init([matrix, vector], potential([matrix, vector], None), dynamics, generator)
    begun, momentum = matrix.detach().clone(), state.momentum.clone()
    _langevin.begin(state, None, potential, dynamics.step_size())
    _langevin.update(state, None, potential, dynamics, generator)
    there = [matrix.detach().clone(), vector.detach().clone(), state.momentum.clone()]
    ends = torch.tensor([-math.inf, math.inf, math.nan])
    with pytest.raises(InputError, match="one potential per chain"):
        _langevin.finish(state, ends[0], dynamics, generator)
    assert _langevin.finish(state, ends, dynamics, generator).accepted.tolist() == [True, False, False]
    assert torch.equal(matrix, torch.cat([there[0][:1], begun[1:]]))
    assert torch.equal(vector, torch.cat([there[1][:1], torch.zeros(2)]))
    assert torch.equal(state.momentum, torch.cat([there[2][:1], -momentum[1:]]))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def captured(step: Callable[[], Any], generator: Generator) -> torch.cuda.CUDAGraph:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph


@on_gpu
def test_captured_steps_are_the_plain_ones_and_wait_for_nothing() -> None:
    dynamics, place, unmix = Dynamics(lr=0.2, data=1, momentum=0.6), MEAN.cuda(), UNMIX.cuda()
    noise = torch.zeros(2, 4, dtype=torch.float64, device="cuda")

    def potential(parameters: Any, _: Any) -> Tensor:
        return (unmix @ (parameters[0] - place)).square().sum() / 2

    def moved(graphed: bool) -> Tensor:
        generator, theta = Generator("cuda").manual_seed(0), leaf(place)
        state = _langevin.init([theta], potential([theta], None), dynamics, generator)

        def step() -> None:
            renewed = lambda: _langevin.gradients(potential, [theta], None)  # noqa: E731
            _, momentum, gradient, work, size, _, _ = state
            _langevin.step([theta], momentum, gradient, work, size, noise, renewed, dynamics)

        if graphed:
            at_rest = {name: tensor.clone() for name, tensor in _langevin.state_tensors(state, generator).items()}
            step = captured(step, Generator("cuda")).replay
            _langevin.restore(state, generator, at_rest)
        for trajectory in range(20):
            torch.cuda.set_sync_debug_mode("error")
            _langevin.begin(state, None, potential, dynamics.step_size(trajectory / 20))
            for _ in range(5):
                noise.normal_(generator=generator)
                step()
            _langevin.finish(state, potential([theta], None), dynamics, generator)
            torch.cuda.set_sync_debug_mode("default")
        return torch.cat([theta.detach(), state.momentum])

    torch.testing.assert_close(moved(graphed=True), moved(graphed=False))


@on_gpu
def test_a_captured_update_draws_its_own_noise_and_samples_the_law() -> None:
    dynamics, generator = Dynamics(lr=0.1, data=1, momentum=0.6, temperature=0.5), Generator("cuda").manual_seed(0)
    place, unmix = MEAN.cuda(), UNMIX.cuda()
    theta = leaf(place.expand(4000, 4))

    def potential(parameters: Any, _: Any) -> Tensor:
        return ((parameters[0] - place) @ unmix.T).square().sum(-1) / 2

    state = _langevin.init([theta], potential([theta], None), dynamics, generator)
    graph = captured(lambda: _langevin.update(state, None, potential, dynamics, generator), generator)
    state.potential.copy_(potential([theta], None).detach())
    samples = []
    for _ in range(100):
        _langevin.begin(state, None, potential, dynamics.step_size())
        for _ in range(5):
            graph.replay()
        _langevin.finish(state, potential([theta], None), dynamics, generator)
        samples.append(theta.detach().clone())
    off, error = deviations(torch.stack(samples[40:]).cpu().numpy(), MEAN, MIX, 0.5)
    assert error.max() < 0.01
    assert np.abs(off / error).max() < 4
