"""Recipes: named sets of runs. Each states what it shows, what it costs and what to expect."""

from buttress.lab.recipes import cifar, digits, gpt2, growing, imagenet  # noqa: F401  (they register themselves)
from buttress.lab.recipes.base import Recipe, find, recipes

__all__ = ["Recipe", "find", "recipes"]
