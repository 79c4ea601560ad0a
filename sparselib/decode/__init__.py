"""Fast decoding on CPUs: packed weights, one kernel program for a token, sampling.

from sparselib.decode import Engine, generate, pack

engine = Engine(pack(model, "int8"))
tokens = generate(engine, prompt, max_tokens=32)

logits = engine.prefill(tokens)  # or step by step
logits = engine.step(logits.argmax(-1))
"""

from .engine import Engine, State
from .generate import Sampling, generate
from .pack import DTYPES, Packed, pack, pack_random

__all__ = ["DTYPES", "Engine", "Packed", "Sampling", "State", "generate", "pack", "pack_random"]
