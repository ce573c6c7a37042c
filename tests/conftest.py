"""Tests run offline: no model, tokenizer or telemetry may go over the network."""

import os

# Before anything imports a library that reads these at import time.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
