"""The distribution-shift benchmark: rows, image sets, units, engines and results."""
