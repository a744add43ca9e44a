"""peft: LoRA adapters on top of structured layers."""

from __future__ import annotations

import warnings
from typing import Any

from buttress.errors import PlanError
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv


def lora(config: Any) -> Any:
    """Make a peft `LoraConfig` accept structured layers as targets.

    The adapters stay separate modules. The sum of a structured and a low-rank matrix has neither structure, so they
    cannot be merged; `densify_` the model first where merging is needed.

    Args:
        config: A `LoraConfig`, or the `PeftConfig` of a saved adapter. It is changed in place.

    Returns:
        The same config.

    Raises:
        ImportError: If peft is not installed.

    Example:
        >>> model = get_peft_model(model, lora(LoraConfig(r=8, target_modules=["q_proj"])))
        >>> model = PeftModel.from_pretrained(model, folder, config=lora(PeftConfig.from_pretrained(folder)))
    """
    from peft.tuners.lora import Linear

    class StructuredLora(Linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unsupported layer type")  # they have all that peft needs
                super().__init__(*args, **options)

        def merge(self, *args: Any, **options: Any) -> None:
            raise PlanError("an adapter cannot be merged into a structured layer: densify_ the model before adding it")

    def refuse(*args: Any, **options: Any) -> Any:
        raise PlanError("LoRA has no adapter for a structured convolution: leave it out of target_modules")

    # The first class that matches decides.
    config._register_custom_module({StructuredPointwiseConv: refuse, StructuredLinear: StructuredLora})
    return config
