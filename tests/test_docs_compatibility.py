"""The compatibility matrix: every architecture is as good as the record says, and the page shows the record."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from pages import DOCS

for library in ("transformers", "timm", "torchvision"):
    pytest.importorskip(library)
sys.path.insert(0, str(DOCS))
try:
    from generation.compatibility import record
    from generation.compatibility.checks import CASES, check
finally:
    sys.path.remove(str(DOCS))

RECORDED = {row.label: row for row in record.Record.read().rows}
REGENERATE = "run make compatibility and commit the record and the page"


def test_every_architecture_is_recorded() -> None:
    assert list(RECORDED) == list(CASES), REGENERATE


@pytest.mark.parametrize("label", CASES)
def test_architecture_is_as_good_as_recorded(label: str) -> None:
    row = check(CASES[label])
    assert not record.worse(row, RECORDED[label])
    if record.installed_versions() == record.Record.read().versions:
        assert not record.better(row, RECORDED[label]), REGENERATE


class TestComparison:
    ROW = record.Row("A", "timm", 50.0, {}, "works", "refused: a", "fails: b")

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"surgery": "refused: x"}, "A, surgery: was 'works', is 'refused: x'"),
            ({"saving": "fails: x"}, "A, save and load: was 'refused: a', is 'fails: x'"),
            ({"share": 40.0}, "A: reached 50.0 % of the parameters, reaches 40.0 %"),
        ],
    )
    def test_names_what_is_worse(self, change: dict[str, object], problem: str) -> None:
        assert record.worse(replace(self.ROW, **change), self.ROW) == [problem]
        assert record.better(self.ROW, replace(self.ROW, **change))

    def test_another_message_is_neither_worse_nor_better(self) -> None:
        row = replace(self.ROW, saving="refused: x", compression="fails: y")
        assert not record.worse(row, self.ROW)
        assert not record.better(row, self.ROW)
