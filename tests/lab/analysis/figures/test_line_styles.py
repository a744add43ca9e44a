"""Styles of lines: a family has one color, its variants have different markers, and figures agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

import buttress as bt
from buttress.lab.analysis import figures
from buttress.lab.analysis.figures.line_styles import LineStyles, by_family, families
from buttress.lab.analysis.lines import BASELINE, LineKey
from synthetic_records import study

PLAIN = (
    [BASELINE]
    + [
        LineKey(str(candidate))
        for cls in bt.structures().values()
        if cls.__module__.startswith("buttress.")  # other tests declare structures of their own
        for candidate in cls.default_candidates()[:1]
    ]
)
RANK_2, RANK_4 = LineKey("btt(rank=2)"), LineKey("btt(rank=4)", "hidden", normalize=True)


def test_every_family_has_its_own_color_and_marker() -> None:
    styles = LineStyles(PLAIN)
    assert len({styles[key].color for key in PLAIN}) == len(PLAIN)
    assert len({styles[key].marker for key in PLAIN}) == len(PLAIN)
    assert families()[0] == BASELINE.structure
    assert len({*styles[BASELINE].color[1:]}) == 1, "the baseline is a shade of grey"


def test_variants_share_the_color_and_differ_in_marker() -> None:
    variants = [LineKey("btt"), RANK_2, RANK_4]
    styles = LineStyles(variants)
    assert len({styles[key].color for key in variants}) == 1
    assert len({styles[key].marker for key in variants}) == 3


def test_naive_rates_are_dashed_and_otherwise_alike() -> None:
    naive = replace(RANK_4, aware=False)
    styles = LineStyles([LineKey("btt"), naive])
    assert replace(styles[naive], dashes="-") == styles[RANK_4]
    assert styles[naive].dashes != "-"


def test_a_style_does_not_depend_on_other_families() -> None:
    alone = LineStyles([LineKey("btt"), BASELINE])
    among = LineStyles([*PLAIN, RANK_2, RANK_4])
    for key in (LineKey("btt"), BASELINE):
        assert alone[key] == among[key]


def test_figures_that_share_styles_draw_a_line_alike() -> None:
    few = [r for r in study() if r.run.structure]
    styles = LineStyles([*PLAIN, RANK_2, RANK_4])
    drawn = [
        {(line.get_color(), line.get_marker()) for line in figure.axes[0].get_lines() if line.get_marker() != "None"}
        for figure in (figures.widths(few, styles=styles), figures.scaling(study(), styles=styles))
    ]
    assert len(drawn[0]) == 2
    assert drawn[0] < drawn[1]


def test_families_group_their_lines() -> None:
    naive = replace(RANK_2, aware=False)
    assert by_family([RANK_4, LineKey("kronecker"), naive, BASELINE, RANK_2]) == {
        BASELINE.structure: [BASELINE],
        "btt": [RANK_2, naive, RANK_4],
        "kronecker": [LineKey("kronecker")],
    }


def test_shades_darken_to_the_full_color() -> None:
    style = LineStyles([LineKey("btt")])[LineKey("btt")]
    shades = [int(shade.color[1:3], 16) for shade in style.shades(4)]
    assert shades == sorted(shades, reverse=True)
    assert style.shades(4)[-1] == style
    assert style.shades(1) == [style]
