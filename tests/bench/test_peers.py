"""The peers' harness. What needs a peer's library is skipped where that is not installed."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.bench import peers
from sparselib.bench.peers import CATALOGUE, PEERS, NotRun, Peer, PeerTiming, llama, pytorch, t5
from sparselib.bench.peers.__main__ import measure
from sparselib.bench.peers.base import Job, build_once, weights_read, with_random_weights
from sparselib.bench.protocol import Timing
from sparselib.config import preset
from sparselib.models import Transformer

from ..helpers import close, configs, ids, randomized

SMALL = preset("smoke", architecture="encoder_decoder", n_encoder_layers=3, vocab_size=64)
NEEDS = {
    "transformers": ["transformers"],
    "CTranslate2": ["ctranslate2", "transformers"],
    "llama.cpp": ["llama_cpp", "gguf"],
}
DENSE = dict(
    architecture="encoder_decoder",
    feedforward="dense",
    attention="dense",
    encoder_attention=None,
    cross_attention="dense",
    loss_sparsity=1,
)


def job(name="PyTorch eager", dtype="fp32", config=SMALL, files=""):
    return Job(name, dtype, 1, config, tokens=3, context=2, warmup=1, files=str(files))


def timing(**changes):
    return Timing(**dict(ms_median=2.0, ms_q1=1.0, ms_q3=3.0, ms_min=1.0, n=5, threads=1, bytes=10**9) | changes)


def test_importing_needs_no_peer_and_loads_none():
    modules = "sparselib.bench.peers.t5, sparselib.bench.peers.llama, sparselib.bench.peers.pytorch"
    optional = sorted({library for needed in NEEDS.values() for library in needed})
    code = f"import sys; import {modules}; print([m for m in {optional} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# --- decoders -----------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(configs(**DENSE, sru_units=0), st.integers(1, 5))
@torch.inference_mode()
def test_static_decoder_is_the_models_step(config, length):
    model = randomized(Transformer(config))
    source, tokens = ids(1, 4, high=config.vocab_size), ids(length, high=config.vocab_size, seed=1)
    decoder = pytorch.StaticDecoder(model, length, source, pytorch.advance_block)
    state = model.init_state(1, source)
    for token in tokens:
        expected, state = model.step(token[None], state)
        close(decoder.step(token.item()), expected)


def test_compiled_decoder_compiles_a_block_once_and_starts_after_the_context(monkeypatch):
    compiled, positions = [], []

    def compile(function, **_):
        compiled.append(function)
        return lambda block, x, position, *rest: (
            positions.append(position.item()) or function(block, x, position, *rest)
        )

    monkeypatch.setattr(torch, "compile", compile)
    with torch.inference_mode():
        decoder = pytorch.compiled(job())
        decoder.step(3)
    assert compiled == [pytorch.advance_block]
    assert positions == [p for p in (0, 1, 2) for _ in range(SMALL.n_layers)]


def test_random_weights_are_everywhere_all_different_and_share_no_memory():
    model = with_random_weights(lambda: Transformer(SMALL))
    plain = Transformer(SMALL)
    assert not model.training
    assert [w.shape for w in model.parameters()] == [w.shape for w in plain.parameters()]
    spans = sorted((w.data_ptr(), w.data_ptr() + w.nbytes) for w in model.parameters())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert len({tuple(w.flatten()[:8].tolist()) for w in model.parameters()}) == len(spans)
    for weight in model.parameters():
        assert weight.device.type == "cpu" and weight.abs().gt(1e-30).float().mean() > 0.99 and weight.abs().max() < 1


@given(configs(**DENSE))
def test_llama_block_touches_as_many_weights_as_a_block_with_cross_attention(config):
    matrices = [shape for name, shape in llama.tensors(llama.equal_decoder(config)) if name.startswith("blk.")]
    touched = sum(int(np.prod(shape)) for shape in matrices if len(shape) == 2)
    d, f = config.d_model, config.d_ff
    assert touched == config.n_layers * (6 * d * d + 2 * d * f)


@pytest.mark.parametrize("name", ["paper_800m", "paper_17b"])
def test_t5_touches_nearly_the_weights_of_the_packages_model(name):
    config = preset(name)
    matrices, rows, rest = t5.weights_read(config)
    assert (matrices + rest) / weights_read(config) == pytest.approx(1, abs=2e-3)
    assert rows < matrices / 1000


def test_t5_weights_read_are_those_of_the_decoder_less_cached_and_embedding():
    pytest.importorskip("transformers")
    model = t5._model(SMALL)
    read = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if name.startswith(("decoder.block", "decoder.final", "lm_head")) and ".EncDecAttention.k" not in name
        if ".EncDecAttention.v" not in name
    )
    matrices, _, rest = t5.weights_read(SMALL)
    assert matrices + rest == read + SMALL.d_model


def test_ctranslate2_file_holds_every_layer(tmp_path):
    for library in NEEDS["CTranslate2"]:
        pytest.importorskip(library)
    t5._convert(SMALL, tmp_path)
    weights = sum(weight.numel() for weight in t5._model(SMALL).parameters())
    assert (tmp_path / "model.bin").stat().st_size > 2 * weights  # equal weights would be stored once


@pytest.mark.parametrize("dtype", CATALOGUE["llama.cpp"].dtypes)
def test_llama_file_holds_what_is_counted(dtype, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    config = llama.equal_decoder(SMALL)
    llama.write_gguf(config, dtype, tmp_path / "a.gguf")
    model = llama_cpp.Llama(str(tmp_path / "a.gguf"), n_ctx=8, n_threads=1, verbose=False)
    assert llama_cpp.llama_model_n_params(model.model) == sum(int(np.prod(s)) for _, s in llama.tensors(config))
    unread = 4 * config.d_model * (config.max_len - 1)  # rows of the position table
    assert llama_cpp.llama_model_size(model.model) == llama.bytes_read(config, dtype) + unread


# --- running one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [peer for peer in PEERS if peer[0] != "torch.compile"])
def test_a_small_peer_runs_in_a_process_of_its_own(name, dtype):
    for library in NEEDS.get(name, []):
        pytest.importorskip(library)
    result = peers.run_peer(name, dtype, 1, SMALL, tokens=3, context=2, warmup=1)
    assert isinstance(result, PeerTiming), result
    assert (result.peer, result.dtype, result.threads) == (name, dtype, 1)
    assert result.timing.n == 3 and result.timing.threads == 1 and result.timing.ms_median > 0
    assert result.version[0].isdigit() and f"{SMALL.n_layers} layers, d_model {SMALL.d_model}" in result.shape
    exact = weights_read(SMALL) * {"fp32": 4, "F16": 2, "int8": 1, "Q8_0": 34 / 32, "Q4_0": 18 / 32}[dtype]
    assert result.timing.bytes == pytest.approx(exact, rel=0.2)  # biases and norms weigh more in a small model


@pytest.mark.parametrize(("name", "library"), [(name, needed[0]) for name, needed in NEEDS.items()])
def test_a_missing_library_is_the_reason(name, library, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    assert measure(job(name, CATALOGUE[name].dtypes[0], files=tmp_path)) == {"reason": f"{library} is not installed"}


def test_what_a_library_raises_is_the_reason_in_one_line(monkeypatch):
    def broken(_):
        raise RuntimeError("no kernel\nhere")

    monkeypatch.setattr(pytorch, "eager", broken)
    assert measure(job()) == {"reason": "RuntimeError: no kernel"}


def test_a_process_out_of_time_is_ended(monkeypatch):
    result = peers.run_peer("PyTorch eager", "fp32", 1, SMALL, timeout=0.2)
    assert result == NotRun("PyTorch eager", "fp32", 1, "took longer than the 0.2 s it was given")
    assert not psutil.Process().children()


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ((-9, "", ""), "its process ended with code -9: no message"),
        ((1, "", "Traceback\n  line\nOSError: disk full\n"), "its process ended with code 1: OSError: disk full"),
        ((0, 'chatter\n{"reason": "gguf is not installed"}\n', ""), "gguf is not installed"),
    ],
)
def test_a_process_that_fails_is_not_run(ended, reason, monkeypatch):
    monkeypatch.setattr(peers, "_child", lambda *_: ended)
    assert peers.run_peer("llama.cpp", "F16", 1, SMALL) == NotRun("llama.cpp", "F16", 1, reason)


def test_a_model_that_does_not_fit_is_not_started(monkeypatch):
    monkeypatch.setattr(peers, "_child", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5e9))
    result = peers.run_peer("PyTorch eager", "fp32", 1)
    assert isinstance(result, NotRun) and "5.0 GB are free" in result.reason


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("numpy", "fp32", 1), {}, "name = 'numpy'"),
        (("llama.cpp", "fp32", 1), {}, "dtype = 'fp32': must be one of 'F16', 'Q8_0', 'Q4_0'"),
        (("PyTorch eager", "fp32", 0), {}, "threads = 0"),
        (("PyTorch eager", "fp32", 10**6), {}, "threads = 1000000"),
        (("PyTorch eager", "fp32", 1), {"tokens": 0}, "tokens = 0"),
        (("PyTorch eager", "fp32", 1), {"context": -1}, "context = -1"),
        (("PyTorch eager", "fp32", 1), {"warmup": 1.5}, "warmup = 1.5"),
        (("PyTorch eager", "fp32", 1), {"timeout": 0}, "timeout = 0"),
        (("PyTorch eager", "fp32", 1), {"tokens": 61}, "positions = 65: must be at most max_len = 64"),
        (("PyTorch eager", "fp32", 1, preset("paper_800m", "ff")), {}, "feedforward = 'sparse'"),
        (("PyTorch eager", "fp32", 1, preset("paper_800m", "qkv")), {}, "attention = 'mult_conv'"),
        (("PyTorch eager", "fp32", 1, preset("smoke")), {}, "architecture = 'decoder'"),
    ],
)
def test_bad_input_is_refused_before_any_process(arguments, changes, message, monkeypatch):
    monkeypatch.setattr(peers, "_child", lambda *_: pytest.fail("started"))
    arguments = arguments if len(arguments) == 4 else (*arguments, SMALL)
    with pytest.raises(ValueError, match=message):
        peers.run_peer(*arguments, **changes)


@given(configs(**DENSE))
def test_a_job_survives_the_way_to_its_process(config):
    assert Job.from_json(job(config=config).to_json()) == job(config=config)


def test_a_build_is_kept_and_a_broken_one_is_not(tmp_path):
    def cut_short(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", cut_short)
    assert not (tmp_path / "model").exists()
    assert build_once(tmp_path / "model", lambda path: path.write_text("whole")).read_text() == "whole"
    assert build_once(tmp_path / "model", lambda _: pytest.fail("built again")).read_text() == "whole"


# --- the comparison -----------------------------------------------------------------------------------------------


def test_all_peers_run_in_order_with_one_folder_that_goes_away(monkeypatch):
    jobs = []

    def run(job, timeout):
        assert Path(job.files).is_dir() and 0 < timeout <= 50 / 4
        jobs.append(job)
        return NotRun(job.peer, job.dtype, job.threads, "-")

    monkeypatch.setattr(peers, "_run", run)
    results = peers.run_peers(SMALL, (1,), budget=50, tokens=7, context=5, warmup=2)
    assert [(result.peer, result.dtype) for result in results] == PEERS == [(job.peer, job.dtype) for job in jobs]
    assert len({job.files for job in jobs}) == 1 and not Path(jobs[0].files).exists()
    assert {(job.tokens, job.context, job.warmup, job.config.n_encoder_layers) for job in jobs} == {(7, 5, 2, 2)}


def test_what_is_left_after_the_budget_is_not_run(monkeypatch):
    hand = SimpleNamespace(seconds=0.0)

    def run(job, timeout):
        hand.seconds += 4
        return NotRun(job.peer, job.dtype, job.threads, f"{timeout:g}")

    monkeypatch.setattr(peers, "_run", run)
    monkeypatch.setattr(time, "monotonic", lambda: hand.seconds)
    results = peers.run_peers(SMALL, (1,), peers=PEERS[:4], budget=9)
    spent = "the budget of 9 s was used up"
    assert [result.reason for result in results] == ["2.25", "2.25", "1", spent]


def test_frame_has_a_row_for_each_result():
    ran = PeerTiming("llama.cpp", "1.2", "F16", 2, "GPT-2", timing())
    frame = peers.peers_frame([ran, NotRun("CTranslate2", "int8", 1, "ctranslate2 is not installed")])
    first, second = frame.to_dict("records")
    assert list(first.values())[:5] == ["llama.cpp", "1.2", "F16", 2, "GPT-2"]
    assert list(first.values())[5:11] == [1000, 2, 1, 3, 5, 500]
    assert list(first)[5:11] == ["MB a token", "ms a token", "ms q1", "ms q3", "n", "GB/s"]
    assert first["not run"] is None and second["not run"] == "ctranslate2 is not installed"
    assert second["ms a token"] is None and second["shape"] is None


def test_every_peer_names_a_function_of_the_package():
    modules = {"pytorch": pytorch, "t5": t5, "llama": llama}
    assert all(callable(getattr(modules[peer.module], peer.function)) for peer in CATALOGUE.values())
    assert all(isinstance(peer, Peer) and peer.dtypes for peer in CATALOGUE.values())
