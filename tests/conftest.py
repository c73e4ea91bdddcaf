"""Every shape and type annotation is checked while the tests run; every test starts from the same random state."""

import os

from jaxtyping import install_import_hook

if not os.environ.get("JAXTYPING_DISABLE"):
    install_import_hook("onefold", "checker.checked")

import pytest
import torch
from browser import browser, opened  # noqa: F401
from hypothesis import HealthCheck, settings
from torch import Generator

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # one core for each worker


@pytest.fixture
def generator() -> Generator:
    return Generator().manual_seed(0)
