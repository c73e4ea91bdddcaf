"""Data sets that come with the installation, and the perturbations of the paper."""

from onefold.data.digits import Digits, digits
from onefold.data.glyphs import letters
from onefold.data.perturb import perturb

__all__ = ["Digits", "digits", "letters", "perturb"]
