"""The table of main numbers is what the recorded results say."""

import pytest

from sparselib.book import NUMBERED
from sparselib.paths import repository, results_dir
from sparselib.results.readme import END, START, _losses, numbers_table, with_numbers


@pytest.mark.parametrize("page", NUMBERED)
def test_pages_hold_the_recorded_numbers(page):
    text = (repository() / page).read_text(encoding="utf-8")
    assert with_numbers(text, numbers_table(results_dir())) == text, "run make refresh"


def test_only_what_is_between_the_markers_changes():
    assert with_numbers(f"a {START} old {END} z", "new \\1") == f"a {START}\n\nnew \\1\n\n{END} z"


@pytest.mark.parametrize("page", ["no marker", START, f"{START}{END}{START}{END}"[::-1]])
def test_missing_markers_are_refused(page):
    with pytest.raises(ValueError, match="page = 'no markers'"):
        with_numbers(page, "table")


def test_missing_result_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"permutation_check\.csv"):
        numbers_table(tmp_path)


def test_of_many_models_the_least_and_the_greatest_difference_are_told(tmp_path):
    rows = ["dense,3,–", "a,3,+0.2", "b,2,-0.1", "c,3,+0.05", "d,3,+0.3", "e,3,+0.1", "f,3,+0.1", "g,0,–"]
    (tmp_path / "loss.csv").write_text("\n".join(["model,seeds,difference (nats)", *rows]), encoding="utf-8")
    what, paper, here = _losses(tmp_path, "loss", "figure", "equal")
    assert here == "b -0.1 to d +0.3 (2 seeds, `laptop`)" and paper == "equal"
    (tmp_path / "loss.csv").write_text("\n".join(["model,seeds,difference (nats)", *rows[:3]]), encoding="utf-8")
    assert _losses(tmp_path, "loss", "figure", "equal")[2] == "a +0.2, b -0.1 (2 seeds, `laptop`)"
