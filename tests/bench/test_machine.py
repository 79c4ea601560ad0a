import os
import platform

import numpy
import torch

from sparselib.bench.machine import last_level_cache, load, machine


def test_the_machine_is_described():
    facts = machine()
    assert list(facts) == ["cpu", "physical_cores", "threads", "memory_gb", "python", "torch", "numpy", "os"]
    assert facts["cpu"] and 1 <= facts["physical_cores"] <= facts["threads"] and facts["memory_gb"] > 0
    assert (facts["torch"], facts["numpy"]) == (torch.__version__, numpy.__version__)
    assert facts["python"] == platform.python_version()


def test_nothing_names_the_machine():
    text = " ".join(map(str, machine().values()))
    assert platform.node() not in text and os.sep not in text.replace("N/A", "")


def test_a_caller_cannot_change_the_description():
    machine()["cpu"] = "other"
    assert machine()["cpu"] != "other"


def test_load_is_a_number_of_processes():
    assert load() >= 0


def test_the_last_level_cache_is_counted_once_for_those_who_share_it(tmp_path, monkeypatch):
    for cpu, index, level, size, shared in [
        (0, 0, 1, "32K", "0"), (1, 0, 1, "32K", "1"),
        (0, 3, 3, "16M", "0-1"), (1, 3, 3, "16M", "0-1"),
        (2, 3, 3, "16M", "2"),
    ]:  # fmt: skip
        folder = tmp_path / f"cpu{cpu}/cache/index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr("sparselib.bench.machine.CACHES", tmp_path)
    assert last_level_cache() == 2 * 16 * 2**20


def test_an_unknown_cache_is_zero(tmp_path, monkeypatch):
    monkeypatch.setattr("sparselib.bench.machine.CACHES", tmp_path / "none")
    assert last_level_cache() == 0
