"""Structured models in timm: save and load them."""

from buttress.integrations.timm import fill, load, model_args, save

__all__ = ["fill", "load", "model_args", "save"]
