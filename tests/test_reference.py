"""The checker of golden files passes on the stored ones and fails on every kind of wrong file."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from sparselib.reference import check

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.glob("*.safetensors"))


def read(path):
    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["args"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def write(path, args, tensors):
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, path, {"args": json.dumps(args)})
    return path


def stem(path):
    return path.stem


# --- the stored files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_stored_file(path):
    outcome, text, count = check(path)
    assert (outcome, count > 0) == ("ok", True), text


def test_command_prints_a_line_for_each_file_and_a_summary(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reference", str(GOLDEN)])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("sparselib.reference", run_name="__main__")
    assert done.value.code == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert all(path.name in line for path, line in zip(FILES, lines, strict=True))
    assert f"{len(FILES)} files: {len(FILES)} ok, 0 failed" in summary


# --- wrong files ------------------------------------------------------------------------------------------------------


def is_expected(key):
    return not key.startswith(("w.", "in.")) and key != "noisy.u"


def last_compared(key, tensors):
    """Place of the last value of ``key`` that counts."""
    value = tensors[key]
    if key == "out.y" and "in.compare_rows" in tensors:
        return *np.argwhere(tensors["in.compare_rows"])[-1], value.shape[-1] - 1
    return tuple(n - 1 for n in value.shape)


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_every_expected_value_is_compared(path, tmp_path):
    args, tensors = read(path)
    expected = set(filter(is_expected, tensors))
    for key in expected:
        value, at = tensors[key].copy(), last_compared(key, tensors)
        value[at] += 1 if value.dtype == np.int32 else 4e-5 + 3e-5 * abs(value[at])
        tensors[key] = value
    outcome, text, _ = check(write(tmp_path / "a.safetensors", args, tensors))
    assert outcome == "FAIL"
    differ = text.split(" differ in ")[1].split(";")[0].split(", ")
    assert {name.split(" by ")[0] for name in differ} == expected
    for face in ("prefill", "step") if any(key.startswith("predict") for key in expected) else ():
        assert f" by {face}" in text


@pytest.mark.parametrize("key", ["out.y", "mid.index", "train_soft.grad.m1", "noisy.grad.mb"])
def test_one_wrong_number_fails(key, tmp_path):
    args, tensors = read(GOLDEN / "sparse_ff.safetensors")
    tensors[key] = tensors[key].copy()
    tensors[key].flat[5] += 1 if key == "mid.index" else np.float32(1e-4)
    outcome, text, _ = check(write(tmp_path / "a.safetensors", args, tensors))
    assert outcome == "FAIL" and f" differ in {key}" in text


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_rows_of_hashing_that_the_reference_gets_wrong_are_left_out(kind, tmp_path):
    args, tensors = read(GOLDEN / f"lsh_attention_{kind}.safetensors")
    rows = tensors["in.compare_rows"] == 0
    tensors["out.y"] = tensors["out.y"] + rows[..., None].astype(np.float32)
    outcome, text, _ = check(write(tmp_path / "a.safetensors", args, tensors))
    assert outcome == "ok", text


def test_who_sees_nobody_else_must_have_its_own_value(tmp_path):
    args, tensors = read(GOLDEN / "lsh_attention_causal.safetensors")
    tensors["in.compare_rows"] = tensors["in.compare_rows"].copy()
    tensors["in.compare_rows"][1, 20] = 0  # which sees others
    outcome, text, _ = check(write(tmp_path / "a.safetensors", args, tensors))
    assert outcome == "FAIL" and "8 differ in in.v by positions that see nobody else" in text


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_every_key_is_needed(path, tmp_path):
    args, tensors = read(path)
    for key in tensors:
        fewer = {name: value for name, value in tensors.items() if name != key}
        outcome, text, _ = check(write(tmp_path / "a.safetensors", args, fewer))
        assert (outcome, text) == ("FAIL", f"{args['case']}: missing key {key}")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("factored_dense", "w.G"),
        ("local_conv_k3_f3", "w.b"),
        ("mult_conv_attention", "w.conv_k.W"),
        ("sparse_ff", "w.w2"),
        ("sparse_ff", "w.mb"),
        ("layer_norm", "w.scale"),
        ("lm_dense", "w.pos"),
        ("lsh_block_dense", "w.q.W"),
        ("lsh_block_dense", "w.o.b"),
        ("lsh_block_sparse", "w.conv_v.b"),
        ("lm_sparse", "w.block1.ffn.ff.m2"),
    ],
)
def test_altered_weight_fails(name, key, tmp_path, capsys):
    args, tensors = read(GOLDEN / f"{name}.safetensors")
    tensors[key] = -tensors[key]
    write(tmp_path / "a.safetensors", args, tensors)
