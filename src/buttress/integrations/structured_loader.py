"""How transformers loads a structured model: layers are replaced on the meta device, then the factors are read.

Importing this module registers it. Nothing is unpickled, and no code is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from buttress.errors import PlanError
from buttress.inspection.sites import find_sites
from buttress.integrations.weight_headers import Shapes, check_size, saved_dtypes, saved_shapes
from buttress.nn.structured import Structured
from buttress.surgery import Plan, PlanEntry
from buttress.surgery.config_entry import LOADER, METHOD, record_plan
from buttress.surgery.entry import entries_of


@register_quantization_config(METHOD)
@dataclass
class StructuredConfig(QuantizationConfigMixin):
    """The entry "quantization_config" of a structured model's config, while the model is loaded.

    Args:
        plan: The plan, as `Plan.to_json` writes it.
        parts: Names of the models inside the model that have a config of their own, each with its model type.
        model_type: Model type of the whole model; empty in folders of version 0.1.
        quant_method: Always "buttress". It is not written to config.json: transformers ignores a method that it does
            not know, and would load random weights, but refuses an entry without a method.

    Example:
        >>> hf.StructuredConfig(plan=json.loads(plan.to_json())).layers.entries
    """

    plan: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    model_type: str = ""
    quant_method: str = METHOD  # type: ignore[assignment]

    @property
    def layers(self) -> Plan:
        """The plan itself."""
        return Plan.from_json(json.dumps(self.plan))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The entry that a config.json holds; what is unknown is left out."""
        known = {f.name for f in fields(cls)}
        entry = cls(**{k: v for k, v in config_dict.items() if k in known} | {"quant_method": METHOD})
        return (entry, kwargs) if return_unused_kwargs else entry

    def to_dict(self) -> dict[str, Any]:
        """The entry as it is written to config.json."""
        return {"loader": LOADER, "model_type": self.model_type, "parts": self.parts, "plan": self.plan}

    def layers_of(self, model: PreTrainedModel) -> Plan:
        """The plan for a model: the whole one, or that of the one part which has the model's type.

        Args:
            model: The dense model, or a dense model of one part.

        Returns:
            The plan with names as they are in that part.

        Raises:
            PlanError: If several parts have this type.
        """
        own = str(getattr(model.config, "model_type", ""))
        if not isinstance(self.parts, dict) or own == self.model_type or own not in self.parts.values():
            return self.layers
        prefixes = [f"{name}." for name, model_type in self.parts.items() if model_type == own]
        if len(prefixes) > 1:
            raise PlanError(
                f"the folder holds several models of type {own}, {', '.join(p[:-1] for p in prefixes)}: load the "
                "whole model, and take the part from it"
            )
        entries = [
            replace(e, name=e.name.removeprefix(prefixes[0]), tied=e.tied and e.tied.removeprefix(prefixes[0]))
            for e in self.layers.entries
            if e.name.startswith(prefixes[0])
        ]
        return Plan(tuple(entries))


@register_quantizer(METHOD)
class _StructuredLoader(HfQuantizer):
    """Replaces layers after a model is built and before its weights are read."""

    requires_calibration = True  # a dense model becomes structured by replace_, not by loading

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        shapes = saved_shapes(checkpoint_files or ())
        assert isinstance(self.quantization_config, StructuredConfig)
        layers = self.quantization_config.layers
        plan = adapted(self.quantization_config.layers_of(model), model)
        if plan.entries or not layers.entries:
            plan.apply_(model)
        check_weights(model, shapes)
        _keep_adapter_dtypes(model, saved_dtypes(checkpoint_files or ()))
        if not hasattr(HfQuantizer, "get_new_dtype"):
            # Such versions of transformers do not cast tensors of quantized files that they rename; ours are plain.
            self.pre_quantized = False

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        return model

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        # A quantized model could not be moved, cast, trained or wrapped; this one can.
        model.hf_quantizer = None  # type: ignore[assignment]
        for attribute in ("is_quantized", "quantization_method"):
            if attribute in vars(model):
                delattr(model, attribute)
        record_plan(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def check_weights(model: PreTrainedModel, shapes: Shapes) -> None:
    """Compare a model on the meta device with the names and shapes in its files, as transformers translates them.

    transformers would only warn and initialize weights again; with a loader such as ours it does not compare shapes.

    Args:
        model: The model, with its layers replaced.
        shapes: Shapes by the names in the files.

    Raises:
        PlanError: If a structured layer's factors are missing, a shape differs, a layer is stored in another form, or
            the model is far larger than the files.
    """
    provided, unexpected = _translated(model, shapes)
    parameters = dict(model.named_parameters())
    missing = _missing(model, provided)
    structures = {f"{name}.": m for name, m in model.named_modules() if isinstance(m, Structured)}
    for key, parameter in parameters.items():
        shape = provided.get(key)
        if key in missing or (shape is not None and shape != parameter.shape):
            layer = next((m for prefix, m in structures.items() if key.startswith(prefix)), None)
            if layer is not None or key not in missing:
                raise _misfit(key, parameter, layer, shape)
    _check_stored_forms(model, missing, unexpected)
    check_size(missing, shapes)


def _keep_adapter_dtypes(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
    """Load the trained factors of an adapter in their own data type where it is not that of the frozen weight.

    transformers casts what it reads to the data type of the parameter that is on the meta device.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Structured) and m.base is not None}
    if not layers:
        return
    keys = list(dtypes)
    provided, _ = _translated(model, {key: (position,) for position, key in enumerate(keys)})
    own = {name: dtypes[keys[found[0]]] for name, found in provided.items() if found is not None}
    for name, layer in layers.items():
        saved = {key: own.get(f"{name}.factors.{key}") for key in layer.factors}
        if len(set(saved.values())) > 1:
            for key, parameter in layer.factors.items():
                if parameter is not layer.base and (dtype := saved[key]) is not None and dtype.is_floating_point:
                    layer.factors[key] = nn.Parameter(parameter.to(dtype), parameter.requires_grad)


def missing_weights(model: PreTrainedModel, shapes: Shapes) -> set[str]:
    """Names of a model's parameters that its files do not hold, as transformers translates their names.

    Args:
        model: The model, with its layers replaced.
        shapes: Shapes by the names in the files.

    Returns:
        The names; without those of tied parameters, and those that the class declares to be computed.
    """
    computed = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    missing = _missing(model, _translated(model, shapes)[0])
    return {key for key in missing if not any(pattern.search(key) for pattern in computed)}


def _missing(model: PreTrainedModel, provided: Container[str]) -> dict[str, tuple[int, ...]]:
    tied = getattr(model, "all_tied_weights_keys", {})  # stored under one name alone
    return {k: tuple(p.shape) for k, p in model.named_parameters() if k not in provided and k not in tied}


def _misfit(key: str, parameter: nn.Parameter, layer: Structured | None, shape: tuple[int, ...] | None) -> PlanError:
    kind = "" if layer is None else f", since its layer is {layer.structure}"
    problem = "is missing" if shape is None else f"has the shape {shape}"
    config = "config.json" if layer is None else "the plan in config.json"
    return PlanError(
        f"{key} should have the shape {tuple(parameter.shape)}{kind}, but in the file it {problem}: {config} and the "
        "weights do not belong together"
    )


def _check_stored_forms(model: PreTrainedModel, missing: Mapping[str, Any], unexpected: list[str]) -> None:
    """Raise if a layer's own parameters are missing while the files hold others for it: those of a structured layer."""
    owners = {key.rpartition(".")[0] for key in missing}
    for key in unexpected:
        names = [key[:i] for i, c in enumerate(key) if c == "."]
        layer = next((name for name in names if name in owners), None)
        if layer is not None:
            raise PlanError(
                f"the files hold {key}, but the plan in config.json does not name {layer}: save the model again with "
                "buttress.hf.save, or load the whole model instead of a part"
            )


def _translated(model: PreTrainedModel, shapes: Shapes) -> tuple[dict[str, tuple[int, ...] | None], list[str]]:
    """Shapes by the names in the model, and the names that it does not have, as transformers itself translates them.

    The shape is None where transformers computes a parameter from several tensors.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    provided: dict[str, tuple[int, ...] | None] = {}
    unexpected: list[str] = []
    for key, shape in shapes.items():
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if pattern is not None:
            converter = next(c for c in converters if pattern in c.source_patterns)
            targets = converter.target_patterns
            provided |= dict.fromkeys([name, *(name.replace(targets[0], target) for target in targets)])
        elif name in state:
            provided[name] = shape
        else:
            unexpected.append(name)
    return provided, unexpected


def adapted(plan: Plan, model: PreTrainedModel) -> Plan:
    """Translate a plan to another model with the same base.

    Names gain or lose the base's prefix if one model has a head and the other does not. Entries for a head are left out
    if the model has none, and so are entries for layers that the model's own class builds in this form.

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
    built_in = {e.name: e for e in entries_of(model)}
    replaceable = {*find_sites(model, embeddings=True), *built_in}
    names = {e.name: _name_in(replaceable, e.name, model) for e in plan.entries}
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
    if plan.entries and not entries:
        raise PlanError(f"none of the layers that the plan names are in {type(model).__name__}: load the whole model")
    return Plan(tuple(e for e in entries if not _has_form(built_in.get(e.name), e)))


def _has_form(built_in: PlanEntry | None, entry: PlanEntry) -> bool:
    """Whether a layer that is structured already has the factors of an entry."""
    forms = [(e.structure, e.normalize, e.split) for e in (built_in, entry) if e is not None]
    return len(forms) == 2 and forms[0] == forms[1]


def _name_in(layers: Container[str], name: str, model: PreTrainedModel) -> str | None:
    """The name of a layer in a model with the same base, with or without a head, or around the part that was saved."""
    prefix = f"{model.base_model_prefix}."
    around = [f"{child}.{name}" for child, _ in model.named_children()]
    return next((n for n in (name, f"{prefix}{name}", name.removeprefix(prefix), *around) if n in layers), None)
