"""Tables of the GPT-2 experiments."""

from __future__ import annotations

from collections.abc import Sequence

from buttress.lab.analysis import figures
from buttress.lab.analysis.lines import largest_activations, training_seconds
from buttress.lab.runs.records import Record

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


def learning_rates_table(records: Sequence[Record]) -> str:
    """Validation losses by learning rate: one row for each model, the lowest loss of a row in bold."""
    losses: dict[tuple[str, int], dict[float, float]] = {}
    for r in sorted(records, key=lambda r: (r.run.structure, r.run.width)):
        losses.setdefault((r.run.structure or "dense", r.run.width), {})[r.run.lr] = r.results["test_loss"]
    rates = sorted({lr for by_rate in losses.values() for lr in by_rate})
    cells = [
        (structure, f"{width}", *(_loss(by_rate[lr], min(by_rate.values())) for lr in rates))
        for (structure, width), by_rate in losses.items()
    ]
    return table("structure | width | " + " | ".join(f"lr {lr:g}" for lr in rates), cells)


def _loss(loss: float, lowest: float) -> str:
    return f"**{loss:.3f}**" if loss == lowest else f"{loss:.3f}"


def muon_table() -> str:
    """Losses and largest activations at three learning rates, by AdamW and by Muon."""
    models: dict[tuple[str, str, bool], list[Record]] = {}
    for r in sorted(runs("gpt2-muon-small", "cpu"), key=lambda r: r.run.lr):
        models.setdefault((r.run.structure, r.run.optimizer, r.run.normalize), []).append(r)
    cells = []
    for (structure, optimizer, normalize), by_rate in sorted(models.items()):
        lowest = min(r.results["test_loss"] for r in by_rate)
        losses = (_loss(r.results["test_loss"], lowest) for r in by_rate)
        sizes = (f"{max(size for _, size in largest_activations(r)):.1f}" for r in by_rate)
        model = f"{structure or 'dense'}, width {by_rate[0].run.width}" + (", normalized" if normalize else "")
        cells.append((model, optimizer, *losses, " / ".join(sizes)))
    heads = ("lowest rate", "middle rate", "highest rate", "largest RMS of a block's output, by rate")
    return table(" | ".join(("model", "optimizer", *heads)), cells)


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
    "language_rates": lambda: learning_rates_table(runs("gpt2-rates")),
    "rate_transfer": lambda: learning_rates_table(runs("gpt2-rate-transfer-small", "cpu")),
    "muon": muon_table,
    "throughput": throughput_table,
    "stability": stability_table,
}

FIGURES = {
    "language.png": lambda: figures.language(runs("gpt2-wiki")),
    "rate_transfer.png": lambda: figures.landscape(runs("gpt2-rate-transfer-small", "cpu"), "test_loss"),
    "stability.png": lambda: figures.stability(runs("gpt2-stability")),
}
