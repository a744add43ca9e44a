"""Models of the paper, in plain nn.Linear: nothing in them knows of structured matrices."""

from buttress.lab.models.mlp import MLP
from buttress.lab.models.vit import ViT

__all__ = ["MLP", "ViT"]
