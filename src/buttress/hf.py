"""Structured models in transformers and peft: importing this module lets `from_pretrained` load them."""

from buttress.integrations.peft import lora
from buttress.integrations.transformers import StructuredConfig, adapted, attach, save

__all__ = ["StructuredConfig", "adapted", "attach", "lora", "save"]
