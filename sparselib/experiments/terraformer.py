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


def configs_of_both(name: str) -> dict[str, ModelConfig]:
    """A dense Transformer, a sparse one, and the Terraformer with the same sparse layers."""
    return {
        "dense Transformer": preset(name),
        "sparse Transformer": preset(name, "ff_qkv"),
        "Terraformer": preset(name, "ff_qkv", architecture="terraformer"),
    }


def both_table(configs: Mapping[str, ModelConfig], measured: Rounds, roofline: Roofline) -> DataFrame:
    """The time of a token of each model of :func:`configs_of_both`, the paper's and ours."""
    seconds = {
        "dense Transformer": TABLE_1.row(size="800M", variant="dense").seconds,
        "sparse Transformer": TABLE_1.row(size="800M", variant="ff_qkv").seconds,
        "Terraformer": TERRAFORMER_800M.value,
    }
    frame = []
    for name, config in configs.items():
        least = limit(config, "fp32", roofline, context=measured.context, source_length=SOURCE_LENGTH)
        row = figures(measured.samples[name].token, least)
        frame.append(
            {
                "model": name,
                "paper (ms)": 1e3 * seconds[name],
                "here (ms)": row["ms_median"],
                "quartiles": f"{row['ms_q1']:,.2f} to {row['ms_q3']:,.2f}",
                "paper, times dense": seconds["dense Transformer"] / seconds[name],
                "here, times dense": measured.ratio("dense Transformer", name),
                "MB touched": row["bytes"] / 1e6,
                "limit (ms)": row["limit_ms"],
                "% of limit": 100 * row["limit_fraction"],
            }
        )
    return DataFrame(frame)


def times_the_transformer(measured: Rounds) -> tuple[float, float]:
    """How many times as long as the sparse Transformer's a Terraformer's token takes: in the paper, and here."""
    theirs = TERRAFORMER_800M.value / TABLE_1.row(size="800M", variant="ff_qkv").seconds
    return theirs, measured.ratio("Terraformer", "sparse Transformer")
