"""Gymnasium, or one line that says how to get it."""

from onefold.errors import MissingExtraError

try:
    import gymnasium
except ImportError:
    raise MissingExtraError("reinforcement learning needs gymnasium: pip install 'onefold[rl]'") from None

__all__ = ["gymnasium"]
