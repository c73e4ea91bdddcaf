"""Closed forms and trained references: the judges of every estimator above this floor."""

from onefold.exact.ensemble import reference_ensemble
from onefold.exact.gp import Gram, Law, ntk_gp
from onefold.exact.primal import PrimalGP

__all__ = ["Gram", "Law", "PrimalGP", "ntk_gp", "reference_ensemble"]
