"""cuDNN's switches. They belong to the process, so overlapping threads share one change of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.backends import cudnn

OPERATORS: tuple[Any, ...] = (cudnn.conv, cudnn.rnn)  # pyright: ignore[reportAttributeAccessIssue]


class _Shared:
    """A change of global state that lasts while anyone needs it: the first user makes it, the last one undoes it.

    `torch.backends.cudnn.flags` saves and restores in every call instead: of two threads that overlap, the first to
    leave takes the change from the other, and the second leaves it behind for good.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        """`change` makes the change and returns the function that undoes it."""
        self._change, self._undo = change, change
        self._lock, self._users = threading.Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._undo = self._change()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo()


def _without_tf32() -> Callable[[], None]:
    try:
        allowed = cudnn.allow_tf32
    except RuntimeError:  # the user has set `fp32_precision`, the newer interface, for one kind of operator only
        allowed = True
    precisions = [operator.fp32_precision for operator in OPERATORS]
    cudnn.allow_tf32 = False
    _set_precisions(
        ["ieee" if operator.fp32_precision == "tf32" else operator.fp32_precision for operator in OPERATORS]
    )

    def undo() -> None:
        cudnn.allow_tf32 = allowed
        _set_precisions(precisions)

    return undo


def _set_precisions(precisions: list[str]) -> None:
    for operator, precision in zip(OPERATORS, precisions, strict=True):
        if operator.fp32_precision != precision:
            operator.fp32_precision = precision


def _with_benchmark() -> Callable[[], None]:
    before = cudnn.benchmark
    cudnn.benchmark = True

    def undo() -> None:
        cudnn.benchmark = before

    return undo


exact_float32 = _Shared(_without_tf32)
"""A context in which cuDNN computes in all digits of float32; with TF32 a GPU would keep three."""

tuned_cudnn = _Shared(_with_benchmark)
"""A context in which cuDNN tries which of its algorithms is fastest."""
