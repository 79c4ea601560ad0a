"""Sweep files, and their runs in local processes and on a Dask cluster, with stand-ins for the training."""

import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from sparselib import sweep
from sparselib.paths import repository
from sparselib.results import store
from sparselib.sweep import Sweep, run_sweep

from .results.runs import CHECKSUM, MODEL, config, record

BASE = {name: value for name, value in config().model_dump().items() if name not in ("variant", "seed")}


def names(configs):
    return [f"{config.variant}-{config.seed}" for config in configs]


def make(points=None, seeds=(0,), **fields):
    return Sweep(base=BASE, points=points or {"dense": {}}, seeds=list(seeds), **fields)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_points_change_the_base_with_dots_or_mappings_and_leave_the_rest():
    dotted, mapping, other = make(
        {
            "dotted": {"model.feedforward": "sparse", "model.ff_sparsity": 8, "optimizer.warmup": 3},
            "mapping": {"model": {"feedforward": "sparse", "ff_sparsity": 8}, "optimizer": {"warmup": 3}},
            "other": {"steps": 9},
        }
    ).configs()
    assert dotted.model == mapping.model == MODEL | {"feedforward": "sparse", "ff_sparsity": 8}
    assert dotted.optimizer == mapping.optimizer == config(optimizer=dict(learning_rate=0.01, warmup=3)).optimizer
    assert other == config(variant="other", steps=9)


def test_order():
    points = {"a": {}, "b": {}}
    assert names(make(points, [0, 1]).configs()) == ["a-0", "b-0", "a-1", "b-1"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(points={"a": {"model.d_fff": 3}}), "points.a: model = 'd_fff': must be fields of ModelConfig"),
        (dict(points={"a": {"steps.most": 3}}), "points.a: steps = 6: must be a mapping, for most is set in it"),
        (dict(points={"a": {"stepz": 3}}), "points.a: stepz = 3"),
        (dict(points={"a b": {}}), "points.a b: variant = 'a b'"),
        (dict(seeds=[0, 0]), r"seeds = \[0, 0\]: must be all different"),
        (dict(seeds=[-1]), "seed = -1"),
        (dict(points={"a": {"seed": 3}}), r"points\.a\.seed = 3: must be left to points and seeds"),
    ],
)
def test_refusals_of_points_and_seeds(fields, words):
    with pytest.raises(ValueError, match=words):
        make(**fields).configs()


def test_refusals_of_files(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("base: {}\npoints: {a: {}}\nseed: [0]\n")
    with pytest.raises(ValueError, match=r"sweep\.yaml: seeds: Field required; seed = \[0\]"):
        Sweep.load(file)
    file.write_text("base: [")
    with pytest.raises(ValueError, match=r"sweep\.yaml is no YAML file"):
        Sweep.load(file)
    with pytest.raises(ValueError, match=r"base\.seed = 1: must be left to points and seeds"):
        Sweep(base=BASE | {"seed": 1}, points={"a": {}}, seeds=[0]).configs()


@pytest.mark.parametrize("file", sorted((repository() / "data" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_are_of_their_experiment_and_of_equal_length(file):
    configs = Sweep.load(file).configs()
    assert {config.experiment for config in configs} == {file.stem}
    assert len({config.steps for config in configs}) == 1


# --- local processes --------------------------------------------------------------------------------------------------

# What the process of a run does is in the name of its variant.
CHILD = """
import json, os, pathlib, signal, sys, time
config = json.load(sys.stdin)
here = pathlib.Path(sys.argv[1]) / f"{config['variant']}-{config['seed']}"
with here.with_suffix(".tries").open("a") as file:
    file.write(os.environ["OMP_NUM_THREADS"])
tries = len(here.with_suffix(".tries").read_text())
kind = config["variant"]
print("a warning", file=sys.stderr, flush=True)
if kind == "dies" or (kind == "dies_once" and tries == 1):
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "fails":
    raise ValueError("loss is nan")
if kind == "slow":
    try:
        here.with_suffix(".ready").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        here.with_suffix(".interrupted").touch()
        raise
if kind == "quick":
    while not list(here.parent.glob("slow-0.ready")):
        time.sleep(0.01)
here.with_suffix(".done").touch()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the stand-in leaves its marks; a run with the mark "done" is held."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(sweep, "CHILD", (sys.executable, "-S", str(tmp_path / "child.py"), str(tmp_path)))
    monkeypatch.setattr(sweep, "code", lambda: SimpleNamespace(commit="a" * 40, tree="b" * 40))
    monkeypatch.setattr(sweep, "held", lambda config: _record(config) if _mark(tmp_path, config).exists() else None)
    return tmp_path


def _mark(folder, config):
    return folder / f"{config.variant}-{config.seed}.done"


def _record(settings):
    return record(variant=settings.variant, seed=settings.seed, final_loss=5.25)


def tries(folder):
    return {path.stem: path.read_text() for path in folder.glob("*.tries")}


def test_only_missing_runs_are_made_each_on_one_thread(folder):
    (folder / "dense-0.done").touch()
    told = []
    assert run_sweep(make({"dense": {}, "ff": {}}, [0, 1]).configs(), say=told.append) == []
    assert tries(folder) == {"dense-1": "1", "ff-0": "1", "ff-1": "1"}
    assert told[0] == "1 of 4 runs are recorded"
    assert "loss 5.250, 0.1 min (3 of 3, about 0 min left)" in told[-1]
    assert sorted(line.split(":")[0] for line in told[1:]) == ["dense seed 1", "ff seed 0", "ff seed 1"]
    run_sweep(make({"dense": {}, "ff": {}}, [0, 1]).configs(), say=told.append)
    assert told[4:] == ["4 of 4 runs are recorded"]


def test_a_death_is_tried_again_once_an_error_is_not_and_the_others_go_on(folder):
    points = {"dies": {}, "fails": {}, "dies_once": {}, "dense": {}}
    faults = run_sweep(make(points).configs(), say=lambda line: None)
    assert sorted(faults) == ["dies seed 0: its process died (exit code -9)", "fails seed 0: ValueError: loss is nan"]
    assert tries(folder) == {"dies-0": "11", "fails-0": "1", "dies_once-0": "11", "dense-0": "1"}
    assert (folder / "dense-0.done").exists() and (folder / "dies_once-0.done").exists()


def test_an_interrupt_stops_the_processes_and_starts_no_more(folder):
    def interrupt(line):
        if line.startswith("quick"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(make({"slow": {}, "quick": {}, "slow_too": {}, "dense": {}}).configs(), say=interrupt)
    assert (folder / "slow-0.interrupted").exists()
    assert tries(folder)["slow-0"] == "1"
    assert "dense-0" not in tries(folder)


@pytest.mark.parametrize("executor", ["cluster", "dask://", "dask://host:port", "dask:host"])
def test_an_executor_that_is_none_is_refused(folder, executor):
    with pytest.raises(ValueError, match="must be local or dask://HOST"):
        run_sweep(make().configs(), executor)


def test_unclean_code_is_refused_before_a_process_starts(folder, monkeypatch):
    def unclean():
        raise ValueError("code: unclean")

    monkeypatch.setattr(sweep, "code", unclean)
    with pytest.raises(ValueError, match="unclean"):
        run_sweep(make().configs(), say=lambda line: None)
    assert tries(folder) == {}


# --- a Dask cluster ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    options = dict(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50)
    with distributed.LocalCluster(host="127.0.0.1", **options) as cluster:
        yield cluster.scheduler_address.replace("tcp", "dask")


def _worker(folder):
    """What a worker does: a function that pickles by value and imports nothing of the package."""
    records = {name: _record(config(variant=name)).model_dump_json() for name in ("dense", "dies_once")}

    def work(text, tree):
        variant = json.loads(text)["variant"]
        mark = folder / f"{variant}.died"
        if variant == "dies_once" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if variant == "fails":
            raise ValueError("loss is nan")
        return records[variant]

    return work


def test_dask_gives_the_run_of_a_lost_worker_to_another(folder, monkeypatch, cluster):
    monkeypatch.setenv("SPARSELIB_RUNS", str(folder / "runs"))
    monkeypatch.setattr(sweep, "record_here", _worker(folder))
    faults = run_sweep(make({"dies_once": {}, "fails": {}, "dense": {}}).configs(), cluster, say=lambda line: None)
    assert faults == ["fails seed 0: ValueError: loss is nan"]
    assert (folder / "dies_once.died").exists()
    assert [run.variant for run in store.scan()[0]] == ["dense", "dies_once"]
    assert store.find(config(), CHECKSUM).final_loss == 5.25


def test_dask_workers_with_other_code_are_refused(folder, monkeypatch, cluster):
    here = os.getpid()
    monkeypatch.setattr(sweep, "code", lambda: SimpleNamespace(commit="a" * 40, tree=str(os.getpid() == here)))
    with pytest.raises(ValueError, match=r"code of workers = 'tcp://.*must be that of commit a{40}"):
        run_sweep(make().configs(), cluster, say=lambda line: None)


def test_a_worker_that_joins_later_with_other_code_records_nothing(monkeypatch):
    monkeypatch.setattr(sweep, "code", lambda: SimpleNamespace(commit="a" * 40, tree="b" * 40))
    with pytest.raises(ValueError, match="code of a worker = 'a{40}'"):
        sweep.record_here(config().model_dump_json(), "c" * 40)


def test_a_cluster_without_workers_is_told_in_one_line(folder, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(sweep, "TIMEOUT", 1.0)
    with distributed.LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=":0", silence_logs=50) as empty:
        address = empty.scheduler_address
        with pytest.raises(ValueError, match=rf"the scheduler at {address} has no workers"):
            run_sweep(make().configs(), address.replace("tcp", "dask"), say=lambda line: None)


def test_no_scheduler_is_told_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(sweep, "TIMEOUT", 0.2)
    with pytest.raises(ValueError, match=r"no scheduler answers at tcp://127\.0\.0\.1:9"):
        run_sweep(make().configs(), "dask://127.0.0.1:9", say=lambda line: None)
