import matplotlib
import pytest

from sparselib.config import ATTENTIONS, FEEDFORWARDS, VARIANTS
from sparselib.results.figures import GREY, LOOKS, OKABE_ITO, log_axes, look, new_figure, shades

matplotlib.use("Agg")


def test_every_variant_has_a_colour_marker_and_label_of_its_own():
    looks = [look(variant) for variant in VARIANTS]
    for field in ("color", "marker", "label"):
        assert len({getattr(one, field) for one in looks}) == len(VARIANTS)


def test_no_two_looks_are_alike_and_all_colours_are_safe():
    assert len({one.marker for one in LOOKS.values()}) == len(LOOKS)
    assert len({one.label for one in LOOKS.values()}) == len(LOOKS)
    assert {one.color for one in LOOKS.values()} <= {GREY, *OKABE_ITO.values()} - {OKABE_ITO["yellow"]}


def test_layers_of_the_package_have_looks():
    missing = {*FEEDFORWARDS, *ATTENTIONS} - {*LOOKS, "sparse"}  # "sparse" is drawn as its variant, ff
    assert not missing


def test_an_unknown_look_is_refused():
    with pytest.raises(ValueError, match="'moe'.*'ff_qkv'"):
        look("moe")


def test_lengths_on_a_logarithmic_axis_are_its_only_ticks():
    _, axis = new_figure()
    log_axes(axis, [2000, 30, 2000])
    ticks = axis.get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["30", "2,000"] and [tick.get_position()[0] for tick in ticks] == [
        30,
        2000,
    ]
    assert axis.get_xscale() == axis.get_yscale() == "log" and not len(axis.xaxis.get_minorticklocs())


def draw():
    figure, axes = new_figure(height=3.0)
    axes.plot([1, 2], [3, 4], **look("ff").line)
    axes.legend()
    return figure


def test_a_figure_has_the_size_asked_for_and_axes():
    figure, axes = new_figure(1, 2, width=8, height=2, sharey=True)
    assert tuple(figure.get_size_inches()) == (8, 2) and axes.shape == (2,)


def test_shades_keep_their_order_and_no_two_are_alike():
    assert len({tuple(shade) for shade in shades(5)}) == 5
    assert tuple(shades(1)[0]) == tuple(shades(5)[0]) and shades(0) == []
    brightness = [sum(shade[:3]) for shade in shades(5)]
    assert brightness == sorted(brightness)
