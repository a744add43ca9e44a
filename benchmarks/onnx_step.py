"""The one-token step of a causal language model in ONNX Runtime, with the static cache as inputs and outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache


class CacheStep(nn.Module):
    """The step as a function of its cache: (token, position, mask, keys..., values...) -> (logits, keys..., values...).

    Args:
        model: The model.
        max_length: Tokens that the cache holds.
    """

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__()
        self.model, self.max_length = model, max_length

    def forward(self, token: Tensor, position: Tensor, mask: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        """One token of each text."""
        pasts = StaticCache(config=self.model.config, max_cache_len=self.max_length)
        depth = len(cache) // 2
        for i, layer in enumerate(pasts.layers):
            layer.lazy_initialization(cache[i], cache[depth + i])
            # An exported program may not write to its inputs.
            layer.keys, layer.values = cache[i].clone(), cache[depth + i].clone()
            layer.cumulative_length = position[0, 0].clone()
        output = self.model(
            input_ids=token, position_ids=position, attention_mask=mask, past_key_values=pasts, use_cache=True
        )
        return (output.logits[:, -1], *(c.keys for c in pasts.layers), *(c.values for c in pasts.layers))


class OnnxDecoder:
    """Greedy decoding in ONNX Runtime, without padding. The prompt is read token by token.

    Args:
        model: The model, in float32: ONNX Runtime has no bfloat16 matmuls on CPUs.
        max_length: Tokens that the cache holds.
        batch: Number of prompts at a time.
        threads: Threads of ONNX Runtime.
    """

    def __init__(self, model: Any, max_length: int, batch: int, threads: int) -> None:
        import onnxruntime

        empty = StaticCache(config=model.config, max_cache_len=max_length)
        token, position = torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, 1, dtype=torch.long)
        with torch.no_grad():
            model(token, past_key_values=empty, use_cache=True)  # allocates the cache
        empty.reset()
        cache = [*(c.keys for c in empty.layers), *(c.values for c in empty.layers)]
        mask = torch.ones(batch, max_length, dtype=torch.long)
        step = CacheStep(model, max_length).eval()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = Path(folder) / "step.onnx"
            torch.onnx.export(step, (token, position, mask, *cache), dynamo=True, verbose=False).save(path)
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.mask, self.cache = self._value(mask.numpy()), [c.numpy() for c in cache]

    def stream(self, ids: Tensor, *, max_new_tokens: int) -> Iterator[Tensor]:
        """The most likely next tokens, (batch,) each."""
        # Two copies of the cache take turns, so that no step reads what it writes.
        caches = [[self._value(c * 0) for c in self.cache] for _ in range(2)]
        token, length = ids[:, :1], ids.shape[1]
        for i in range(length + max_new_tokens - 1):
            binding = self.session.io_binding()
            position = torch.full_like(token, i).numpy()
            values = (self._value(token.contiguous().numpy()), self._value(position), self.mask, *caches[i % 2])
            for name, value in zip(self.inputs, values, strict=True):
                binding.bind_ortvalue_input(name, value)
            binding.bind_output(self.outputs[0])
            for name, value in zip(self.outputs[1:], caches[1 - i % 2], strict=True):
                binding.bind_ortvalue_output(name, value)
            self.session.run_with_iobinding(binding)
            if i + 1 < length:
                token = ids[:, i + 1 : i + 2]
            else:
                token = torch.from_numpy(binding.get_outputs()[0].numpy()).argmax(-1, keepdim=True)
                yield token[:, 0]
