"""Notebook 16: a Terraformer's token beside a Transformer's (section 4.4), and its perplexity (appendix)."""

from __future__ import annotations

from collections.abc import Mapping

from pandas import DataFrame

from ..bench.roofline import Roofline, limit
from ..bench.rounds import SOURCE_LENGTH, Rounds, figures
from ..config import ModelConfig, preset
from ..results.paper import TABLE_1, TERRAFORMER_800M
from .recorded import Row

# The paper compares the sparse two with the sparse output layer in both (appendix).
APPENDIX = (
    Row("dense Transformer", "appendix/dense", "dense"),
    Row("sparse Transformer", "appendix/ff_qkv_loss", "ff_qkv_loss", "equal"),
    Row("Terraformer", "appendix/terraformer", "terraformer", "equal"),
)
APPENDIX_TUNING = ("appendix_tuning",)


SPARSE, ALIKE, TERRAFORMER = "sparse Transformer", "sparse Transformer, sparse loss", "Terraformer, sparse loss"


def configs_of_both(name: str) -> dict[str, ModelConfig]:
    """A dense Transformer, a sparse one, one with the sparse output layer, too, and a Terraformer with all of these."""
    return {
        "dense Transformer": preset(name),
        SPARSE: preset(name, "ff_qkv"),
        ALIKE: preset(name, "ff_qkv_loss"),
        TERRAFORMER: preset(name, "ff_qkv_loss", architecture="terraformer"),
    }


def both_table(configs: Mapping[str, ModelConfig], measured: Rounds, roofline: Roofline) -> DataFrame:
    """The time of a token of each model of :func:`configs_of_both`, the paper's, where it has one, and ours."""
    dense = TABLE_1.row(size="800M", variant="dense").seconds
    seconds = {
        "dense Transformer": dense,
        SPARSE: TABLE_1.row(size="800M", variant="ff_qkv").seconds,
        TERRAFORMER: TERRAFORMER_800M.value,
    }
    frame = []
    for name, config in configs.items():
        least = limit(config, "fp32", roofline, context=measured.context, source_length=SOURCE_LENGTH)
        row, theirs = figures(measured.samples[name].token, least), seconds.get(name)
        frame.append(
            {
                "model": name,
                "paper (ms)": theirs and 1e3 * theirs,
                "here (ms)": row["ms_median"],
                "quartiles": f"{row['ms_q1']:,.2f} to {row['ms_q3']:,.2f}",
                "paper, times dense": theirs and dense / theirs,
                "here, times dense": measured.ratio("dense Transformer", name),
                "MB touched": row["bytes"] / 1e6,
                "limit (ms)": row["limit_ms"],
                "% of limit": 100 * row["limit_fraction"],
            }
        )
    return DataFrame(frame)


def times_the_transformer(measured: Rounds) -> tuple[float, float, float]:
    """How many times as long as the sparse Transformer's a Terraformer's token takes: in the paper, here, and here
    against one with the same output layer."""
    theirs = TERRAFORMER_800M.value / TABLE_1.row(size="800M", variant="ff_qkv").seconds
    return theirs, measured.ratio(TERRAFORMER, SPARSE), measured.ratio(TERRAFORMER, ALIKE)
