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
from files import write_csv
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import buttress.hf  # noqa: F401  (so that compressed folders load)
from buttress.compression.pipeline import compress
from buttress.lab.data import tokens as token_folders

CONTEXT, BATCH = 512, 64
PROMPTS = ("The history of the city begins", "In mathematics, a matrix is", "She was born in")


def batch(ids: Any, starts: np.ndarray, device: str) -> torch.Tensor:
    """Token sequences at these starts."""
    positions = starts[:, None] + np.arange(CONTEXT)
    return torch.from_numpy(ids[positions].astype(np.int64)).to(device, non_blocking=True)


def train(tokens: token_folders.Tokens, steps: int, width: int, depth: int, lr: float, device: str) -> GPT2LMHeadModel:
    """Train a GPT-2 from scratch: AdamW, warmup and cosine schedule, bf16 on a GPU."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tokens.vocab, n_positions=CONTEXT, n_embd=width, n_layer=depth, n_head=width // 64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=tokens.end, eos_token_id=tokens.end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * s / steps)))
    )
    rng = np.random.default_rng(0)
    run = torch.compile(model) if device == "cuda" else model
    start = time.perf_counter()
    for step in range(steps):
        x = batch(tokens.train, rng.integers(0, len(tokens.train) - CONTEXT, BATCH), device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = run(input_ids=x).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, tokens: token_folders.Tokens, device: str, limit: int) -> float:
    """Perplexity of the validation sequences: of all, or of at most `limit`, evenly spaced."""
    starts = np.arange(0, len(tokens.val) - CONTEXT, CONTEXT)
    starts = starts[:: -(-len(starts) // limit)] if limit else starts
    total, count = 0.0, 0
    for part in np.array_split(starts, max(1, len(starts) // 16)):
        x = batch(tokens.val, part, device)
        logits = model(input_ids=x).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
        count += x[:, 1:].numel()
    return math.exp(total / count)


def continuations(model: Any, tokens: token_folders.Tokens, device: str) -> list[str]:
    """The model's continuation of each prompt, sampled from the most likely tokens."""
    texts = []
    for prompt in PROMPTS:
        torch.manual_seed(0)
        ids = torch.tensor([tokens.encode(prompt)], device=device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=40, temperature=0.8, max_new_tokens=50,
            pad_token_id=tokens.end,
        )  # fmt: skip
        texts.append(tokens.decode(output[0].tolist()))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="token folder, from `buttress tokens`")
    parser.add_argument("--text", type=Path, required=True, help="plain text to calibrate and heal with")
    parser.add_argument("--model", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--out", type=Path, default=Path("results/gpt2_wiki.csv"), help="CSV file to write")
    parser.add_argument("--steps", type=int, default=1500, help="training steps")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    parser.add_argument("--depth", type=int, default=8, help="number of blocks")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the training")
    parser.add_argument("--keep", type=float, nargs="*", default=[0.75, 0.5], help="fractions of the MACs to keep")
    parser.add_argument("--heal", type=int, nargs="*", default=[0, 500], help="steps of healing")
    parser.add_argument("--heal-lr", type=float, default=1e-4, help="learning rate of healing")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens, to calibrate and heal with")
    parser.add_argument("--measure", type=int, default=0, help="largest number of validation sequences. Default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to compute on")
    options = parser.parse_args()
    tokens = token_folders.read(options.tokens)
    if not (options.model / "config.json").is_file():
        model = train(tokens, options.steps, options.width, options.depth, options.lr, options.device)
        model.save_pretrained(options.model)
        PreTrainedTokenizerFast(
            tokenizer_file=str(options.tokens / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        ).save_pretrained(options.model)
    rows: list[dict[str, object]] = []
    texts: list[str] = []

    def record(folder: Path, keep: float, heal: int, more: dict[str, object]) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder).to(options.device).eval()
        value = perplexity(model, tokens, options.device, options.measure)
        rows.append({"keep": keep, "heal": heal, "perplexity": round(value, 3)} | more)
        print(rows[-1], flush=True)
        write_csv(options.out, rows)
        texts.append(f"keep {keep}, healed by {heal} steps\n" + "\n".join(continuations(model, tokens, options.device)))
        options.out.with_suffix(".txt").write_text("\n\n".join(texts) + "\n")

    record(options.model, 1.0, 0, {"kept": 1.0, "undone": "", "seconds": ""})
    for keep in options.keep:
        plan, kept = None, 1.0  # those of the first compression are used for all of them
        for heal in options.heal:
            out = options.model.with_name(f"{options.model.name}-{keep}-{heal}")
            outcome = compress(
                options.model, out, keep, plan=plan, text=options.text, heal=heal, lr=options.heal_lr, length=256,
                batch=options.batch, device=options.device,
            )  # fmt: skip
            plan, kept = outcome.plan, outcome.budget.kept if outcome.budget else kept
            seconds = round(sum(outcome.seconds.values()), 1)
            undone = outcome.undone if heal else ""
            record(out, keep, heal, {"kept": round(kept, 4), "undone": undone, "seconds": seconds})


if __name__ == "__main__":
    main()
