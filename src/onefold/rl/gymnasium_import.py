"""The optional import of Gymnasium, with an error that names the extra to install."""

from onefold.errors import MissingExtraError

try:
    import gymnasium
except ImportError:
    raise MissingExtraError("reinforcement learning needs gymnasium: pip install 'onefold[rl]'") from None

__all__ = ["gymnasium"]
