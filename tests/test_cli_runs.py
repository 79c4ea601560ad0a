"""The commands on recorded trainings and sweeps, called as from a shell."""

import csv
import io
import json
import os
import signal
import time

import pytest
from typer.testing import CliRunner

from sparselib import recording, sweep
from sparselib.cli import app
from sparselib.results import store

from .results.runs import config, record


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path / "runs"))
    for changes in (dict(seed=0), dict(seed=1), dict(variant="ff"), dict(experiment="loss")):
        store.save(record(**changes))
    return tmp_path


def test_list_as_table_and_as_json():
    table = call("runs", "list")
    assert table.exit_code == 0
    assert [
        word for word in (config().experiment, record().key[:8], "6.0000", "0.061M") if word not in table.output
    ] == []
    runs = json.loads(call("runs", "list", "--json", "--experiment", "figure1").output)
    assert [(run["variant"], run["seed"]) for run in runs] == [("dense", 0), ("dense", 1), ("ff", 0)]
    fields = "experiment variant seed parameters tokens final_loss minutes code_version key"
    assert set(runs[0]) == set(fields.split())


def test_list_names_strange_files_and_goes_on(folder):
    (folder / "runs" / "figure1" / "bad.json").write_text("{")
    result = call("runs", "list", "--json")
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)) == 4
    assert "bad.json is no recorded run" in result.stderr
    assert call("runs", "list", "--strict").exit_code == 1


def test_show_prints_one_run():
    by_key = call("runs", "show", record(variant="ff").key)
    by_name = call("runs", "show", "--experiment", "figure1", "--variant", "ff", "--seed", "0")
    assert by_key.output == by_name.output
    shown = json.loads(by_key.output)
    assert (shown["variant"], shown["steps"], shown["first_loss"]) == ("ff", 6, 6.25)


def test_show_refuses_several_and_none():
    several = call("runs", "show", "--experiment", "figure1", "--variant", "dense")
    assert several.exit_code == 2
    assert f"{record(seed=1).key} (figure1 dense seed 1)" in several.output
    assert call("runs", "show", "--variant", "conv").exit_code == 2


@pytest.mark.parametrize(("difference", "exit_code"), [(4e-4, 0), (0.02, 1)])
def test_replay_says_the_difference_of_every_run(monkeypatch, difference, exit_code):
    seen = []
    monkeypatch.setattr(recording, "replay", lambda run, steps: seen.append((run.seed, steps)) or difference * run.seed)
    result = call("runs", "replay", "--experiment", "figure1", "--variant", "dense", "--steps", "7")
    assert result.exit_code == exit_code
    assert seen == [(0, 7), (1, 7)]
    assert f"figure1 dense seed 1: losses differ by {difference:.1e} at most (allowed 0.001)" in result.output


def test_export_writes_a_row_for_each_run(folder):
    assert call("runs", "export", "--experiment", "figure1", "--csv", str(folder / "runs.csv")).exit_code == 0
    rows = list(csv.DictReader(io.StringIO((folder / "runs.csv").read_text())))
    assert [(row["variant"], row["seed"], row["final_loss"], row["cpu"]) for row in rows] == [
        ("dense", "0", "6.0", "some CPU"),
        ("dense", "1", "6.0", "some CPU"),
        ("ff", "0", "6.0", "some CPU"),
    ]


def test_show_replay_and_export_tell_of_files_they_cannot_read(folder, monkeypatch):
    (folder / "runs" / "figure1" / "bad.json").write_text("{")
    monkeypatch.setattr(recording, "replay", lambda run, steps: 0.0)
    of_figure_1 = ("--experiment", "figure1")
    shown = call("runs", "show", *of_figure_1, "--variant", "ff")
    replayed = call("runs", "replay", *of_figure_1)
    exported = call("runs", "export", *of_figure_1, "--csv", str(folder / "runs.csv"))
    assert [result.exit_code for result in (shown, replayed, exported)] == [0, 1, 1]
    assert all("bad.json is no recorded run" in result.stderr for result in (shown, replayed, exported))
    assert len((folder / "runs.csv").read_text().splitlines()) == 4  # what can be read is there


def test_a_place_that_cannot_be_written_to_is_told_in_one_line(folder):
    result = call("runs", "export", "--csv", str(folder / "runs" / "figure1" / f"{record().key}.json" / "a.csv"))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


@pytest.fixture
def sweep_file(folder):
    base = {name: value for name, value in config().model_dump().items() if name not in ("variant", "seed")}
    (folder / "sweep.yaml").write_text(json.dumps({"base": base, "points": {"dense": {}}, "seeds": [3]}))
    return str(folder / "sweep.yaml")


def test_sweep_records_and_fails_with_what_failed(monkeypatch, sweep_file):
    def run(configs, executor, *, workers, say):
        say(f"{configs[0].variant} {configs[0].seed} {executor} {workers}")
        return ["dense seed 3: loss is nan"]

    monkeypatch.setattr(sweep, "run_sweep", run)
    result = call("sweep", sweep_file, "--executor", "dask://host", "--workers", "3")
    assert (result.exit_code, result.stdout) == (1, "dense 3 dask://host 3\n")
    assert result.stderr == "dense seed 3: loss is nan\n"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_sweep_that_is_interrupted_or_ended_says_how_to_go_on(monkeypatch, sweep_file, ending):
    def run(*arguments, **options):
        os.kill(os.getpid(), ending)
        time.sleep(10)

    monkeypatch.setattr(sweep, "run_sweep", run)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in what a shell starts in the background
    try:
        result = call("sweep", sweep_file)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


def test_sweep_refuses_in_one_line(folder):
    assert call("sweep", str(folder / "none.yaml")).exit_code == 2
