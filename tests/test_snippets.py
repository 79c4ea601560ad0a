"""Every Python snippet of the README and of the book's pages runs as printed."""

import re

import pytest

from sparselib.paths import repository

PAGES = sorted([repository() / "README.md", *repository().glob("book/**/*.md")])
SNIPPETS = [
    pytest.param(code, id=f"{page.relative_to(repository())}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


def test_there_are_snippets():
    assert len(SNIPPETS) >= 7


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code):
    exec(compile(code, "snippet", "exec"), {})
