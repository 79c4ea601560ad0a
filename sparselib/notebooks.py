"""Running and checking the notebooks, each at one of the three sizes (``profile``)."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from nbstripout import strip_output
from papermill.exceptions import PapermillExecutionError

from .bench.machine import machine
from .checks import require_choice
from .paths import notebooks_dir, repository
from .results.profiles import PROFILES

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s'"(=])(/[\w.-]+/[\w./-]+|[A-Za-z]:\\\w[^\s'"]*)""")
NOISE = ["cell.metadata.papermill", "cell.metadata.execution"]  # times of every cell: only unquiet diffs


class NotebookFailed(RuntimeError):
    """A notebook did not run to its end; the message names it, the cell and the error."""


def staged() -> Path:
    """The folder in which the book is made: a copy of its sources, with the notebooks run there."""
    return repository() / "_build" / "source"


def notebook_paths(names: Sequence[str] | None = None, folder: Path | None = None) -> list[Path]:
    """The notebooks NN_name.ipynb of ``folder`` (default: the committed ones) in reading order; ``names`` picks some.

    Errors: FileNotFoundError if there is none, ValueError for an unknown name.
    """
    folder = folder or notebooks_dir()
    paths = {path.stem: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if not paths:
        raise FileNotFoundError(f"no notebook NN_name.ipynb in {folder}")
    for name in names or ():
        require_choice("notebook", name, tuple(paths))
    return [path for name, path in paths.items() if not names or name in names]


# --- running ----------------------------------------------------------------------------------------------------------


def run_notebooks(
    profile: str,
    names: Sequence[str] | None = None,
    output: Path | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Run the notebooks in order and return the executed files, ``output``/notebooks/NN_name.ipynb.

    ``output`` (default: where the book is made) also gets the tables, in data/results. ``parameters`` are further
    values for the cell tagged ``parameters``. A notebook that fails leaves the file of its last good run.
    Errors: ValueError for an unknown profile, notebook or parameter; NotebookFailed.
    """
    require_choice("profile", profile, PROFILES)
    paths, output = notebook_paths(names), output or staged()
    values = {**(parameters or {}), "profile": profile}
    for path in paths:
        for name in values:
            require_choice(f"parameter of {path.stem}", name, tuple(papermill.inspect_notebook(str(path))))
    started, targets = time.monotonic(), [output / "notebooks" / path.name for path in paths]
    with _results_in(output / "data" / "results"):
        for done, (path, target) in enumerate(zip(paths, targets, strict=True), start=1):
            print(f"[{done}/{len(paths)}] {path.stem} at profile {profile} ...", flush=True)
            seconds = _run(path, target, values)
            total = time.monotonic() - started
            left = f", about {total / done * (len(paths) - done):.0f} s left" if done < len(paths) else ""
            print(f"      done in {seconds:.0f} s ({total:.0f} s in all{left})", flush=True)
    return targets


@contextmanager
def _results_in(folder: Path) -> Iterator[None]:
    """Kernels started inside write their tables to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("SPARSELIB_RESULTS")
    os.environ["SPARSELIB_RESULTS"] = str(folder)
    try:
        yield
    finally:
        del os.environ["SPARSELIB_RESULTS"]
        if before is not None:
            os.environ["SPARSELIB_RESULTS"] = before


def _run(path: Path, target: Path, values: Mapping[str, Any]) -> float:
    """Run one notebook into ``target``, whole or not at all; returns the seconds it took."""
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".running-") as folder:
        part = Path(folder) / path.name
        try:
            papermill.execute_notebook(
                str(path),
                str(part),
                parameters=dict(values),
                kernel_name="python3",
                cwd=str(target.parent),
                progress_bar=sys.stderr.isatty(),
                extra_arguments=["--log-level=CRITICAL"],  # else every kernel warns that it talks over the loopback
            )
        except PapermillExecutionError as error:
            trace = ANSI_COLOUR.sub("", "\n".join(error.traceback))
            raise NotebookFailed(
                f"{path.stem}, cell [{error.exec_count}]: {error.ename}: {error.evalue}\n{trace}"
            ) from None
        except DeadKernelError:
            raise NotebookFailed(f"{path.stem}: its process died, most often for want of memory") from None
        notebook = nbformat.read(part, as_version=4)
        _clean(notebook, path.name)
        nbformat.write(notebook, part)
        os.replace(part, target)
    return time.monotonic() - started


def _clean(notebook: NotebookNode, name: str) -> None:
    """Keep what the reader needs to know of the run, and drop paths and what would differ in every run."""
    notebook.metadata.papermill |= {"input_path": f"notebooks/{name}", "output_path": f"notebooks/{name}"}
    notebook.metadata.machine = machine()
    for cell in notebook.cells:
        cell.source = cell.source.rstrip()  # papermill ends its cell of parameters with an empty line
    strip_output(notebook, keep_output=True, keep_count=True, keep_id=True, extra_keys=NOISE)


# --- checking ---------------------------------------------------------------------------------------------------------


def lint_notebooks(folder: Path | None = None, profile: str = "laptop") -> list[str]:
    """Everything that makes the executed notebooks of ``folder`` (default: the committed ones) unfit to publish.

    One line for each fault: not run, run at another profile than ``profile`` or not to its end, not exactly one cell
    tagged ``parameters``, parameters that the cell does not have, a figure without name, caption or alternative text,
    errors and warnings among the outputs, paths or the name of this machine in them.
    """
    require_choice("profile", profile, PROFILES)
    faults = []
    for path in notebook_paths(folder=folder):
        notebook = nbformat.read(path, as_version=4)
        faults += [f"{path.stem}: {fault}" for fault in _lint_run(notebook, path, profile)]
        for number, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                faults += [f"{path.stem}, cell {number}: {fault}" for fault in _lint_cell(cell)]
    return faults


def _lint_run(notebook: NotebookNode, path: Path, profile: str) -> Iterator[str]:
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        yield f"{len(tagged)} cells are tagged `parameters`, not one"
    known = set(papermill.inspect_notebook(str(path)))
    if "profile" not in known:
        yield "the cell tagged `parameters` does not set `profile`"
    record = notebook.metadata.get("papermill")
    if record is None:
        yield "not run by papermill (make refresh)"
        return
    if record.get("exception"):
        yield "its last run ended in an error"
    for name in sorted(set(record.parameters) - known):
        yield f"run with the parameter {name}, which it does not have"
    if record.parameters.get("profile") != profile:
        yield f"run at profile {record.parameters.get('profile')}, not {profile}"
    if ABSOLUTE_PATH.search(str(record)):
        yield "its metadata holds an absolute path (run it with `sparselib notebooks run`)"


def _lint_cell(cell: NotebookNode) -> Iterator[str]:
    if cell.source.strip() and cell.execution_count is None:
        yield "not run"
    if cell.source.rstrip().endswith(";"):
        yield "ends in `;`, which the check of outputs does not heed: give the value a name"
    shown = cell.metadata.get("mystnb", {})
    for output in cell.outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            yield f"an error or a warning is among its outputs: {_text(output)[:80]!r}"
        if any(kind.startswith("image/") for kind in output.get("data", {})):
            for group, key in (("figure", "name"), ("figure", "caption"), ("image", "alt")):
                if not shown.get(group, {}).get(key):
                    yield f"shows a figure without mystnb.{group}.{key} in its metadata"
        found = ABSOLUTE_PATH.search(_text(output))
        if found:
            yield f"an absolute path is among its outputs: {found[1]}"
        if len(platform.node()) > 3 and re.search(rf"\b{re.escape(platform.node())}\b", _text(output)):
            yield f"the name of this machine is among its outputs: {platform.node()}"


def _text(output: NotebookNode) -> str:
    """All text of an output that a reader could see."""
    texts = [str(text) for kind, text in output.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join([output.get("text", ""), *output.get("traceback", []), output.get("evalue", ""), *texts])
