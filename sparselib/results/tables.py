"""Tables of the book: one CSV each, rounded as it is to be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from numbers import Integral, Real
from typing import Any

from pandas import DataFrame, isna

from ..checks import require
from ..files import write_atomically
from ..paths import results_dir

MISSING = "–"


def save_table(name: str, frame: DataFrame, formats: Mapping[str, str] | None = None) -> DataFrame:
    """Write ``frame`` as <results_dir>/<name>.csv and return it as it is shown, every cell a string.

    The file has the same rounding, but no commas between thousands.

    ``formats`` gives a column its format, such as ``{"time (ms)": "{:.2f}"}``; a column with floats needs
    one; None and NaN become a dash. Put units in the column names. The index is not written; the file is
    written whole or not at all. Errors: ValueError for a name that is not made of a-z, 0-9 and _, no rows,
    column names that are not unique, a format for a column that is not there, floats without a format.
    """
    formats = formats or {}
    require(re.fullmatch(r"[a-z0-9_]+", name) is not None, "name", name, "made of a-z, 0-9 and _")
    require(len(frame) > 0, "frame", "no rows", "a table with rows")
    require(frame.columns.is_unique, "frame.columns", list(frame.columns), "unique names")
    for column in formats:
        require(column in frame.columns, "formats", column, f"columns out of {list(frame.columns)}")
    shown, plain = frame.astype(object), frame.astype(object)
    for column, form in ((column, formats.get(column)) for column in frame.columns):
        shown[column] = [_show(cell, column, form) for cell in frame[column]]
        plain[column] = [_show(cell, column, form and form.replace(",", "")) for cell in frame[column]]
    write_atomically(results_dir() / f"{name}.csv", plain.to_csv(index=False, lineterminator="\n"))
    return shown


def _show(cell: Any, column: str, form: str | None) -> str:
    if isna(cell):
        return MISSING
    is_float = isinstance(cell, Real) and not isinstance(cell, Integral)
    require(form is not None or not is_float, "formats", form, f"given for {column!r}, which holds floats")
    return (form or "{}").format(cell)


def show_table(name: str, frame: DataFrame, formats: Mapping[str, str] | None = None, caption: str = "") -> Any:
    """:func:`save_table`, then the table as a notebook shows it: no index, with ``caption`` above."""
    from IPython.display import HTML

    shown = save_table(name, frame, formats).to_html(index=False, border=0, justify="left")
    return HTML(shown.replace("<thead>", f"<caption>{escape(caption)}</caption><thead>", 1))
