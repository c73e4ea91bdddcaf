"""Stochastic-gradient MCMC (Garriga-Alonso & Fortuin, 2021): the disagreement of networks from a posterior."""

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from onefold.core import storage
from onefold.core.arguments import check_choice, check_integer, check_number, check_path, check_sizes
from onefold.core.batches import check_seed, named, pick_device
from onefold.core.rng import generators
from onefold.detectors._langevin import ChainSampler, ChainSchedule, Dynamics, Posterior, Sampler
from onefold.detectors.alarm import Alarm
from onefold.detectors.build import Summary, initial_standardise, streams
from onefold.detectors.diagnosis import Finding
from onefold.detectors.members import (
    Augmentation,
    Disagreement,
    MemberDetector,
    MemberSpec,
    MembersScorer,
    Parallel,
    check_augmentation,
    check_disagreement,
    make_targets,
)
from onefold.detectors.state import DetectorState
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import backbone
from onefold.nn.train import LARGEST_BATCH, save_checkpoints, show_updates
from onefold.types import ArrayLike

SAMPLERS: tuple[Sampler, ...] = ("obabo", "baoa")
MAX_EPOCHS = 10_000.0
MIN_ACCEPTANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class SGMCMCSpec(MemberSpec):
    """Settings of `SGMCMC`."""

    samples: int
    sampler: Sampler
    epochs: float
    burn_in: float
    lr: float
    momentum: float
    temperature: float
    batch: int

    @property
    def networks(self) -> int:
        """Number of networks."""
        return self.samples


@dataclass(frozen=True, kw_only=True)
class SGMCMCSummary(Summary):
    """Share of trajectories that were accepted; −1 without correction."""

    acceptance: float = -1.0


class SGMCMC(MemberDetector):
    """A Bayesian classifier: networks from one Markov chain in the posterior of its weights.

    The chain follows Langevin dynamics with minibatch gradients. The learning rate falls linearly from trajectory to
    trajectory. Default numbers are the paper's; the default momentum is that of bnn_priors.

    The prior of each weight is a normal with mean 0 and variance 2/fan_in in hidden layers, 1/fan_in in the head, and 1
    for biases. In layers that do not widen, these are the variances of the orthogonal initial weights, so that the
    initial network is typical of the prior.

    With sampler="obabo", a Metropolis step accepts or rejects every trajectory after the burn-in, with the potential of
    all data in float64. The posterior is then exact. After a rejected trajectory the previous network is stored once
    more. Two options leave out the correction (`corrected` is False): with `augment`, gradients and potential belong to
    different data; sampler="baoa" is the uncorrected sampler of the package posteriors. Both are biased by the step
    size and by the noise of the minibatches.

    Args:
        samples: Number of networks, from 2 to 1,000.
        sampler: "obabo" or "baoa".
        epochs: Epochs per trajectory; each trajectory gives one network.
        burn_in: Epochs before the first network.
        lr: Initial learning rate.
        momentum: Share of momentum that a step keeps, in [0, 1).
        temperature: Temperature T of the posterior exp(−U/T).
        batch: Samples per minibatch.
        channels: Channels of the convolutional stages, for images.
        hidden: Hidden layers.
        score: Measure of disagreement.
        augment: Augmentation of training images: "crops" enlarges a random part, "flips" also mirrors it.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range.
    """

    spec_class = SGMCMCSpec
    summary_class = SGMCMCSummary

    def __init__(
        self,
        samples: int = 30,
        *,
        sampler: Sampler = "obabo",
        epochs: float = 2.0,
        burn_in: float = 10.0,
        lr: float = 1e-3,
        momentum: float = 0.994,
        temperature: float = 1.0,
        batch: int = 256,
        channels: tuple[int, ...] = (32, 64),
        hidden: tuple[int, ...] = (256, 256),
        score: Disagreement = "mutual_information",
        augment: Augmentation = "none",
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.samples = check_integer(samples, "samples", 2, 1000)
        self.sampler: Sampler = check_choice(sampler, "sampler", SAMPLERS)
        self.epochs = check_number(epochs, "epochs", 0, MAX_EPOCHS)
        self.burn_in = check_number(burn_in, "burn_in", 0, MAX_EPOCHS, closed="both")
        self.batch = check_integer(batch, "batch", 1, LARGEST_BATCH)
        self.lr, self.temperature = check_number(lr, "lr"), check_number(temperature, "temperature")
        self.momentum = check_number(momentum, "momentum", 0, 1, closed="left")
        self.channels, self.hidden = check_sizes(channels, "channels"), check_sizes(hidden, "hidden")
        self.score_kind: Disagreement = check_disagreement(score)
        self.augment: Augmentation = check_augmentation(augment)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    @property
    def corrected(self) -> bool:
        """True if a Metropolis step accepts or rejects trajectories."""
        return self.sampler == "obabo" and self.augment == "none"

    @property
    def acceptance(self) -> float:
        """Share of trajectories that were accepted; −1 without correction."""
        return _summary(self.state).acceptance

    def fit(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "SGMCMC":
        """Sample networks given inputs and class labels.

        Args:
            x: Training data, as in `CSD.fit`.
            y: Class labels 0, 1, 2 …. A Dataset of pairs (x, y) needs no `y`.
            checkpoint: File to resume from, as in `CSD.fit`.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data or the labels cannot be used.
            MissingExtraError: sampler="baoa" without the package posteriors.
            TrainingError: The chain diverged.
        """
        data = read_train_data(x, self.device, self.seed)
        targets = make_targets(x, y, len(data.samples), "classification", self.device)
        spec = SGMCMCSpec(**self.settings, inputs=data.reader.sample_shape, outputs=targets.outputs)
        sizes = {"channels": self.channels, "hidden": self.hidden, "outputs": targets.outputs}
        weights, chain = generators(self.seed, 2)
        tower = backbone(spec.inputs, generator=weights, **sizes).to(self.device)
        posterior = Posterior(data.standardise, tower, data, targets.values, self.batch, self.augment)
        dynamics = Dynamics(lr=self.lr, data=posterior.count, momentum=self.momentum, temperature=self.temperature)
        schedule = self._schedule(posterior.count, len(posterior.index))
        sampling = ChainSampler(posterior, schedule, self.sampler, dynamics, chain.initial_seed())
        updates = iter(sampling)
        if checkpoint is not None:
            problem = [asdict(spec), targets.values, *named(data.reservoir.samples).values()]
            identity = storage.fingerprint(self.device.type, type(self).__name__, *problem)
            updates = save_checkpoints(sampling, check_path(checkpoint, "checkpoint"), identity)
        for _ in show_updates(updates, sampling.steps, "SG-MCMC", progress):
            pass
        members = Parallel([posterior.network(theta) for theta in sampling.members])
        scorer = MembersScorer(members, spec, meta=False).to(self.device)
        self._finish(data, targets, scorer, spec, SGMCMCSummary(acceptance=sampling.acceptance))
        return self

    def build(self, spec: SGMCMCSpec, *, meta: bool = False) -> MembersScorer:
        """Return the members: all with the same initial weights, or on the meta device."""
        first = initial_standardise(spec.inputs, meta=meta)
        sizes = {"channels": spec.channels, "hidden": spec.hidden, "outputs": spec.outputs}
        nets: list[nn.Module] = [
            nn.Sequential(first, backbone(spec.inputs, generator=streams(spec.seed, 2, meta=meta)[0], **sizes))
            for _ in range(spec.samples)
        ]
        return MembersScorer(Parallel(nets), spec, meta=meta)

    def restore_state(self, state: DetectorState, alarm: Alarm | None) -> None:
        """Set the state of a detector from a file."""
        acceptance = _summary(state).acceptance
        if not (0 <= acceptance <= 1 if self.corrected else acceptance == -1):
            raise ValueError("no chain with these settings has this acceptance")
        super().restore_state(state, alarm)

    def _schedule(self, count: int, batch: int) -> ChainSchedule:
        """Return the schedule in whole trajectories and steps, at least one of each."""
        return ChainSchedule(
            burn_in=max(round(self.burn_in / self.epochs), int(self.burn_in > 0)),
            samples=self.samples,
            steps=max(1, round(self.epochs * count / batch)),
            corrected=self.corrected,
        )

    def _checks(self, state: DetectorState) -> list[Finding]:
        findings, share = super()._checks(state), _summary(state).acceptance
        if not self.corrected:
            return findings
        text, is_good = f"{share:.0%} of the trajectories were accepted", share >= MIN_ACCEPTANCE
        advice = ": the members are few networks, many times; use a smaller learning rate or larger minibatches"
        return [*findings, Finding("acceptance", share, is_good, text if is_good else text + advice)]


def _summary(state: DetectorState) -> SGMCMCSummary:
    assert isinstance(state.summary, SGMCMCSummary)
    return state.summary
