"""One look for every figure: each layer and variant has ONE colour, marker and label in the whole book.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), told apart with every kind of colour
vision; the markers differ as well, so that a figure can be read in grey.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import require_choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky_blue": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",  # too pale for a line on white
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
}
GREY = "#8C8C8C"  # what was not measured here: the paper's value, the limit


@dataclass(frozen=True)
class Look:
    """How one kind of model or layer is drawn."""

    color: str
    marker: str
    label: str
    linestyle: str = "-"

    @property
    def line(self) -> dict[str, Any]:
        """Keywords for ``axes.plot``."""
        return {
            "color": self.color,
            "marker": self.marker,
            "label": self.label,
            "linestyle": self.linestyle,
        }


LOOKS = {
    "dense": Look(OKABE_ITO["black"], "o", "dense"),
    "ff": Look(OKABE_ITO["orange"], "s", "sparse FF"),
    "ff_paper": Look(OKABE_ITO["orange"], "d", "sparse FF by the paper's text", "--"),
    "qkv": Look(OKABE_ITO["sky_blue"], "^", "sparse QKV"),
    "ff_qkv": Look(OKABE_ITO["green"], "D", "sparse FF+QKV"),
    "ff_qkv_loss": Look(OKABE_ITO["vermillion"], "v", "sparse FF+QKV+loss"),
    "mult": Look(OKABE_ITO["blue"], "<", "multiplicative"),
    "conv": Look(OKABE_ITO["purple"], ">", "convolution"),
    "mult_conv": Look(OKABE_ITO["sky_blue"], "P", "multiplicative + convolution", "--"),
    "mult_conv_output": Look(OKABE_ITO["green"], "h", "multiplicative + convolution + output", "--"),
    "block": Look(OKABE_ITO["purple"], "X", "experts (block)", "--"),
    "switch": Look(OKABE_ITO["blue"], "p", "experts (Switch)", "--"),
    "terraformer": Look(OKABE_ITO["blue"], "*", "Terraformer"),
    "lsh": Look(OKABE_ITO["vermillion"], "H", "attention by hashing"),
    "lsh_chunks": Look(OKABE_ITO["vermillion"], "+", "attention by hashing, feedforward in chunks", "--"),
    "fused": Look(OKABE_ITO["black"], "8", "full attention, fused", "--"),
    "paper": Look(GREY, "x", "paper", ":"),
    "limit": Look(GREY, "_", "limit (bytes / bandwidth)", "--"),
}

STYLE: dict[Any, Any] = {
    "figure.figsize": (6.4, 3.8),  # inches
    "figure.dpi": 72,  # a notebook draws at twice this ("retina") and shows it at this size
    "savefig.dpi": 144,
    "savefig.bbox": "tight",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures look the same everywhere
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.grid": True,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}


def look(name: str) -> Look:
    """The look of a variant or layer. Errors: ValueError naming it and those there are."""
    require_choice("look", name, tuple(LOOKS))
    return LOOKS[name]


def shades(n: int, palette: str = "viridis") -> list[Any]:
    """Colours of ``n`` settings of one thing, in order, from a matplotlib ``palette`` without its palest end."""
    import matplotlib.pyplot as plt

    return [*plt.get_cmap(palette)([0.9 * i / max(1, n - 1) for i in range(n)])]


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 3.8, **subplots: Any
) -> tuple[Figure, Any]:
    """A figure of ``width`` x ``height`` inches in the book's style, and axes as of ``plt.subplots``."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    _retina()
    return plt.subplots(rows, columns, figsize=(width, height), **subplots)


def log_axes(axis: Axes, lengths: Iterable[int], rotation: float = 45) -> None:
    """Both axes logarithmic, along x a tick at each of the ``lengths`` and nowhere else."""
    axis.set(xscale="log", yscale="log")
    ticks = sorted(set(lengths))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=rotation)
    axis.minorticks_off()


def _retina() -> None:
    """In a notebook, draw PNGs at twice the size at which they are shown."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina")
