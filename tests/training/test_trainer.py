import pytest
import torch
from torch import nn

from sparselib.training import OptimizerConfig
from sparselib.training.optimizers import rate
from sparselib.training.trainer import Trainer

VOCAB = 11


def make(steps=5, accumulate=1, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    config = OptimizerConfig(**dict(learning_rate=1e-2, warmup=2) | changes)
    return Trainer(model, config, steps, accumulate=accumulate), config


def batch(rows=4):
    return {"tokens": torch.randint(VOCAB, (rows, 7), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("schedule", ["cosine", "inverse_root"])
def test_the_rates_used_are_those_of_the_schedule(schedule):
    trainer, config = make(schedule=schedule)
    used = []
    trainer.optimizer.optimizer.register_step_pre_hook(lambda o, *_: used.extend(g["lr"] for g in o.param_groups))
    for step in range(1, 6):
        trainer.update(batch(), step)
    assert used[::2] == used[1::2] == [rate(config, step, 5) for step in range(1, 6)]


@pytest.mark.parametrize(("clip", "norm"), [(1.0, 1.0), (0.5, 0.5), (None, 20)])
def test_gradients_are_clipped(clip, norm):
    trainer, _ = make(clip=clip)
    with torch.no_grad():
        trainer.model[1].weight.mul_(1e3)
    trainer.update(batch(), 1)
    found = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item()
    assert found > norm if clip is None else found == pytest.approx(norm, rel=1e-3)


class Spans(nn.Module):
    """source (B, S), target (B, T) -> logits (B, T, VOCAB)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, source, target, mask):
        return self.out(self.embed(target) + (self.embed(source) * mask[..., None]).mean(1, keepdim=True))


def gradients(batch, accumulate):
    model = Spans() if "source" in batch else make()[0].model
    trainer = Trainer(model, OptimizerConfig(learning_rate=1e-2, warmup=2, clip=None), 5, accumulate=accumulate)
    loss = trainer.update(batch, 1)
    return loss, [p.grad for p in model.parameters()]


def test_parts_of_a_batch_add_up_to_it_even_if_they_count_differently():
    rows = {name: batch(4)["tokens"][:, :n] for name, n in (("source", 5), ("target", 4))}
    counted = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    for whole in (batch(4), rows | {"mask": rows["source"] > 2, "target_mask": counted}):
        loss, wanted = gradients(whole, 1)
        parts_loss, parts = gradients(whole, 4)
        assert parts_loss == pytest.approx(loss, rel=1e-6)
        for got, want in zip(parts, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


def test_a_batch_that_cannot_be_shared_out_is_refused():
    trainer, _ = make(accumulate=3)
    with pytest.raises(ValueError, match="batch = 4: must be a multiple of processes x accumulate = 1 x 3"):
        trainer.update(batch(4), 1)


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="processes = 1: must be the 2 launched; .*ACCELERATE_USE_CPU=1"):
        make()


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_state_that_comes_back_goes_on_alike(name):
    first, second = make(name=name)[0], make(name=name)[0]
    for step in (1, 2):
        first.update(batch(), step)
    weights, state = first.state()
    weights, state = ({k: v.clone() for k, v in kept.items()} for kept in (weights, state))
    drawn = torch.rand(3)
    second.load_state(weights, state)
    assert torch.equal(torch.rand(3), drawn)
    assert first.update(batch(), 3) == second.update(batch(), 3)
    assert all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_the_state_of_another_optimizer_is_refused():
    adamw, adafactor = make()[0], make(name="adafactor")[0]
    with pytest.raises(ValueError, match="in the checkpoint = 'missing'"):
        adamw.load_state(*adafactor.state())
