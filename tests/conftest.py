"""Tests run offline: no model, tokenizer or telemetry may go over the network."""

import os

# Before anything imports a library that reads these at import time.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _one_thread_and_no_stray_randomness():
    """The same numbers whatever the machine and the order of the tests."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
