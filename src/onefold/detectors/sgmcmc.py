"""Stochastic-gradient MCMC (Garriga-Alonso & Fortuin, 2021): networks from a posterior, and how they disagree."""

from pathlib import Path
from typing import Any, ClassVar

from torch import Generator, Tensor, nn

from onefold.core import storage
from onefold.core.arguments import check_choice, check_integer, check_number, check_path, check_sizes
from onefold.core.batches import check_seed, named, pick_device
from onefold.core.rng import generators
from onefold.detectors._classifier import Augmentation, check_augmentation, targets_of
from onefold.detectors._langevin import Dynamics
from onefold.detectors._members import (
    Disagreement,
    MemberDetector,
    MembersScorer,
    Several,
    check_count,
    check_disagreement,
)
from onefold.detectors._posterior import Posterior, Sampler, Sampling, Schedule
from onefold.detectors._random_features import empty_standardise
from onefold.detectors.diagnosis import Finding
from onefold.detectors.state import DetectorState
from onefold.inputs.reader import Reader
from onefold.inputs.samples import read_train_data
from onefold.nn.nets import MLP, Impala, backbone
from onefold.nn.train import LARGEST_BATCH, save_checkpoints, show_updates
from onefold.types import ArrayLike

SAMPLERS: tuple[Sampler, ...] = ("obabo", "baoa")
MOST_EPOCHS = 10_000.0
FEWEST_ACCEPTED = 0.1


class SGMCMC(MemberDetector):
    """A Bayesian classifier: `samples` networks out of one Markov chain in the posterior of its weights.

    The chain follows Langevin dynamics with minibatch gradients. A trajectory takes `epochs` epochs and leaves one
    network; before the first there are `burn_in` epochs. The learning rate falls linearly, trajectory by trajectory.
    Numbers are the paper's; the share of `momentum` that a step keeps is bnn_priors'.

    The prior is a normal of mean 0 for every weight, with variance 2/fan_in in hidden layers and 1/fan_in in the head,
    and 1 for biases: those are the variances of the orthogonal weights that the chain starts from, where a layer does
    not widen, so that its random networks are typical of the prior. `temperature` T makes it exp(−U/T).

    sampler="obabo" accepts or rejects every trajectory after the burn-in by Metropolis' rule, with the potential of all
    data in float64, which makes the posterior exact. After a rejected trajectory the network before it is kept once
    more; `acceptance` is the share of accepted ones. Two things are not corrected (`corrected` is False):
    with `augment`, gradients are those of other data than the potential's, so that there is no posterior that the
    dynamics would leave as it is; and sampler="baoa", which is that of the package posteriors. Both are biased by the
    size of the steps and the noise of the minibatches.

    Labels, `score` and `augment` are as in `DeepEnsemble`; classifiers only.
    """

    about_like: ClassVar[dict[str, Any]] = {**MemberDetector.about_like, "acceptance": 0.0}

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
        self.kernel = None
        self.samples = check_integer(samples, "samples", 2, 1000)
        self.sampler: Sampler = check_choice(sampler, "sampler", SAMPLERS)
        self.epochs = check_number(epochs, "epochs", 0, MOST_EPOCHS)
        self.burn_in = check_number(burn_in, "burn_in", 0, MOST_EPOCHS, closed="both")
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
        """Whether trajectories are judged."""
        return self.sampler == "obabo" and self.augment == "none"

    @property
    def acceptance(self) -> float:
        """The share of trajectories that were accepted; −1 where none are judged."""
        return self._fitted().about["acceptance"]

    def fit(
        self,
        x: ArrayLike,
        y: ArrayLike | None = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "SGMCMC":
        """Sample given inputs and class labels 0, 1, 2 …; a Dataset of pairs brings its own."""
        learned = read_train_data(x, self.device, self.seed)
        targets = targets_of(x, y, len(learned.samples), "classification", self.device)
        weights, chain = generators(self.seed, 2)
        tower = self._tower(learned.reader.sample_shape, weights, targets.outputs).to(self.device)
        posterior = Posterior(learned.standardise, tower, learned, targets.values, self.batch, self.augment)
        dynamics = Dynamics(lr=self.lr, data=posterior.count, momentum=self.momentum, temperature=self.temperature)
        sampling = Sampling(
            posterior,
            self._schedule(posterior.count, len(posterior.index)),
            self.sampler,
            dynamics,
            chain.initial_seed(),
        )
        updates = iter(sampling)
        if checkpoint is not None:
            known = [self._settings(), targets.values, *named(learned.reservoir.samples).values()]
            identity = storage.fingerprint(self.device.type, type(self).__name__, *known)
            updates = save_checkpoints(sampling, check_path(checkpoint, "checkpoint"), identity)
        for _ in show_updates(updates, sampling.steps, "SG-MCMC", progress):
            pass
        members = Several([posterior.network(theta) for theta in sampling.members])
        scorer = MembersScorer(members, self.score_kind, targets.outputs).to(self.device)
        self._settle(learned, targets, scorer, acceptance=sampling.acceptance)
        return self

    def _schedule(self, count: int, batch: int) -> Schedule:
        """In whole trajectories of whole steps, at least one of each."""
        return Schedule(
            burn_in=max(round(self.burn_in / self.epochs), int(self.burn_in > 0)),
            samples=self.samples,
            steps=max(1, round(self.epochs * count / batch)),
            corrected=self.corrected,
        )

    def _tower(self, shape: tuple[int, ...], stream: Generator | None, outputs: int) -> MLP | Impala:
        return backbone(shape, channels=self.channels, hidden=self.hidden, outputs=outputs, generator=stream)

    def _checks(self, state: DetectorState) -> list[Finding]:
        findings, share = super()._checks(state), state.about["acceptance"]
        if not self.corrected:
            return findings
        text, good = f"{share:.0%} of the trajectories were accepted", share >= FEWEST_ACCEPTED
        advice = ": the members are few networks, many times; use a smaller learning rate or larger minibatches"
        return [*findings, Finding("acceptance", share, good, text if good else text + advice)]

    def _settings(self) -> dict[str, Any]:
        sizes = {"channels": list(self.channels), "hidden": list(self.hidden)}
        return {
            "samples": self.samples, "sampler": self.sampler, "epochs": self.epochs, "burn_in": self.burn_in,
            "lr": self.lr, "momentum": self.momentum, "temperature": self.temperature, "batch": self.batch, **sizes,
            "score": self.score_kind, "augment": self.augment, "seed": self.seed,
        }  # fmt: skip

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        check_count(self.samples, self.hidden, weights)
        if not (0 <= about["acceptance"] <= 1 if self.corrected else about["acceptance"] == -1):
            raise ValueError("no chain has this acceptance")
        shape, outputs = reader.sample_shape, about["outputs"]
        towers = [self._tower(shape, None, outputs) for _ in range(self.samples)]
        members = Several([nn.Sequential(empty_standardise(shape), tower) for tower in towers])
        return MembersScorer(members, self.score_kind, outputs)
