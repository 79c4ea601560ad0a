import pytest
import yaml

from sparselib.config import _SIZES, preset
from sparselib.paths import repository
from sparselib.training import TrainConfig

FIELDS = {
    "experiment": "figure1",
    "variant": "ff",
    "model": {"preset": "smoke", "variant": "ff", "d_ff": 96},
    "data": {"corpus": "lm_ci", "vocab_size": 300, "length": 16},
    "optimizer": {"learning_rate": 1e-3, "warmup": 5},
    "steps": 10,
    "batch": 4,
}


def write(folder, **changes):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(FIELDS | changes))
    return path


def test_yaml_becomes_a_config_whose_model_has_the_datas_vocabulary(tmp_path):
    config = TrainConfig.load(write(tmp_path))
    assert config.model_config_() == preset("smoke", "ff", d_ff=96, vocab_size=300)
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config != config.model_copy(update={"seed": 1})


def test_what_is_written_names_no_preset_that_may_change_later(tmp_path, monkeypatch):
    config = TrainConfig.load(write(tmp_path))
    written, model = config.model_dump(mode="json"), config.model_config_()
    assert not {"preset", "variant", "temperature"} & set(written["model"])  # temperature has its default
    monkeypatch.setitem(_SIZES["smoke"], "n_layers", 9)
    assert config.model_config_() != model
    assert TrainConfig.model_validate(written).model_config_() == model


def test_a_model_may_be_given_field_by_field(tmp_path):
    model = dict(d_model=8, d_ff=16, n_heads=2, n_layers=1)
    assert TrainConfig.load(write(tmp_path, model=model)).model_config_().d_model == 8


def test_span_corruption_takes_an_encoder_decoder(tmp_path):
    data = {"vocab_size": 300, "length": 16, "objective": "span", "target_length": 8}
    model = {"preset": "smoke", "architecture": "encoder_decoder", "n_encoder_layers": 1}
    assert TrainConfig.load(write(tmp_path, data=data, model=model)).data.target_length == 8
    with pytest.raises(ValueError, match="model.architecture = 'decoder'"):
        TrainConfig.load(write(tmp_path, data=data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "steps, epochs = .None, None.: must be one given"),
        ({"epochs": 1}, "steps, epochs = .10, 1.0.: must be one given"),
        ({"batch": 0}, "batch = 0"),
        ({"batch": 4, "accumulate": 3}, "batch = 4: must be a multiple of accumulate = 3"),
        ({"stepz": 3}, "stepz = 3: Extra inputs"),
        ({"seed": True}, "seed = True"),
        ({"seed": -1}, "seed = -1"),
        ({"experiment": "../figure1"}, "experiment = '../figure1'"),
        ({"precision": "fp16"}, "precision = 'fp16'"),
        ({"remember": "draws"}, "remember = 'draws': must be given for a terraformer"),
        ({"optimizer": {"learning_rate": 0, "warmup": 5}}, "optimizer.learning_rate = 0"),
        ({"optimizer": {"learning_rate": float("inf"), "warmup": 5}}, "optimizer.learning_rate = inf"),
        ({"optimizer": {"learning_rate": 1, "warmup": 11}}, "warmup = 11: must be at most steps = 10"),
        ({"optimizer": {"learning_rate": 1, "warmup": 5, "name": "sgd"}}, "optimizer.name = 'sgd'"),
        ({"data": {"length": 65}}, "model.max_len = 64: must be at least the 65 tokens"),
        ({"data": {"tokenizer": "t5"}}, "data: vocab_size = 4096: must be 32100"),
        ({"data": {"target_length": 3}}, "data: target_length = 3"),
        ({"model": {"preset": "smoke", "d_mod": 3}}, "d_mod"),
        ({"model": {"preset": "large"}}, "preset = 'large'"),
        ({"model": {"d_mod": 3}}, "model = 'd_mod'"),
        ({"model": {"d_model": 8}}, "model: .*missing.*d_ff"),
        ({"model": {"preset": "smoke", "vocab_size": 301}}, "model.vocab_size = 301: must be the data's 300"),
    ],
)
def test_bad_configs_are_refused_in_one_line_that_names_file_and_field(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        TrainConfig.load(write(tmp_path, **change))
    assert str(tmp_path / "run.yaml") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"batch: [1", b"\xff\xfe", b"- 1\n"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="run.yaml"):
        TrainConfig.load(path)


def test_shipped_configs_load():
    files = sorted((repository() / "data" / "configs").glob("*.yaml"))
    assert files and all(TrainConfig.load(file).model_config_() for file in files)


def test_one_setting_has_one_form():
    """So that 1 and 1.0 name one run."""
    models = ({"preset": "smoke", "variant": "ff", "hard_share": share} for share in (1, 1.0))
    as_int, as_float = (TrainConfig(**FIELDS | {"model": model}) for model in models)
    assert as_int.model_dump_json() == as_float.model_dump_json() and '"hard_share":1,' in as_int.model_dump_json()
