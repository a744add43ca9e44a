"""Models of the paper, in plain nn.Linear: nothing in them knows of structured matrices."""

from buttress.lab.models.mlp import MLP

__all__ = ["MLP"]
