import pytest

from sparselib.config import VARIANTS
from sparselib.results import paper

TABLES = [value for value in vars(paper).values() if isinstance(value, paper.PaperTable)]


@pytest.mark.parametrize("table", (paper.TABLE_1, paper.TABLE_6), ids=lambda t: t.source)
def test_printed_speed_ups_follow_from_printed_times(table):
    """Both are rounded in the paper: equal to 3%."""
    printed = 0
    for row in table.rows:
        dense = table.row(size=row.size, variant="dense")
        if row.speedup:
            assert dense.seconds / row.seconds == pytest.approx(row.speedup, rel=0.03)
            printed += 1
        if row.block_speedup:
            assert dense.block_seconds / row.block_seconds == pytest.approx(row.block_speedup, rel=0.03)
    assert printed >= 2


def test_tables_that_quote_each_other_agree():
    assert paper.TABLE_2.row(ff_sparsity=1).seconds == paper.TABLE_1.row(size="800M", variant="dense").seconds
    assert paper.TABLE_2.row(ff_sparsity=64).seconds == paper.TABLE_1.row(size="800M", variant="ff").seconds
    for variant in ("ff", "ff_qkv"):
        row = paper.TABLE_6.row(variant=variant)
        assert row.seconds == paper.TABLE_1.row(size="17B", variant=variant).seconds


def test_variants_are_those_of_the_package():
    assert {row.variant for table in (paper.TABLE_1, paper.TABLE_6) for row in table.rows} == set(VARIANTS)


def test_glue_has_six_tasks_of_three_models():
    assert len(paper.TABLE_3.rows) == 18
    row = paper.TABLE_3.row(model="ff_qkv", task="MNLI-m")
    assert (row.accuracy, row.spread) == (82.9, None)
    assert paper.TABLE_3.row(model="dense", task="SST-2").spread == 0.85


def test_inferred_sizes_say_so_and_agree_with_table_1():
    assert not paper.SIZES.row(name="800M").inferred
    large = paper.SIZES.row(name="17B")
    dense = paper.TABLE_1.row(size="17B", variant="dense")
    assert large.inferred and f"{dense.seconds / dense.block_seconds:.2f}" in large.source
    assert int(dense.seconds / dense.block_seconds) == large.n_layers


def test_a_lookup_needs_exactly_one_row():
    with pytest.raises(ValueError, match="Table 1: 2 rows"):
        paper.TABLE_1.row(variant="dense")
    with pytest.raises(ValueError, match="Table 1: 0 rows"):
        paper.TABLE_1.row(variant="none")


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.source)
def test_every_table_has_a_source_and_opens_as_a_frame(table):
    frame = table.frame()
    assert table.source and table.about
    assert len(frame) == len(table.rows) and list(frame) == list(vars(table.rows[0]))
