"""Compiled kernels are cached on disk where that can be; where not, all works without."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sparselib
from sparselib.decode import simd

PACKAGE = Path(sparselib.__file__).parent
USE_A_KERNEL = """
import numpy as np
from sparselib.config import preset
from sparselib.decode import kernels, pack_random
packed = pack_random(preset("smoke"), seed=3)
print(kernels.__file__, type(kernels.fill._cache).__name__, np.abs(packed.w).sum() > 0)
"""
USE_AN_ENGINE = """
import numba
from sparselib.config import preset
from sparselib.decode import Engine, generate, pack_random
assert numba.config.NUMBA_NUM_THREADS == 1
for threads in (1, 2):
    print(generate(Engine(pack_random(preset("smoke", "ff_qkv_loss")), threads=threads), [1, 2, 3], 5))
"""


def run(code, **environment):
    """Lines that a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def nowhere_to_write(folder):
    """A copy of the package and settings under which no cache folder can be made, not even by root.

    Where a folder is wanted there is a file.
    """
    file = folder / "file"
    file.touch()
    shutil.copytree(PACKAGE, folder / "sparselib", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sparselib" / "decode" / "__pycache__").touch()
    homes = {name: str(file / "x") for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "LOCALAPPDATA")}
    return homes | dict(PYTHONPATH=str(folder))


def test_a_read_only_install_works_without_cache(tmp_path):
    (line,) = run(USE_A_KERNEL, **nowhere_to_write(tmp_path))
    assert line == f"{tmp_path / 'sparselib' / 'decode' / 'kernels.py'} NullCache True"


def test_kernels_are_cached_where_a_folder_can_be_written(tmp_path):
    environment = nowhere_to_write(tmp_path) | dict(NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    (line,) = run(USE_A_KERNEL, **environment)
    assert line.endswith("FunctionCache True")
    assert list((tmp_path / "cache").glob("*/kernels.fill-*.nbc"))


@pytest.mark.parametrize("message", ["cannot cache function", "no locator available"])
def test_a_kernel_without_cache_is_compiled_all_the_same(monkeypatch, message):
    cached = []
    original = simd.njit

    def njit(**options):
        cached.append(options.get("cache", False))
        if cached[-1]:
            raise RuntimeError(message)
        return original(**options)

    monkeypatch.setattr(simd, "njit", njit)
    assert simd.kernel(lambda x: x + 1)(2) == 3 and cached == [True, False]


def test_one_numba_thread_is_enough():
    first, second = run(USE_AN_ENGINE, NUMBA_NUM_THREADS="1")
    assert first == second and first.count(",") == 4
