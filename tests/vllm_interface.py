"""A copy of the part of vLLM's interface that the plug-in uses, in our words, for machines without vLLM.

It has the names, the arguments and the order of calls of vLLM 0.33, and none of its code or behavior beyond that:
`tests/integrations/test_vllm.py` runs the plug-in with vLLM itself where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

PREFIX = "vllm.model_executor.layers"


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class QuantizeMethodBase:
    pass


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        pass


class LinearBase(nn.Module):
    """A linear layer of one process out of `processes`, with one or several outputs side by side.

    Its outputs are divided among the processes, or its inputs.
    """

    def __init__(
        self,
        d_in: int,
        outputs: list[int],
        config: Any,
        prefix: str,
        *,
        processes: int = 1,
        rank: int = 0,
        by_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.output_sizes = outputs
        self.tp_size, self.tp_rank = processes, rank
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            self,
            input_size_per_partition=d_in // processes if by_inputs else d_in,
            output_partition_sizes=outputs if by_inputs else [size // processes for size in outputs],
            input_size=d_in,
            output_size=sum(outputs),
            params_dtype=torch.float32,
            weight_loader=None,
        )


class WeightsMapper:
    """Renames layers, as vLLM's does where its model has other names than transformers'."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def apply_dict(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name.replace(self.old, self.new): value for name, value in values.items()}


class Registry(dict[str, type]):
    def register(self, name: str) -> Callable[[type], type]:
        return lambda cls: self.setdefault(name, cls)


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Registry]:
    """Put the interface in vLLM's place, and import the plug-in anew.

    Returns:
        The plug-in's module, and what it registers.
    """
    registry = Registry()
    modules = {
        "vllm": {},
        "vllm.config": {
            "get_current_vllm_config_or_none": lambda: SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
        },
        "vllm.model_executor": {},
        PREFIX: {},
        f"{PREFIX}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{PREFIX}.quantization": {"register_quantization_config": registry.register},
        f"{PREFIX}.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": QuantizeMethodBase,
        },
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    spec = find_spec("buttress.integrations.vllm")
    assert spec is not None
    assert spec.loader is not None
    plugin = module_from_spec(spec)  # not in sys.modules: it ends with the test
    spec.loader.exec_module(plugin)
    return plugin, registry
