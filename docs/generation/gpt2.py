"""Tables of the GPT-2 experiments."""

from __future__ import annotations

from buttress.lab.analysis import figures
from buttress.lab.analysis.lines import largest_activations, training_seconds

from .markdown import table
from .records import runs


def loss_table() -> str:
    cells = []
    for r in sorted(runs("gpt2-wiki"), key=lambda r: (r.run.structure, r.macs)):
        macs = r.macs / r.run.context, (r.macs - r.results["head_macs"]) / r.run.context
        costs = (f"{r.params / 1e6:.0f} M", *(f"{m / 1e6:.1f} M" for m in macs))
        losses = (f"{r.results[k]:.3f}" for k in ("train_loss", "test_loss"))
        cells.append((r.run.structure or "dense", f"{r.run.width}", *costs, *losses, f"{training_seconds(r):.0f}"))
    return table(
        "structure | width | parameters | MACs per token | MACs per token without the head | "
        "train loss | validation loss | training seconds",
        cells,
    )


def learning_rates_table() -> str:
    losses = {(r.run.structure, r.run.width, r.run.lr): r.results["test_loss"] for r in runs("gpt2-rates")}
    rates = sorted({lr for *_, lr in losses})
    cells = [
        (structure or "dense", f"{width}", *(f"{losses[structure, width, lr]:.3f}" for lr in rates))
        for structure, width in sorted({(s, w) for s, w, _ in losses})
    ]
    return table("structure | width | " + " | ".join(f"lr {lr:g}" for lr in rates), cells)


def throughput_table() -> str:
    cells = []
    for r in runs("gpt2-throughput"):
        speed = f"{r.results['step_ms']:.0f}", f"{r.results['tokens_per_second'] / 1e3:.0f} k"
        usage = f"{100 * r.results['mfu']:.1f} %", f"{r.results['peak_gib']:.1f}"
        macs = f"{r.macs / r.run.context / 1e6:.1f} M"
        cells.append((r.run.structure or "dense", f"{r.run.width}", macs, *speed, *usage))
    return table("structure | width | MACs per token | ms per step | tokens per second | MFU | peak memory, GiB", cells)


def stability_table() -> str:
    cells = []
    for r in sorted(runs("gpt2-stability"), key=lambda r: (r.run.lr, r.run.normalize)):
        blocks = [size for _, size in largest_activations(r)]
        layers = (r.metrics[f"{which} output"][-1][1] for which in ("median", "largest"))
        sizes = (f"{size:,.0f}" if size >= 10 else f"{size:.2f}" for size in (max(blocks), blocks[-1], *layers))
        normalized = "yes" if r.run.normalize else "no"
        cells.append((f"{r.run.lr:g}", normalized, *sizes, f"{r.results['test_loss']:.3f}"))
    return table(
        "lr | normalized | largest RMS of a block's output | final RMS of a block's output | "
        "median RMS of a layer's output | largest RMS of a layer's output | validation loss",
        cells,
    )


TABLES = {
    "language": loss_table,
    "language_rates": learning_rates_table,
    "throughput": throughput_table,
    "stability": stability_table,
}

FIGURES = {
    "language.png": lambda: figures.language(runs("gpt2-wiki")),
    "stability.png": lambda: figures.stability(runs("gpt2-stability")),
}
