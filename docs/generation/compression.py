"""Tables of the compressed models."""

from __future__ import annotations

from .markdown import percent, table
from .records import rows

STAGES = {"plain": "projected", "aware": "projected, input-aware", "healed 1000": "healed, 1000 steps"}


def minilm_table() -> str:
    measured = rows("h200/minilm.csv")
    stages = list(dict.fromkeys(r["weights"] for r in measured))
    by_stage = {(r["keep"], r["structure"], r["weights"]): r for r in measured}
    cells = []
    for keep, structure in dict.fromkeys((r["keep"], r["structure"]) for r in measured):
        group = [by_stage.get((keep, structure, stage)) for stage in stages]
        kept = next(r["kept"] for r in group if r)
        scores = (f"{r['cosine']} / {r['spearman']} ({float(r['seconds']):.0f} s)" if r else "" for r in group)
        cells.append((percent(keep), structure, percent(kept), *scores))
    return table("target | structure | kept | " + " | ".join(STAGES[stage] for stage in stages), cells)


def minilm_sums_table() -> str:
    measured = rows("cpu/minilm_sums.csv")
    by_stage = {(r["rank"], r["structure"], r["weights"]): r for r in measured}
    stages = list(dict.fromkeys(r["weights"] for r in measured))
    cells = []
    for rank, structure in dict.fromkeys((r["rank"], r["structure"]) for r in measured):
        group = [by_stage[rank, structure, stage] for stage in stages]
        scores = (f"{r['cosine']} / {r['spearman']}" for r in group)
        cells.append((rank, structure, f"{100 * float(group[0]['kept']):.1f}%", *scores))
    steps = stages[-1].removeprefix("healed ")
    return table(f"BTT rank | structure | kept | projected, input-aware | healed, {steps} steps", cells)


def gpt2_wiki_table() -> str:
    cells = [
        (
            percent(r["kept"]),
            r["heal"] + (", undone" if r["undone"] == "True" else ""),
            f"{float(r['perplexity']):.1f}",
            f"{float(r['seconds'] or 0):.0f}",
        )
        for r in rows("gpt2_wiki.csv")
    ]
    return table("kept MACs | healing steps | perplexity | seconds", cells)


def smollm2_table() -> str:
    measured = rows("cpu/smollm2.csv")
    cells = []
    for r in sorted(measured, key=lambda r: (-float(r["target"]), int(r["healed_tokens"]), float(r["perplexity"]))):
        tokens = int(r["healed_tokens"])
        cells.append(
            (
                percent(r["kept"]),
                r["model"],
                f"{tokens:,}" if tokens else "",
                f"{float(r['perplexity']):.1f}",
                f"{float(r['perplexity_second']):.1f}",
                f"{int(r['bytes_bf16']) / 1e6:.0f}",
            )
        )
    return table("kept MACs | model | healed tokens | Wikipedia | Python source | MB", cells)


def decoding_table() -> str:
    cells = [
        (
            r["model"],
            r["dtype"],
            r["engine"],
            r["batch"],
            f"{float(r['tokens_per_second']):.1f}",
            f"{float(r['bound']):.1f}",
            f"{float(r['faster_than_first']):.2f}×",
            f"{float(r['faster_by_bytes']):.2f}×",
            f"{float(r['spread']):.0%}",
        )
        for r in rows("cpu/decode_models.csv")
    ]
    heading = "model | dtype | engine | batch | tokens per second | bound | against dense | by bytes | spread"
    return table(heading, cells)


TABLES = {
    "decode_models": decoding_table,
    "smollm2": smollm2_table,
    "minilm": minilm_table,
    "minilm_sums": minilm_sums_table,
    "gpt2_wiki": gpt2_wiki_table,
}
