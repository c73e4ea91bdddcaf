"""Context managers for cuDNN's global flags, shared by threads that overlap."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.backends import cudnn

OPERATORS: tuple[Any, ...] = (cudnn.conv, cudnn.rnn)  # pyright: ignore[reportAttributeAccessIssue]


class _SharedFlag:
    """A change of global state with a user count: the first user applies it, the last one restores the old state.

    `torch.backends.cudnn.flags` saves and restores in every call instead. Of two threads that overlap, the first to
    leave would undo the change for the other, and the second would restore the changed state for good.

    Args:
        change: Applies the change and returns the function that undoes it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
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


def _disable_tf32() -> Callable[[], None]:
    """Turn TF32 off and return the function that restores the flags."""
    try:
        allowed = cudnn.allow_tf32
    except RuntimeError:  # the user set `fp32_precision`, the newer interface, for one kind of operator only
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
    """Set the float32 precision of convolutions and recurrent layers where it differs."""
    for operator, precision in zip(OPERATORS, precisions, strict=True):
        if operator.fp32_precision != precision:
            operator.fp32_precision = precision


def _enable_benchmark() -> Callable[[], None]:
    """Turn cuDNN's benchmark mode on and return the function that restores it."""
    previous = cudnn.benchmark
    cudnn.benchmark = True

    def undo() -> None:
        cudnn.benchmark = previous

    return undo


exact_float32 = _SharedFlag(_disable_tf32)
"""Context manager: cuDNN computes in full float32 precision; TF32 on a GPU would keep three digits."""

tune_cudnn = _SharedFlag(_enable_benchmark)
"""Context manager: cuDNN benchmarks its algorithms and uses the fastest."""
