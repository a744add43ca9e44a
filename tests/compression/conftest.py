"""Small model folders of transformers, sentence-transformers and timm, and data for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from toy_language import sentence, tokenizer


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(sentence(i) for i in range(400)))
    return path


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A language model that has learnt a little."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=62, n_positions=32, n_embd=48, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    words = tokenizer()
    ids = words(text.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    blocks = ids[: len(ids) // 24 * 24].view(-1, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = blocks[torch.randint(0, len(blocks), (16,), generator=torch.Generator().manual_seed(step))]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers writes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=62, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    folder = tmp_path_factory.mktemp("bert") / "model"
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"another module's weights")
    kinds = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
             {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
             {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(kinds))
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as timm writes it."""
    timm = pytest.importorskip("timm")
    from buttress import vision

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1, img_size=32, patch_size=8)
    folder = tmp_path_factory.mktemp("timm") / "model"
    model.pretrained_cfg["input_size"] = (3, 32, 32)
    timm.models.save_for_hf(
        model, str(folder), model_args={"depth": 1, "img_size": 32, "patch_size": 8}, safe_serialization=True
    )
    torch.testing.assert_close(vision.load(folder)(torch.ones(1, 3, 32, 32)), model.eval()(torch.ones(1, 3, 32, 32)))
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    Image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(40):
        pixels = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).resize((40, 40)).save(folder / f"{i}.png")
    return folder
