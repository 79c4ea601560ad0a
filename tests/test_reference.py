"""The checker of golden files passes on the stored ones and fails on every kind of wrong file."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from sparselib.reference import check, main

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.glob("*.safetensors"))
LEFT_OUT = ("sru", "ff_sru", "lm_sparse_sru", "concat_strip", "rev_decoder_block", "terraformer")
COMPARED = [path for path in FILES if not path.name.startswith(LEFT_OUT)]


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
    assert (outcome, count > 0) == (("ok", True) if path in COMPARED else ("left out", False)), text


def test_command_prints_a_line_for_each_file_and_a_summary(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reference", str(GOLDEN)])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("sparselib.reference", run_name="__main__")
    assert done.value.code == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert all(path.name in line for path, line in zip(FILES, lines, strict=True))
    assert f"{len(FILES)} files: {len(COMPARED)} ok, 0 failed, {len(FILES) - len(COMPARED)} left out" in summary
    reasons = {line.split("needs ")[1] for line in lines if line.startswith("left out")}
    assert reasons == {"the recurrent layer", "the reversible stack"}


# --- wrong files ------------------------------------------------------------------------------------------------------


def is_expected(key):
    return not key.startswith(("w.", "in.")) and key != "noisy.u"


def last_compared(key, tensors):
    """Place of the last value of ``key`` that counts."""
    value = tensors[key]
    if key == "out.y" and "in.compare_rows" in tensors:
        return *np.argwhere(tensors["in.compare_rows"])[-1], value.shape[-1] - 1
    return tuple(n - 1 for n in value.shape)


@pytest.mark.parametrize("path", COMPARED, ids=stem)
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


@pytest.mark.parametrize("path", COMPARED, ids=stem)
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
    shutil.copy(GOLDEN / "attention.safetensors", tmp_path / "b.safetensors")
    assert main(tmp_path) == 1
    first, second, summary = capsys.readouterr().out.splitlines()
    assert first.startswith(f"FAIL      a.safetensors  {args['case']}: ") and " differ in " in first
    assert second.startswith("ok        b.safetensors  attention: ")
    assert "1 ok, 1 failed, 0 left out" in summary


def altered_sparse_ff(change, path):
    args, tensors = read(GOLDEN / "sparse_ff.safetensors")
    change(args, tensors)
    return write(path, args, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args, t: t.update({"w.extra": t["w.b2"]}), "extra keys w.extra"),
        (lambda args, t: args.update(case="dense_ff"), "case = 'dense_ff': must be one of"),
        (lambda args, t: args.pop("d_lowrank"), "args lack d_lowrank"),
        (lambda args, t: args.pop("case"), "args: must be a JSON object that names its `case`"),
        (lambda args, t: args.update(d_ff=50), "d_ff = 50: must be a multiple of"),
        (lambda args, t: args.update(d_ff=40), "w.m2 has shape (5, 6, 8), by the args it must be (5, 5, 8)"),
        (lambda args, t: t.update({"w.w2": t["w.w2"].swapaxes(0, 1)}), "w.w2 has shape (6, 8, 16)"),
        (lambda args, t: t.update({"out.y": t["out.y"][:1]}), "out.y has shape (1, 7, 16), ours (2, 7, 16)"),
        (lambda args, t: t.update({"w.b2": t["w.b2"] * np.float32("nan")}), "w.b2 holds NaN"),
        (lambda args, t: t.update({"noisy.y": t["noisy.y"] / np.float32(0)}), "noisy.y holds NaN or infinity"),
        (lambda args, t: t.update({"w.b2": t["w.b2"].astype(float)}), "w.b2 is torch.float64"),
        (lambda args, t: t.update({"mid.index": t["mid.index"].astype(np.float32)}), "mid.index is torch.float"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_wrong_file_fails(change, message, tmp_path):
    outcome, text, count = check(altered_sparse_ff(change, tmp_path / "a.safetensors"))
    assert (outcome, count) == ("FAIL", 0)
    assert message in text


@pytest.mark.parametrize(
    ("option", "value"), [("v_concat_type", "original"), ("output_layer_type", "dense"), ("share_qk", False)]
)
def test_option_that_the_format_does_not_have(option, value, tmp_path):
    args, tensors = read(GOLDEN / "mult_conv_attention_full.safetensors")
    outcome, text, _ = check(write(tmp_path / "a.safetensors", {**args, option: value}, tensors))
    assert outcome == "FAIL"
    assert f"{option} = {value!r}" in text or "missing key w.conv_q.W" in text


@pytest.mark.parametrize(("option", "value"), [("weights_format", "both"), ("num_weights", 2), ("n_buckets", [4, 3])])
def test_option_that_hashing_does_not_have(option, value, tmp_path):
    args, tensors = read(GOLDEN / "lsh_block_dense.safetensors")
    outcome, text, _ = check(write(tmp_path / "a.safetensors", {**args, option: value}, tensors))
    assert outcome == "FAIL" and f"{option} = " in text and "must be " in text


@pytest.mark.parametrize("kept", [0, 7, 100, 3000, -1])
def test_truncated_file_fails(kept, tmp_path, capsys):
    content = (GOLDEN / "attention.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:kept])
    assert main(tmp_path) == 1
    assert capsys.readouterr().out.startswith("FAIL      a.safetensors  unreadable: ")


def test_folders_with_nothing_to_compare_fail(tmp_path, capsys):
    assert main(tmp_path / "nowhere") == 1
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert main(tmp_path) == 1
    assert "holds no .safetensors files" in capsys.readouterr().err
    shutil.copy(GOLDEN / "sru.safetensors", tmp_path)
    assert main(tmp_path) == 1
    assert "nothing was compared" in capsys.readouterr().err
