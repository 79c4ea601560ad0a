"""Staging, publishing and the check that no request leaves a built page."""

import os
from pathlib import Path

import pytest
import yaml

from sparselib import book, notebooks
from sparselib.book import BookFailed, check_offline
from sparselib.paths import repository
from sparselib.results import readme

PAGE = "<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>"
FOREIGN = "//example.org/x"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small repository in place of this one."""
    for name in ("index.md", "_config.yml", "_toc.yml", "book/a.md", "notebooks/01_a.ipynb", "data/results/t.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for module in (book, notebooks):
        monkeypatch.setattr(module, "repository", lambda: tmp_path)
        monkeypatch.setattr(module, "notebooks_dir", lambda: tmp_path / "notebooks")
    return tmp_path


def pages(folder, head="", body="", files=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(PAGE.format(head=head, body=body))
    for name, text in files:
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("scheme", ["", "https:", "http:", "HTTPS:"])
@pytest.mark.parametrize(
    ("head", "body"),
    [
        ('<script src="{}"></script>', ""),
        ('<link rel="stylesheet" href="{}">', ""),
        ('<link rel="preload stylesheet" href="{}">', ""),
        ('<link rel="icon" href="{}">', ""),
        ('<base href="{}">', ""),
        ('<style>@import "{}";</style>', ""),
        ("<style>p {{ background: url({}) }}</style>", ""),
        ('<script type="module">import x from "{}"</script>', ""),
        ("<script>fetch('{}')</script>", ""),
        ("<script>s.src = '{}'</script>", ""),
        ("", '<img alt="" src="{}">'),
        ("", "<p style=\"background: url('{}')\">"),
        ("", '<iframe src="{}"></iframe>'),
        ("", '<video poster="{}"></video>'),
        ("", '<object data="{}"></object>'),
        ("", '<svg><image href="{}"/></svg>'),
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(tmp_path, scheme, head, body):
    address = scheme + FOREIGN
    (fault,) = check_offline(pages(tmp_path, head.format(address), body.format(address)))
    assert fault == f"index.html would load {address}"


def test_style_sheets_and_scripts_are_read_too(tmp_path):
    files = [("a.css", f"@font-face {{ src: url('https:{FOREIGN}') }}"), ("a.js", f'import("https:{FOREIGN}")')]
    assert check_offline(pages(tmp_path, files=files)) == [
        f"{name} would load https:{FOREIGN}" for name in ("a.css", "a.js")
    ]


def test_links_that_a_reader_clicks_are_allowed(tmp_path):
    head = '<link rel="canonical" href="https://example.org"><link rel="next" href="https://example.org">'
    body = '<a href="https://example.org">x</a><img src="data:image/png;base64,x//y"><img src="_images/a//b.png">'
    assert check_offline(pages(tmp_path, head, body, [("a.css", "p { background: url(a.png) }")])) == []


def test_a_folder_without_a_book_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="make book"):
        check_offline(tmp_path)


def test_no_request_leaves_the_built_book():
    built = repository() / "_build" / "html"
    if not built.exists() and not os.environ.get("CI"):
        pytest.skip("no built book here: make book")
    assert check_offline(built) == []


def test_staging_copies_the_sources_afresh_and_keeps_good_runs(root):
    source = book.stage()
    (source / "book" / "gone.md").touch()
    (source / "notebooks").mkdir()
    for name in ("01_a.ipynb", "02_gone.ipynb"):
        (source / "notebooks" / name).write_text("run")
    assert book.stage() == root / "_build" / "source"
    assert {str(path.relative_to(source)): path.read_text() for path in source.rglob("*") if path.is_file()} == {
        name: name for name in ("index.md", "_config.yml", "_toc.yml", "book/a.md", "data/results/t.csv")
    } | {"notebooks/01_a.ipynb": "run"}


def _build(root, monkeypatch, head="", faults=(), profile="smoke"):
    """book.build with the slow steps replaced."""
    monkeypatch.setattr(book, "run_notebooks", lambda *arguments, **names: None)
    monkeypatch.setattr(book, "lint_notebooks", lambda *arguments: list(faults))
    monkeypatch.setattr(book, "executions_page", lambda folder: "# Executions")
    monkeypatch.setattr(book, "_build_pages", lambda source: pages(root / "_build" / "pages", head))
    return book.build(profile)


def test_a_good_build_takes_the_place_of_the_one_before(root, monkeypatch):
    (pages(root / "_build" / "html") / "old.html").touch()
    assert _build(root, monkeypatch) == root / "_build" / "html" / "index.html"
    assert [path.name for path in (root / "_build" / "html").iterdir()] == ["index.html"]
    assert (root / "_build" / "source" / "book" / "executions.md").read_text() == "# Executions"


@pytest.mark.parametrize(("profile", "shown"), [("smoke", "old"), ("laptop", "new"), ("paper", "old")])
def test_the_main_numbers_are_those_of_a_build_at_laptop(root, monkeypatch, profile, shown):
    (root / "index.md").write_text(f"{readme.START}old{readme.END}")
    monkeypatch.setattr(book, "numbers_table", lambda folder: "new")
    _build(root, monkeypatch, profile=profile)
    assert shown in (root / "_build" / "source" / "index.md").read_text()
    assert "old" in (root / "index.md").read_text()


@pytest.mark.parametrize("spoilt", [{"head": f'<script src="{FOREIGN}"></script>'}, {"faults": ["a fault"]}])
def test_a_faulty_build_is_refused_and_the_one_before_stays(root, monkeypatch, spoilt):
    before = pages(root / "_build" / "html", body="before") / "index.html"
    with pytest.raises(BookFailed, match="nothing was published"):
        _build(root, monkeypatch, **spoilt)
    assert "before" in before.read_text()


def test_refresh_writes_nothing_unless_every_notebook_is_fit(root, monkeypatch):
    asked = []

    def run(profile, names, output):
        asked.append(names)
        (output / "notebooks").mkdir()
        (output / "notebooks" / "01_a.ipynb").write_text(f"run at {profile}")
        (output / "data" / "results" / "t.csv").write_text("new")
        return [output / "notebooks" / "01_a.ipynb"]

    monkeypatch.setattr(book, "run_notebooks", run)
    monkeypatch.setattr(book, "lint_notebooks", lambda folder: ["a fault"])
    with pytest.raises(BookFailed):
        book.refresh()
    assert (root / "data/results/t.csv").read_text() == "data/results/t.csv"
    (root / "_build/source/notebooks/01_a.ipynb").unlink()
    (root / "_build/source/notebooks").rmdir()
    monkeypatch.setattr(book, "lint_notebooks", lambda folder: [])
    monkeypatch.setattr(book, "numbers_table", lambda folder: (folder / "t.csv").read_text())
    for name in book.NUMBERED:
        (root / name).write_text(f"{readme.START}{readme.END}")
    assert len(book.refresh(["01_a"])) == 4 and asked == [None, ["01_a"]]
    assert all("new" in (root / name).read_text() for name in book.NUMBERED)
    assert (root / "data/results/t.csv").read_text() == "new"
    assert (root / "notebooks/01_a.ipynb").read_text() == "run at laptop"


def test_every_page_of_the_contents_is_there():
    contents = yaml.safe_load((repository() / "_toc.yml").read_text())
    names = [contents["root"]] + [chapter["file"] for part in contents["parts"] for chapter in part["chapters"]]
    written = {str(path.relative_to(repository()).with_suffix("")) for path in repository().glob("book/**/*.md")}
    assert written <= set(names)
    made = "book/executions"  # from the runs, when the book is built
    for name in set(names) - {made}:
        assert any(Path(repository(), name + end).is_file() for end in (".md", ".ipynb")), name
