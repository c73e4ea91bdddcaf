"""The command line: dataclass arguments, one function each, one readable line on bad input."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from onefold.errors import OnefoldError

if TYPE_CHECKING:
    from onefold.demo import Outcome


@dataclass(frozen=True)
class Demo:
    """Fit five methods on handwritten digits and see which strange inputs they notice.

    Everything it needs comes with the installation. It prints a table and writes a page, index.html, and the figures,
    results.json. About a minute on two cores.
    """

    out: Path = Path("out/demo")
    """Folder to write to."""
    seed: int = 0
    """The same seed gives the same result on the same machine."""

    def __call__(self) -> None:
        from rich.console import Console

        from onefold.inputs import check_seed

        check_seed(self.seed)
        out = _folder(self.out)
        from onefold import demo
        from onefold.report.page import render
        from onefold.store import write_bytes, write_json

        data = demo.sets(self.seed)
        outcomes = list(demo.compare(data, self.seed))
        result = demo.summary(outcomes, data, self.seed)
        write_json(out / "results.json", result)
        write_bytes(out / "index.html", render(result, outcomes, data, "CSD-Aug").encode())
        console = Console()
        console.print(_table(outcomes))
        console.print(f"The page: [bold]{out / 'index.html'}[/bold]", highlight=False, soft_wrap=True)


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
        from onefold.inputs import check_seed
        from onefold.report.plots import draw_line, draw_plane
        from onefold.store import write_json

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
        print(f"Figures: {out / 'toy_1d.png'}, {out / 'toy_2d.png'}")


Command = Annotated[Demo, tyro.conf.subcommand("demo")] | Annotated[Toy, tyro.conf.subcommand("toy")]  # pyright: ignore[reportInvalidTypeForm]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
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
        command()
    except OnefoldError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}", 2)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"onefold: {message}", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main())
