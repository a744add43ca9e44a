"""Structured models in transformers: `save`, `attach`, `adapted` and `lora` of `buttress.integrations.transformers`."""

from buttress.integrations.transformers import StructuredConfig, adapted, attach, lora, save

__all__ = ["StructuredConfig", "adapted", "attach", "lora", "save"]
