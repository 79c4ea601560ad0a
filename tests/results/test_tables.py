import os

import pandas as pd
import pytest

from sparselib.results import tables
from sparselib.results.tables import save_table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "results_dir", lambda: tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def frame():
    return pd.DataFrame({"variant": ["dense", "ff"], "time (ms)": [1.23456, None], "weights": [1234567, 12]})


FORMATS = {"time (ms)": "{:.2f}", "weights": "{:,}"}


def test_the_file_holds_what_is_shown_without_commas_in_numbers(folder, frame):
    shown = save_table("table_1", frame, FORMATS)
    assert (folder / "table_1.csv").read_text("utf-8") == ("variant,time (ms),weights\ndense,1.23,1234567\nff,–,12\n")
    assert shown.values.tolist() == [["dense", "1.23", "1,234,567"], ["ff", "–", "12"]]
    assert frame["weights"].tolist() == [1234567, 12]


def test_an_index_of_its_own_does_not_matter(folder, frame):
    save_table("a", frame.sort_values("weights"), FORMATS)
    assert (folder / "a.csv").read_text("utf-8").splitlines()[1] == "ff,–,12"


def test_a_failed_write_leaves_the_old_file(folder, frame, monkeypatch):
    save_table("a", frame, FORMATS)
    before = (folder / "a.csv").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_table("a", frame[:1], FORMATS)
    assert [path.name for path in folder.iterdir()] == ["a.csv"]
    assert (folder / "a.csv").read_bytes() == before


@pytest.mark.parametrize("name", ["", "../a", "A", "a b", "a.csv", "a\n"])
def test_names_that_are_no_names_are_refused(folder, frame, name):
    with pytest.raises(ValueError, match="name = "):
        save_table(name, frame, FORMATS)
    assert not folder.exists()


def test_bad_tables_are_refused(folder, frame):
    with pytest.raises(ValueError, match="no rows"):
        save_table("a", frame[:0], FORMATS)
    with pytest.raises(ValueError, match="'seconds'"):
        save_table("a", frame, {"seconds": "{:.1f}"})
    with pytest.raises(ValueError, match=r"formats.*'time \(ms\)'"):
        save_table("a", frame)
    with pytest.raises(ValueError, match=r"formats.*'time \(ms\)'"):
        save_table("a", frame.astype({"time (ms)": "float32"}))
    with pytest.raises(ValueError, match="unique"):
        save_table("a", pd.concat([frame, frame], axis=1), FORMATS)
    assert not folder.exists()
