"""The entry point: parses the command, runs its job, and prints errors on one line."""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, NoReturn, Union, get_args, get_type_hints

import tyro

from onefold.cli import jobs
from onefold.cli.jobs import RERUN, Job
from onefold.core.runtime import raise_interrupt_on_termination
from onefold.errors import OnefoldError, plain_warnings, visible

BROKEN_PIPE = 141  # exit status of a command that SIGPIPE ends
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Group(NamedTuple):
    """Commands with a common first word."""

    description: str
    commands: Mapping[str, "type[Job] | Group"]


BENCH = {"run": jobs.BenchRun, "ablate": jobs.Ablate, "search": jobs.BenchSearch, "methods": jobs.ListMethods}
RL = {
    "train": jobs.Train, "resume": jobs.Resume, "grid": jobs.Grid, "search": jobs.RLSearch, "eval": jobs.Eval,
    "watch": jobs.Watch,
}  # fmt: skip
COMMANDS = Group(
    "Know when your neural network is guessing: flag unfamiliar inputs with one model and one forward pass.",
    {
        "demo": jobs.Demo,
        "fit": jobs.Fit,
        "score": jobs.Score,
        "watch": jobs.WatchStream,
        "diagnose": jobs.Diagnose,
        "export": jobs.Export,
        "serve": jobs.Serve,
        "toy": jobs.Toy,
        "bench": Group("Compare uncertainty methods on image sets: the paper's distribution-shift benchmark.", BENCH),
        "rl": Group("Train and evaluate the paper's exploration agents in ViZDoom and in small environments.", RL),
        "report": jobs.Report,
        "data": Group("Download and list image sets.", {"fetch": jobs.Fetch, "list": jobs.ListSets}),
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        try:
            return _main(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        from onefold import __version__

        print(f"onefold {__version__}")
        return 0
    job = parse(arguments)
    try:
        with plain_warnings(), raise_interrupt_on_termination():
            return job() or 0
    except OnefoldError as error:
        error.argument = options(job).get(error.argument, error.argument)
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename or 'file'}: {error.strerror or error}"
        if error.errno in FULL_DISK:
            message += f". Free some space; finished work is kept. {job.resume_hint or RERUN}"
        return _fail(message, 2)
    except (MemoryError, RuntimeError) as error:
        from onefold.core.runtime import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        return _fail("out of memory. Use smaller batches or networks.", 2)
    except KeyboardInterrupt:
        return _fail(f"stopped. {job.resume_hint}" if job.resume_hint else "stopped", 130)


def parse(arguments: Sequence[str], group: Group = COMMANDS, prog: str = "onefold") -> Job:
    """Return the job of a command. Only the parser of that command is built, because building all of them is slow."""
    first, *rest = arguments or ["--help"]
    if first not in group.commands:
        _show_help(group, prog, [first, *rest])
    command = group.commands[first]
    if isinstance(command, Group):
        return parse(rest, command, f"{prog} {first}")
    return tyro.cli(command, prog=f"{prog} {first}", args=rest, config=(tyro.conf.OmitArgPrefixes,))


@dataclass(frozen=True)
class _Listed:
    """A command in a list of commands."""


def _show_help(group: Group, prog: str, arguments: Sequence[str]) -> NoReturn:
    """List the commands of a group with one line each, or print an error about the first argument; then exit."""
    listed = [
        Annotated[_Listed, tyro.conf.subcommand(name, description=_summary(command))]
        for name, command in group.commands.items()
    ]
    parser: Any = Union[tuple(listed)]  # noqa: UP007 - the commands are only known at run time
    tyro.cli(parser, prog=prog, description=group.description, args=arguments)
    raise SystemExit(2)


def _summary(command: type[Job] | Group) -> str:
    return command.description if isinstance(command, Group) else (command.__doc__ or "").partition("\n")[0]


def options(job: Any) -> dict[str, str]:
    """Return the options of a job by the names of the arguments that they set, for error messages."""
    hints, names = get_type_hints(type(job), include_extras=True), {}
    for field in fields(job):
        value = getattr(job, field.name)
        if is_dataclass(value):
            names |= options(value)
        elif tyro.conf.Positional not in get_args(hints[field.name]):
            names[field.name] = f"--{field.name.replace('_', '-')}"
    return names


def _fail(message: str, status: int) -> int:
    print(f"onefold: {visible(message)}", file=sys.stderr)
    return status
