"""Settings of every test: one thread a process when tests run side by side, hypothesis without chance or clock."""

import os

import torch
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
