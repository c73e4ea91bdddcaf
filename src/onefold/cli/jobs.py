"""Jobs: the dataclasses that are the commands. Fields are options, and calling a job runs the command.

This module imports neither torch nor NumPy, so that help is fast; each job imports the module that does its work.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from onefold.detectors.registry import METHODS, by_command

FIT_METHODS = tuple(
    method.command for method in METHODS.values() if not (method.needs_labels or method.needs_classifier)
)
AUTO = "auto"
METHOD_HELP = f"{AUTO}: the method that suits DATA and the model. " + " ".join(
    f"{command}: {by_command(command).summary}." for command in FIT_METHODS
)


class Job(ABC):
    """A command with its options."""

    @abstractmethod
    def __call__(self) -> int | None:
        """Run the command and return its exit status; None for success."""

    @property
    def resume_hint(self) -> str:
        """Return a sentence on how to resume the stopped command; empty if it left nothing to resume."""
        return ""


def _option(metavar: str, default: str = "optional") -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"({default})")


Out = tyro.conf.arg(aliases=["-o"], metavar="DIR")
OutFile = tyro.conf.arg(aliases=["-o"], metavar="FILE")
Data = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
DetectorFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DETECTOR")]
ModelFile = Annotated[Path | None, _option("NET.pt2|NAME|FOLDER")]
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Settings = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE …")]
DataFolder = Annotated[Path | None, _option("DIR", "default: $ONEFOLD_DATA, else the user's cache folder")]
Engine = Literal["serial", "processes", "ray"]
Device = Literal["auto", "cpu", "cuda"]

RERUN = "Run the same command again to resume."


# --- examples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo(Job):
    """Train a small classifier of digits, and flag the images that it should not be trusted with.

    Writes a page, the detector, the exported detector and the figures: index.html, digits.onefold, digits.pt2 and
    results.json. Needs no download. Takes half a minute on two cores.

    For example:

        onefold demo --out out/demo
    """

    out: Path = Path("out/demo")
    """Output folder."""
    seed: int = 0
    """Random seed; one seed always gives the same result on one machine."""

    def __call__(self) -> None:
        from onefold.cli import demo

        demo.run(self)


@dataclass(frozen=True)
class Toy(Job):
    """Draw the paper's two toy figures and compare CSD with the exact answer.

    toy_1d.png shows the prior kernel and the regression for four known queries; their gap is the variance. toy_2d.png
    shows the variance of 100 trained networks, of the exact NTK-GP and of CSD. toy.json has the rank correlation of
    each pair. Takes about a minute and a half on two cores.

    For example:

        onefold toy --out out/toy
    """

    out: Path = Path("out/toy")
    """Output folder."""
    seed: int = 0
    """Random seed; one seed always gives the same figures on one machine."""

    def __call__(self) -> None:
        from onefold.cli import toy

        toy.run(self)


# --- detectors on a user's files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """A trained model whose features the detector uses. It is not changed."""

    model: ModelFile = None
    """Model that torch.export.save wrote; it receives images as [N, C, H, W] in [0, 1]. Or a pretrained encoder, by
    name (dinov2-small, clip-vit-b32, efficientnet_lite0 for images; minilm, wordllama for texts), by
    Hugging Face id, or by folder."""
    layer: Annotated[str | None, _option("NAME", "default: what the model returns")] = None
    """Layer whose output is the embedding."""
    role: Annotated[Literal["classifier", "encoder"] | None, _option("{classifier,encoder}")] = None
    """Whether the model's outputs are logits of the classes of DATA; by default decided by how sure it is of DATA."""


@dataclass(frozen=True)
class CalibrationOptions:
    """The threshold of the alarm."""

    calibrate: Annotated[str | None, _option("DATA", "default: a fifth of DATA")] = None
    """Familiar data for calibration."""
    fpr: float = 0.05
    """False-alarm rate: share of familiar inputs that are flagged."""


@dataclass(frozen=True)
class TrainingOptions:
    """How the detector is fitted."""

    context: Annotated[str | None, _option("DATA")] = None
    """Unlabelled data from where the detector will be used, for csd. It may contain unfamiliar inputs."""
    steps: Annotated[int | None, _option("INT", "default: 2000")] = None
    """Training steps, for csd and rnd."""
    seed: int = 0
    """Random seed; one seed always gives the same detector on one machine."""
    device: str = "auto"
    """cpu, cuda, or auto for the first GPU if there is one."""


@dataclass(frozen=True)
class Fit(Job):
    """Fit a detector to familiar data, calibrate it and write it to a file.

    DATA is a folder of images, a table (.csv, .tsv, .parquet), texts (.txt, .jsonl, or a column of a table), or an
    array (.npy, or one array of an .npz file: FILE.npz::KEY). Texts need --model. A fifth of DATA calibrates the alarm,
    unless --calibrate names other familiar data. With --model, the detector uses the features of a trained model; this
    is the most accurate choice if you have such a model. If a fit is stopped, run the same command again to resume it.

    For example:

        onefold fit photos/ -o photos.onefold
        onefold fit rows.csv -o rows.onefold --method gp --fpr 0.01
        onefold fit reviews.jsonl -o reviews.onefold --model wordllama --text body
    """

    data: Data
    """Familiar data."""
    out: Annotated[Path, OutFile]
    """Detector file to write, such as model.onefold."""
    method: Annotated[str, tyro.conf.arg(metavar="{" + ",".join((AUTO, *FIT_METHODS)) + "}", help=METHOD_HELP)] = AUTO
    samples: bool = True
    """Keep up to 5,000 raw training samples in the file, for reports, diagnose and updates; or none."""
    text: Annotated[str | None, _option("COLUMN")] = None
    """Column of the texts in a table or in JSON lines."""
    model: ModelOptions = field(default_factory=ModelOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __call__(self) -> None:
        from onefold.cli import fit

        fit.run(self)

    @property
    def checkpoint(self) -> Path:
        """Return the file with the state of the training; it exists until the fit is complete."""
        return self.out.with_name(self.out.name + ".part")

    @property
    def embeddings(self) -> Path:
        """Return the file with the embeddings of a pretrained encoder, which later fits of the same data use again."""
        return self.out.with_name(self.out.name + ".embeddings.safetensors")

    @property
    def resume_hint(self) -> str:
        if not self.checkpoint.exists():
            return RERUN if self.embeddings.exists() else ""
        return f"Run the same command again to resume from {self.checkpoint}, or delete that file to start again."


@dataclass(frozen=True)
class Score(Job):
    """Score inputs and flag those above the calibrated threshold. Streams data larger than memory.

    The table has one row per input. Columns: name (file name, or row number from 0), score (bigger is more unfamiliar),
    pvalue (share of familiar inputs that score at least as high), is_ood (1: flagged).

    For example:

        onefold score photos.onefold new/ -o scores.csv --report scores.html
    """

    detector: DetectorFile
    """File that `onefold fit` wrote."""
    data: Data
    """Data of the same kind as in the fit."""
    out: Annotated[Path, OutFile] = Path("scores.csv")
    """Table to write: .csv or .parquet."""
    report: Annotated[Path | None, _option("PAGE.html")] = None
    """Also write an HTML page that shows the inputs with their scores."""
    explain: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Explain the N most unfamiliar inputs, here and on the page: which patches or columns raise their scores."""
    model: ModelFile = None
    """Model of the fit, if it had one that is not a pretrained encoder."""
    device: str = "auto"
    """cpu, cuda, or auto for the first GPU if there is one."""

    def __call__(self) -> None:
        from onefold.cli import score

        score.run(self)


@dataclass(frozen=True)
class WatchStream(Job):
    """Watch a stream of inputs: has it changed? Prints one JSON line per batch. The exit status is 3 if it has changed.

    The evidence is valid after every batch, however long the stream is: a stream of familiar inputs raises a false
    alarm with probability at most --alpha. Standard input (-) is CSV with a header, or JSON lines.

    For example:

        onefold watch rows.onefold today.csv --state rows.watch.json --report today.html
        onefold watch rows.onefold - --batch 10 --stop
    """

    detector: DetectorFile
    """File that `onefold fit` wrote."""
    data: Data
    """Data of the same kind as in the fit, or - for standard input."""
    alpha: float = 1e-3
    """Probability of a false alarm about the whole stream."""
    batch: int = 100
    """Inputs per batch."""
    stop: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Stop as soon as the stream has changed."""
    state: Annotated[Path | None, _option("FILE")] = None
    """File with the state of the watch. If it exists, the watch is resumed: DATA is what follows."""
    report: Annotated[Path | None, _option("PAGE.html")] = None
    """Also write an HTML page with the evidence over time, the least familiar inputs and the shifted columns."""
    model: ModelFile = None
    """Model of the fit, if it had one that is not a pretrained encoder."""
    device: str = "auto"
    """cpu, cuda, or auto for the first GPU if there is one."""

    def __call__(self) -> int:
        from onefold.cli import watch

        return watch.run(self)

    @property
    def resume_hint(self) -> str:
        if self.state is None or not self.state.exists():
            return ""
        return "Run the same command with the data that follow to resume."


@dataclass(frozen=True)
class Diagnose(Job):
    """Check whether a detector can be trusted. The exit status is 1 if a check fails.

    For example:

        onefold diagnose photos.onefold --data held-out/
    """

    detector: DetectorFile
    """File that `onefold fit` wrote."""
    data: Annotated[str | None, _option("DATA")] = None
    """Familiar data that was not in the fit, to compare with the stored training samples."""
    model: ModelFile = None
    """Model of the fit, if it had one that is not a pretrained encoder."""

    def __call__(self) -> int:
        from onefold.cli import diagnose

        return diagnose.run(self)


@dataclass(frozen=True)
class Export(Job):
    """Write a detector as ONNX or torch.export program: raw data in, score and alarm out.

    The exported file runs without onefold. README.md, a model card, is written beside it; a README.md that onefold did
    not write is kept. With --check, the exit status is 1 if decisions differ elsewhere than at the threshold.

    For example:

        onefold export photos.onefold photos.onnx --check held-out/
    """

    detector: DetectorFile
    """File that `onefold fit` wrote."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File to write: .onnx or .pt2."""
    inputs: Literal["auto", "image", "batch"] = "auto"
    """image: one image of any size, .onnx only. batch: any number of samples of the size of the fit. auto: image for a
    detector of image files, the columns for one of a table, else batch."""
    check: Annotated[str | None, _option("DATA")] = None
    """Data to compare the decisions of the exported file and of the detector on."""
    model: ModelFile = None
    """Model of the fit, if it had one that is not a pretrained encoder."""

    def __call__(self) -> int:
        from onefold.cli import export

        return export.run(self)


@dataclass(frozen=True)
class Serve(Job):
    """Serve an exported detector over HTTP; needs no torch.

    POST /score takes an image file, or JSON {"rows": [...]} with one list of numbers or one object of columns per row.
    GET /metrics has counts, histograms and the evidence of a monitor for Prometheus. GET /health says what is served.

    For example:

        onefold serve photos.onnx --port 8000
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL.onnx")]
    """File that `onefold export` wrote, of a calibrated detector."""
    port: int = 8000
    """Port; 0 for any free one."""
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can connect. There is no password."""
    max_body: int = 16
    """Largest request in MiB."""
    max_rows: int = 1024
    """Most rows in a request."""
    alpha: float = 1e-3
    """Probability of a false alarm of the monitor about the whole stream."""
    state: Annotated[Path | None, _option("FILE")] = None
    """File that keeps the monitor's evidence, so that a restarted server resumes it."""

    def __call__(self) -> int:
        from onefold.cli import serve

        return serve.run(self)


# --- reports and data -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report(Job):
    """Write a page with tables and plots of a benchmark or of reinforcement-learning runs.

    A benchmark is shown with the best score of each rival method, with and without flips, and with the default score
    of CSD. Runs are shown with learning curves, final figures and visit counts. table.md and, for a benchmark,
    table.tex are written beside the page. Damaged files are named and left out.

    For example:

        onefold report results/shift
    """

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS_DIR")]
    """Folder that `onefold bench run` wrote, folder of a run, or folder with runs at any depth."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(aliases=["-o"], metavar="OUT_DIR", help_behavior_hint="(default: RESULTS_DIR/report)"),
    ] = None
    """Output folder."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print every figure as one JSON object; write files only if -o names a folder."""

    def __call__(self) -> None:
        from onefold.cli import report

        report.run(self)


@dataclass(frozen=True)
class Fetch(Job):
    """Download public image sets and verify their checksums. Existing sets are left unchanged.

    If a download is stopped, run the same command again to resume it. `onefold data list` shows the names.

    For example:

        onefold data fetch mnist fashion_mnist
    """

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...", help_behavior_hint="(at least one)")
    ]
    """Names of the sets."""
    data_dir: DataFolder = None
    """Folder of the image sets."""

    def __call__(self) -> None:
        from onefold.cli import data

        data.fetch(self)


@dataclass(frozen=True)
class ListSets(Job):
    """List the public image sets, the sets in the data folder, and their sizes.

    For example:

        onefold data list
    """

    data_dir: DataFolder = None
    """Folder of the image sets."""

    def __call__(self) -> None:
        from onefold.cli import data

        data.show(self)


# --- the benchmark ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineOptions:
    """Where the units are computed."""

    engine: Engine = "serial"
    """One after another, in processes of this machine, or on the Ray cluster in RAY_ADDRESS."""
    workers: int | None = None
    """Number of concurrent units."""


@dataclass(frozen=True)
class BenchRun(Job):
    """Run the distribution-shift benchmark: methods x familiar sets x seeds.

    Each unit, such as csd_aug/fashion_mnist/seed3, writes one file below OUT/units. Units that have their file are
    skipped, so the same command resumes a stopped run. Failed units are listed and tried again. `onefold report OUT`
    shows the results.

    For example:

        onefold bench run -o results/shift --preset quick --methods csd csd_aug knn
    """

    out: Annotated[Path, Out]
    """Folder of the results, such as results/shift."""
    preset: Literal["paper", "quick", "smoke"] = "quick"
    """paper: the paper's settings. quick: part of the data, fewer steps. smoke: embedded data, a few seconds a unit."""
    methods: tuple[str, ...] = ()
    """Names of methods, such as csd csd_aug ens3; by default all. `onefold bench methods` lists them."""
    ids: tuple[str, ...] = ()
    """Familiar sets; each is compared with all other sets. Names in the data folder, or name=path for an .npz file or a
    folder with train/ and test/. Other sets of the paper are used as unfamiliar sets, unless name=path or --ood is
    used."""
    ood: tuple[str, ...] = ()
    """Sets that are only used as unfamiliar data."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default ten, and three for the slow methods of the preset paper."""
    data_dir: DataFolder = None
    """Folder of the image sets; see `onefold data`."""
    execution: EngineOptions = field(default_factory=EngineOptions)

    def __call__(self) -> int:
        from onefold.cli import bench

        return bench.run(self)


@dataclass(frozen=True)
class Ablate(Job):
    """Measure what each choice in CSD contributes: initialisation, kernel, pairs, contexts, score.

    One table on FashionMNIST and KMNIST, with three seeds. The same command resumes a stopped run.

    For example:

        onefold bench ablate -o results/ablation
    """

    out: Annotated[Path, Out]
    """Folder of the results, such as results/ablation."""
    preset: Literal["ablate", "smoke"] = "ablate"
    """ablate: all data. smoke: embedded data, a few seconds a unit."""
    ids: tuple[str, ...] = ()
    """Familiar sets, to replace those two."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default three."""
    data_dir: DataFolder = None
    """Folder of the image sets; see `onefold data`."""
    execution: EngineOptions = field(default_factory=EngineOptions)

    def __call__(self) -> int:
        from onefold.cli import bench

        return bench.ablate(self)


@dataclass(frozen=True)
class BenchSearch(Job):
    """Search a method's learning rates over the paper's grids, in two stages, by AUROC on one set.

    Finished trials are kept in OUT/search.journal (Optuna) and are not repeated.

    For example:

        onefold bench search csd -o results/search
    """

    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")]
    """ens3, laplace, sgmcmc, mcd, rnd or csd."""
    out: Annotated[Path, Out]
    """Folder of the trials."""
    preset: Literal["paper", "quick", "smoke"] = "quick"
    """As for `onefold bench run`."""
    ids: tuple[str, ...] = ()
    """Familiar set, followed by the unfamiliar sets; by default FashionMNIST against the others."""
    data_dir: DataFolder = None
    """Folder of the image sets; see `onefold data`."""
    execution: EngineOptions = field(default_factory=EngineOptions)

    def __call__(self) -> int:
        from onefold.cli import bench

        return bench.search(self)


@dataclass(frozen=True)
class ListMethods(Job):
    """List the methods and presets of the benchmark.

    For example:

        onefold bench methods
    """

    def __call__(self) -> None:
        from onefold.cli import bench

        bench.list_methods()


# --- reinforcement learning -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOptions:
    """How the run is computed. These options do not change its settings."""

    workers: int | None = None
    """Number of processes for the environments."""
    checkpoint: float | None = None
    """Frames between two checkpoints; by default a quarter of all frames, and at least one every 15 minutes."""
    device: Device = "auto"
    """Device of the networks."""


@dataclass(frozen=True)
class Train(Job):
    """Train an agent in an environment: Rainbow with a CSD bonus, or one of four other agents.

    The output folder gets settings.json, progress.csv, episodes.csv, visits.json, networks.safetensors (to share), a
    checkpoint, and TensorBoard files if TensorBoard is installed. `onefold rl resume DIR` resumes a stopped run.

    For example:

        onefold rl train -o runs/chain --env chain-20 --frames 50000
    """

    out: Annotated[Path, Out]
    """Folder of the run, such as runs/csd-sparse-0."""
    agent: Literal["dqn", "bdqn", "rnd", "ids", "csd"] = "csd"
    """dqn: epsilon-greedy. bdqn: ten members with random priors. rnd: Rainbow with an RND bonus. ids:
    information-directed sampling. csd: Rainbow with a CSD bonus."""
    env: str = "my-way-home-sparse"
    """my-way-home-dense, -sparse or -very-sparse; chain-N; deep-sea-N; a Gymnasium id; or my_package:MyEnv-v0, where
    importing my_package registers the environment. Observations are vectors or grey images, actions are Discrete."""
    frames: float = 5e6
    """Frames of all environments together."""
    seed: int = 0
    """Random seed."""
    settings: Settings = ()
    """Other settings, named as in settings.json: learning.target_period=2000 agent.lr=1e-3."""
    environments: int | None = None
    """Number of environments at once; by default 16 for MyWayHome and 4 for small environments."""
    execution: RunOptions = field(default_factory=RunOptions)

    def __call__(self) -> None:
        from onefold.cli import rl

        rl.train(self)

    @property
    def resume_hint(self) -> str:
        return _resume_command(self.out, self.env)


@dataclass(frozen=True)
class Resume(Job):
    """Resume a stopped run from its last checkpoint, or train a finished one longer with --frames.

    For example:

        onefold rl resume runs/chain --frames 100000
    """

    run: RunFolder
    """Folder of the run."""
    frames: float | None = None
    """Frames in total; more than the run has. Schedules keep the lengths in settings.json."""
    env: str | None = None
    """Environment of the run, if its name is module:Id, to import the module. No module is imported because a run's
    folder names it."""
    execution: RunOptions = field(default_factory=RunOptions)

    def __call__(self) -> None:
        from onefold.cli import rl

        rl.resume(self)

    @property
    def resume_hint(self) -> str:
        return _resume_command(self.run, self.env)


@dataclass(frozen=True)
class GridOptions:
    """Where the runs are computed."""

    engine: Engine = "serial"
    """One after another, in processes of this machine, or on the Ray cluster in RAY_ADDRESS."""
    workers: int | None = None
    """Number of concurrent runs."""
    device: Device = "auto"
    """Device of the networks."""


@dataclass(frozen=True)
class Grid(Job):
    """Train agents x environments x seeds, one folder each below OUT.

    Finished runs are skipped and stopped runs are resumed. `onefold report OUT` shows the curves.

    For example:

        onefold rl grid -o runs/grid --agents dqn csd --envs chain-20 --frames 50000
    """

    out: Annotated[Path, Out]
    """Folder of the runs."""
    agents: tuple[str, ...] = ("dqn", "bdqn", "rnd", "ids", "csd")
    """Agents."""
    envs: tuple[str, ...] = ("my-way-home-dense", "my-way-home-sparse", "my-way-home-very-sparse")
    """Environments."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds."""
    frames: float = 5e6
    """Frames of each run."""
    settings: Settings = ()
    """Other settings for all runs: learning.target_period=2000 learning.batch_size=128."""
    checkpoint: float | None = None
    """Frames between two checkpoints; by default a quarter of a run, and at least one every 15 minutes."""
    execution: GridOptions = field(default_factory=GridOptions)

    def __call__(self) -> int:
        from onefold.cli import rl

        return rl.grid(self)

    @property
    def resume_hint(self) -> str:
        return RERUN


@dataclass(frozen=True)
class RLSearch(Job):
    """Search an agent's learning rates over the paper's grid, by the return at the end of training.

    Finished trials are not repeated.

    For example:

        onefold rl search csd -o runs/search --env chain-20 --frames 50000 --trials 4
    """

    agent: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="AGENT")]
    """dqn, bdqn, rnd, ids or csd."""
    out: Annotated[Path, Out]
    """Folder of the trials."""
    env: str = "my-way-home-sparse"
    """Environment."""
    frames: float = 5e6
    """Frames of each trial."""
    seed: int = 0
    """Random seed of each trial, and of the choice of trials."""
    trials: int | None = None
    """Largest number of grid points; they are drawn at random."""
    settings: Settings = ()
    """Other settings for all trials, as for `onefold rl grid`."""
    execution: GridOptions = field(default_factory=GridOptions)

    def __call__(self) -> int:
        from onefold.cli import rl

        return rl.search(self)

    @property
    def resume_hint(self) -> str:
        return RERUN


@dataclass(frozen=True)
class Eval(Job):
    """Run a trained agent for some episodes and print its return.

    For example:

        onefold rl eval runs/chain --episodes 100
    """

    run: RunFolder
    """Folder of a run, or its networks.safetensors."""
    episodes: int = 20
    """Number of episodes."""
    epsilon: float = 0.01
    """Share of random actions."""
    seed: int = 0
    """Random seed of the first states."""
    env: str | None = None
    """Environment of the run, if its name is module:Id, to import the module."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        from onefold.cli import rl

        rl.evaluate(self)


@dataclass(frozen=True)
class Watch(Job):
    """Write a film, GIF or MP4, of a trained agent in MyWayHome; other environments have no pictures.

    For example:

        onefold rl watch runs/csd-sparse-0 -o play.gif
    """

    run: RunFolder
    """Folder of a run, or its networks.safetensors."""
    out: Annotated[Path, OutFile]
    """File to write: play.gif, or play.mp4 (`pip install 'onefold[video]'`)."""
    epsilon: float = 0.01
    """Share of random actions."""
    seed: int = 0
    """Random seed of the first state."""

    def __call__(self) -> None:
        from onefold.cli import rl

        rl.watch(self)


def _resume_command(out: Path, env: str | None) -> str:
    option = f" --env {env}" if env and ":" in env else ""
    return f"Resume with: onefold rl resume {out}{option}" if (out / "settings.json").exists() else ""
