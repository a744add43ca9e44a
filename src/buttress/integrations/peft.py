"""peft: LoRA adapters on top of structured layers."""

from __future__ import annotations

import warnings
from typing import Any

from buttress.errors import PlanError
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv

_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initializations that leave the layer below as it is; the others write to its weight."""


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
        PlanError: If `init_lora_weights` is one that writes to the layers below, such as "pissa" or "olora".

    Example:
        >>> model = get_peft_model(model, lora(LoraConfig(r=8, target_modules=["q_proj"])))
        >>> model = PeftModel.from_pretrained(model, folder, config=lora(PeftConfig.from_pretrained(folder)))
    """
    from peft.tuners.lora import Linear

    class StructuredLora(Linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            base = args[0] if args else options.get("base_layer")
            if (activation := getattr(base, "input_activation", None)) is not None:
                raise PlanError(
                    f"a layer that applies {activation} to its input has no place for LoRA, which reads the result: "
                    "call bt.unfuse_(model) first"
                )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unsupported layer type")  # they have all that peft needs
                super().__init__(*args, **options)

        def update_layer(self, *args: Any, **options: Any) -> None:
            # The config may have been changed since, and a second adapter has a config of its own.
            _check_initialization(next((v for v in (*args, *options.values()) if hasattr(v, _INITIALIZATION)), None))
            super().update_layer(*args, **options)

        def merge(self, *args: Any, **options: Any) -> None:
            raise PlanError("an adapter cannot be merged into a structured layer: densify_ the model before adding it")

    _check_initialization(config)

    def refuse(*args: Any, **options: Any) -> Any:
        raise PlanError("LoRA has no adapter for a structured convolution: leave it out of target_modules")

    # The first class that matches decides.
    config._register_custom_module({StructuredPointwiseConv: refuse, StructuredLinear: StructuredLora})
    return config


_INITIALIZATION = "init_lora_weights"


def _check_initialization(config: Any) -> None:
    value = getattr(config, _INITIALIZATION, True)
    if not any(value is kept or (isinstance(kept, str) and value == kept) for kept in _KEEP_THE_BASE):
        raise PlanError(
            f"{_INITIALIZATION}={value!r} writes to the weight of the layer below, which a structured layer does not "
            f"have: use one of {', '.join(map(repr, _KEEP_THE_BASE))}, or densify_ the model first"
        )
