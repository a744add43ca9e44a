"""transformers: saving and loading structured models like any other, without remote code.

    import buttress.hf

    buttress.hf.save(model, "small", tokenizer)             # written atomically
    model = AutoModelForCausalLM.from_pretrained("small")   # anywhere, after `import buttress.hf`

The plan is in the model's config under "quantization_config", where transformers looks up how weights are stored.
Importing this module registers the method "buttress": the model is built on the meta device, its layers are replaced,
and the factors are read from safetensors files. Nothing is unpickled, and no code is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from buttress.errors import MissingExtraError, PlanError
from buttress.files import new_folder
from buttress.inspection.sites import find_sites
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
    """The entry "quantization_config" of a structured model's config.

    Args:
        plan: The plan, as `Plan.to_json` writes it.
        quant_method: Always "buttress".

    Example:
        >>> model.config.quantization_config.layers.entries
    """

    plan: dict[str, Any] = field(default_factory=dict)
    quant_method: str = METHOD  # type: ignore[assignment]

    @property
    def layers(self) -> Plan:
        """The plan itself."""
        return Plan.from_json(json.dumps(self.plan))


@register_quantizer(METHOD)
class _StructuredLoader(HfQuantizer):
    """Replaces layers after a model is built and before its weights are read."""

    requires_calibration = True  # a dense model becomes structured by replace_, not by loading

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        for file in checkpoint_files or ():
            if Path(file).suffix != ".safetensors":
                raise PlanError(f"{file} is not a safetensors file: save the model with safetensors")
        assert isinstance(self.quantization_config, StructuredConfig)
        adapted(self.quantization_config.layers, model).apply_(model)
        _check_factors(model, checkpoint_files or ())

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        return model

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        # A quantized model could not be moved, cast, trained or wrapped; this one can.
        model.hf_quantizer = None  # type: ignore[assignment]
        for attribute in ("is_quantized", "quantization_method"):
            if attribute in vars(model):
                delattr(model, attribute)
        model.config.quantization_config = self.quantization_config
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _check_factors(model: PreTrainedModel, files: Iterable[str]) -> None:
    """Raise if factors are missing or have other shapes: transformers would only warn and initialize them again."""
    saved_shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            saved_shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    tied = getattr(model, "all_tied_weights_keys", {})  # stored under one name alone
    for name, module in model.named_modules():
        if not isinstance(module, Structured):
            continue
        for own_name, parameter in module.named_parameters():
            key = f"{name}.{own_name}"
            shape = next((saved_shapes[n] for n in _equivalent_names(key, model) if n in saved_shapes), None)
            if shape != parameter.shape and key not in tied:
                problem = "is missing" if shape is None else f"has the shape {shape}"
                raise PlanError(
                    f"{key} should have the shape {tuple(parameter.shape)}, since {name} is {module.structure}, but "
                    f"in the file it {problem}: the plan in config.json and the weights do not belong together"
                )


def _equivalent_names(name: str, model: PreTrainedModel) -> tuple[str, str, str]:
    """A name in this model, and in a model with the same base with or without a head."""
    prefix = f"{model.base_model_prefix}."
    return name, f"{prefix}{name}", name.removeprefix(prefix)


def adapted(plan: Plan, model: PreTrainedModel) -> Plan:
    """Translate a plan to another model with the same base.

    Names gain or lose the base's prefix if one model has a head and the other does not. Entries for a head are left out
    if the model has none.

    Args:
        plan: The plan of a model with the same base.
        model: The model to apply it to. It is not changed.

    Returns:
        The plan with this model's names.

    Raises:
        PlanError: If the model lacks a layer of the plan.

    Example:
        >>> hf.adapted(bt.Plan.of(causal_model), base_model).apply_(base_model)
    """
    prefix = f"{model.base_model_prefix}."
    sites = find_sites(model, embeddings=True)
    names = {e.name: next((n for n in _equivalent_names(e.name, model) if n in sites), None) for e in plan.entries}
    entries: list[PlanEntry] = []
    for entry in plan.entries:
        name = names[entry.name]
        if name is None and (model.base_model is not model or entry.name.startswith(prefix)):
            raise PlanError(
                f"the plan names a layer that {type(model).__name__} does not have: {entry.name!r}. The folder was "
                "written for another architecture, or its config was changed"
            )
        if name is not None:  # the base alone has no head
            tied = None if entry.tied is None else names.get(entry.tied, entry.tied)
            entries.append(replace(entry, name=name, tied=tied))
    return Plan(tuple(entries))


def attach(model: PreTrainedModel) -> None:
    """Write a model's plan into its config, or remove it if no layer is structured any more.

    `save` calls it; call it yourself before `save_pretrained`.

    Args:
        model: The model whose config is changed.

    Example:
        >>> hf.attach(model)
        >>> model.save_pretrained("small")
    """
    plan = Plan.of(model)
    if plan.entries:
        model.config.quantization_config = StructuredConfig(plan=json.loads(plan.to_json()))
    elif getattr(getattr(model.config, "quantization_config", None), "quant_method", None) == METHOD:
        del model.config.quantization_config


def save(model: PreTrainedModel, folder: Path | str, *others: Any) -> Path:
    """Save a model to a new folder, atomically.

    Args:
        model: The model, structured or not.
        folder: The folder to write. It must not exist, or be empty.
        *others: A tokenizer, or anything else with `save_pretrained`.

    Returns:
        The folder.

    Raises:
        PlanError: If the folder is not empty.

    Example:
        >>> buttress.hf.save(model, "small", tokenizer)
        >>> model = AutoModelForCausalLM.from_pretrained("small")
    """
    with new_folder(folder) as part:
        attach(model)
        model.save_pretrained(part)
        for other in others:
            other.save_pretrained(part)
    return Path(folder)
