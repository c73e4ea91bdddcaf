"""The command line: dataclass arguments, one function each, one readable line on bad input."""

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from onefold.cli.bench import Bench
from onefold.cli.data import Data
from onefold.cli.report import Report
from onefold.cli.rl import RL
from onefold.core.signals import terminated_as_interrupted
from onefold.errors import OnefoldError, plain_warnings, visible

if TYPE_CHECKING:
    from onefold.demo import Outcome

BROKEN_PIPE = 141  # exit status of a command that SIGPIPE ends


@dataclass(frozen=True)
class Demo:
    """Fit five methods on handwritten digits and see which strange inputs they notice.

    Everything it needs comes with the installation. It prints a table and writes a page, index.html, and the figures,
    results.json. About two minutes on two cores.
    """

    out: Path = Path("out/demo")
    """Folder to write to."""
    seed: int = 0
    """The same seed gives the same result on the same machine."""

    def __call__(self) -> None:
        from rich.console import Console

        from onefold.core.batches import check_seed

        check_seed(self.seed)
        out = _folder(self.out)
        from onefold import demo
        from onefold.core.storage import write_bytes, write_json
        from onefold.report.page import render

        data = demo.sets(self.seed)
        outcomes = list(demo.compare(data, self.seed))
        result = demo.summary(outcomes, data, self.seed)
        write_json(out / "results.json", result)
        write_bytes(out / "index.html", render(result, outcomes, data, "CSD-Aug").encode())
        console = Console()
        console.print(_table(outcomes))
        _say(f"The page: {out / 'index.html'}")


@dataclass(frozen=True)
class Toy:
    """Draw the paper's two toy figures and say how well CSD agrees with the exact answer.

    toy_1d.png: for four known queries the prior kernel and the regression trained on it; their gap is the variance.
    toy_2d.png: the variance of 100 trained networks, of the exact NTK-GP and of CSD. toy.json: every pair's rank
    correlation. About a minute and a half on two cores.
    """

    out: Path = Path("out/toy")
    """Folder to write to."""
    seed: int = 0
    """The same seed gives the same figures on the same machine."""

    def __call__(self) -> None:
        from onefold import toy
        from onefold.core.batches import check_seed
        from onefold.core.storage import write_json
        from onefold.report.plots import draw_line, draw_plane

        check_seed(self.seed)
        out = _folder(self.out)
        line, plane, summary = toy.run(self.seed)
        draw_line(line, out / "toy_1d.png")
        draw_plane(plane, out / "toy_2d.png")
        write_json(out / "toy.json", summary)
        print(f"Known queries: mean relative error of the variance {summary['line']['mean_relative_error']:.1%}")
        print("Rank correlation on the plane:")
        for pair, value in summary["plane"]["rank_correlation"].items():
            print(f"  {value:6.3f}  {pair}")
        _say(f"Figures: {out / 'toy_1d.png'}, {out / 'toy_2d.png'}")


def _option(metavar: str, default: str = "optional") -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"({default})")


DetectorFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DETECTOR")]
Model = Annotated[Path | None, _option("NET.pt2")]


@dataclass(frozen=True)
class Fit:
    """Learn what is familiar from your own data and write a detector, calibrated and ready to raise alarms.

    DATA is a folder of images, a table (.csv, .tsv, .parquet) or an array (.npy, or one of an .npz: FILE.npz::KEY). A
    fifth of it is set apart to calibrate the alarms, unless --calibrate names other familiar data. A fit that was
    stopped goes on when the same command is given again. With --model, the detector looks through a trained model of
    your own: the best there is where such a model exists.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Familiar data."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")]
    """The detector's file, for example model.onefold."""
    method: Literal["csd", "gp", "rnd", "knn"] = "csd"
    """CSD; the closed form, quick and good on small data; random network distillation; nearest neighbours."""
    context: Annotated[str | None, _option("DATA")] = None
    """Unlabelled data from where the detector will be used, to be told from what is familiar (csd)."""
    model: Model = None
    """A trained model of your own, written by torch.export.save. It is given images as [N, C, H, W] in [0, 1]."""
    layer: Annotated[str | None, _option("NAME", "default: what enters its dense head")] = None
    """The layer of the model whose output to use."""
    calibrate: Annotated[str | None, _option("DATA", "default: a fifth of DATA")] = None
    """Familiar data to calibrate on."""
    fpr: float = 0.05
    """The share of familiar inputs that may raise an alarm."""
    steps: Annotated[int | None, _option("INT", "default: 2000")] = None
    """Training steps (csd, rnd)."""
    seed: int = 0
    """The same seed gives the same detector on the same machine."""
    samples: bool = True
    """Keep up to 5,000 raw training samples in the file, for reports, diagnose and updates; or none."""
    device: str = "auto"
    """cpu, cuda, or the first GPU if there is one."""

    def __call__(self) -> None:
        from dataclasses import fields

        from onefold.cli import jobs

        job = jobs.FitJob(**{field.name: getattr(self, field.name) for field in fields(self)})
        detector, notes = jobs.fit(job)
        _say(*notes)
        detector.diagnose()
        _say(f"The detector: {self.out}")


@dataclass(frozen=True)
class Score:
    """Say of every input how unfamiliar it is and whether to raise an alarm; data may be larger than memory.

    The table has a row for each input: its name (the file's, or the row's number, counted from 0), its score (bigger is
    stranger), its p-value (the share of familiar inputs at least as strange) and is_ood (1 is an alarm).
    """

    detector: DetectorFile
    """A file that `onefold fit` wrote."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data of the same kind as that of the fit."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("scores.csv")
    """Where to write the scores: .csv or .parquet."""
    report: Annotated[Path | None, _option("PAGE.html")] = None
    """Also write a page to look at."""
    model: Model = None
    """The model that the detector was fitted on, if it was."""
    device: str = "auto"
    """cpu, cuda, or the first GPU if there is one."""

    def __call__(self) -> None:
        from onefold.cli import jobs

        notes = jobs.score(self.detector, self.data, self.out, model=self.model, report=self.report, device=self.device)
        _say(*notes)


@dataclass(frozen=True)
class Diagnose:
    """Say what speaks for and against trusting a detector. The exit status is 1 if anything speaks against it."""

    detector: DetectorFile
    """A file that `onefold fit` wrote."""
    data: Annotated[str | None, _option("DATA")] = None
    """Familiar data that was not in the fit, to compare with what the detector remembers."""
    model: Model = None
    """The model that the detector was fitted on, if it was."""

    def __call__(self) -> int:
        from onefold.cli import jobs

        return 0 if jobs.diagnose(self.detector, self.data, self.model).ok else 1


@dataclass(frozen=True)
class Export:
    """Write a detector as .onnx or .pt2, to be run without onefold: raw data in, score and alarm out."""

    detector: DetectorFile
    """A file that `onefold fit` wrote."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Where to write: .onnx or .pt2."""
    model: Model = None
    """The model that the detector was fitted on, if it was."""

    def __call__(self) -> None:
        from onefold.cli import jobs

        jobs.export(self.detector, self.out, self.model)
        _say(f"Exported: {self.out}")


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]  # pyright: ignore[reportInvalidTypeForm]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Score, tyro.conf.subcommand("score")]
    | Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Toy, tyro.conf.subcommand("toy")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[RL, tyro.conf.subcommand("rl")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Data, tyro.conf.subcommand("data")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _main(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        from onefold import __version__

        print(f"onefold {__version__}")
        return 0
    command = tyro.cli(
        Command,
        prog="onefold",
        description="How much would an infinite ensemble of your network disagree here? One model, one forward pass.",
        args=arguments or ["--help"],
    )
    try:
        with plain_warnings(), terminated_as_interrupted():
            return command() or 0
    except OnefoldError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        again = _onward(command) or "the same command"
        advice = f"; make room and go on with: {again}; what was finished is not lost" if full else ""
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}{advice}", 2)
    except (MemoryError, RuntimeError) as error:
        from onefold.core.memory import ran_out

        if not ran_out(error):
            raise
        return _fail("there is not enough memory for that: smaller batches or networks take less", 2)
    except KeyboardInterrupt:
        return _fail(_stopped(command), 130)


# What the library's messages call an argument, and what it is called here.
OPTIONS = {
    "load(path, model=…)": "name it with --model",
    "kernel=kernels.from_model(model)": "--model NET.pt2",
    "layer='…'": "--layer NAME",
    "context=…": "--context DATA",
    "device='cpu'": "--device cpu",
}


def _onward(command: Any) -> str:
    """What goes on with a command that was stopped, if it is not the same one again."""
    return getattr(getattr(command, "what", None), "onward", "")


def _stopped(command: Any) -> str:
    """What is left behind when a person has had enough: never a broken file, sometimes a state to go on from."""
    if onward := _onward(command):
        return f"stopped; go on with: {onward}"
    if not isinstance(command, Fit) or not (part := Path(f"{command.out}.part")).exists():
        return "stopped"
    return f"stopped; the same command goes on from {part}, or delete it to begin anew"


def _say(*lines: str) -> None:
    """Print lines that may hold names of files."""
    print(*map(visible, lines), sep="\n")


def _fail(message: str, status: int) -> int:
    for argument, option in OPTIONS.items():
        message = message.replace(argument, option)
    print(f"onefold: {visible(message)}", file=sys.stderr)
    return status


def _folder(path: Path) -> Path:
    """Make the output folder first, so that a long job does not end in an error about it."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def _table(outcomes: "list[Outcome]"):
    from rich.table import Table

    table = Table(title="Digits against letters, perturbed digits and noise (means, %)", title_justify="left")
    table.add_column("Method")
    names = list(outcomes[0].figures)
    for name in (*names, "seconds"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        cells = [f"{outcome.figures[name]['mean']:.1f}" for name in names]
        table.add_row(outcome.name, *cells, f"{outcome.fit_seconds + outcome.score_seconds:.1f}")
    return table
