"""How the fixtures in this folder were created, with version 0.1.0: python generate.py OUT

It uses import paths of version 0.1 and does not run with later ones; it is kept as a record of what the files are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

os.environ["BUTTRESS_CACHE"] = str(Path(sys.argv[1]) / "speeds")

import contextlib

import tokenizers
import transformers
from buttress.compress import compress
from buttress.lab.config import Run
from buttress.lab.records import Store, write_records
from buttress.lab.train import Progress, train
from buttress.lab.trainer import Diverged
from buttress.ops.measured import Row, Times, keep

import buttress as bt
from buttress import hf, vision
from buttress.lab.data import tokens
from buttress.lab.recipes import recipes
from buttress.ops.tuning import Backward, Forward, Tuning

OUT = Path(sys.argv[1])
RUN = Run(task="digits", model="mlp", width=16, depth=2, structure="btt(rank=2)", normalize=True, batch=64, steps=250,
          lr=3e-3, evaluate=100, trace=100, clip=1.0, mixup=0.2, warmup=10)  # fmt: skip
DIVERGES = Run(task="digits", model="mlp", width=16, depth=2, optimizer="sgd", batch=64, steps=200, lr=1e6, trace=50)


class Stop(Exception):
    pass


def run_keys() -> None:
    keys = {name: [run.key for run in recipe.runs()] for name, recipe in recipes().items()}
    runs = [RUN, DIVERGES]
    data = {"recipes": keys, "runs": [{"fields": json.loads(r.to_json()), "key": r.key} for r in runs]}
    (OUT / "run_keys.json").write_text(json.dumps(data, indent=1) + "\n")


def training() -> None:
    records = [train(RUN, device="cpu")]
    try:
        train(DIVERGES, device="cpu", store=Store(OUT / "tmp"))
    except Diverged:
        records += list(Store(OUT / "tmp"))
    write_records(OUT / "records.jsonl", records)
    store = Store(OUT / "runs")

    def stop(progress: Progress) -> None:
        if progress.step >= 200:
            raise Stop

    with contextlib.suppress(Stop):
        train(RUN, device="cpu", store=store, watch=stop, checkpoint_seconds=0.0)
    for name in ("lock", "claim"):
        (store.place(RUN) / name).unlink(missing_ok=True)
    shutil.rmtree(OUT / "tmp")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.qkv = nn.Linear(8, 24)
        self.body = nn.Linear(24, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.qkv(self.encoder(self.embed(ids)))))
        return y


def modules() -> None:
    torch.manual_seed(0)
    model = Model()
    plan = {
        "embed": bt.BTT(rank=2), "head": bt.BTT(rank=2), "qkv": bt.Monarch(blocks=2), "body": bt.LowRank(rank=3),
        "encoder.self_attn.*": bt.Kronecker(), "encoder.linear*": bt.TensorTrain(rank=2),
    }  # fmt: skip
    bt.replace_(model, plan, normalize=True, split={"qkv": 3})
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.eval()
    ids = torch.arange(12).remainder(11).view(2, 6)
    (OUT / "plan.json").write_text(bt.Plan.of(model).to_json() + "\n")
    tensors = {f"state.{k}": v.contiguous().clone() for k, v in model.state_dict().items()}
    save_file(tensors | {"ids": ids, "output": model(ids).detach().contiguous()}, OUT / "state_dict.safetensors")


WORDS = [f"w{i}" for i in range(30)]


def sentence(seed: int) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[15 * (seed % 2) + int(i)] for i in torch.randint(0, 15, (12,), generator=draw))


def text() -> Path:
    path = OUT / "text.txt"
    path.write_text("\n".join(sentence(i) for i in range(120)) + "\n")
    return path


def tokenizer() -> Any:
    vocab = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=12, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def folders() -> None:
    ids = torch.arange(8).view(1, 8)
    model = gpt2()
    bt.replace_(model, {"transformer.wte": bt.BTT(rank=2), "lm_head": bt.BTT(rank=2), "*": bt.BTT(rank=2)},
                split={"*.c_attn": 3})  # fmt: skip
    hf.save(model, OUT / "transformers", tokenizer())
    outputs = {"transformers": model(ids).logits.detach().contiguous()}
    source = OUT / "source"
    gpt2().save_pretrained(source)
    tokenizer().save_pretrained(source)
    compress(source, OUT / "compressed", keep=0.6, text=OUT / "text.txt", batch=8, length=8, calibrate=4)
    small = transformers.GPT2LMHeadModel.from_pretrained(OUT / "compressed").eval()
    outputs["compressed"] = small(ids).logits.detach().contiguous()
    shutil.rmtree(source)
    import timm

    args = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", **args).eval()
    bt.replace_(vit, bt.BTT(rank=2))
    vision.save(vit, OUT / "timm", **args)
    x = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    outputs["timm"] = vit(x).detach().contiguous()
    save_file({**outputs, "ids": ids, "image": x}, OUT / "folder_outputs.safetensors")


def student_and_teacher() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))
    student = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))
    student.load_state_dict(teacher.state_dict())
    bt.replace_(student, bt.BTT(rank=2), init="project")
    return student, teacher


def batch(step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))


def healing() -> None:
    student, teacher = student_and_teacher()
    losses = bt.heal(student, teacher, batch, 12, lr=1e-3)

    def stops(step: int) -> Tensor:
        if step == 6:
            raise Stop
        return batch(step)

    student, teacher = student_and_teacher()
    start = {f"student.{k}": v.clone() for k, v in student.state_dict().items()}
    start |= {f"teacher.{k}": v.clone() for k, v in teacher.state_dict().items()}
    with contextlib.suppress(Stop):
        bt.heal(student, teacher, stops, 12, lr=1e-3, checkpoint=OUT / "healing.pt", every=3, label="fixture")
    save_file(start, OUT / "healing_start.safetensors")
    (OUT / "healing_losses.json").write_text(json.dumps(losses) + "\n")


def speeds() -> None:
    times = Times(forward=0.01, both=0.03, forward_eager=0.02, both_eager=0.06)
    fused = Times(forward=0.005, both=0.02, forward_eager=0.015, both_eager=0.05)
    chain = bt.BTT(rank=2).chain(256, 512)
    from buttress.ops.fused import prepare

    way = prepare(chain)
    assert way is not None
    tuning = Tuning(Forward(), Backward())
    row = Row("btt(rank=2)", 256, 512, 4096, "torch.bfloat16", way.signature, times, {"bmm": times, "triton": fused},
              tuning)  # fmt: skip
    keep("Test GPU 0.1", [row])
    for lock in (OUT / "speeds").glob("*.lock"):
        lock.unlink()


def token_folder() -> None:
    documents = OUT / "documents.txt"
    documents.write_text("".join(f"{sentence(i)}\n<|endoftext|>\n" for i in range(40)))
    tokens.write([documents], OUT / "tokens", tokenizer="train:270", val=0.2)
    documents.unlink()


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    text()
    for step in (run_keys, training, modules, folders, healing, speeds, token_folder):
        step()
        print(step.__name__, flush=True)
