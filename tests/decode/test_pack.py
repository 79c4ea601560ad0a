import dataclasses
import json

import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from sparselib.config import VARIANTS, preset
from sparselib.decode import DTYPES, Engine, Packed, pack, pack_random
from sparselib.models import Terraformer, Transformer

from ..models.build import DECODING, make, make_preset
from .engines import unpacked

dtypes = pytest.mark.parametrize("dtype", DTYPES)
decoding = pytest.mark.parametrize("architecture", DECODING)
SPARSE = dict(attention="mult_conv_output", feedforward="sparse", loss_sparsity=2)


# --- numbers ----------------------------------------------------------------------------------------------------------


@dtypes
@decoding
def test_weights_are_rounded_to_the_nearest(dtype, architecture):
    model = make(architecture, **SPARSE)
    packed = pack(model, dtype)
    matrices = packed.layout.matrices
    for name, weights in unpacked(packed, model).items():
        exact = model.state_dict()[name].double()
        error = (weights - exact).abs()
        if dtype == "fp32" or name not in matrices:
            bound = exact.abs() * 2**-24
        elif dtype == "bf16":
            bound = exact.abs() * 2**-8 * 1.0001  # half of the last of 8 bits
        else:
            rows = matrices[name].rows
            scale = torch.from_numpy(packed.p[matrices[name].scale : matrices[name].scale + rows].copy())
            assert (scale > 0).all()
            bound = scale.double().max() * 0.5001
        assert (error <= bound).all(), name


def test_int8_uses_all_of_its_range_in_every_row():
    model = make()
    packed = pack(model, "int8")
    matrix = packed.layout.matrices["embedding.weight"]
    rows = packed.w[matrix.offset : matrix.offset + matrix.size].reshape(matrix.rows, -1).astype(int)
    scale = packed.p[matrix.scale : matrix.scale + matrix.rows]
    assert (abs(rows).max(1) == 127).all()
    assert (abs(rows * scale[:, None] - model.embedding.weight.detach().numpy()).max(1) <= 0.5001 * scale).all()


@dtypes
def test_rows_of_zeros_stay_zeros(dtype):
    model = make(**SPARSE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert all((weight == 0).all() for weight in unpacked(pack(model, dtype), model).values())
    logits = Engine(pack(model, dtype), threads=1).step(1)
    assert (logits == 0).all()


def test_packing_leaves_the_model_as_it_was():
    model = make(**SPARSE)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    pack(model, "int8")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


# --- random weights ---------------------------------------------------------------------------------------------------


@dtypes
def test_random_weights_follow_the_seed(dtype):
    config = preset("smoke", "ff_qkv_loss")
    first, again, other = (pack_random(config, dtype, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.w, again.w) and np.array_equal(first.p, again.p)
    assert (first.w != other.w).mean() > 0.9


@dtypes
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_weights_deviate_as_those_of_an_untrained_model(dtype, variant):
    sizes = dict(d_model=256, n_heads=16, n_modules=16, d_ff=256, d_lowrank=32, n_layers=1, n_encoder_layers=1)
    config = preset("smoke", variant, architecture="encoder_decoder", **sizes)
    torch.manual_seed(0)
    model = Transformer(config)
    random, matrices = unpacked(pack_random(config, dtype), model), pack_random(config, dtype).layout.matrices
    for name, weight in model.state_dict().items():
        if name in matrices:
            n = weight.numel()
            assert abs(random[name].mean()) < 6 * matrices[name].deviation / n**0.5, name
            assert random[name].std() == pytest.approx(float(weight.std()), rel=0.01 + 5 / n**0.5), name
        else:
            torch.testing.assert_close(random[name], weight.double(), msg=name)


@dtypes
def test_random_weights_decode(dtype):
    config = preset("smoke", "ff_qkv_loss")
    logits = Engine(pack_random(config, dtype), threads=1).prefill([1, 2, 3])
    assert np.isfinite(logits).all() and logits.std() > 0.1


def test_an_encoder_can_be_left_out():
    config = preset("smoke", "ff_qkv", architecture="encoder_decoder", n_encoder_layers=2)
    packed, whole = pack_random(config, encoder=False), pack_random(config)
    assert packed.nbytes < whole.nbytes
    assert not [name for name in [*packed.layout.matrices, *packed.layout.vectors] if name.startswith("encoder.")]
    engine = Engine(packed, threads=1)
    with pytest.raises(ValueError, match="memory: this model was packed without its encoder"):
        engine.start([[1, 2]])
    engine.start(memory=np.ones((1, 3, config.d_model)))
    assert np.isfinite(engine.step(1)).all()


def test_progress_counts_every_weight():
    done = []
    packed = pack_random(preset("smoke"), progress=done.append)
    assert sum(done) == sum(matrix.size for matrix in packed.layout.matrices.values())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "", None, np.float32])
def test_unknown_dtypes_are_refused(dtype):
    for make_packed in (lambda: pack(make(), dtype), lambda: pack_random(preset("smoke"), dtype)):
        with pytest.raises(ValueError, match="dtype = .*'fp32', 'bf16', 'int8'"):
            make_packed()


def test_a_model_without_decoder_is_refused():
    for make_packed in (lambda: pack(make("encoder")), lambda: pack_random(make("encoder").config)):
        with pytest.raises(ValueError, match="architecture = 'encoder'.*decoder"):
            make_packed()


def test_a_terraformer_whose_streams_swap_once_is_refused():
    config = preset("smoke", architecture="terraformer", two_swaps=False)
    with pytest.raises(ValueError, match="two_swaps = False: must be True"):
        pack(Terraformer(config))


def test_what_does_not_fit_in_memory_is_refused_with_numbers(monkeypatch):
    packed, memory = pack(make()), psutil.virtual_memory()._replace(available=600_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    pack(make())
    with pytest.raises(MemoryError, match=r"billion weights as int8 needs [\d.]+ GB, 0.1 GB are free"):
        pack_random(preset("paper_17b"), "int8")
    with pytest.raises(MemoryError, match=r"batch 100000 and max_len 10 needs [\d.]+ GB, 0.1 GB are free"):
        Engine(packed, batch=100_000, threads=1)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    pack(make("encoder_decoder", **SPARSE), "int8").save(path)
    return path


@dtypes
@decoding
def test_a_saved_file_gives_the_same_model(tmp_path, dtype, architecture):
    model = make_preset("ff_qkv_loss", architecture)
    packed, path = pack(model, dtype), tmp_path / "new folder" / "model.safetensors"
    packed.save(path)
    loaded = Packed.load(path)
    assert (loaded.config, loaded.dtype, loaded.nbytes) == (packed.config, dtype, packed.nbytes)
    assert loaded.layout == packed.layout
    assert np.array_equal(loaded.w, packed.w) and np.array_equal(loaded.p, packed.p)
    engines = [Engine(p, threads=1) for p in (packed, loaded)]
    if architecture == "encoder_decoder":
        for engine in engines:
            engine.start([[1, 2, 3]])
    assert np.array_equal(*[engine.prefill([1, 2, 3]) for engine in engines])


def test_a_file_without_encoder_stays_one(tmp_path):
    config = preset("smoke", architecture="encoder_decoder", n_encoder_layers=1)
    pack_random(config, encoder=False).save(tmp_path / "packed")
    assert not Packed.load(tmp_path / "packed").layout.encoder


def rewritten(path, change):
    """The file again with other metadata, everything else as it was."""
    with safe_open(path, "np") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in ("w", "p")}
    change(metadata)
    save_file(arrays, path, metadata)


def test_another_format_is_refused(path):
    rewritten(path, lambda metadata: metadata.update(format="0"))
    with pytest.raises(ValueError, match="format = '0': must be 1: pack the model again"):
        Packed.load(path)


@pytest.mark.parametrize("field", ["about", "format", "checksum"])
def test_missing_metadata_is_refused(path, field):
    rewritten(path, lambda metadata: metadata.pop(field))
    with pytest.raises(ValueError, match="packed file"):
        Packed.load(path)


@pytest.mark.parametrize("field", ["dtype", "config", "encoder"])
def test_altered_metadata_is_refused(path, field):
    def change(metadata):
        about = json.loads(metadata["about"])
        about[field] = {"dtype": "bf16", "config": about["config"] | dict(n_heads=1), "encoder": False}[field]
        metadata["about"] = json.dumps(about)

    rewritten(path, change)
    with pytest.raises(ValueError, match="packed file = 'model.safetensors'.*checksum"):
        Packed.load(path)


@pytest.mark.parametrize("place", [0, 4, 9, 300, 0.2, 0.5, 0.999])
def test_altered_bytes_are_refused(path, place):
    content = bytearray(path.read_bytes())
    content[place if isinstance(place, int) else int(place * len(content))] ^= 16
    path.write_bytes(content)
    with pytest.raises(ValueError, match="packed file"):
        Packed.load(path)


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.5, 0.9999])
def test_a_truncated_file_is_refused(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="packed file = 'model.safetensors'.*damaged"):
        Packed.load(path)


def test_other_files_are_refused(tmp_path, path):
    with pytest.raises(ValueError, match="packed file = '.*none'.*a file"):
        Packed.load(tmp_path / "none")
    with pytest.raises(ValueError, match="a file"):
        Packed.load(tmp_path)
    save_file({"w": np.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"written by Packed.save"):
        Packed.load(path)
    path.write_text("some text that is no packed model at all")
    with pytest.raises(ValueError, match="damaged"):
        Packed.load(path)


def test_a_full_disk_leaves_the_old_file_and_no_half_one(path, monkeypatch):
    before = path.read_bytes()

    def fails(arrays, filename, metadata):
        filename.write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        pack(make()).save(path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]


def test_packed_weights_are_a_value():
    packed = pack(make())
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.w = None
