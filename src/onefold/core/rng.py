"""Independent random number generators from one seed."""

import numpy as np
from torch import Generator

from onefold.core.batches import check_seed


def generators(seed: int, count: int) -> list[Generator]:
    """Return `count` generators whose streams are independent."""
    check_seed(seed)
    return [Generator().manual_seed(int(s)) for s in np.random.SeedSequence(seed).generate_state(count)]
