"""Runner for the code of Markdown pages: all blocks of a page in order, in one namespace and one folder.

A `python` block is executed and a `sh` block is run line by line. A `text` block is the expected output of the block
before it; numbers may differ. HTML comments control the run: `<!-- run: this → that -->` replaces `this` by `that` in
the next block (a shorter training, a smaller grid), `<!-- first: … -->` is Python that prepares the reader's files,
`<!-- check: … -->` is an expression that must be true, `<!-- test: slow -->` marks a slow page. `_short` and `_tiny`
are recipes of few steps for such replacements. In bash, $REPOSITORY is the folder of the repository.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cli import main
from onefold.nn.train import Recipe

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"<!--[ ]*(?P<key>run|first|check|test):\s*(?P<value>.*?)\s*-->", re.DOTALL)
FIGURE = re.compile(r"[-+−]?\d[\d,.]*(?:e[-+]?\d+)?")
SHORT = Recipe(steps=150, batch=64, lr=3e-3, warmup=20)
TINY = Recipe(steps=30, batch=32, lr=3e-3, warmup=5)
LANGUAGES = ("python", "sh", "text")


class Step(NamedTuple):
    """A block or a comment: its kind, its content and its first line."""

    kind: str
    code: str
    line: int


def steps(text: str) -> Iterator[Step]:
    """Yield the blocks and comments of a page in order; comments inside a block belong to it."""
    at = 0
    while True:
        block, comment = FENCE.search(text, at), COMMENT.search(text, at)
        if block is None and comment is None:
            return
        if comment is not None and (block is None or comment.start() < block.start()):
            yield Step(comment["key"], textwrap.dedent(comment["value"]), text.count("\n", 0, comment.start()) + 1)
            at = comment.end()
        else:
            assert block is not None
            yield Step(block["language"], textwrap.dedent(block["code"]), text.count("\n", 0, block.start()) + 1)
            at = block.end()


def replaced(code: str, changes: list[str], where: str) -> str:
    """Return the block with all replacements; each must match."""
    for change in changes:
        old, arrow, new = (part.strip() for part in change.partition("→"))
        assert arrow, f"{where}: a change is written: this → that"
        assert old in code, f"{where}: there is no {old!r} in the block"
        code = code.replace(old, new)
    return code


def run_page(path: Path) -> None:
    """Run a page in the current folder; raise at the first block that fails."""
    names: dict[str, Any] = {"__name__": "__main__", "_short": SHORT, "_tiny": TINY}
    changes: list[str] = []
    printed = ""
    for step in steps(path.read_text("utf-8")):
        where = f"{path.name}, line {step.line}"
        if step.kind == "run":
            changes.append(step.code)
        elif step.kind == "check":
            assert eval(step.code, names), f"{where}: {step.code} is not true"
        elif step.kind == "text":
            check_printed(step.code, printed, where)
        elif step.kind != "test":
            code, changes = replaced(step.code, changes, where), []
            printed = shell(code, where) if step.kind == "sh" else python(code, names, where, step.line)
    assert changes == [], f"{path.name}: a comment that no block follows"


def python(code: str, names: dict[str, Any], where: str, line: int) -> str:
    """Execute a block and return its output. Tracebacks show the line of the page."""
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        exec(compile("\n" * line + code, where, "exec"), names)
    return buffer.getvalue()


def shell(code: str, where: str) -> str:
    """Run a block line by line: `onefold` in this process, which is faster, and everything else in bash."""
    printed = ""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "onefold" and not re.search(r"[|&;<>$*]", line.partition(" #")[0]):
            buffer = io.StringIO()
            try:
                with contextlib.redirect_stdout(buffer):
                    status = main(words[1:])
            except SystemExit as stop:  # from the argument parser
                status = stop.code
            printed += buffer.getvalue()
            assert status == 0, f"{where}: {line}: exit status {status}"
        else:
            tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            places = {"PATH": tools, "REPOSITORY": str(Path(__file__).parent.parent)}
            done = subprocess.run(
                ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **places}, check=False
            )
            assert done.returncode == 0, f"{where}: {line}: {done.stderr}"
            printed += done.stdout
    return printed


def check_printed(expected: str, printed: str, where: str) -> None:
    """Check that every line of a `text` block was printed, apart from its numbers."""
    shapes = {_shape(line) for line in printed.splitlines()}
    for line in expected.splitlines():
        assert not line.strip() or _shape(line) in shapes, f"{where}: {line!r} was not printed, but:\n{printed}"


def _shape(line: str) -> str:
    return " ".join(FIGURE.sub("#", line).split())
