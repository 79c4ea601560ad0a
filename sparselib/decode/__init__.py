"""Fast decoding on CPUs: packed weights, one kernel program for a token, sampling.

from sparselib.decode import Engine, pack

engine = Engine(pack(model, "int8"))
logits = engine.prefill(prompt)
logits = engine.step(logits.argmax(-1))
"""

from .engine import Engine, State
from .pack import DTYPES, Packed, pack, pack_random

__all__ = ["DTYPES", "Engine", "Packed", "State", "pack", "pack_random"]
