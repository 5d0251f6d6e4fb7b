"""Tests that need a GPU: `make test-gpu`. On a machine without one they are skipped, and pytest says so."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Skip without a GPU. The number of GPUs is read without starting CUDA, so that children may still use it."""
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU, and torch sees none here")
