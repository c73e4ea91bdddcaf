"""Every shape and type annotation is checked while the tests run; every test starts from the same random state."""

import ctypes
import os
import sys

import checker

if not os.environ.get("JAXTYPING_DISABLE"):
    checker.install()

import pytest
import torch
from browser import browser, opened  # noqa: F401
from hypothesis import HealthCheck, settings
from torch import Generator

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # one core for each worker

if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
    # Small networks allocate and free the same few megabytes at every step. glibc would return them to the system each
    # time, which costs a quarter of the time of a test that trains.
    mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD
    mallopt(-1, 256 * 2**20)  # M_TRIM_THRESHOLD


@pytest.fixture
def generator() -> Generator:
    return Generator().manual_seed(0)
