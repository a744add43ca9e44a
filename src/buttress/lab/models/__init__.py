"""Models of the paper, in plain nn.Linear: nothing in them knows of structured matrices."""

from buttress.lab.models.gpt import GPT
from buttress.lab.models.mlp import MLP, start_
from buttress.lab.models.vit import ViT

__all__ = ["GPT", "MLP", "ViT", "start_"]
