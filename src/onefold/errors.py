"""Errors and warnings of onefold, and the escaping of text that they print."""

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# Control characters, direction marks and surrogates: characters that can hide or reorder text in a terminal.
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Return `text` on one line, with invisible characters and control characters escaped as \\uXXXX."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class OnefoldError(Exception):
    """Base class of the errors that onefold raises on purpose.

    The text is one line: `<argument>: <problem>. <hint>`. It is safe to print: control characters in names from
    untrusted files are escaped.

    Args:
        problem: Description of the problem; a sentence without its full stop if there is a hint.
        argument: Name of the argument that is wrong or missing, such as "x" or "model"; empty if there is none. The
            command line prints the option or the file instead.
        hint: Sentence that says what to do.
    """

    def __init__(self, problem: str = "", *, argument: str = "", hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.argument, self.hint = problem, argument, hint

    def __str__(self) -> str:
        prefix = f"{self.argument}: " if self.argument else ""
        return visible(f"{prefix}{self.problem}. {self.hint}" if self.hint else f"{prefix}{self.problem}")


class InputError(OnefoldError, ValueError):
    """Data or an argument that cannot be used."""


class NotFittedError(OnefoldError, RuntimeError):
    """A detector that needs `fit` first."""


class LayerError(OnefoldError, LookupError):
    """A layer that the model does not have, or that gives no usable features."""


class NotEnoughMemoryError(OnefoldError, MemoryError):
    """A computation that needs more memory than is available, refused before it starts."""


class TrainingError(OnefoldError, RuntimeError):
    """A training that ended in NaN or infinity."""


class FileError(OnefoldError, ValueError):
    """A file that is damaged, of another format, of a newer version, or from another run."""


class MissingExtraError(OnefoldError, ImportError):
    """An optional dependency that is not installed; the message has the command that installs it."""


class OnefoldWarning(UserWarning):
    """A result that should not be trusted without a check; the message has the reason."""


class DiagnosisWarning(OnefoldWarning):
    """A finding of a diagnosis that speaks against a detector."""


def warn(message: str, category: type[OnefoldWarning] = OnefoldWarning) -> None:
    """Warn about the line of the user's code that called onefold, however deep in the package the cause is."""
    frame, level, package_level = sys._getframe(), 0, 0
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == "onefold":
            package_level = level
        frame = frame.f_back
    warnings.warn(visible(message), category, stacklevel=package_level + 1)


@contextlib.contextmanager
def renamed_argument(argument: str, name: str) -> Iterator[None]:
    """Call an argument by another name in errors, such as the file that is passed as `x`."""
    try:
        yield
    except OnefoldError as error:
        if error.argument == argument:
            error.argument = name
        raise


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print onefold's warnings as one line each, without the line of source code."""
    with warnings.catch_warnings():
        show_default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, OnefoldWarning):
                print(f"onefold: warning: {message}", file=sys.stderr)
            else:
                show_default(message, category, *rest)

        warnings.showwarning = show
        yield
