"""Running and checking notebooks, on small ones made here."""

import copy
import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from sparselib import notebooks
from sparselib.notebooks import NotebookFailed, lint_notebooks, notebook_paths, run_notebooks

FIGURE = {"mystnb": {"figure": {"name": "fig-a", "caption": "A line."}, "image": {"alt": "a line"}}}

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def write(path, *sources):
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell('profile = "laptop"\nseed = 1', metadata={"tags": ["parameters"]}),
    ]
    cells += [new_code_cell(source) for source in sources]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in place of the committed notebooks."""
    folder = tmp_path / "committed"
    folder.mkdir()
    monkeypatch.setattr(notebooks, "notebooks_dir", lambda: folder)
    return folder


@pytest.fixture
def good():
    """A notebook as a good run leaves it."""
    record = {"exception": None, "parameters": {"profile": "laptop"}, "input_path": "notebooks/01_a.ipynb"}
    cells = [
        new_code_cell('profile = "laptop"', metadata={"tags": ["parameters"]}, execution_count=1),
        new_code_cell("draw()", metadata=copy.deepcopy(FIGURE), execution_count=2),
        new_code_cell("print(1 / 2)", execution_count=3, outputs=[new_output("stream", name="stdout", text="0.5")]),
    ]
    cells[1].outputs = [new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Figure size 6x4>"})]
    return new_notebook(cells=cells, metadata={"papermill": record, "kernelspec": KERNEL})


def faults_of(notebook, folder):
    nbformat.write(notebook, folder / "01_a.ipynb")
    return lint_notebooks()


def test_a_run_is_whole_clean_and_fit_to_publish(folder, tmp_path, capsys):
    write(
        folder / "01_a.ipynb",
        "import os\nfrom pathlib import Path",
        'Path(os.environ["SPARSELIB_RESULTS"], "t.csv").write_text(f"{profile}{seed}")',
        'print(Path("../data/results/t.csv").read_text())',
    )
    (target,) = run_notebooks("smoke", output=tmp_path, parameters={"seed": 7})
    assert target == tmp_path / "notebooks" / "01_a.ipynb"
    executed = nbformat.read(target, as_version=4)
    assert executed.cells[-1].outputs[0].text == "smoke7\n"
    assert (tmp_path / "data" / "results" / "t.csv").read_text() == "smoke7"
    assert lint_notebooks(tmp_path / "notebooks", "smoke") == []
    assert any("run at profile smoke" in fault for fault in lint_notebooks(tmp_path / "notebooks"))
    assert str(tmp_path) not in json.dumps(executed)
    assert executed.metadata.machine.cpu and executed.metadata.papermill.duration > 0
    assert sorted(path.name for path in target.parent.iterdir()) == ["01_a.ipynb"]
    assert "[1/1] 01_a at profile smoke" in capsys.readouterr().out


def test_a_failed_run_names_the_place_and_keeps_the_file_of_the_last_good_one(folder, tmp_path):
    write(folder / "01_a.ipynb", "x = 0", "1 / x")
    target = tmp_path / "notebooks" / "01_a.ipynb"
    target.parent.mkdir()
    target.write_text("the last good run")
    with pytest.raises(NotebookFailed, match=r"01_a, cell \[\d+\]: ZeroDivisionError: division by zero"):
        run_notebooks("smoke", output=tmp_path)
    assert [path.read_text() for path in target.parent.iterdir()] == ["the last good run"]


@pytest.mark.parametrize(
    ("profile", "names", "parameters", "message"),
    [
        ("fast", None, {}, "profile = 'fast': must be one of 'smoke', 'laptop', 'paper'"),
        ("smoke", ["02_b"], {}, "notebook = '02_b': must be one of '01_a'"),
        ("smoke", None, {"sed": 1}, "parameter of 01_a = 'sed': must be one of 'profile', 'seed'"),
    ],
)
def test_unknown_names_are_errors_and_nothing_is_written(folder, tmp_path, profile, names, parameters, message):
    write(folder / "01_a.ipynb", "raise SystemExit")
    with pytest.raises(ValueError, match=message):
        run_notebooks(profile, names, tmp_path / "out", parameters)
    assert not (tmp_path / "out").exists()


def test_notebooks_come_in_reading_order_and_only_notebooks(folder):
    with pytest.raises(FileNotFoundError, match="no notebook"):
        notebook_paths()
    for name in ("02_b.ipynb", "01_a.ipynb", "scratch.ipynb", "03_notes.md"):
        (folder / name).touch()
    assert [path.stem for path in notebook_paths()] == ["01_a", "02_b"]
    assert [path.stem for path in notebook_paths(["02_b"])] == ["02_b"]


def test_a_good_notebook_has_no_fault(good, folder):
    assert faults_of(good, folder) == []


def _two_parameter_cells(notebook):
    notebook.cells[1].metadata["tags"] = ["parameters"]


def _no_profile(notebook):
    notebook.cells[0].source = "size = 1"


def _never_run(notebook):
    del notebook.metadata["papermill"]


def _ended_in_error(notebook):
    notebook.metadata.papermill["exception"] = True


def _unknown_parameter(notebook):
    notebook.metadata.papermill.parameters["sed"] = 1


def _absolute_metadata(notebook):
    notebook.metadata.papermill["input_path"] = "/home/someone/01_a.ipynb"


def _cell_not_run(notebook):
    notebook.cells[2].execution_count = None


def _semicolon(notebook):
    notebook.cells[1].source = "draw();\n"


def _no_caption(notebook):
    del notebook.cells[1].metadata.mystnb.figure["caption"]


def _no_alt(notebook):
    notebook.cells[1].metadata["mystnb"] = {"figure": {"name": "fig-a", "caption": "A line."}}


def _warning(notebook):
    notebook.cells[2].outputs = [new_output("stream", name="stderr", text="UserWarning: odd")]


def _error(notebook):
    notebook.cells[2].outputs = [new_output("error", ename="ValueError", evalue="odd", traceback=[])]


def _path(notebook):
    notebook.cells[2].outputs[0].text = "saved to /home/someone/x.csv"


def _host(notebook):
    notebook.cells[2].outputs[0].text = "measured on reader-laptop today"


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_two_parameter_cells, "2 cells are tagged"),
        (_no_profile, "does not set `profile`"),
        (_never_run, "not run by papermill"),
        (_ended_in_error, "ended in an error"),
        (_unknown_parameter, "parameter sed"),
        (_absolute_metadata, "metadata holds an absolute path"),
        (_cell_not_run, "cell 2: not run"),
        (_semicolon, "cell 1: ends in `;`"),
        (_no_caption, "cell 1: shows a figure without mystnb.figure.caption"),
        (_no_alt, "cell 1: shows a figure without mystnb.image.alt"),
        (_warning, "cell 2: an error or a warning"),
        (_error, "cell 2: an error or a warning"),
        (_path, "cell 2: an absolute path is among its outputs: /home/someone/x.csv"),
        (_host, "cell 2: the name of this machine"),
    ],
)
def test_every_fault_is_found(good, folder, monkeypatch, spoil, fault):
    monkeypatch.setattr(notebooks.platform, "node", lambda: "reader-laptop")
    spoil(good)
    assert any(fault in line for line in faults_of(good, folder))
