"""vLLM: serving structured models, as a plug-in that vLLM finds by itself where both are installed.

    vllm serve small

The folder is the one that `save_pretrained` writes. vLLM calls `register` at its start, through the entry point
"vllm.general_plugins", and asks the class registered here whether it can load the entry in config.json.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from buttress.core.partition import Side
from buttress.errors import PlanError
from buttress.integrations.fused_shards import FusedShards, Shard, check_servable
from buttress.integrations.missing import FAILURES, import_failure
from buttress.surgery import Plan, PlanEntry
from buttress.surgery.config_entry import METHOD, is_ours

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
except FAILURES as error:
    raise import_failure("buttress.integrations.vllm", "vllm", error) from error


def register() -> None:
    """Tell vLLM how structured models are loaded; vLLM calls it in each of its processes."""
    register_quantization_config(METHOD)(StructuredQuantization)


class StructuredQuantization(QuantizationConfig):
    """The plan of a structured model, where vLLM asks how each layer's weights are stored.

    Args:
        entries: The entries of the plan, by the names of the layers.

    Example:
        >>> StructuredQuantization.from_config(json.load(open("small/config.json"))["quantization_config"])
    """

    def __init__(self, entries: dict[str, PlanEntry]) -> None:
        super().__init__()
        self.entries = entries

    def get_name(self) -> Any:
        """The method's name."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Data types that the layers compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Smallest compute capability of a GPU: none is needed."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files beside config.json that describe the layers: none."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StructuredQuantization:
        """The entry "quantization_config" of a config.json.

        Raises:
            PlanError: If the entry is not ours, its plan is damaged, or it has structured embeddings or split layers.
        """
        if not is_ours(config):
            raise PlanError("this config.json describes no structured model: leave out quantization='buttress'")
        plan = Plan.from_json(json.dumps(config.get("plan")))
        return cls({entry.name: check_servable(entry) for entry in plan.entries})

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None = None, hf_config: Any = None
    ) -> str | None:
        """Claim a folder of ours, whose entry names no "quant_method" (see `buttress.surgery.config_entry`).

        Raises:
            PlanError: If another method was asked for.
        """
        if not is_ours(hf_quant_cfg):
            return None
        if user_quant not in (None, METHOD):
            raise PlanError(
                f"the model has structured layers, which cannot be quantized with {user_quant}: leave it out"
            )
        return METHOD

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Translate the names of the plan to those of vLLM's model."""
        self.entries = hf_to_vllm_mapper.apply_dict(self.entries)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer's weights are stored: structured, or as vLLM stores any other's.

        Args:
            layer: The layer.
            prefix: Its name in vLLM's model.

        Returns:
            The method; None for vLLM's own where the layer is not a linear one.

        Raises:
            PlanError: If the plan has entries here that vLLM's layer cannot hold.
        """
        if not isinstance(layer, LinearBase):
            self._check_dense(layer, prefix)
            return None
        names = self._shard_names(layer, prefix)
        if not any(name in self.entries for name in names):
            return UnquantizedLinearMethod()
        return StructuredLinearMethod([(name, self.entries.get(name)) for name in names])

    def _shard_names(self, layer: nn.Module, prefix: str) -> list[str]:
        """Names in the files of the layers that a layer of vLLM fuses; its own where it was saved in one piece."""
        if prefix in self.entries:
            return [prefix]
        parent, dot, name = prefix.rpartition(".")
        if shards := self.packed_modules_mapping.get(name):
            return [f"{parent}{dot}{shard}" for shard in shards]
        beside = [entry for entry in self.entries if entry.rpartition(".")[0] == parent]
        if beside and len(getattr(layer, "output_sizes", ())) > 1:  # one of them may be a shard, never to be loaded
            raise PlanError(
                f"vLLM's model does not say which layers {prefix} consists of, and {beside[0]} beside it is "
                "structured: densify_ the model"
            )
        return [prefix]

    def _check_dense(self, layer: nn.Module, prefix: str) -> None:
        inside = next((name for name in self.entries if name == prefix or name.startswith(f"{prefix}.")), None)
        if prefix and inside is not None:
            raise PlanError(
                f"{inside} is {self.entries[inside].structure}, and vLLM's {type(layer).__name__} holds dense weights "
                "only: keep embeddings, the output head and experts dense, or densify_ the model"
            )


class StructuredLinearMethod(LinearMethodBase):
    """One linear layer of vLLM with structured weights; a fused one consists of several saved layers.

    Args:
        shards: Name and entry of each saved layer, None for a dense one, in the order of their outputs.
    """

    def __init__(self, shards: list[tuple[str, PlanEntry | None]]) -> None:
        super().__init__()
        self.saved = shards

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the factors on the layer: all of them, or this process's part where the layer is divided.

        Raises:
            PlanError: If a layer cannot be divided among this number of GPUs, or its shards are not those of the plan.
        """
        by_inputs = input_size_per_partition != input_size
        divided = by_inputs or sum(output_partition_sizes) != output_size
        processes, rank = (int(layer.tp_size), int(layer.tp_rank)) if divided else (1, 0)  # type: ignore[arg-type]
        names = ", ".join(name for name, _ in self.saved)
        if divided and getattr(layer, "num_kv_head_replicas", 1) > 1:
            raise PlanError(f"{names} has fewer heads than there are GPUs: serve with a smaller tensor_parallel_size")
        in_one_piece = len(self.saved) == 1
        if divided and in_one_piece and len(output_partition_sizes) > 1:
            raise PlanError(f"{names} fuses several layers in one matrix: serve with tensor_parallel_size=1")
        sizes = [output_size] if in_one_piece else [n if by_inputs else n * processes for n in output_partition_sizes]
        if len(sizes) != len(self.saved):
            raise PlanError(f"{type(layer).__name__} has {len(sizes)} parts, but the files hold {names}: densify_ them")
        shards = [Shard(name, size, entry) for (name, entry), size in zip(self.saved, sizes, strict=True)]
        side: Side = "inputs" if by_inputs else "outputs"
        fused = FusedShards(shards, input_size, side=side, processes=processes, rank=rank)
        fused.create(layer, params_dtype)
        vars(layer).update(structured_shards=fused, has_dummy_weights=_has_dummy_weights())

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that every weight was loaded.

        Raises:
            PlanError: If the files lack one.
        """
        if not layer.has_dummy_weights:
            _shards_of(layer).finish(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the layer to `x`, of shape (*, input_size)."""
        return _shards_of(layer).apply(layer, x, bias)


def _shards_of(layer: nn.Module) -> FusedShards:
    shards = layer.structured_shards
    assert isinstance(shards, FusedShards)
    return shards


def _has_dummy_weights() -> bool:
    """Whether vLLM was told to make weights up, for measuring speed."""
    config = get_current_vllm_config_or_none()
    return config is not None and str(config.load_config.load_format) == "dummy"
