"""The models of the paper, built from nn.Linear. `buttress.replace_` turns them into structured models."""

from buttress.lab.models.gpt import GPT
from buttress.lab.models.mlp import MLP, start_
from buttress.lab.models.vit import ViT

__all__ = ["GPT", "MLP", "ViT", "start_"]
