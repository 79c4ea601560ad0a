"""The store: what is written comes back, keys follow what fixes a run, and nothing strange is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.results import store
from sparselib.training.config import TrainConfig

from .runs import CHECKSUM, config, record


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))
    return tmp_path


def test_a_saved_run_comes_back_with_losses_of_five_decimals(folder):
    run = record()
    assert store.save(run) == folder / "figure1" / f"{run.key}.json"
    assert store.find(config(), CHECKSUM) == run
    assert run.losses == [6.25, *[6.12346] * 5]


def test_a_run_of_1500_steps_is_a_small_file():
    path = store.save(record(losses=[9 / (1 + step / 7) for step in range(1500)], steps=1500))
    assert path.stat().st_size < 20_000


def test_the_key_follows_all_that_fixes_a_run_and_nothing_else():
    here = store.key_of(config(), CHECKSUM)
    others = [
        store.key_of(config(seed=1), CHECKSUM),
        store.key_of(config(steps=7), CHECKSUM),
        store.key_of(config(optimizer=dict(learning_rate=0.02, warmup=2)), CHECKSUM),
        store.key_of(config(), "1" * 64),
        store.key_of(config(), CHECKSUM, store.RECIPE + 1),
    ]
    assert len({here, *others}) == 6
    assert store.key_of(config(precision="fp32", optimizer=dict(warmup=2, learning_rate=0.01)), CHECKSUM) == here


def test_a_new_field_with_a_default_moves_no_key_and_a_changed_default_refuses_the_file():
    path = store.save(record())

    class Wider(TrainConfig):
        new: int = 3

    assert store.key_of(Wider.model_validate(config().model_dump()), CHECKSUM) == path.stem
    content = json.loads(path.read_text())
    content["config"]["accumulate"] = 2  # as if the default had been 2 then
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the hash of its config"):
        store.find(config(), CHECKSUM)


@given(st.data())
def test_no_altered_field_that_fixes_the_run_is_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("runs") / "run.json"
    content = json.loads(record().model_dump_json())
    field = data.draw(st.sampled_from(["experiment", "variant", "seed", "key", "recipe", "data_checksum"]))
    content[field] = data.draw(st.integers(7, 99) if field in ("seed", "recipe") else st.text("abc", min_size=1))
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is no recorded run"):
        store.read(path)


def _without(field):
    return lambda content: {name: value for name, value in content.items() if name != field}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("losses"), "losses: Field required"),
        (lambda content: content | {"note": "hello"}, "note = 'hello'"),
        (lambda content: content | {"losses": []}, "losses = \\[\\]"),
        (lambda content: content | {"final_loss": "NaN"}, "final_loss = 'NaN'"),
        (lambda content: content | {"code_version": "unknown"}, "code_version = 'unknown'"),
        (lambda content: content | {"config": {}}, "config: experiment: Field required"),
        (lambda content: content | {"parameters": 1}, "parameters = 1: must be [0-9]+, those of its model"),
        (lambda content: content | {"losses": [6.0]}, "losses = '1 steps': must be one for each of 6 steps"),
        (
            lambda content: content | {"validation": [[3, 6.0]]},
            "up to step 3': must be up to the last, 6",
        ),
        (lambda content: content | {"final_loss": 3.0}, "final_loss = 3.0: must be 6.0, the last of validation"),
        (lambda content: [content], "is no recorded run"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(change, words):
    path = store.save(record())
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=words) as error:
        store.read(path)
    assert str(path) in str(error.value)


def test_half_a_file_and_a_file_in_a_wrong_place_are_refused(folder):
    path = store.save(record())
    wrong = folder / "figure3" / path.name
    wrong.parent.mkdir()
    wrong.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=f"wrong place: it belongs to .*figure1/{path.name}"):
        store.read(wrong)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is no recorded run"):
        store.find(config(), CHECKSUM)


def test_scan_sorts_the_runs_and_names_every_other_file(folder):
    for variant, seed in (("ff", 0), ("dense", 1), ("dense", 0)):
        store.save(record(variant=variant, seed=seed))
    store.save(record(experiment="figure3"))
    (folder / "README.md").write_text("what this is")
    (folder / "figure1" / ".half.json.tmp").write_text("a killed writer left this")
    (folder / "figure1" / "notes.txt").write_text("foreign")
    (folder / "stray.json").write_text("{}")
    runs, faults = store.scan()
    names = [(run.experiment, run.variant, run.seed) for run in runs]
    assert names == [("figure1", "dense", 0), ("figure1", "dense", 1), ("figure1", "ff", 0), ("figure3", "dense", 0)]
    assert [str(folder / "figure1" / "notes.txt") in faults[0], str(folder / "stray.json") in faults[1]] == [True, True]
    assert len(store.scan("figure3")[0]) == 1
    with pytest.raises(ValueError, match="experiment = 'figure9': must be one of those recorded: figure1, figure3"):
        store.scan("figure9")


def test_an_empty_store_holds_no_runs(folder):
    assert store.scan() == ([], [])
    assert store.find(config(), CHECKSUM) is None
    with pytest.raises(ValueError, match="experiment = 'figure1': must be one of those recorded: none"):
        store.scan("figure1")


def test_select_takes_the_start_of_a_key_or_the_fields(folder):
    runs = [record(variant=variant, seed=seed) for variant in ("dense", "ff") for seed in (0, 1)]
    for run in runs:
        store.save(run)
    assert store.select(runs[2].key[:9]) == ([runs[2]], [])
    assert store.select(experiment="figure1", seed=0) == ([runs[0], runs[2]], [])
    (folder / "figure1" / "bad.json").write_text("{}")
    found, faults = store.select(experiment="figure1", seed=0)
    assert found == [runs[0], runs[2]] and "bad.json is no recorded run" in faults[0]
    with pytest.raises(ValueError, match=r"no recorded run of variant ff, seed 7 in .*bad\.json is no recorded run"):
        store.select(variant="ff", seed=7)
