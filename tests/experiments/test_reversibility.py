"""What reversing saves and costs, on small Terraformers."""

from dataclasses import replace

import torch

from sparselib.config import LSHSizes, preset
from sparselib.experiments import reversibility
from sparselib.experiments.recorded import load, verdict
from sparselib.experiments.reversibility import Shape, step_cost
from sparselib.results import statistics

from .invented import invent

CONFIG = preset("smoke", "ff_qkv", architecture="terraformer", dropout=0.1)
SHAPE = Shape(2, 12, 8)
LSH = LSHSizes(n_hashes=2, n_buckets=4, chunk_len=8)


def test_a_step_makes_the_same_gradients_again():
    step = reversibility.training_step(CONFIG, "choices", SHAPE)
    first = [p.grad.clone() for p in step().parameters()]
    assert all(torch.equal(one, p.grad) for one, p in zip(first, step().parameters(), strict=True))


def test_rebuilt_activations_do_not_grow_with_depth():
    frame = reversibility.memory_by_depth(CONFIG, Shape(8, 32, 32), (2, 8))
    kept, rebuilt = frame["kept (MB)"], frame["rebuilt (MB)"]
    assert kept[1] > 2 * kept[0] and rebuilt[1] < 1.15 * rebuilt[0] < kept[0]
    axis = reversibility.draw_memory_by_depth(frame).axes[0]
    assert [line.get_label() for line in axis.lines] == ["kept", "rebuilt"]


def test_nor_at_one_short_sequence():
    """Gradients and random states, not the activations, are then most of what could be held."""
    config = preset("laptop", "ff_qkv", architecture="terraformer", n_encoder_layers=1, dropout=0.1)
    sizes = [step_cost(replace(config, n_layers=n), "choices", Shape(1, 64, 64))[0] for n in (2, 24)]
    assert sizes[1] < 1.15 * sizes[0]


def test_every_way_is_timed_and_weighed_up_to_its_longest():
    ways, shapes = reversibility.ways(LSH, 4), [SHAPE, Shape(1, 28, 4)]
    frame = reversibility.cost_by_length(CONFIG, shapes, ways, {"kept": 20})
    assert frame["kind"].value_counts().to_dict() == {name: 1 if name == "kept" else 2 for name in ways}
    assert (frame[["activations (MB)", "step (s)"]] > 0).all(axis=None)
    assert len(reversibility.draw_cost_by_length(frame, ways).axes[1].lines) == 4


def test_chunks_and_hashing_hold_less_on_long_inputs():
    kept, rebuilt, hashing, chunked = reversibility.ways(LSH, 64).values()
    shape, wide = Shape(1, 480, 32), replace(CONFIG, d_ff=4096)
    ways = (kept, rebuilt, hashing, chunked)
    sizes = [step_cost(replace(wide, **way.fields), way.remember, shape)[0] for way in ways]
    assert sizes[0] > 1.5 * sizes[1] and sizes[2] > 3 * sizes[3]


def test_step_times_compare_with_the_first():
    frame = reversibility.step_times(CONFIG, SHAPE, ("everything", "choices"), repeat=2)
    assert frame["remembered"].tolist() == ["everything", "choices"]
    assert frame["times the first"][0] == 1 and (frame["step (s)"] > 0).all()


def test_the_recurrence_is_timed_three_ways():
    frame = reversibility.recurrence_times(4, (3, 300), repeat=2)
    assert frame["positions"].tolist() == [3, 300] and (frame > 0).all(axis=None)
    assert frame["steps, times faster"][1] == frame["one by one (ms)"][1] / frame["in log2 steps (ms)"][1]


def test_only_new_draws_change_the_gradient_of_a_first_step():
    frame = reversibility.gradient_errors(CONFIG, SHAPE, [0, 1]).set_index(["precision", "remembered"])
    errors = frame["largest"]
    assert errors["fp64", "choices"] < 1e-13 and errors["fp32", "choices"] < 1e-5 and errors["bf16", "choices"] < 1e-2
    assert (frame.loc[[(precision, "nothing") for precision in reversibility.PRECISIONS], "error"] > 0.01).all()
    assert torch.get_default_dtype() == torch.float32


def test_the_harm_is_a_difference_from_the_model_that_remembers(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    assert verdict(load(reversibility.HARM))[0] == "not tested"
    invent("appendix", lambda config: 5.0)
    invent("reversible", lambda config: 5.5 + 0.001 * config.seed if config.variant == "nothing" else 5.0)
    assert verdict(load(reversibility.HARM))[0] == "partly reproduced"
