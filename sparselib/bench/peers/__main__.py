"""``python -m sparselib.bench.peers``: the whole comparison; ``--one JOB``: one peer, its result as a line of JSON."""

from __future__ import annotations

import importlib
import json
import random
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ..protocol import time_call
from . import CATALOGUE, peers_frame, run_peers
from .base import Decoder, Job


@torch.inference_mode()
def measure(job: Job) -> dict[str, Any]:
    """The fields of a :class:`~sparselib.bench.peers.PeerTiming`, or the ``reason`` why there are none."""
    torch.set_num_threads(job.threads)
    peer = CATALOGUE[job.peer]
    try:
        module = importlib.import_module(f"{__package__}.{peer.module}")
        decoder: Decoder = getattr(module, peer.function)(job)
        fresh = partial(random.randrange, job.config.vocab_size)
        timing = time_call(decoder.step, job.tokens, job.warmup, fresh, bytes=decoder.bytes)
    except ModuleNotFoundError as error:
        return {"reason": f"{error.name} is not installed"}
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    return {"version": decoder.version, "shape": decoder.shape, "timing": asdict(timing)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(Job.from_json(sys.argv[2]))))
    else:
        from ..roofline import Reader

        threads = (1, 2)
        results = run_peers(threads=threads, readers={n: Reader(n) for n in threads})
        print(peers_frame(results).to_string(float_format="{:.1f}".format))
