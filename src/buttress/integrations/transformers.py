"""transformers: structured models saved and loaded like any other, without remote code.

    import buttress.integrations.transformers

    buttress.hf.save(model, "small", tokenizer)                      # a folder that refuses to be half-written
    model = AutoModelForCausalLM.from_pretrained("small")            # anywhere, after `import buttress.hf`

The plan of the structured layers travels in the model's config, where transformers looks for the way in which weights
are stored ("quantization_config"). Importing this module teaches it ours: the model is built on the meta device, its
layers are replaced, and the factors are read from safetensors files. Nothing is unpickled, no code is read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from buttress.errors import MissingExtraError, PlanError
from buttress.files import new_folder
from buttress.inspection.sites import find_sites
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import Structured
from buttress.surgery import Plan, PlanEntry

try:
    from safetensors import safe_open
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingExtraError(f"buttress.hf needs transformers: pip install 'buttress[hf]' ({error})") from error

METHOD = "buttress"


@register_quantization_config(METHOD)
@dataclass
class StructuredConfig(QuantizationConfigMixin):
    """What stands in a config: the plan, as `Plan.to_json` writes it."""

    plan: dict[str, Any] = field(default_factory=dict)
    quant_method: str = METHOD  # type: ignore[assignment]

    @property
    def layers(self) -> Plan:
        return Plan.from_json(json.dumps(self.plan))


@register_quantizer(METHOD)
class _Loader(HfQuantizer):
    """Replaces layers between the making of a model and the reading of its weights."""

    requires_calibration = True  # a dense model becomes structured by replace_, not by loading

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        for file in checkpoint_files or ():
            if Path(file).suffix != ".safetensors":
                raise PlanError(f"{file} is not a safetensors file: structured models are read from these alone")
        assert isinstance(self.quantization_config, StructuredConfig)
        adapted(self.quantization_config.layers, model).apply_(model)
        _check(model, checkpoint_files or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        return model

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        # From here on it is a model like any other: it may be moved, cast, trained and wrapped.
        model.hf_quantizer = None  # type: ignore[assignment]
        for mark in ("is_quantized", "quantization_method"):
            if mark in vars(model):
                delattr(model, mark)
        model.config.quantization_config = self.quantization_config
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _check(model: PreTrainedModel, files: Iterable[str]) -> None:
    """Refuse files that lack factors or have others: transformers would start them anew with a warning."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    tied = getattr(model, "all_tied_weights_keys", {})  # stored under one name alone
    for name, module in model.named_modules():
        if not isinstance(module, Structured):
            continue
        for part, parameter in module.named_parameters():
            full = f"{name}.{part}"
            shape = next((found[n] for n in _names(full, model) if n in found), None)
            if shape != parameter.shape and full not in tied:
                has = "is missing" if shape is None else f"has the shape {shape}"
                raise PlanError(
                    f"{full} should have the shape {tuple(parameter.shape)}, since {name} is {module.structure}, but "
                    f"in the file it {has}: the plan in config.json and the weights do not belong together"
                )


def _names(name: str, model: PreTrainedModel) -> tuple[str, str, str]:
    """What something is called here, and in a model over the same base with or without a head."""
    prefix = f"{model.base_model_prefix}."
    return name, f"{prefix}{name}", name.removeprefix(prefix)


def adapted(plan: Plan, model: PreTrainedModel) -> Plan:
    """A plan for another model over the same base: with or without a head, names gain or lose the base's prefix."""
    prefix = f"{model.base_model_prefix}."
    there = find_sites(model, embeddings=True)
    names = {e.name: next((n for n in _names(e.name, model) if n in there), None) for e in plan.entries}
    entries: list[PlanEntry] = []
    for entry in plan.entries:
        known = names[entry.name]
        if known is None and (model.base_model is not model or entry.name.startswith(prefix)):
            raise PlanError(
                f"the plan names a layer that {type(model).__name__} does not have: {entry.name!r}. The folder was "
                "made from another architecture, or its config was changed"
            )
        if known is not None:  # the base alone has no head
            tied = None if entry.tied is None else names.get(entry.tied, entry.tied)
            entries.append(replace(entry, name=known, tied=tied))
    return Plan(tuple(entries))


def attach(model: PreTrainedModel) -> None:
    """Write the model's plan into its config, or take it out where nothing is structured; `save` does so itself."""
    plan = Plan.of(model)
    if plan.entries:
        model.config.quantization_config = StructuredConfig(plan=json.loads(plan.to_json()))
    elif getattr(getattr(model.config, "quantization_config", None), "quant_method", None) == METHOD:
        del model.config.quantization_config


def save(model: PreTrainedModel, folder: Path | str, *others: Any) -> Path:
    """`save_pretrained` of a model, and of a tokenizer or what else is given: a new folder, whole or not at all."""
    with new_folder(folder) as part:
        attach(model)
        model.save_pretrained(part)
        for other in others:
            other.save_pretrained(part)
    return Path(folder)


def lora(config: Any) -> Any:
    """Let a peft LoraConfig target structured layers, too; returns it.

    >>> model = get_peft_model(model, lora(LoraConfig(r=8, target_modules=["q_proj"])))
    >>> model = PeftModel.from_pretrained(model, folder, config=lora(PeftConfig.from_pretrained(folder)))

    Such adapters stay beside the layer: the sum of a structured and a low-rank matrix has neither's structure, so they
    cannot be merged. `densify_` first where that is wanted.
    """
    from peft.tuners.lora import Linear

    class Beside(Linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unsupported layer type")  # it has all that is asked of it
                super().__init__(*args, **options)

        def merge(self, *args: Any, **options: Any) -> None:
            raise PlanError("an adapter cannot be merged into a structured layer: densify_ the model before adding it")

    config._register_custom_module({StructuredLinear: Beside})
    return config
