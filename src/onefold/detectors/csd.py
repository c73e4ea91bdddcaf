"""CSD: the variance of an infinite ensemble by one regression, for any query, in one forward pass."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onefold.core.arguments import check_choice, check_instance, check_number
from onefold.core.batches import batch_length, check_seed, concatenate, map_batch, named, pick_device
from onefold.core.rng import generators
from onefold.detectors._combined_score import SCORES, Score
from onefold.detectors._csd_scorer import AT_ONCE, CSDScorer, residuals
from onefold.detectors._random_features import check_kernel, empty_map, empty_standardise, feature_map, middle
from onefold.detectors._streaming import both_halves, update_recipe
from onefold.detectors.base import EXAMINED, Detector, ExportMixin, VarianceMixin, parts
from onefold.detectors.diagnosis import Finding, agreement, convergence, familiarity
from onefold.detectors.export import copied
from onefold.detectors.state import DetectorState
from onefold.distil import (
    Architecture,
    AugmentedContexts,
    Chain,
    ExtraContexts,
    Mixture,
    TrainContexts,
    distillation,
    similarity_model,
)
from onefold.distil.contexts import Contexts
from onefold.distil.parallel import is_distributed, parallel_distillation, run_distributed
from onefold.errors import InputError
from onefold.exact.primal import last_layer_share
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import Reservoir, capacity_for, shuffle_values
from onefold.inputs.samples import CPU_BUDGET, HELD_OUT, InMemorySamples, Samples, TrainData, hold_out, read_train_data
from onefold.kernels import ModelFeatures
from onefold.metrics import rank_correlation
from onefold.nn.nets import Standardise, finished
from onefold.nn.train import Recipe, run
from onefold.types import ArrayLike, Kernel

PRIOR_WIDTH = 256
STATISTICS = 4096  # samples whose mean and spread are taken
AUGMENT = 0.5  # share of contexts to augment where nothing is said and the data are images


class CSD(VarianceMixin, Detector, ExportMixin):
    """Contextual Similarity Distillation (Section 3).

    `kernel` gives the labels: by default the last-layer kernel of a random network that suits the data (Eq. 14), or
    that of a trained model, kernels.from_model(model): φ and ψ are then small heads on the frozen model.
    `augment` is the share of contexts that go through the paper's augmentations, for images (by default a half).
    `centred` takes the mean over train data off the features, without which all images are much alike; by default for
    images and trained models (of which half of it is taken off). False is Eq. 14 as it stands.
    `score` is what `score(x)` returns: the variance of Eq. 12, the variance relative to its prior, or by default the
    more alarming of the two in standard deviations of held-out familiar data (a tenth of the train data is kept apart).
    `recipe` is how long and how fast to train, `architecture` the sizes of φ and ψ. After `fit`, `loss` is the mean
    loss over the last tenth of the steps.

    A model of the user's own sees float and integer data as they are given; uint8 images become [N, C, H, W] in [0, 1].
    """

    about_like: ClassVar[dict[str, Any]] = {"loss": 0.0, "explained": 0.0, "dissimilarity": 0.0}

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        augment: float | None = None,
        centred: bool | None = None,
        score: Score = "combined",
        recipe: Recipe | None = None,
        architecture: Architecture | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_kernel(kernel, Kernel)
        if centred and not (kernel is None or isinstance(kernel, ModelFeatures)):
            raise InputError("a kernel that is handed in is used as it is; centre its features yourself")
        self.kernel = kernel
        self.augment = None if augment is None else check_number(augment, "augment", 0, 1, closed="both")
        self.centred = None if centred is None else bool(centred)
        self.score_kind: Score = check_choice(score, "score", SCORES)
        self.recipe = check_instance(recipe or Recipe(steps=2000, batch=64, lr=3e-3, warmup=100), "recipe", Recipe)
        self.architecture = check_instance(architecture or Architecture(), "architecture", Architecture)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    @property
    def loss(self) -> float:
        """Mean loss over the last tenth of the steps; NaN before a fit."""
        return float("nan") if self._state is None else self._state.about["loss"]

    def fit(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "CSD":
        """Learn what is familiar from `x`, unlabelled. `context` is unlabelled data of the target domain, if any.

        With `checkpoint`, a file that is written every 30 seconds, a killed fit goes on from there when it is called
        again with the same data and settings. `progress` shows a bar, by default where a person watches.
        """
        learned = read_train_data(x, self.device, self.seed, as_given=isinstance(self.kernel, ModelFeatures))
        train, aside = learned.samples, None
        if self.score_kind == "combined":
            train, aside = hold_out(learned.samples, self.seed, self.device)
        extra = self._extra(learned.reader, context)
        contexts = self._contexts(learned.reader, extra, learned.prepare)
        scorer = self._scorer(learned, train)
        identity = [
            asdict(self.recipe),
            asdict(self.architecture),
            self.seed,
            self.augment,
            self.centred,
            self.score_kind,
            len(train),
        ]
        identity += [*named(learned.reservoir.samples).values(), *named(aside).values()]
        identity += [] if extra is None else [extra.seen, *named(extra.samples).values()]
        loss = self._distil(
            scorer, train, contexts, self.recipe, checkpoint=checkpoint, identity=identity, progress=progress
        )
        finished(scorer, self.device)
        held = Reservoir(HELD_OUT, self.seed)
        state = DetectorState(
            reader=learned.reader,
            prepare=learned.prepare,
            scorer=scorer,
            reservoir=learned.reservoir.remove(aside),
            held=held if aside is None else held.add(aside),
        )
        self._settle(state, train, loss)
        return self

    def update(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | None = None,
        half_life: float | None = None,
        progress: bool | None = None,
    ) -> "CSD":
        """Take in more data as it comes, in bounded memory: a few steps on it and on what is remembered of the rest.

        With `half_life`, old samples are forgotten: one that came so many samples ago is half as likely to be
        remembered. `context` is as in `fit`, for these steps. The threshold has to be calibrated again.
        """
        state = self._fitted()
        reservoir, held = state.reservoir.copy(), state.held.copy()
        fresh, count = Reservoir(reservoir.capacity, self.seed), 0
        for raw in state.reader.batches(x):
            size = batch_length(raw)
            aside = (
                torch.arange(count, count + size) % 10 == 9 if held.samples is not None else torch.zeros(size).bool()
            )
            count += size
            if aside.any():
                held.add(map_batch(lambda t, aside=aside: t[aside], raw), half_life and half_life / 10)
            if not aside.all():
                kept = map_batch(lambda t, aside=aside: t[~aside], raw)
                reservoir.add(kept, half_life)
                fresh.add(kept)
        train = both_halves(reservoir, fresh, state.prepare, self.device)
        scorer = copied(state.scorer)
        assert isinstance(scorer, CSDScorer)
        for tower in (scorer.model.phi, scorer.model.psi):
            tower.requires_grad_(True)
        recipe = update_recipe(self.recipe, count)
        contexts = self._contexts(state.reader, self._extra(state.reader, context), state.prepare)
        loss = self._distil(scorer, train, contexts, recipe, progress=progress, seed=reservoir.seen)
        finished(scorer, self.device)
        changed = {"scorer": scorer, "reservoir": reservoir, "held": held, "about": {}}
        self._settle(replace(state, **changed), train, loss)
        return self

    def _contexts(self, reader: Reader, extra: Reservoir | None, prepare: nn.Module) -> Contexts:
        own: Contexts = TrainContexts()
        share = (AUGMENT if reader.has_pictures else 0.0) if self.augment is None else self.augment
        if share > 0:
            if not reader.may_be_pictures:
                raise InputError(
                    "augmented contexts are for images", argument="context", hint="Pass unlabelled data for other data."
                )
            own = AugmentedContexts(Chain(apply=share), reader.low, reader.high)
        if extra is None or extra.samples is None:
            return own
        raw = map_batch(lambda t: t.to(self.device), extra.samples)
        return Mixture((own, ExtraContexts(InMemorySamples(raw, prepare))), (0.5, 0.5))

    def _extra(self, reader: Reader, context: ArrayLike | None) -> Reservoir | None:
        """Unlabelled data of the target domain, or a fair part of it."""
        memory: Reservoir | None = None
        for raw in () if context is None else reader.batches(context, "context"):
            memory = memory or Reservoir(capacity_for(raw, 10**9, CPU_BUDGET), self.seed)
            memory.add(raw)
        return memory

    def _scorer(self, learned: TrainData, train: Samples) -> CSDScorer:
        prior_stream, model_stream = generators(self.seed, 3)[:2]
        features = feature_map(learned, self.kernel, prior_stream, PRIOR_WIDTH)
        shape, first = None, learned.standardise
        few = torch.arange(min(len(train), STATISTICS), device=self.device).split(AT_ONCE)
        if isinstance(self.kernel, ModelFeatures):
            z = torch.cat([features.encode(train[part]) for part in few])
            if self.centred is not False:
                features.centre = middle(z)
                z = z - features.centre
            shape, first = (z.shape[1],), Standardise.of(z)
        elif self.kernel is None and (learned.reader.has_pictures if self.centred is None else self.centred):
            features.centre = torch.cat([features.features(train[part]) for part in few]).mean(0)
        model = similarity_model(shape or learned.reader.sample_shape, first, self.architecture, model_stream)
        return CSDScorer(model, features, self.score_kind).to(self.device)

    def _distil(
        self,
        scorer: CSDScorer,
        train: Samples,
        contexts: Contexts,
        recipe: Recipe,
        *,
        checkpoint: str | Path | None = None,
        identity: Sequence[Any] = (),
        progress: bool | None = None,
        seed: int | None = None,
    ) -> float:
        if self.kernel is not None and checkpoint is not None:  # three digits: threads and devices round differently
            few = train[torch.arange(min(8, len(train)), device=self.device)]
            identity = [
                *identity,
                getattr(self.kernel, "settings", None),
                f"{float(self.kernel(few, few).double().sum()):.2e}",
            ]
        draw_seed = generators(self.seed if seed is None else seed, 3)[2].initial_seed()
        given = (scorer.model, train, scorer.map.labels, contexts, recipe, draw_seed)
        encode = scorer.map.encode if isinstance(self.kernel, ModelFeatures) else None
        if is_distributed():
            together = parallel_distillation(*given, encode=encode, device=self.device)
            return run_distributed(together, "CSD", checkpoint=checkpoint, identity=identity, show=progress)
        capturable = self.kernel is None or getattr(self.kernel, "capturable", False)
        training = distillation(*given, encode=encode, device=self.device, capturable=capturable)
        return run(training, "CSD", checkpoint=checkpoint, identity=identity, show=progress)

    @torch.no_grad()
    def _settle(self, state: DetectorState, train: Samples, loss: float) -> None:
        """Take the statistics of the combined score, look at the result, and only then replace what was there."""
        scorer = state.scorer
        assert isinstance(scorer, CSDScorer)
        few = state.familiar.subsample(HELD_OUT)
        relative, scale = self._over_all(state, parts, few)
        scorer.combine.learn(torch.from_numpy(relative), torch.from_numpy(scale))
        state.about.update(loss=loss, **residuals(scorer, train, self.seed, self.device))
        self._became(state)

    def _checks(self, state: DetectorState) -> list[Finding]:
        """What can be said without other data."""
        findings = [*super()._checks(state), convergence(state.about["explained"])]
        if state.reservoir.samples is not None:
            train = self._over(state, lambda s, b: s.relative(b), state.reservoir.subsample(EXAMINED))
            findings.append(familiarity(train, state.about["dissimilarity"]))
        return findings

    @torch.no_grad()
    def _information(self, state: DetectorState) -> list[Finding]:
        """Rank agreement with the closed form on familiar and scrambled samples."""
        scorer, memory = state.scorer, state.familiar
        assert isinstance(scorer, CSDScorer)
        if memory.samples is None or state.reservoir.samples is None or not scorer.map.has_features:
            return []
        few = memory.subsample(EXAMINED)
        queries = concatenate([few, shuffle_values(few, self.seed)])
        known, asked = (
            torch.cat([scorer.map.features(scorer.map.encode(batch)) for batch in self._prepared(state, raw)])
            for raw in (state.reservoir.samples, queries)
        )
        own = self._over(state, lambda s, b: s.relative(b), queries)
        return [agreement(rank_correlation(own, last_layer_share(known, asked).cpu().numpy()))]

    def _settings(self) -> dict[str, Any]:
        return {
            "augment": self.augment,
            "centred": self.centred,
            "score": self.score_kind,
            "recipe": asdict(self.recipe),
            "architecture": asdict(self.architecture),
            "seed": self.seed,
        }

    @classmethod
    def _from_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        sizes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings["architecture"].items()}
        return {**super()._from_settings(settings), "architecture": Architecture(**sizes)}

    def _empty(self, reader: Reader, about: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
        del about
        features = empty_map(reader, self.kernel, PRIOR_WIDTH)
        own = isinstance(self.kernel, ModelFeatures)
        shape = tuple(weights["model.phi.0.mean"].shape) if own else reader.sample_shape
        if "map.centre" in weights:
            features.centre = torch.empty(shape[0] if own else PRIOR_WIDTH, device="meta")
        model = similarity_model(shape, empty_standardise(shape), self.architecture, None)
        return CSDScorer(model, features, self.score_kind)
