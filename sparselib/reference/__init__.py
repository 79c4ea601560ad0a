"""Golden values: our layers and models against stored ones of the reference implementation.

    python -m sparselib.reference FOLDER

loads the weights of every .safetensors file in FOLDER into our layers, and compares values, step-by-step values and
gradients at the tolerance of the format, which tests/golden/README.md describes.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from .compare import compare_file
from .golden import GoldenFile


def main(folder: Path) -> int:
    """Compare every file of ``folder``, one line each. Returns 0 if all agree, 1 otherwise or if there are none."""
    if not folder.is_dir():
        print(f"{folder}: no such folder", file=sys.stderr)
        return 1
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        print(f"{folder}: holds no .safetensors files", file=sys.stderr)
        return 1
    outcomes: Counter[str] = Counter()
    values = 0
    for path in paths:
        outcome, text, count = check(path)
        outcomes[outcome] += 1
        values += count
        print(f"{outcome:<4}  {path.name}  {text}", flush=True)
    counts = f"{outcomes['ok']} ok, {outcomes['FAIL']} failed"
    print(f"{len(paths)} files: {counts}; {values} values compared")
    return int(outcomes["FAIL"] > 0)


def check(path: Path) -> tuple[str, str, int]:
    """Outcome (ok or FAIL) of one file, what is to be said about it, and how many values were compared."""
    case = "unreadable"
    try:
        file = GoldenFile(path)
        case = file.case
        comparison = compare_file(file)
    except Exception as error:  # whatever is wrong with one file must not hide the others
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return "FAIL", f"{case}: {name}{error}", 0
    return ("FAIL" if comparison.wrong else "ok"), f"{case}: {comparison}", comparison.count
