"""Settings of every test: one thread (tensors are tiny, tests run side by side), hypothesis without chance or clock."""

import signal

import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")

# A shell starts what it puts in the background with Ctrl-C ignored; tests of interrupts send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
