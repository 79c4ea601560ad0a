"""From notebooks and pages to the built book, without changing a tracked file.

`_build/source/` gets a copy of the pages, settings and results; papermill runs the notebooks there; jupyter-book
turns that folder into pages; they are checked and moved to `_build/html/`. Whatever fails, the book built before
stays as it was.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import nbformat

from .checks import require_choice
from .files import write_atomically
from .notebooks import ANSI_COLOUR, lint_notebooks, notebook_paths, run_notebooks, staged
from .paths import notebooks_dir, repository
from .results.profiles import PROFILES
from .results.readme import numbers_table, with_numbers

PAGES = ("index.md", "_config.yml", "_toc.yml", "book")
NUMBERED = ("README.md", "index.md")  # with the table of main numbers
RESULTS = "data/results"
EXECUTIONS = """# Executions

Made when this book was built, from what each notebook recorded about its run.

| notebook | profile | run on | took | machine |
|---|---|---|---|---|
"""


class BookFailed(RuntimeError):
    """The book could not be built; the message says what is wrong with it."""


def build(profile: str) -> Path:
    """Run every notebook at ``profile``, build the book strictly and return its first page.

    Errors: ValueError for an unknown profile, NotebookFailed, BookFailed.
    """
    require_choice("profile", profile, PROFILES)
    source = stage()
    print("Running the notebooks", flush=True)
    run_notebooks(profile, output=source)
    _refuse("the notebooks", lint_notebooks(source / "notebooks", profile))
    write_atomically(source / "book" / "executions.md", executions_page(source / "notebooks"))
    if profile == "laptop":  # the table is of that profile
        first = source / "index.md"
        write_atomically(first, with_numbers(first.read_text(encoding="utf-8"), numbers_table(source / RESULTS)))
    pages = _build_pages(source)
    _refuse("the pages", check_offline(pages))
    return _publish(pages) / "index.html"


def stage() -> Path:
    """Copy the book's sources and results to ``_build/source`` and return it; notebooks run there earlier stay."""
    source = staged()
    for name in (*PAGES, RESULTS):
        original, copy = repository() / name, source / name
        if copy.is_dir():
            shutil.rmtree(copy)
        if original.is_dir():
            shutil.copytree(original, copy)
        elif name != RESULTS:  # before the first `make refresh` there are no results
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, copy)
    current = {path.name for path in notebook_paths()}
    for path in (source / "notebooks").glob("*.ipynb"):
        if path.name not in current:
            path.unlink()
    return source


def refresh(names: Sequence[str] | None = None) -> list[Path]:
    """Run the notebooks (default: all) at profile laptop; once all are well, write them, results and main numbers."""
    source = stage()
    executed = run_notebooks("laptop", names, source)
    _refuse("the notebooks", lint_notebooks(source / "notebooks"))
    results = sorted((source / RESULTS).glob("*.csv"))
    targets = [notebooks_dir() / path.name for path in executed]
    targets += [repository() / RESULTS / path.name for path in results]
    table, numbered = numbers_table(source / RESULTS), [repository() / name for name in NUMBERED]
    texts = [with_numbers(path.read_text(encoding="utf-8"), table) for path in numbered]
    for path, target in zip([*executed, *results], targets, strict=True):
        write_atomically(target, path.read_text(encoding="utf-8"))
    for path, text in zip(numbered, texts, strict=True):
        write_atomically(path, text)
    return [*targets, *numbered]


def executions_page(folder: Path) -> str:
    """The page that tells when, where and for how long each notebook of ``folder`` ran."""
    rows = []
    for path in notebook_paths(folder=folder):
        metadata = nbformat.read(path, as_version=4).metadata
        run, machine = metadata.papermill, metadata.machine
        date = datetime.fromisoformat(run.start_time)
        rows.append(
            f"| {{doc}}`/notebooks/{path.stem}` | {run.parameters.profile} | {date:%Y-%m-%d %H:%M} UTC "
            f"| {run.duration:.0f} s | {machine.cpu}, {machine.threads} threads, {machine.memory_gb} GB, "
            f"{machine.os}, Python {machine.python}, torch {machine.torch} |\n"
        )
    return EXECUTIONS + "".join(rows)


def _build_pages(source: Path) -> Path:
    """Run jupyter-book from scratch, every warning an error; returns the folder of pages."""
    place, log = repository() / "_build" / "pages", repository() / "_build" / "book.log"
    shutil.rmtree(place, ignore_errors=True)  # a half-built cache would hide warnings
    place.mkdir(parents=True)
    print("Building the pages (about a minute)", flush=True)
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(source)]
    command += ["--path-output", str(place), "-W", "-n", "--keep-going"]
    started = time.monotonic()
    run = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = ANSI_COLOUR.sub("", run.stdout)
    write_atomically(log, output)
    if run.returncode != 0:
        lines = output.splitlines()
        faults = [line for line in lines if re.search(r"\b(WARNING|ERROR|CRITICAL|Error)\b", line)] or lines[-20:]
        _refuse(f"the pages (whole log: {log.relative_to(repository())})", faults)
    print(f"      done in {time.monotonic() - started:.0f} s", flush=True)
    return place / "_build" / "html"


def _publish(pages: Path) -> Path:
    """Put the new pages in the place of those built before."""
    target, old = repository() / "_build" / "html", repository() / "_build" / "html.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    pages.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def _refuse(what: str, faults: Sequence[str]) -> None:
    if faults:
        raise BookFailed(f"{len(faults)} faults in {what}; nothing was published:\n" + "\n".join(faults))


# --- no request may leave a built page --------------------------------------------------------------------------------

FOREIGN = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?//", re.I)
CSS_LOAD = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s;]+)""", re.I)
SCRIPT_LOAD = re.compile(
    r"""(?:\bimport\s*\(?|\bfrom|\bfetch\(|\bimportScripts\(|\.src\s*=|\.open\([^,]*,)\s*["'`]([^"'`]+)"""
)
LOADING_LINKS = {"stylesheet", "icon", "apple-touch-icon", "preload", "modulepreload", "prefetch", "preconnect"}
LOADING_LINKS |= {"dns-prefetch", "manifest", "mask-icon"}
LOADING_ATTRIBUTES = {"src", "srcset", "poster", "data", "background", "xlink:href"}


class _Loads(HTMLParser):
    """Collects every address that a browser loads by itself when it shows a page (not those a reader clicks)."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        values = {name: value or "" for name, value in attributes}
        self.addresses += [value for name, value in values.items() if name in LOADING_ATTRIBUTES and tag != "a"]
        self.addresses += CSS_LOAD.findall(values.get("style", ""))
        if tag == "link" and LOADING_LINKS & set(values.get("rel", "").lower().split()):
            self.addresses.append(values.get("href", ""))
        if tag in ("use", "image", "base"):
            self.addresses.append(values.get("href", ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, text: str) -> None:
        if self.inside == "style":
            self.addresses += CSS_LOAD.findall(text)
        if self.inside == "script":
            self.addresses += SCRIPT_LOAD.findall(text)


def _loads(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".html":
        yield from (CSS_LOAD if path.suffix == ".css" else SCRIPT_LOAD).findall(text)
        return
    parser = _Loads()
    parser.feed(text)
    yield from parser.addresses


def check_offline(pages: Path) -> list[str]:
    """A line for every address outside the book that opening one of its pages would load.

    Errors: FileNotFoundError if there is no book in ``pages``.
    """
    paths = sorted(path for path in pages.rglob("*") if path.suffix in (".html", ".css", ".js"))
    if not (pages / "index.html").is_file():
        raise FileNotFoundError(f"no built book in {pages}: run `make book`")
    return [
        f"{path.relative_to(pages)} would load {address[:100]}"
        for path in paths
        for address in dict.fromkeys(_loads(path))
        if FOREIGN.match(address)
    ]
