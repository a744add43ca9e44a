"""GGUF files: loaded with the numbers that they hold, or refused before memory is allocated; never run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from buttress.compression.model_folders import open_model_folder
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import mutate_bytes

WIDTH, HIDDEN, VOCABULARY = 32, 64, 40
NUMBERS = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "vocab_size", "rope.dimension_count",
)  # fmt: skip


def prepare(folder: Path) -> tuple[bytes, torch.Tensor]:
    """The bytes of a file with one layer, and the matrix of its embedding."""
    disable_progress_bar()
    write(folder / "model.gguf", {})
    return (folder / "model.gguf").read_bytes(), matrix("token_embd", VOCABULARY, WIDTH)


def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
    """A matrix whose values depend on its name."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(len(name)))


def write(path: Path, changed: dict[str, Any]) -> None:
    """Write a llama of one layer in float32, with some of its counts changed."""
    writer = gguf.GGUFWriter(path, changed.get("architecture", "llama"))
    counts = dict(zip(KEYS, (1, 64, WIDTH, HIDDEN, 4, 2, VOCABULARY, 8), strict=True))
    for key, value in (counts | changed.get("counts", {})).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(changed.get("tokens", VOCABULARY))])
    writer.add_token_merges([])
    writer.add_bos_token_id(changed.get("bos", 0))
    shapes = {
        "token_embd": (VOCABULARY, WIDTH), "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (WIDTH // 2, WIDTH),
        "blk.0.attn_v": (WIDTH // 2, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH), "blk.0.ffn_gate": (HIDDEN, WIDTH),
        "blk.0.ffn_up": (HIDDEN, WIDTH), "blk.0.ffn_down": (WIDTH, HIDDEN),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", matrix(name, *shape).numpy())
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_case(case: Case) -> None:
    content, embedding = case.inputs
    path = case.folder / "model.gguf"
    damage = case.random.choice((damage_bytes, damage_header, damage_header, damage_counts))
    damage(case, path, content)
    folder = open_model_folder(path, "cpu")
    expected = type(LlamaForCausalLM(LlamaConfig(**_sizes())))
    if damage is damage_counts and not isinstance(folder.model, expected):
        raise Failure("another class than the file names")
    loaded = folder.model.get_input_embeddings().weight
    if damage is damage_counts and not torch.equal(loaded, embedding):
        raise Failure("a model has other weights than its file without a word")


def _sizes() -> dict[str, int]:
    return {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def damage_bytes(case: Case, path: Path, content: bytes) -> None:
    """Change, remove or add bytes anywhere."""
    path.write_bytes(mutate_bytes(content, case.random))


def damage_header(case: Case, path: Path, content: bytes) -> None:
    """Change a number of the header: a count, a length, a type or an offset."""
    start = content.index(b"token_embd") + 400
    at = case.random.choice([8, 16, *(m.end() for m in re.finditer(rb"[a-z_]{3,}", content[:start]))])
    width = case.random.choice((1, 4, 8))
    value = case.random.choice((*NUMBERS, 2**40, 2**63, 2**64 - 1)) & ((1 << (8 * width)) - 1)
    path.write_bytes(content[:at] + value.to_bytes(width, "little") + content[at + width :])


def damage_counts(case: Case, path: Path, content: bytes) -> None:
    """Write other sizes than those of the tensors, as a valid file."""
    random = case.random
    changed: dict[str, Any] = {"counts": {random.choice(KEYS): random.choice(NUMBERS)}}
    if random.random() < 0.2:
        changed["architecture"] = random.choice(("qwen2", "gpt2", "", "bloom", "../../secret", "x" * 3000))
    if random.random() < 0.2:
        changed |= {"tokens": random.choice((1, 39, 41, 5000)), "bos": random.choice((0, 39, 40, 2**32 - 1))}
    write(path, changed)


AREA = Area("gguf_files", 400, 30.0, prepare, run_case)
