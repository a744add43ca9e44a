"""Train a GPT-2 of transformers on text, compress it with `buttress compress`, heal it, and sample from it.

    buttress tokens train.txt --val val.txt --out tokens/wiki
    python benchmarks/gpt2_wiki.py --tokens tokens/wiki --text some_of_train.txt --model out/gpt2

Perplexity is that of the validation tokens, before, after compression, and after healing. The model is trained once
and saved in the folder `--model`; compressed models are saved next to it. `--text` is plain text for calibration and
healing.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu import save
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import buttress.hf  # noqa: F401  (so that compressed folders load)
from buttress.compression.pipeline import compress
from buttress.lab.data import tokens as tokens_of

CONTEXT, BATCH = 512, 64
PROMPTS = ("The history of the city begins", "In mathematics, a matrix is", "She was born in")


def batch(ids: Any, starts: np.ndarray, device: str) -> torch.Tensor:
    """Token sequences at the given starts."""
    places = starts[:, None] + np.arange(CONTEXT)
    return torch.from_numpy(ids[places].astype(np.int64)).to(device, non_blocking=True)


def trained(found: tokens_of.Tokens, steps: int, width: int, depth: int, lr: float, device: str) -> GPT2LMHeadModel:
    """A GPT-2 from scratch: AdamW, warm-up and cosine, bf16 where there is a GPU."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=found.vocab, n_positions=CONTEXT, n_embd=width, n_layer=depth, n_head=width // 64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=found.end, eos_token_id=found.end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    rise = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / rise, 0.1 + 0.45 * (1 + math.cos(math.pi * s / steps)))
    )
    rng = np.random.default_rng(0)
    run = torch.compile(model) if device == "cuda" else model
    begin = time.perf_counter()
    for step in range(steps):
        x = batch(found.train, rng.integers(0, len(found.train) - CONTEXT, BATCH), device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = run(input_ids=x).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, found: tokens_of.Tokens, device: str, most: int) -> float:
    """Perplexity of validation sequences: of all, or of at most `most`, evenly spaced."""
    starts = np.arange(0, len(found.val) - CONTEXT, CONTEXT)
    starts = starts[:: -(-len(starts) // most)] if most else starts
    total, count = 0.0, 0
    for part in np.array_split(starts, max(1, len(starts) // 16)):
        x = batch(found.val, part, device)
        logits = model(input_ids=x).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
        count += x[:, 1:].numel()
    return math.exp(total / count)


def written(model: Any, found: tokens_of.Tokens, device: str) -> list[str]:
    """How the model continues each prompt, sampled from the most likely tokens."""
    texts = []
    for prompt in PROMPTS:
        torch.manual_seed(0)
        ids = torch.tensor([found.encode(prompt)], device=device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=40, temperature=0.8, max_new_tokens=50,
            pad_token_id=found.end,
        )  # fmt: skip
        texts.append(found.decode(output[0].tolist()))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="token folder, from `buttress tokens`")
    parser.add_argument("--text", type=Path, required=True, help="plain text to calibrate and heal with")
    parser.add_argument("--model", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--out", type=Path, default=Path("results/gpt2_wiki.csv"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--keep", type=float, nargs="*", default=[0.75, 0.5])
    parser.add_argument("--heal", type=int, nargs="*", default=[0, 500])
    parser.add_argument("--heal-lr", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens, to calibrate and heal with")
    parser.add_argument("--measure", type=int, default=0, help="largest number of validation sequences. Default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    found = tokens_of.read(given.tokens)
    if not (given.model / "config.json").is_file():
        model = trained(found, given.steps, given.width, given.depth, given.lr, given.device)
        model.save_pretrained(given.model)
        PreTrainedTokenizerFast(
            tokenizer_file=str(given.tokens / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        ).save_pretrained(given.model)
    lines: list[dict[str, object]] = []
    texts: list[str] = []

    def record(folder: Path, keep: float, heal: int, more: dict[str, object]) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder).to(given.device).eval()
        value = perplexity(model, found, given.device, given.measure)
        lines.append({"keep": keep, "heal": heal, "perplexity": round(value, 3)} | more)
        print(lines[-1], flush=True)
        save(given.out, lines)
        texts.append(f"keep {keep}, healed by {heal} steps\n" + "\n".join(written(model, found, given.device)))
        given.out.with_suffix(".txt").write_text("\n\n".join(texts) + "\n")

    record(given.model, 1.0, 0, {"kept": 1.0, "undone": "", "seconds": ""})
    for keep in given.keep:
        plan, kept = None, 1.0  # the first one's are the others' too
        for heal in given.heal:
            out = given.model.with_name(f"{given.model.name}-{keep}-{heal}")
            done = compress(
                given.model, out, keep, plan=plan, text=given.text, heal=heal, lr=given.heal_lr, length=256,
                batch=given.batch, device=given.device,
            )  # fmt: skip
            plan, kept = done.plan, done.budget.kept if done.budget else kept
            seconds = round(sum(done.seconds.values()), 1)
            record(out, keep, heal, {"kept": round(kept, 4), "undone": done.undone if heal else "", "seconds": seconds})


if __name__ == "__main__":
    main()
