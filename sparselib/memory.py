"""How much memory this process has taken."""

from __future__ import annotations

import sys


def peak_memory() -> int:
    """Bytes of memory that the process has held at most."""
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
