"""Contextual Similarity Distillation: the variance of an infinite ensemble from one model in one forward pass."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from onefold.core.arguments import check_choice, check_instance, check_integer, check_number
from onefold.core.batches import batch_length, check_seed, concatenate, map_batch, named, pick_device
from onefold.core.rng import generators
from onefold.detectors.alarm import AnyAlarm
from onefold.detectors.base import DIAGNOSED, Detector, ExportMixin, VarianceMixin
from onefold.detectors.build import (
    Spec,
    check_kernel,
    data_format,
    feature_map,
    initial_standardise,
    set_standardisation,
    streams,
)
from onefold.detectors.csd_scorer import (
    ROLES,
    SLICE,
    CSDScorer,
    CSDSpec,
    CSDSummary,
    Role,
    default_score,
    is_pretrained,
    measure_fit,
)
from onefold.detectors.diagnosis import Finding, agreement, convergence, familiarity, logits_used
from onefold.detectors.state import DetectorState
from onefold.detectors.streaming import all_samples, balanced_samples, update_recipe
from onefold.detectors.variance_scorer import MODEL_SCORES, ModelScore
from onefold.distil import (
    Architecture,
    AugmentedContexts,
    Chain,
    CopiedContexts,
    ExtraContexts,
    Mixture,
    TrainContexts,
    distillation,
    similarity_model,
)
from onefold.distil.contexts import Contexts
from onefold.distil.encodings import Encodings, encode_samples, fits_in_memory
from onefold.distil.fit import Encoded
from onefold.distil.parallel import is_distributed, parallel_distillation, run_distributed
from onefold.errors import InputError
from onefold.exact.primal import last_layer_share
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import Reservoir, capacity_for, shuffle_values
from onefold.inputs.samples import (
    CPU_BUDGET,
    HELD_OUT,
    InMemorySamples,
    Samples,
    TrainData,
    hold_out,
    read_train_data,
)
from onefold.kernels import ModelFeatures
from onefold.kernels.feature_maps import STAGE_WIDTH, FeatureMap, StageFeatures, encoder_centre, stage_outputs
from onefold.metrics import rank_correlation
from onefold.nn.nets import Standardise, finished
from onefold.nn.train import Recipe, run
from onefold.types import ArrayLike, Batch, Indexable, Kernel

PRIOR_WIDTH = 256
STATISTICS = 4096  # samples for the centre and the standardisation of encodings
CONFIDENT = 0.5  # least mean of the largest softmax probability of a classifier on data of its own classes
ON_CPU = 128  # samples per pass of a model on a CPU; the activations of more leave its cache
AUGMENT = 0.5  # default share of augmented contexts for images


class CSD(VarianceMixin, Detector, ExportMixin):
    """Contextual Similarity Distillation (Section 3).

    A model of your own receives float and integer data unchanged; uint8 images become [N, C, H, W] in [0, 1].

    Args:
        kernel: Kernel that gives the labels. By default the last-layer kernel of a random network that suits the data
            (Eq. 14). With kernels.from_model(model), φ and ψ are small heads on a frozen trained model.
        augment: Share of contexts that the paper's augmentations change; for images only. By default 0.5 for images.
        centred: Subtract the mean over the training data from the features, so that samples are less similar to each
            other. By default for images and trained models. Encodings of a model, which all scores but "surprisal" use,
            keep half of their mean. False is Eq. 14.
        score: What `score(x)` returns. "variance" is Eq. 12. "relative" is the variance divided by its prior.
            "combined" is the larger of the two in standard deviations of held-out data. "surprisal", for a model, adds
            the variance on its pooled stages to the energy of its logits, see
            `detectors.variance_scorer.SurprisalScore`. The default is "surprisal" with kernels.from_model(model) if no
            layer is named, else "combined". For both, a tenth of the training data is held out.
        role: What the model is, for the score "surprisal": "classifier" if its logits are of the classes of these data,
            "encoder" if not. By default it counts as a classifier if the mean of its largest softmax probability over
            the training data is at least ½, and if it is not from `kernels.from_pretrained`.
        recipe: Steps, batch size and learning rate.
        architecture: Sizes of φ and ψ.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        InputError: An argument is out of range, or `kernel` is not a kernel.
    """

    spec_class = CSDSpec
    summary_class = CSDSummary
    kernel_class = Kernel

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        augment: float | None = None,
        centred: bool | None = None,
        score: ModelScore | None = None,
        role: Role | None = None,
        recipe: Recipe | None = None,
        architecture: Architecture | None = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        check_kernel(kernel, Kernel)
        if centred and not (kernel is None or isinstance(kernel, ModelFeatures)):
            raise InputError("a kernel is used as it is", argument="centred", hint="Centre its features in the kernel.")
        self.kernel = kernel
        self.augment = None if augment is None else check_number(augment, "augment", 0, 1, closed="both")
        self.centred = None if centred is None else bool(centred)
        self.score_kind: ModelScore = check_choice(score or default_score(kernel), "score", MODEL_SCORES)
        if self.score_kind == "surprisal" and not isinstance(kernel, ModelFeatures):
            raise InputError(
                "surprisal needs a model", argument="score", hint="Pass kernel=kernels.from_model(model) with it."
            )
        self.role: Role | None = None if role is None else check_choice(role, "role", ROLES)
        if role is not None and self.score_kind != "surprisal":
            raise InputError(
                f"the score {self.score_kind} does not use it",
                argument="role",
                hint='Leave it out, or use "surprisal".',
            )
        self.recipe = check_instance(recipe or Recipe(steps=2000, batch=64, lr=3e-3, warmup=100), "recipe", Recipe)
        self.architecture = check_instance(architecture or Architecture(), "architecture", Architecture)
        self.seed = check_seed(seed)
        self.device = pick_device(device)

    @property
    def loss(self) -> float:
        """Mean loss over the last tenth of the steps of the last fit or update; NaN before `fit`."""
        return math.nan if self._state is None else _summary(self._state).loss

    def fit(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> "CSD":
        """Fit on in-distribution data without labels.

        Args:
            x: Training data: arrays, tensors, data frames, a Dataset, a DataLoader, or a path.
            context: Unlabelled data of the target domain. Half of the contexts are then from it.
            checkpoint: File that is written every 30 seconds. A stopped fit resumes from it if it is called with the
                same data and settings.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data cannot be used.
            TrainingError: The training diverged.
        """
        data = read_train_data(x, self.device, self.seed, **data_format(self.kernel))
        train, held_out = data.samples, None
        if self.score_kind in ("combined", "surprisal"):
            train, held_out = hold_out(data.samples, self.seed, self.device)
        extra = self._read_context(data.reader, context)
        self._augmented_share(data.reader)  # raises before the work starts
        encodings, complete = None, False
        if isinstance(self.kernel, ModelFeatures) and self.score_kind == "surprisal":
            stages, _ = stage_outputs(self.kernel, train[torch.arange(min(2, len(train)), device=self.device)])
            complete = self._keeps_encodings(stages.shape[1], len(train), data.reader, self.recipe)
            encodings = self._encode(self.kernel, train, data.reader, progress, complete=complete)
            spec, scorer = self._initial_stage_scorer(self.kernel, encodings)
        else:
            spec, scorer = self._initial_scorer(data, train)
        problem = self._problem(scorer, train, data, extra, encodings if complete else None)
        confidence = 0.0 if encodings is None else encodings.confidence
        del encodings  # `problem` has standardised ones
        settings = {**self.settings, "recipe": asdict(self.recipe), "architecture": asdict(self.architecture)}
        identity = [settings, len(train), *named(data.reservoir.samples).values(), *named(held_out).values()]
        identity += [] if extra is None else [extra.seen, *named(extra.samples).values()]
        loss = self._train(
            scorer, train, problem, self.recipe, checkpoint=checkpoint, identity=identity, progress=progress
        )
        finished(scorer, self.device)
        held_out_reservoir = Reservoir(HELD_OUT, self.seed)
        state = DetectorState.from_data(
            data,
            scorer,
            spec,
            self.device,
            summary=CSDSummary(loss=loss, confidence=confidence),
            reservoir=data.reservoir.remove(held_out),
            held_out=held_out_reservoir if held_out is None else held_out_reservoir.add(held_out),
        )
        self._finish(state, train)
        return self

    def update(
        self,
        x: ArrayLike,
        *,
        context: ArrayLike | None = None,
        half_life: float | None = None,
        reset_every: int | None = None,
        progress: bool | None = None,
    ) -> "CSD":
        """Continue the fit on new in-distribution data, in bounded memory.

        A few steps train φ and ψ on the new samples and on the stored ones. Afterwards calibrate again.

        Args:
            x: New data.
            context: Unlabelled data of the target domain for these steps, as in `fit`.
            half_life: Number of samples after which a sample is half as likely to be stored. By default samples of all
                ages are stored with equal probability.
            reset_every: Number of samples after which φ and ψ start again, against their drift on long streams. The
                update that completes this number since the fit or the last reset draws new weights and trains them with
                the recipe of the fit. Prior features, standardisation and stored samples are kept. By default never.
            progress: Show a progress bar; by default only on a terminal.

        Returns:
            This detector.

        Raises:
            InputError: The data does not have the layout of the training data, or the detector was saved without
                samples.
            TrainingError: The training diverged.
        """
        if reset_every is not None:
            check_integer(reset_every, "reset_every")
        if half_life is not None:
            check_number(half_life, "half_life")
        state, summary = self.state, _summary(self.state)
        stream = self._read_stream(state, x, half_life)
        scorer = copy.deepcopy(state.scorer)
        assert isinstance(scorer, CSDScorer)
        for tower in (scorer.model.phi, scorer.model.psi):
            tower.requires_grad_(True)
        since_reset, resets = summary.since_reset + stream.new_count, summary.resets
        if reset_every is not None and since_reset >= reset_every:
            since_reset, resets = 0, resets + 1
            self._reset(scorer, state.spec, resets)
            recipe, make_samples = self.recipe, all_samples
        else:
            recipe, make_samples = update_recipe(self.recipe, stream.new_count), balanced_samples
        train = make_samples(stream.reservoir, stream.new, state.prepare, self.device)
        extra = self._read_context(state.reader, context)
        features, encodings = scorer.map, None
        if isinstance(features, StageFeatures) and self._keeps_encodings(
            len(features.standardise.mean), len(train), state.reader, recipe
        ):
            encodings = self._encode(features.kernel, train, state.reader, progress)
        problem = self._problem(scorer, train, state, extra, encodings)
        loss = self._train(scorer, train, problem, recipe, progress=progress, seed=stream.reservoir.seen)
        finished(scorer, self.device)
        summary = CSDSummary(loss=loss, since_reset=since_reset, resets=resets, confidence=summary.confidence)
        self._finish(
            replace(state, scorer=scorer, reservoir=stream.reservoir, held_out=stream.held_out, summary=summary), train
        )
        return self

    def build(self, spec: CSDSpec, *, meta: bool = False) -> CSDScorer:
        """Return φ, ψ and the feature map: with initial weights, or on the meta device."""
        prior_stream, model_stream, _ = streams(spec.seed, 3, meta=meta)
        first = initial_standardise(spec.inputs, meta=meta)
        if spec.score == "surprisal":
            assert isinstance(self.kernel, ModelFeatures)
            centre = None if spec.centre is None else torch.zeros(spec.centre, device="meta" if meta else "cpu")
            features: FeatureMap = StageFeatures(self.kernel, first, centre)
            first = nn.Identity()  # stages are standardised once for both networks
        else:
            features = feature_map(spec, self.kernel, PRIOR_WIDTH, prior_stream, centre=spec.centre)
        model = similarity_model(spec.inputs, first, spec.architecture, model_stream)
        return CSDScorer(model, features, spec.score, classes=spec.classes)

    def restore_state(self, state: DetectorState, alarm: AnyAlarm | None) -> None:
        """Set the state of a detector from a file."""
        summary = _summary(state)
        if min(summary.since_reset, summary.resets) < 0 or not 0 <= summary.confidence <= 1:
            raise ValueError("negative number of samples or resets, or no probability")
        super().restore_state(state, alarm)

    def _initial_scorer(self, data: TrainData, train: Samples) -> tuple[CSDSpec, CSDScorer]:
        """Return the spec for these data, and the scorer before training."""
        few = torch.arange(min(len(train), STATISTICS), device=self.device).split(SLICE)
        if isinstance(self.kernel, ModelFeatures):
            encodings = torch.cat([self.kernel.encode(train[part]) for part in few])
            centre = None if self.centred is False else encoder_centre(encodings)
            inputs = (encodings.shape[1],)
            statistics = Standardise.of(encodings if centre is None else encodings - centre)
        else:
            inputs, centre, statistics = data.reader.sample_shape, None, data.standardise
        centred = data.reader.has_pictures if self.centred is None else self.centred
        width = PRIOR_WIDTH if self.kernel is None and centred else None if centre is None else len(centre)
        spec = CSDSpec(**self.settings, inputs=inputs, centre=width)
        scorer = self.build(spec).to(self.device)
        set_standardisation(scorer, statistics)
        if self.kernel is None and centred:
            centre = torch.cat([scorer.map.features(train[part]) for part in few]).mean(0)
        if centre is not None:
            scorer.map.centre = centre
        return spec, scorer

    def _encode(
        self, kernel: ModelFeatures, train: Samples, reader: Reader, progress: bool | None, *, complete: bool = True
    ) -> Encodings:
        """Return raw stages of all samples and, for images, of one augmented copy of each; else of 4,096 samples."""
        copies, count = None, len(train) if complete else min(len(train), STATISTICS)
        if complete and self._augmented_share(reader):
            copies = AugmentedContexts(Chain(apply=1.0), reader.low, reader.high)
        return encode_samples(
            partial(stage_outputs, kernel),
            train,
            torch.arange(count, device=self.device),
            copies=copies,
            generator=generators(self.seed, 4)[3],
            size=reader.batch_size * 8 if self.device.type == "cuda" else min(reader.batch_size, ON_CPU),
            show=progress,
        )

    def _keeps_encodings(self, width: int, count: int, reader: Reader, recipe: Recipe) -> bool:
        """Return True if encodings are computed once: if each is used, they fit into memory, and one process trains."""
        copies = 2 if self._augmented_share(reader) else 1
        used = recipe.steps * recipe.batch >= count
        return used and not is_distributed() and fits_in_memory(width, copies * count, self.device)

    def _initial_stage_scorer(self, kernel: ModelFeatures, encodings: Encodings) -> tuple[CSDSpec, CSDScorer]:
        """Return the spec for these raw stages and logits, and the scorer before training."""
        width = None if self.centred is False else kernel.settings["width"] or STAGE_WIDTH
        spec = CSDSpec(
            **self.settings,
            inputs=(encodings.samples.shape[1],),
            centre=width,
            classes=self._count_classes(kernel, encodings),
        )
        scorer = self.build(spec).to(self.device)
        set_standardisation(scorer, Standardise.of(encodings.samples))
        features = scorer.map
        assert isinstance(features, StageFeatures)
        if width is not None:
            parts = features.standardise(encodings.samples).split(STATISTICS)
            sums = [features.random_layer(part).sum(0, dtype=torch.float64) for part in parts]
            features.centre = (torch.stack(sums).sum(0) / len(encodings.samples)).float()
        return spec, scorer

    def _count_classes(self, kernel: ModelFeatures, encodings: Encodings) -> int | None:
        """Return the number of logits if they are of the classes of these data, else None; see `role`."""
        classes = encodings.classes
        if self.role == "classifier" and (classes or 0) < 2:
            raise InputError(
                "the model has no logits of at least 2 classes", argument="role", hint='Pass role="encoder".'
            )
        role = self.role
        if role is None:
            is_sure = encodings.confidence >= CONFIDENT and not is_pretrained(kernel)
            role = "classifier" if is_sure else "encoder"
        return classes if role == "classifier" and (classes or 0) >= 2 else None

    def _reset(self, scorer: CSDScorer, spec: Spec, resets: int) -> None:
        """Replace φ and ψ by new networks behind the same standardisation; each reset has a seed of its own."""
        seed = int(np.random.SeedSequence([self.seed, resets]).generate_state(1)[0])
        first = copy.deepcopy(next(iter(scorer.model.phi.children()))).to("cpu")
        model = similarity_model(spec.inputs, first, self.architecture, generators(seed, 3)[1])
        scorer.model = model.to(self.device)

    def _read_stream(self, state: DetectorState, x: ArrayLike, half_life: float | None) -> "_Stream":
        """Read new data into copies of the reservoirs; every tenth sample is held out if the fit held out any."""
        reservoir, held_out = state.reservoir.copy(), state.held_out.copy()
        new, count = Reservoir(reservoir.capacity, self.seed), 0
        for raw in state.reader.batches(x):
            rows = torch.arange(count, count + batch_length(raw))
            is_held_out = rows % 10 == 9 if held_out.samples is not None else torch.zeros(len(rows)).bool()
            count += len(rows)
            if is_held_out.any():
                held_out.add(_rows(raw, is_held_out), half_life and half_life / 10)
            if not is_held_out.all():
                train = _rows(raw, ~is_held_out)
                reservoir.add(train, half_life)
                new.add(train)
        return _Stream(reservoir, held_out, new, count)

    def _read_context(self, reader: Reader, context: ArrayLike | None) -> Reservoir | None:
        """Return unlabelled data of the target domain, or a random sample of it if it is large."""
        memory: Reservoir | None = None
        for raw in () if context is None else reader.batches(context, "context"):
            memory = memory or Reservoir(capacity_for(raw, 10**9, CPU_BUDGET), self.seed)
            memory.add(raw)
        return memory

    def _augmented_share(self, reader: Reader) -> float:
        """Return the share of augmented contexts; raise InputError if it is positive for other data than images."""
        share = (AUGMENT if reader.has_pictures else 0.0) if self.augment is None else self.augment
        if share > 0 and not reader.may_be_pictures:
            raise InputError(
                "augmented contexts are for images",
                argument="augment",
                hint="Pass unlabelled data as context=… for other data.",
            )
        return share

    def _problem(
        self,
        scorer: CSDScorer,
        train: Samples,
        data: TrainData | DetectorState,
        extra: Reservoir | None,
        encodings: Encodings | None = None,
    ) -> "_Problem":
        """Return what φ and ψ are trained on; `encodings` are raw stages of all samples, if they are computed once."""
        share, features = self._augmented_share(data.reader), scorer.map
        encode = features.encode if isinstance(self.kernel, ModelFeatures) else None
        x: Indexable = train
        contexts: Contexts = TrainContexts()
        if share > 0:
            contexts = AugmentedContexts(Chain(apply=share), data.reader.low, data.reader.high)
        others: Indexable | None = None
        if extra is not None and extra.samples is not None:
            others = InMemorySamples(map_batch(lambda t: t.to(self.device), extra.samples), data.prepare)
        if isinstance(features, StageFeatures) and encodings is not None:
            x, encode = features.standardise(encodings.samples), None
            if encodings.copies is not None:
                contexts = CopiedContexts(features.standardise(encodings.copies), share)
            others = None if others is None else Encoded(others, features.encode, self.device)
        if others is not None:
            contexts = Mixture((contexts, ExtraContexts(others)), (0.5, 0.5))
        return _Problem(x, contexts, encode)

    def _train(
        self,
        scorer: CSDScorer,
        train: Samples,
        problem: "_Problem",
        recipe: Recipe,
        *,
        checkpoint: str | Path | None = None,
        identity: Sequence[Any] = (),
        progress: bool | None = None,
        seed: int | None = None,
    ) -> float:
        """Train φ and ψ and return the mean loss over the last tenth of the steps."""
        if self.kernel is not None and checkpoint is not None:  # three digits: threads and devices round differently
            few = train[torch.arange(min(8, len(train)), device=self.device)]
            total = f"{float(self.kernel(few, few).double().sum()):.2e}"
            identity = [*identity, getattr(self.kernel, "settings", None), total]
        draw_seed = generators(self.seed if seed is None else seed, 3)[2].initial_seed()
        arguments = (scorer.model, problem.x, scorer.map.labels, problem.contexts, recipe, draw_seed)
        if is_distributed():
            together = parallel_distillation(*arguments, encode=problem.encode, device=self.device)
            return run_distributed(together, "CSD", checkpoint=checkpoint, identity=identity, show=progress)
        encoded = isinstance(scorer.map, StageFeatures) and problem.encode is None
        capturable = encoded or self.kernel is None or getattr(self.kernel, "capturable", False)
        training = distillation(*arguments, encode=problem.encode, device=self.device, capturable=capturable)
        return run(training, "CSD", checkpoint=checkpoint, identity=identity, show=progress)

    @torch.no_grad()
    def _finish(self, state: DetectorState, train: Samples) -> None:
        """Set the statistics of the combined score, measure the fit, and replace the state."""
        scorer = state.scorer
        assert isinstance(scorer, CSDScorer)
        parts = state.evaluate_all(state.reference.subsample(HELD_OUT), scorer.parts)
        scorer.combine.set_statistics(*map(torch.from_numpy, parts))
        summary = replace(_summary(state), **measure_fit(scorer, train, self.seed, self.device))
        self._set_state(replace(state, summary=summary))

    def _checks(self, state: DetectorState) -> list[Finding]:
        summary, relative = _summary(state), self._measure(state)
        findings = [*super()._checks(state), convergence(summary.explained)]
        if state.reservoir.samples is not None:
            train = state.evaluate(state.reservoir.subsample(DIAGNOSED), relative)
            findings.append(familiarity(train, summary.dissimilarity))
        return findings

    @torch.no_grad()
    def _information(self, state: DetectorState) -> list[Finding]:
        """Return whether logits are used, and the rank correlation with the closed form."""
        scorer, reference = state.scorer, state.reference
        assert isinstance(scorer, CSDScorer)
        findings = []
        if scorer.kind == "surprisal":
            findings.append(logits_used(_summary(state).confidence, scorer.classes))
        if reference.samples is None or state.reservoir.samples is None or not scorer.map.has_features:
            return findings
        few = reference.subsample(DIAGNOSED)
        queries = concatenate([few, shuffle_values(few, self.seed)])
        train_features, query_features = (
            torch.cat([scorer.map.features(scorer.map.encode(batch)) for batch in state.prepared(raw)])
            for raw in (state.reservoir.samples, queries)
        )
        exact = last_layer_share(train_features, query_features).cpu().numpy()
        return [*findings, agreement(rank_correlation(state.evaluate(queries, scorer.relative), exact))]


class _Problem(NamedTuple):
    """Train samples or their encodings, contexts of the same kind, and the encoder that each step still has to call."""

    x: Indexable
    contexts: Contexts
    encode: Callable[[Any], Tensor] | None


class _Stream(NamedTuple):
    """Reservoirs after an update, the new samples that are not held out, and the number of all new samples."""

    reservoir: Reservoir
    held_out: Reservoir
    new: Reservoir
    new_count: int


def _summary(state: DetectorState) -> CSDSummary:
    assert isinstance(state.summary, CSDSummary)
    return state.summary


def _rows(batch: Batch, mask: Tensor) -> Batch:
    return map_batch(lambda t: t[mask], batch)
