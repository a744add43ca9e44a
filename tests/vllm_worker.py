"""Loads a folder with vLLM's own model class and loader on the CPU, and compares its linear layers with transformers'.

    python vllm_worker.py FOLDER PORT PROCESSES RANK

It prints one line of JSON: the largest relative difference of each linear layer by its name in vLLM, the method that
stores it, or the error. vLLM's kernels are not needed, since attention is not run.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

SHARDS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


def vllm_model(folder: str, port: str, processes: int, rank: int) -> Any:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from buttress.integrations.vllm import register

    register()
    model_config = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )
    config = VllmConfig(
        model_config=model_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(),
    )
    with set_current_vllm_config(config):
        init_distributed_environment(
            processes, rank, local_rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
        )
        initialize_model_parallel(processes)
        with torch.device("cpu"):
            model = initialize_model(vllm_config=config, model_config=model_config)
        get_model_loader(config.load_config).load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    return model


def differences(model: Any, reference: Any, processes: int, rank: int) -> dict[str, Any]:
    """By the name of each linear layer in vLLM: its method, and the relative difference of this process's outputs."""
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        parent, _, own = name.rpartition(".")
        x = torch.randn(5, layer.input_size)
        expected = [reference.get_submodule(f"{parent}.{shard}")(x) for shard in SHARDS.get(own, [own])]
        if isinstance(layer, RowParallelLinear):
            x = x.chunk(processes, dim=-1)[rank]
        else:
            expected = [y.chunk(processes, dim=-1)[rank] for y in expected]
        y = layer(x)[0]
        wanted = torch.cat(expected, dim=-1)
        found[name] = [type(layer.quant_method).__name__, float((y - wanted).norm() / wanted.norm())]
    return found


@torch.no_grad()
def main() -> None:
    folder, port, processes, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import buttress as bt

    try:
        model = vllm_model(folder, port, processes, rank)
        torch.manual_seed(0)
        result: Any = differences(model, bt.from_pretrained(folder), processes, rank)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
