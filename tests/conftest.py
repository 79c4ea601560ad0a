"""Settings of every test: one thread (tensors are tiny, tests run side by side), hypothesis without chance or clock."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
