"""Structured models in transformers and peft: importing this module lets `from_pretrained` load them."""

from buttress.integrations.peft import lora
from buttress.integrations.peft_export import LoraExport, export_lora
from buttress.integrations.transformers import StructuredConfig, adapted, attach, save

__all__ = ["LoraExport", "StructuredConfig", "adapted", "attach", "export_lora", "lora", "save"]
