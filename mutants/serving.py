"""Mistakes in loading and applying the fused layers of a server."""

from __future__ import annotations

from mutants.mutation import Mutation

SHARDS = ("tests/integrations/test_fused_shards.py",)
VLLM = ("tests/integrations/test_vllm.py",)

MUTATIONS = (
    Mutation(
        "shards of one name overwrite each other",
        "integrations/fused_shards.py",
        "start = self._sizes.get(name, 0)",
        "start = 0",
        SHARDS,
    ),
    Mutation(
        "v is loaded as k",
        "integrations/fused_shards.py",
        '_SHARD_IDS = {"q": 0, "k": 1, "v": 2}',
        '_SHARD_IDS = {"q": 0, "k": 2, "v": 1}',
        SHARDS,
    ),
    Mutation(
        "a fused layer ignores its bias",
        "integrations/fused_shards.py",
        "return y if bias is None else y + bias",
        "return y",
        SHARDS,
    ),
    Mutation(
        "gains are multiplied in at each check",
        "integrations/fused_shards.py",
        "        self._unfolded.clear()\n",
        "",
        SHARDS,
    ),
    Mutation(
        "served factors are normalized even where they are small",
        "integrations/fused_shards.py",
        ".clamp(min=1.0))",
        ")",
        SHARDS,
    ),
    Mutation(
        "factors that never came are not noticed",
        "integrations/fused_shards.py",
        "        if self._missing:\n",
        "        if False:\n",
        (*SHARDS, *VLLM),
    ),
    Mutation(
        "factors of any shape with as many numbers are loaded",
        "integrations/fused_shards.py",
        "if tuple(tensor.shape) != place.saved_shape:",
        "if tensor.dim() != len(place.saved_shape):",
        SHARDS,
    ),
    Mutation(
        "every GPU of vLLM loads the first part",
        "integrations/vllm.py",
        "side=side, processes=processes, rank=rank)",
        "side=side, processes=processes)",
        VLLM,
    ),
    Mutation(
        "replicated heads are divided",
        "integrations/vllm.py",
        'getattr(layer, "num_kv_head_replicas", 1) > 1',
        "False",
        VLLM,
    ),
    Mutation(
        "served factors are normalized by the size of one GPU's part",
        "integrations/fused_shards.py",
        "self._stds[shard.name] = {f.name: init_std(f) for f in chain.factors}",
        "self._stds[shard.name] = {f.name: init_std(f) for f in own.chain.factors}",
        VLLM,
    ),
    Mutation(
        "served factors are normalized by the norm of one GPU's part",
        "integrations/fused_shards.py",
        "= mean_square(tensor)",
        "= mean_square(part_of(tensor, place.division, self.rank, self.processes))",
        VLLM,
    ),
    Mutation(
        "vLLM does not claim our folders",
        "integrations/vllm.py",
        "            return None\n        if user_quant not in",
        "            return None\n        return None\n        if user_quant not in",
        VLLM,
    ),
    Mutation(
        "vLLM's fused layers are taken for dense ones",
        "integrations/vllm.py",
        "if shards := self.packed_modules_mapping.get(name):",
        "if shards := ():",
        VLLM,
    ),
    Mutation(
        "vLLM's names of layers are ignored",
        "integrations/vllm.py",
        "self.entries = hf_to_vllm_mapper.apply_dict(self.entries)",
        "hf_to_vllm_mapper.apply_dict(self.entries)",
        VLLM,
    ),
    Mutation(
        "structured experts are left to vLLM",
        "integrations/vllm.py",
        'if name == prefix or name.startswith(f"{prefix}.")',
        "if name == prefix",
        VLLM,
    ),
    Mutation(
        "weights without their scales are applied",
        "integrations/fused_shards.py",
        "        if self._unfolded:\n            names",
        "        if False:\n            names",
        SHARDS,
    ),
    Mutation(
        "factors that were not loaded again are scaled twice",
        "integrations/fused_shards.py",
        "            self._missing |= {key for key in self._slices if key[0] == number}\n",
        "",
        SHARDS,
    ),
    Mutation(
        "a graph of weights that have moved is replayed",
        "integrations/generation.py",
        '        if self.engine == "cuda_graph" and self._captured_tensors != self._tensors():\n',
        "        if False:\n",
        ("tests/integrations/test_generation.py",),
    ),
)
