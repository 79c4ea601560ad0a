"""Which case a golden file is of, and the comparison of all of it."""

from __future__ import annotations

from collections.abc import Callable

from ..checks import require_choice
from . import cases, cases_lsh, cases_models
from .golden import Comparison, GoldenFile

CASES: dict[str, Callable[[GoldenFile, Comparison], None]] = {
    "factored_dense": cases.factored_dense,
    "local_conv": cases.local_conv,
    "mult_conv_attention": cases.mult_conv_attention,
    "mult_conv_attention_full": cases.mult_conv_attention,
    "sparse_ff": cases.sparse_ff,
    "block_sparse_ff": cases.experts,
    "switch_sparse_ff": cases.experts,
    "sparse_loss": cases.sparse_loss,
    "causal_attention": cases.causal_attention,
    "attention": cases.attention,
    "feed_forward": cases.feed_forward,
    "layer_norm": cases.layer_norm_alone,
    "lm": cases_models.lm,
    "sru": cases_models.sru,
    "ff_sru_block": cases_models.ff_sru_block,
    "concat_strip": cases_models.concat_strip,
    "rev_decoder_block": cases_models.rev_decoder_block,
    "terraformer": cases_models.terraformer,
    "lsh_attention": cases_lsh.lsh_attention,
    "lsh_block": cases_lsh.lsh_block,
}


def compare_file(file: GoldenFile) -> Comparison:
    """Compare all of ``file``. Errors: ValueError if its case is unknown or its keys or shapes are not the case's."""
    require_choice("case", file.case, tuple(CASES))
    comparison = Comparison(file)
    CASES[file.case](file, comparison)
    file.require_all_used()
    if not comparison.count:
        raise ValueError("no value to compare")
    return comparison
