"""Generating text with an engine: greedy, or by sampling from the softmax with temperature, top-k and top-p.

Letters: B = the engine's batch; T = length of a source; V = vocab_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..checks import require, require_number, require_size
from .engine import Engine


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    ``temperature`` 0 takes the highest logit, of equal ones the lowest id. Above 0, a token is drawn from
    softmax(logits / temperature), of which at first only the ``top_k`` most likely are kept, then of these the fewest
    most likely whose share of what was kept reaches ``top_p`` (nucleus sampling, arXiv 1904.09751). Of equally likely
    tokens those with lower ids are kept first: exactly ``top_k`` stay. None: all are kept.

    Errors: ValueError for a temperature that is negative, infinite or NaN, top_k below 1, top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature)
        finite = math.isfinite(self.temperature)
        require(finite and self.temperature >= 0, "temperature", self.temperature, "a finite number of at least 0")
        if self.top_k is not None:
            require_size("top_k", self.top_k)
        if self.top_p is not None:
            require_number("top_p", self.top_p)
            require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")

    def choose(self, logits: np.ndarray, generator: np.random.Generator) -> int:
        """A token id from one sequence's logits (V,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        ids = self._likeliest(logits)
        best = logits[ids].astype(np.float64)
        with np.errstate(over="ignore"):  # far below the best at a tiny temperature: minus infinity, probability 0
            shares = np.exp((best - best.max()) / self.temperature)
        shares /= shares.sum()
        if self.top_p is not None and self.top_p < 1:
            shares = shares[: np.searchsorted(np.cumsum(shares), self.top_p) + 1]
        return int(generator.choice(ids[: len(shares)], p=shares / shares.sum()))

    def _likeliest(self, logits: np.ndarray) -> np.ndarray:
        """The ids that may be drawn, the most likely first where that matters: sorting takes its time."""
        ids, k = np.arange(len(logits)), self.top_k
        if k is not None and k < len(ids):
            ids = np.flatnonzero(logits >= np.partition(logits, -k)[-k])
        if k is None and self.top_p is None:
            return ids
        return ids[np.argsort(-logits[ids], kind="stable")][:k]


def generate(
    engine: Engine,
    prompt: Sequence[Any] | np.ndarray,
    max_tokens: int,
    *,
    source: ArrayLike | None = None,
    source_mask: ArrayLike | None = None,
    memory: np.ndarray | None = None,
    prompt_is_prefix: bool = False,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Iterable[int] | None = None,
    stream: Callable[[int, int], Any] | None = None,
    seed: int = 0,
) -> list[Any]:
    """Begin the engine anew, read the prompt and generate up to ``max_tokens`` tokens: the new tokens only.

    ``prompt``: token ids for an engine of batch 1, giving a list of ids; or B prompts, of any lengths, giving B lists.
    ``source`` (B, T) with ``source_mask``, or ``memory`` (B, T, d_model): what an encoder-decoder reads, as in
    :meth:`Engine.start`; without the first axis beside a single prompt. ``prompt_is_prefix``: a prefix-LM sees all of
    the prompt from everywhere.

    ``temperature``, ``top_k``, ``top_p``: see :class:`Sampling`; greedy by default. Sequence i draws from numpy's
    ``default_rng([seed, i])``, so that its tokens do not depend on the others.
    ``stop``: one token id or several. The first of them ends its sequence and is neither returned nor streamed.
    ``stream`` is called with (sequence, token) for each token as soon as it is chosen. What it raises ends the
    generation; the engine can be used on.

    Errors: ValueError naming the field, its value and what is allowed, before the engine is touched.
    """
    one = len(prompt) > 0 and np.ndim(prompt[0]) == 0
    prompts = _check_prompts(engine, [prompt] if one else prompt, max_tokens)
    sampling, stops = Sampling(temperature, top_k, top_p), _check_stop(stop, engine.config.vocab_size)
    require_size("seed", seed, 0)
    if prompt_is_prefix:
        architecture = engine.config.architecture
        require(architecture == "prefix_lm", "prompt_is_prefix", True, f"False for a {architecture}")
    if one:
        source, source_mask, memory = (
            None if x is None else np.asarray(x)[None] for x in (source, source_mask, memory)
        )
    engine.start(source, source_mask, memory=memory)

    generators = [np.random.default_rng([seed, i]) for i in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]

    def goes_on(sequence: int, logits: np.ndarray) -> bool:
        token = sampling.choose(logits, generators[sequence])
        if token in stops:
            return False
        answers[sequence].append(token)
        if stream is not None:
            stream(sequence, token)
        return len(answers[sequence]) < max_tokens

    def read(sequence: int, tokens: np.ndarray) -> np.ndarray:
        return engine.prefill(tokens, [sequence], len(tokens) if prompt_is_prefix else None)[0]

    going = [i for i, tokens in enumerate(prompts) if goes_on(i, read(i, tokens))]
    while going:
        logits = engine.step([answers[i][-1] for i in going], going)
        going = [i for i, line in zip(going, logits, strict=True) if goes_on(i, line)]
    return answers[0] if one else answers


def _check_prompts(engine: Engine, prompts: Sequence[Any] | np.ndarray, max_tokens: int) -> list[np.ndarray]:
    require_size("max_tokens", max_tokens)
    require(len(prompts) > 0, "prompt", [], "at least one token")
    require(len(prompts) == engine.batch, "prompt", f"{len(prompts)} prompts", f"{engine.batch}, the engine's batch")
    arrays = [np.asarray(tokens) for tokens in prompts]
    for tokens in arrays:
        require(tokens.ndim == 1, "prompt.shape", tokens.shape, "(length,) for each prompt")
        require(len(tokens) > 0, "prompt", [], "at least one token")
        engine.check_tokens(tokens[None], "prompt", 1)
        total = f"{len(tokens)} tokens and max_tokens = {max_tokens}"
        require(len(tokens) + max_tokens <= engine.max_len, "prompt", total, f"at most max_len = {engine.max_len}")
    return arrays


def _check_stop(stop: int | Iterable[int] | None, vocab_size: int) -> frozenset[int]:
    stops = [] if stop is None else np.ravel(list(stop) if isinstance(stop, Iterable) else stop).tolist()
    for token in stops:
        require_size("stop", token, 0)
        require(token < vocab_size, "stop", token, f"ids in 0 .. vocab_size - 1 = {vocab_size - 1}")
    return frozenset(stops)
