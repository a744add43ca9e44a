"""The recipes that come with the lab."""

from __future__ import annotations

import pytest

from buttress.lab.recipes import find, recipes
from buttress.lab.runs.config import ConfigError


class TestRecipes:
    def test_each_is_made_of_runs_and_says_what_it_is(self) -> None:
        assert {"digits", "mlp-scaling", "learning-rates", "vit"} <= set(recipes())
        for recipe in recipes().values():
            runs = recipe.runs()
            assert runs
            assert len({run.key for run in runs}) == len(runs)
            assert recipe.summary.endswith((".", "paper."))

    def test_unknown(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'digits'"):
            find("digit")

    def test_the_paper_s_mlp(self) -> None:
        run = next(r for r in find("mlp-scaling").runs() if r.structure == "btt" and r.width == 1024)
        assert (run.batch, run.steps, run.lr, run.smoothing, run.mixup, run.input_scale) == (
            1024, 24000, 3e-3, 0.3, 0.8, 0.1,
        )  # fmt: skip
