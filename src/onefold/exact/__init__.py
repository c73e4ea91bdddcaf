"""Exact laws of infinite ensembles in closed form, and wide networks trained as a reference."""

from onefold.exact.ensemble import reference_ensemble
from onefold.exact.gp import Gram, Law, ntk_gp
from onefold.exact.local import local_bandwidth, local_variance
from onefold.exact.primal import PrimalGP

__all__ = ["Gram", "Law", "PrimalGP", "local_bandwidth", "local_variance", "ntk_gp", "reference_ensemble"]
