"""The README's table is what the recorded results say."""

import pytest

from sparselib.paths import repository, results_dir
from sparselib.results.readme import END, START, numbers_table, with_numbers


def test_readme_holds_the_recorded_numbers():
    readme = (repository() / "README.md").read_text(encoding="utf-8")
    assert with_numbers(readme, numbers_table(results_dir())) == readme, "run make refresh"


def test_only_what_is_between_the_markers_changes():
    assert with_numbers(f"a {START} old {END} z", "new \\1") == f"a {START}\n\nnew \\1\n\n{END} z"


@pytest.mark.parametrize("readme", ["no marker", START, f"{START}{END}{START}{END}"[::-1]])
def test_missing_markers_are_refused(readme):
    with pytest.raises(ValueError, match="README"):
        with_numbers(readme, "table")


def test_missing_result_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"permutation_check\.csv"):
        numbers_table(tmp_path)
