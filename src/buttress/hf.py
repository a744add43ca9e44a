"""Structured models in transformers and peft: importing this module lets `from_pretrained` load them."""

from buttress.integrations.peft import lora
from buttress.integrations.peft_export import LoraExport, export_lora
from buttress.integrations.transformers import StructuredConfig, adapted, attach, save

# After the module above, whose import says what is missing where transformers is.
from buttress.integrations.generation import Decoder, generate  # isort: skip

__all__ = ["Decoder", "LoraExport", "StructuredConfig", "adapted", "attach", "export_lora", "generate", "lora", "save"]
