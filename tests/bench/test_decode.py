"""Decoding timed in rounds: order, sums and refusals; never a time."""

import csv
import gc
import io
import json
import weakref
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.bench import decode, roofline
from sparselib.bench.decode import as_csv, bench_decode, decode_once
from sparselib.bench.machine import last_level_cache
from sparselib.bench.roofline import GRAIN, Reader, Roofline, limit
from sparselib.bench.rounds import Rounds, Samples, side_by_side, time_in_rounds
from sparselib.config import VARIANTS, count_parameters, preset
from sparselib.decode import Engine, pack_random

THREADS = 1
ASKED = dict(threads=THREADS, tokens=2, rounds=2, dtypes=["fp32"])
TWO = ["dense", "ff_qkv_loss"]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """A bandwidth is measured on a megabyte a thread."""
    monkeypatch.setattr(roofline, "SMALLEST", 4 * GRAIN * (psutil.cpu_count() or 1))
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 0)
    monkeypatch.setattr(roofline, "PASSES", 1)
    monkeypatch.setattr(roofline, "TILES", 2**8)


def engine(variant="ff_qkv", encoder=False, max_len=16, **changes):
    packed = pack_random(preset("smoke", variant, **changes), encoder=encoder)
    return Engine(packed, 1, max_len, 3, THREADS)


def cross(**changes):
    return dict(architecture="encoder_decoder", n_encoder_layers=1) | changes


# --- rounds ---


def test_samples_add_up():
    engines = {"dense": engine("dense"), "sparse": engine()}
    rounds = time_in_rounds(engines, 3, 2, context=5, warmup=1, reader=Reader(THREADS))
    assert list(rounds.samples) == ["dense", "sparse"]
    assert rounds.read_gb_s.shape == (2,) and (rounds.read_gb_s > 0).all()
    assert rounds.context == 8  # positions 7, 8 and 9 are attended to
    for name, samples in rounds.samples.items():
        assert samples.token.shape == samples.block.shape == (2, 3)
        assert (samples.block > 0).all() and (2 * samples.block < samples.token).all()
        assert sum(samples.parts.values()) == pytest.approx(samples.token)
        assert engines[name].position.tolist() == [9]


class Pretender:
    """An engine that only writes down what it is asked."""

    max_len, threads, batch = 12, THREADS, 1
    config = preset("smoke")

    def __init__(self, name, log):
        self.name, self.log, self.position = name, log, 0

    def start(self):
        self.position = 0

    def prefill(self, tokens):
        self.position += tokens.shape[1]

    def rewind(self, position):
        assert position <= self.position
        self.position = position

    def step(self, tokens):
        self.position += 1
        assert self.position <= self.max_len
        self.log.append((self.name, int(tokens[0])))

    def clear_clock(self): ...

    def share_of_a_block(self):
        return 0.25

    def shares(self):
        return {"feedforward": 1.0}


def test_engines_take_turns_with_new_tokens_and_a_look_at_the_bandwidth_before_and_after():
    log = []
    reader = SimpleNamespace(
        threads=THREADS, now=lambda: log.append(("reader", 0)) or float(len(log)), handover=lambda: 0.0
    )
    engines = {name: Pretender(name, log) for name in "ab"}
    heard = []
    rounds = time_in_rounds(engines, 3, 2, context=7, warmup=2, reader=reader, progress=heard.append)
    turn = [*5 * "a", *5 * "b"]
    assert [name for name, _ in log] == ["reader", *turn, "reader", *turn, "reader"]
    assert heard == turn * 2
    assert rounds.read_gb_s.tolist() == [(1 + 12) / 2, (12 + 23) / 2]
    tokens = [token for name, token in log if name != "reader"]
    assert len(set(tokens)) > 15 and max(tokens) < Pretender.config.vocab_size
    assert (rounds.samples["a"].block == rounds.samples["a"].token / 4).all()


@pytest.mark.parametrize("encoder", [False, True])
def test_an_encoder_decoder_gets_a_source(encoder):
    decoder = engine(encoder=encoder, **cross())
    rounds = time_in_rounds({"it": decoder}, 1, 1, context=0, warmup=0, reader=Reader(THREADS))
    assert rounds.samples["it"].parts["cross_attention"].item() > 0
    assert decoder.position.tolist() == [1]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (dict(tokens=0), r"^tokens = 0: must be an int of at least 1"),
        (dict(rounds=0), r"^rounds = 0: must be an int of at least 1"),
        (dict(context=-1), r"^context = -1: must be an int of at least 0"),
        (dict(warmup=-1), r"^warmup = -1: must be an int of at least 0"),
        (dict(context=9), r"^context \+ warmup \+ tokens = 13: must be at most a's 12"),
        (dict(engines={}), r"^engines = \{\}: must be at least one"),
    ],
)
def test_impossible_rounds_are_refused(counts, message):
    asked = dict(engines={"a": Pretender("a", [])}, tokens=2, rounds=1, context=2) | counts
    with pytest.raises(ValueError, match=message):
        time_in_rounds(reader=Reader(THREADS), **asked)


def samples(token, block):
    return Samples(np.array(token, float), np.array(block, float), {})


def test_a_ratio_is_the_median_of_the_ratios_of_rounds():
    slow = samples([[8, 8, 100], [20, 20, 20], [9, 9, 9]], np.full((3, 3), 4))
    fast = samples([[2, 2, 2], [10, 10, 10], [1, 1, 1]], np.full((3, 3), 2))
    rounds = Rounds({"slow": slow, "fast": fast}, np.ones(3), 1)
    assert rounds.ratio("slow", "fast") == 4  # of 4, 2 and 9
    assert rounds.ratio("slow", "fast", "block") == 2


def test_a_whole_model_is_derived_from_one_block():
    rounds = Rounds({"a": samples([[10, 12]], [[3, 4]])}, np.ones(1), 1).whole(6)
    assert rounds.samples["a"].token.tolist() == [[10 + 5 * 3, 12 + 5 * 4]]
    assert rounds.samples["a"].block.tolist() == [[3, 4]]


def rounds_at(distances, rounds, threads=2, **wanted):
    """Rounds of a pretender whose cores meet in so many ns at each look."""
    looks = iter(distances)
    reader = SimpleNamespace(threads=threads, now=lambda: 20.0, handover=lambda: float(next(looks)))
    log = []
    return time_in_rounds({"a": Pretender("a", log)}, 2, rounds, context=2, warmup=0, reader=reader, **wanted), log


def test_only_rounds_with_the_cores_at_one_distance_count():
    rounds, log = rounds_at([40, 40, 160, 160, 160, 160], 3)
    assert len(log) == 5 * 2  # near, moving, far, far, far
    assert (rounds.cores, rounds.handover_ns, rounds.other) == ("far", 160, None)
    assert rounds.samples["a"].token.shape == (3, 2) and rounds.read_gb_s.shape == (3,)


def test_a_few_rounds_at_the_other_distance_are_kept_apart():
    rounds, _ = rounds_at([40, 40, 40, 40, 160, 160, 160, 160, 160], 4)
    assert rounds.cores == "far" and rounds.samples["a"].token.shape == (4, 2)
    assert rounds.other.cores == "near" and rounds.other.samples["a"].token.shape == (3, 2)
    whole = rounds.whole(3)
    assert (whole.other.samples["a"].token == rounds.other.samples["a"].token * 1.5).all()  # blocks are a quarter of it


def test_the_distance_that_is_looked_for_counts_if_it_was_there_a_few_times():
    looks = [40, 40, 40, 40, 40, 160, 160, 160, 160]  # near four times, moving, far three times
    rounds, _ = rounds_at(looks, 3, cores="far")
    assert rounds.cores == "far" and rounds.samples["a"].token.shape == (3, 2)
    assert rounds.other.samples["a"].token.shape == (4, 2)
    rounds, log = rounds_at([40] * 10, 3, cores="far")
    assert rounds.cores == "near" and len(log) == 9 * 2


def test_cores_that_never_rest_end_it_and_are_called_moving():
    rounds, log = rounds_at([40, 160] * 4, 2)
    assert len(log) == 6 * 2
    assert rounds.cores == "moving" and rounds.samples["a"].token.shape == (6, 2)


def test_the_distance_is_told_by_the_time_of_a_thread():
    assert rounds_at([160, 160], 1, threads=4)[0].cores == "near"
    assert rounds_at([160, 160], 1, threads=3)[0].cores == "far"


# --- memory ---


@given(sizes=st.lists(st.integers(1, 10), max_size=6), room=st.integers(0, 30))
def test_groups_fit_and_hold_the_first_wherever_it_fits(sizes, room):
    sizes = {f"v{i}": size for i, size in enumerate(sizes)}
    fitting = [name for name, size in sizes.items() if size <= room]
    groups = side_by_side(sizes, room)
    assert sorted({name for group in groups for name in group}) == sorted(fitting)
    others = [name for group in groups for name in group if name not in fitting[:1]]
    assert len(others) == len(set(others))  # nothing but the first is timed twice
    for group in groups:
        assert sum(sizes[name] for name in group) <= room
        alone = len(group) == 1 and sizes[group[0]] + sizes[fitting[0]] > room
        assert fitting[0] in group or alone


@pytest.mark.parametrize("changes", [{}, cross(), dict(architecture="terraformer")])
@pytest.mark.parametrize("variant", TWO)
def test_the_memory_of_an_engine_is_known_before(variant, changes):
    config = preset("smoke", variant, **changes)
    built = Engine(pack_random(config, encoder=False), 1, 16, decode.SOURCE_LENGTH if changes else None, THREADS)
    assert decode.engine_bytes(config, "fp32", 16, THREADS) == built.packed.nbytes + built._m.nbytes


# --- the benchmark ---


@pytest.mark.parametrize("model", ["transformer", "terraformer"])
def test_rows_are_complete_and_agree_with_the_limit(model):
    heard = []
    result = bench_decode("smoke", model, **ASKED, progress=lambda what, done: heard.append(done))
    assert (result["preset"], result["model"], result["left_out"]) == ("smoke", model, [])
    reads = model == "terraformer"
    assert result["source_length"] == decode.SOURCE_LENGTH * reads
    assert result["machine"].keys() >= {"cpu", "threads", "read_gb_s", "peak_gflops"}
    rows = result["rows"]
    assert [(row["variant"], row["scope"]) for row in rows] == [(v, s) for v in VARIANTS for s in ("block", "model")]
    for row in rows:
        here = Roofline(THREADS, row["read_gb_s"], result["machine"]["peak_gflops"])
        config = preset("smoke", row["variant"], **dict(architecture=model) if reads else {})
        least = limit(config, "fp32", here, context=result["context"], scope=row["scope"])
        assert (row["bytes"], row["flops"], row["limit_ms"]) == (least.bytes, least.flops, least.ms)
        assert row["limit_fraction"] == row["limit_ms"] / row["ms_median"]
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms_median"] / 1e6)
        assert row["ms_min"] <= row["ms_q1"] <= row["ms_median"] <= row["ms_q3"]
        assert (row["cores"], row["usual"], row["handover_ns"]) == ("near", True, 0)  # of one thread
        assert row["n"] == 4 and row["side_by_side"] and not row["derived"]
        assert row["in_cache"] == (last_level_cache() > 0)
        assert row["speedup"] == 1 if row["variant"] == "dense" else row["speedup"] > 0
        assert result["machine"]["read_gb_s"] >= row["read_gb_s"] > 0
    assert heard == sorted(heard) and heard[-1] == pytest.approx(1)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_csv_has_the_rows_and_the_machine():
    result = bench_decode("smoke", **ASKED, variants=["dense"])
    lines = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert [line["scope"] for line in lines] == ["block", "model"]
    for line, row in zip(lines, result["rows"], strict=True):
        assert float(line["ms_median"]) == row["ms_median"] and int(line["n"]) == row["n"]
        assert (line["preset"], line["cpu"]) == ("smoke", result["machine"]["cpu"])


def test_every_dtype_is_asked_for_its_own_variants(monkeypatch):
    planned = []
    monkeypatch.setattr(decode._Bench, "plan", lambda self, *asked: planned.append(asked) or [])
    assert bench_decode("smoke", threads=THREADS)["rows"] == []
    assert planned == [("fp32", list(VARIANTS)), *((d, ["dense", "ff_qkv", "ff_qkv_loss"]) for d in ("bf16", "int8"))]
    planned.clear()
    bench_decode("smoke", threads=THREADS, dtypes=["int8"], variants=["qkv", "dense"])
    assert planned == [("int8", ["dense", "qkv"])]


def sizes_of(n_layers):
    """Bytes of smoke engines as the benchmark builds them."""
    max_len = decode.CONTEXT + decode.WARMUP + ASKED["tokens"]
    return {v: decode.engine_bytes(preset("smoke", v, n_layers=n_layers), "fp32", max_len, THREADS) for v in VARIANTS}


def room_for(monkeypatch, bytes):
    monkeypatch.setattr(decode, "free_room", lambda: bytes)


def made_up(engines, tokens, rounds, **_):
    """What engines of one block would take: dense 100 + 10 a block, the sparse one 40 + 1."""
    taken = {"dense": samples(np.full((rounds, tokens), 110), np.full((rounds, tokens), 10))}
    taken["ff_qkv_loss"] = samples(np.full((rounds, tokens), 41), np.full((rounds, tokens), 1))
    assert all(engine.config.n_layers == 1 for engine in engines.values())
    return Rounds({name: taken[name] for name in engines}, np.full(rounds, 20.0), 35)


def test_a_model_that_does_not_fit_is_derived_from_its_blocks(monkeypatch):
    room_for(monkeypatch, min(sizes_of(2).values()) - 1)
    monkeypatch.setattr(decode, "time_in_rounds", made_up)
    result = bench_decode("smoke", **ASKED, variants=TWO)
    rows = {(row["variant"], row["scope"]): row for row in result["rows"]}
    assert [row["derived"] for row in rows.values()] == [False, True, False, True]
    assert rows["dense", "model"]["ms_median"] == 100 + 2 * 10 and rows["dense", "block"]["ms_median"] == 10
    assert rows["ff_qkv_loss", "model"]["ms_median"] == 40 + 2 * 1
    outside = limit(preset("smoke"), "fp32", Roofline(1, 20.0, 1.0), context=35).parts
    whole, block = rows["dense", "model"], rows["dense", "block"]
    rest = sum(20e6 * ms for name, ms in outside.items() if name in ("embedding", "positions")) + 4 * 33 * 512
    assert whole["bytes"] == pytest.approx(2 * block["bytes"] + rest)
    assert [(out["variant"], "whole model needs" in out["reason"]) for out in result["left_out"]] == [
        (variant, True) for variant in TWO
    ]


def test_later_groups_look_for_the_distance_of_the_first(monkeypatch):
    wanted = []

    def times(engines, tokens, rounds, *, cores, **_):
        wanted.append(cores)
        return Rounds({v: samples([[1]], [[1]]) for v in engines}, np.ones(1), 35, "far", 160.0)

    monkeypatch.setattr(decode, "time_in_rounds", times)
    bench_decode("smoke", threads=THREADS, tokens=2, rounds=2)
    assert wanted == [None, "far", "far"]


def test_both_distances_of_the_cores_have_rows(monkeypatch):
    """Each variant against dense at the same distance."""

    def times(engines, tokens, rounds, **_):
        def at(factor):
            each = dict(dense=8.0, ff_qkv_loss=2.0 / factor)
            return {v: samples(np.full((rounds, tokens), factor * each[v]), np.ones((rounds, tokens))) for v in engines}

        far = Rounds(at(0.5), np.full(rounds, 60.0), 35, "far", 160.0)
        return Rounds(at(1.0), np.full(rounds, 30.0), 35, "near", 40.0, far)

    monkeypatch.setattr(decode, "time_in_rounds", times)
    rows = [row for row in bench_decode("smoke", **ASKED, variants=TWO)["rows"] if row["scope"] == "model"]
    assert [(row["variant"], row["cores"], row["usual"], row["ms_median"], row["speedup"]) for row in rows] == [
        ("dense", "near", True, 8.0, 1.0),
        ("dense", "far", False, 4.0, 1.0),
        ("ff_qkv_loss", "near", True, 2.0, 4.0),
        ("ff_qkv_loss", "far", False, 2.0, 2.0),
    ]
    assert [(row["read_gb_s"], row["handover_ns"]) for row in rows[:2]] == [(30.0, 40.0), (60.0, 160.0)]


def test_what_fits_one_at_a_time_is_timed_alone_and_let_go_before_the_next(monkeypatch):
    sizes = {v: sizes_of(2)[v] for v in TWO}
    room_for(monkeypatch, max(sizes.values()))
    alive = weakref.WeakSet()

    class Watched(Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.add(self)

    def watch(engines, *arguments, **keywords):
        gc.collect()
        assert set(alive) == set(engines.values()) and len(engines) == 1
        return time_in_rounds(engines, *arguments, **keywords)

    monkeypatch.setattr(decode, "Engine", Watched)
    monkeypatch.setattr(decode, "time_in_rounds", watch)
    result = bench_decode("smoke", **ASKED, variants=TWO)
    assert [row["side_by_side"] for row in result["rows"]] == [True, True, False, False]
    medians = [row["ms_median"] for row in result["rows"]]
    assert [row["speedup"] for row in result["rows"][2:]] == pytest.approx(
        [medians[0] / medians[2], medians[1] / medians[3]]
    )


def test_pairs_keep_the_dense_engine(monkeypatch):
    sizes = sizes_of(2)
    room_for(monkeypatch, sizes["dense"] + max(sizes.values()))
    built = []
    monkeypatch.setattr(decode, "pack_random", lambda c, *a, **k: built.append(c) or pack_random(c, *a, **k))
    result = bench_decode("smoke", **ASKED)
    assert built == [preset("smoke", v) for v in VARIANTS]
    assert all(row["side_by_side"] and not row["derived"] for row in result["rows"])
    assert result["rows"][0]["n"] > 4  # dense was timed in every group


def test_what_fits_nowhere_is_left_out_with_the_numbers(monkeypatch):
    room_for(monkeypatch, 10)
    result = bench_decode("smoke", **ASKED, variants=TWO)
    assert result["rows"] == []
    assert {(out["variant"], out["reason"].split(" needs ")[0]) for out in result["left_out"]} == {
        (variant, what) for variant in TWO for what in ("the whole model", "one block")
    }
    assert all("GB are free" in out["reason"] for out in result["left_out"])
    lines = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert [line["reason"] for line in lines] == [out["reason"] for out in result["left_out"]]


def test_memory_that_somebody_else_took_leaves_out_one_group_only(monkeypatch):
    sizes = sizes_of(2)
    room_for(monkeypatch, sizes["dense"] + max(sizes["ff"], sizes["qkv"]))

    def make(config, *arguments, **keywords):
        if config.attention != "dense":
            raise MemoryError("packing needs 9.0 GB, 1.0 GB are free on this machine")
        return pack_random(config, *arguments, **keywords)

    monkeypatch.setattr(decode, "pack_random", make)
    result = bench_decode("smoke", **ASKED, variants=["dense", "ff", "qkv"])
    assert [row["variant"] for row in result["rows"]] == ["dense", "dense", "ff", "ff"]
    assert {out["variant"] for out in result["left_out"]} >= {"qkv"}
    assert "9.0 GB" in result["left_out"][-1]["reason"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(preset_name="huge"), r"^preset = 'huge'"),
        (dict(model="rnn"), r"^model = 'rnn'"),
        (dict(dtypes=["fp16"]), r"^dtype = 'fp16': must be one of 'fp32', 'bf16', 'int8'"),
        (dict(variants=["sparse"]), r"^variant = 'sparse'"),
        (dict(tokens=0), r"^tokens = 0"),
        (dict(tokens=31), r"^context \+ warmup \+ tokens = 65: must be at most max_len = 64"),
        (dict(rounds=0), r"^rounds = 0"),
        (dict(threads=0), r"^threads = 0"),
    ],
)
def test_impossible_benchmarks_are_refused_before_anything_is_built(monkeypatch, asked, message):
    monkeypatch.setattr(decode, "pack_random", lambda *a, **k: pytest.fail("built"))
    with pytest.raises(ValueError, match=message):
        bench_decode(**dict(preset_name="smoke") | asked)


# --- one model ---


@pytest.mark.parametrize("encoder", [False, True])
def test_decode_once_measures_what_was_packed(encoder):
    config = preset("smoke", "ff_qkv_loss", **cross())
    packed = pack_random(config, encoder=encoder)
    heard = []
    numbers = decode_once(packed, 3, Reader(THREADS), context=4, progress=heard.append)
    assert len(heard) == 3 + decode.WARMUP and numbers["n"] == 3 and numbers["threads"] == THREADS
    assert numbers["bytes"] == limit(config, "fp32", Roofline(1, 1.0, 1.0), context=4 + decode.WARMUP + 2).bytes
    assert numbers["tokens_per_s"] > 0
    assert (decode.count_weights(packed) == count_parameters(config)) == encoder


def test_weights_without_the_encoder_are_a_decoders():
    packed = pack_random(preset("smoke", **cross(n_encoder_layers=2)), encoder=False)
    d, layers = 32, 2
    crossing = layers * (4 * (d * d + d) + 2 * d)  # query, key, value, output, and a norm
    assert decode.count_weights(packed) == count_parameters(preset("smoke")) + crossing


def test_decode_once_refuses_more_tokens_than_positions():
    with pytest.raises(ValueError, match=r"^context \+ warmup \+ tokens = 66: must be at most max_len = 64"):
        decode_once(pack_random(preset("smoke")), 32, Reader(THREADS))
