"""What can go wrong, by name. Every message is one line that says what was found and what to do."""

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# Controls, direction marks and overrides, and halves of surrogate pairs: what a name can hide or turn around with.
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text on one line, with everything that is invisible or that a terminal acts on written as \\uXXXX."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class OnefoldError(Exception):
    """Base of every error that onefold raises on purpose. Its text is safe to print: names in it may be strangers'."""

    def __str__(self) -> str:
        return visible(super().__str__())


class InputError(OnefoldError, ValueError):
    """Data or an argument that cannot be used as it is."""


class NotFittedError(OnefoldError, RuntimeError):
    """A method was asked for scores before it was fitted."""


class LayerError(OnefoldError, LookupError):
    """A model has no layer of that name, or the layer gives no usable features."""


class NotEnoughMemoryError(OnefoldError, MemoryError):
    """A job that would not fit, refused before it starts."""


class TrainingError(OnefoldError, RuntimeError):
    """A training that ended in NaN or infinity."""


class FileError(OnefoldError, ValueError):
    """A file that is damaged, foreign, of a newer version, or made by another run."""


class MissingExtraError(OnefoldError, ImportError):
    """An optional dependency that is not installed; the message has the command that installs it."""


class OnefoldWarning(UserWarning):
    """Something that works but should not be trusted as it is; the message has the reason."""


def warn(message: str) -> None:
    """Warn about the line of the user's that led here, however deep in the package the reason was found."""
    frame, level, ours = sys._getframe(), 0, 0
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == "onefold":
            ours = level
        frame = frame.f_back
    warnings.warn(visible(message), OnefoldWarning, stacklevel=ours + 1)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings of ours as one line each, without a line of source code."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, OnefoldWarning):
                print(f"onefold: warning: {message}", file=sys.stderr)
            else:
                shown(message, category, *rest)

        warnings.showwarning = show
        yield
