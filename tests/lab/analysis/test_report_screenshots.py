"""The report as a browser shows it, on a desktop and on a phone: the answer first, nothing cut off, text legible."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

import numpy as np
from matplotlib.image import imread

from browser import BINARY, Browser, browser
from buttress.lab.analysis.figures.line_styles import LineStyles
from buttress.lab.analysis.lines import BASELINE, LineKey
from buttress.lab.analysis.report import report
from buttress.lab.runs.records import Record
from synthetic_records import record, study

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs chromium or chrome")

DESKTOP, PHONE = (1280, 900), (390, 844)
MIN_FONT, MAX_FONT = 9.0, 18.0
"""Sizes of legible text that does not shout, in pixels."""

ALL_TEXTS = """[...document.querySelectorAll('svg text')].flatMap(text => {
  const box = text.getBoundingClientRect(), frame = text.closest('svg').getBoundingClientRect();
  const matrix = text.getScreenCTM(), scale = Math.hypot(matrix.a, matrix.b);
  const inside = box.left >= frame.left - 1 && box.right <= frame.right + 1
    && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
  const leaves = text.children.length ? [...text.children] : [text];
  return leaves.map(leaf => [leaf.textContent, scale * parseFloat(getComputedStyle(leaf).fontSize), inside]);
})"""
FIRST = "document.querySelector('{}').getBoundingClientRect().toJSON()"
LEGEND_MARKERS = """[...document.querySelectorAll('figure .legend')[0].querySelectorAll('use')].map(use =>
  [document.querySelector(use.getAttribute('xlink:href')).getAttribute('d'), getComputedStyle(use).fill])"""


def records() -> list[Record]:
    """Experiments that differ in precision, one with variants and naive rates, one with learning rates."""
    variants = [
        record(structure, width, 50 - width / 64, aware=aware, normalize=True, precision="tf32")
        for structure in ("btt(rank=2)", "monarch(blocks=16)")
        for width in (64, 128, 256)
        for aware in (True, False)
    ]
    rates = [
        record("btt", width, 30 + abs(lr - 3e-3) * 1e3, lr=lr, task="teacher")
        for width in (64, 256)
        for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    ]
    sizes = {"activation/a": [(step, 2.0**step) for step in range(20)], "median output": [(1, 1.0), (19, 2.0)]}
    long_label = {"layers": "hidden", "aware": False, "normalize": True}
    traced = [replace(record("btt(rank=16)", trace=1, lr=lr, **long_label), metrics=sizes) for lr in (1e-3, 1e-2)]
    return [*study(precision="tf32"), *study(precision="bfloat16"), *variants, *rates, *traced]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    title = "Structured layers: runs in results_in_one_folder_with_a_long_name_that_has_no_space"
    return report(records(), tmp_path_factory.mktemp("report") / "page.html", title)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


def pixels(tab: Browser) -> np.ndarray[Any, Any]:
    """The window as rows of RGB values between 0 and 1."""
    return np.asarray(imread(io.BytesIO(tab.screenshot()), format="png"))[:, :, :3]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("unfolded", [False, True])
def test_the_page_never_scrolls_sideways(tab: Browser, page: Path, size: tuple[int, int], unfolded: bool) -> None:
    tab.open(page, *size)
    assert tab.evaluate("innerWidth") == size[0]
    if unfolded:
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == size[0]
    margins = pixels(tab)[:, [*range(10), *range(size[0] - 10, size[0])]]
    assert np.all(margins == 1), "the margins are empty"


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_wide_tables_scroll_in_their_own_box(tab: Browser, page: Path, size: tuple[int, int]) -> None:
    tab.open(page, *size)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    boxes = tab.evaluate("[...document.querySelectorAll('.scroll')].map(box => [box.clientWidth, box.scrollWidth])")
    assert all(width <= size[0] for width, _ in boxes)
    if size == PHONE:
        assert any(content > width for width, content in boxes)


def test_the_answer_is_in_the_first_screen(tab: Browser, page: Path) -> None:
    tab.open(page, *DESKTOP)
    for what in (".verdict", "figure svg", "nav"):
        assert tab.evaluate(FIRST.format(what))["bottom"] <= DESKTOP[1], what
    tab.open(page, *PHONE)
    assert tab.evaluate(FIRST.format(".verdict"))["bottom"] <= PHONE[1] / 2
    assert tab.evaluate(FIRST.format("figure svg"))["bottom"] <= tab.evaluate(FIRST.format("nav"))["top"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_first_figure_shows_its_lines(tab: Browser, page: Path, size: tuple[int, int]) -> None:
    tab.open(page, *size)
    tab.evaluate("document.querySelector('figure').scrollIntoView()")
    box = tab.evaluate(FIRST.format("figure svg"))
    top, left = max(round(box["top"]), 0), round(box["left"])
    drawing = pixels(tab)[top : round(box["bottom"]), left : round(box["right"])]
    styles = LineStyles([BASELINE, LineKey("btt")])
    for key in (BASELINE, LineKey("btt")):
        color = [int(styles[key].color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert np.sum(np.all(np.abs(drawing - color) < 0.01, axis=-1)) > 100, key.label


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_text_of_figures_is_whole_and_legible(tab: Browser, page: Path, size: tuple[int, int]) -> None:
    tab.open(page, *size)
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    texts = tab.evaluate(ALL_TEXTS)
    assert len(texts) > 100
    assert [(text, font) for text, font, _ in texts if not MIN_FONT <= font <= MAX_FONT] == []
    assert [text for text, _, inside in texts if not inside] == []


def test_the_lines_of_a_figure_differ_in_marker_as_well_as_in_color(tab: Browser, page: Path) -> None:
    tab.open(page, *DESKTOP)
    entries = tab.evaluate(LEGEND_MARKERS)
    assert len(entries) == 7
    assert len({color for _, color in entries}) == 4, "one per family"
    assert len({shape for shape, _ in entries}) == 5, "one per structure, with both kinds of learning rates"


def test_links_of_the_contents_lead_to_sections(tab: Browser, page: Path) -> None:
    tab.open(page, *PHONE)
    headings = tab.evaluate(
        "[...document.querySelectorAll('nav a')].map(a => document.querySelector(a.hash).innerText)"
    )
    assert headings == tab.evaluate("[...document.querySelectorAll('nav a')].map(a => a.innerText)")
    assert len(headings) == len(set(headings)) == 4
