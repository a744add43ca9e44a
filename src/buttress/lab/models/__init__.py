"""Models of the paper, built from plain nn.Linear; `buttress.replace_` makes them structured."""

from buttress.lab.models.gpt import GPT
from buttress.lab.models.mlp import MLP, start_
from buttress.lab.models.vit import ViT

__all__ = ["GPT", "MLP", "ViT", "start_"]
