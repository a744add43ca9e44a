"""The end of error messages about unknown names."""

from __future__ import annotations

import doctest

import pytest

from buttress import suggestions
from buttress.suggestions import did_you_mean


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["btf", "BTT", "bt"])
def test_a_near_name_is_suggested(name: str, listed: bool) -> None:
    assert did_you_mean(name, ["dense", "btt"], listed=listed) == "; did you mean 'btt'?"


def test_without_a_near_name_all_are_listed_unless_they_are_already() -> None:
    assert did_you_mean("zzz", {"dense", "btt"}) == ": valid names are btt, dense"
    assert did_you_mean("zzz", {"dense", "btt"}, listed=True) == ""
    assert did_you_mean("", [], listed=True) == ""


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(suggestions)
    assert result.attempted > 0
    assert result.failed == 0
