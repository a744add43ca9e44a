"""Tables of layer speed, for README.md and docs/results/layer-speed.md."""

from __future__ import annotations

import json
from typing import Any

import buttress as bt
from buttress.lab.analysis.figures import LineStyles
from buttress.lab.analysis.figures.style import (
    Figure,
    add_legend,
    new_panels,
    set_cost_ticks,
    set_log_axes,
    set_plain_ticks,
    set_title,
)
from buttress.lab.analysis.lines import BASELINE, LineKey

from .markdown import milliseconds, ratio, table
from .records import RESULTS, rows

QUANTITIES = {
    "over_floor": "time over floor",
    "faster_than_linear": "speedup over nn.Linear",
    "faster_than_linear_same_macs": "speedup over nn.Linear of equal MACs",
    "faster_than_usual": "speedup over permute-and-bmm as its authors write it",
    "faster_than_bmm": "speedup over the fastest code with torch.bmm",
}

SUMMARY_QUANTITIES = ("faster_than_linear", "faster_than_linear_same_macs", "faster_than_bmm")

SUMMARY_LAYERS = (
    ("btt", "1024"),
    ("btt(rank=4)", "1024"),
    ("btt", "4096"),
    ("btt(rank=4)", "4096"),
    ("monarch(blocks=16)", "4096"),
)

GOALS = (
    ("btt", 4096, 4096, {"over_floor": 2.2, "faster_than_linear": 7, "faster_than_usual": 8}),
    ("btt", 16384, 16384, {"over_floor": 2.2, "faster_than_usual": 8}),
    ("btt(rank=2)", 4096, 4096, {"over_floor": 3, "faster_than_linear": 4.5}),
    ("btt(rank=4)", 4096, 4096, {"over_floor": 3, "faster_than_linear": 2.8, "faster_than_usual": 5}),
    ("btt", 1024, 1024, {"faster_than_linear": 1 / 0.6, "faster_than_usual": 4.5}),
    ("btt(rank=2)", 1024, 1024, {"faster_than_linear": 1 / 0.85, "faster_than_usual": 4.5}),
    ("btt(rank=4)", 1024, 1024, {"faster_than_linear": 1 / 1.3, "faster_than_usual": 4.5}),
    ("btt(rank=2)", 768, 3072, {"faster_than_linear": 1}),
    ("btt(rank=2)", 1024, 4096, {"faster_than_linear": 1}),
    ("btt(rank=4)", 1024, 4096, {"faster_than_linear": 1}),
    ("btt(rank=2)", 4096, 1024, {"faster_than_linear": 1}),
    ("btt(rank=4)", 4096, 1024, {"faster_than_linear": 1}),
    ("monarch(blocks=16)", 4096, 4096, {"over_floor": 2, "faster_than_usual": 1}),
    ("monarch", 4096, 4096, {"over_floor": 2, "faster_than_usual": 1}),
)


def summary_table() -> str:
    square = {(r["structure"], r["d_in"]): r for r in rows("h200/layers.csv") if r["d_in"] == r["d_out"]}
    cells = []
    for structure, width in SUMMARY_LAYERS:
        r = square[structure, width]
        times = (f"{milliseconds(r[k])} ms" for k in ("both_ms", "linear_both_ms", "linear_same_macs_both_ms"))
        speedups = (ratio(r[k]) for k in SUMMARY_QUANTITIES)
        cells.append((f"{structure}, {width}", *times, *speedups))
    names = " | ".join(QUANTITIES[k] for k in SUMMARY_QUANTITIES)
    return table(f"layer | time | nn.Linear of equal width | nn.Linear of equal MACs | {names}", cells)


def layers_table() -> str:
    times = ("forward_ms", "both_ms", "floor_both_ms", "linear_both_ms", "linear_same_macs_both_ms")
    others = ("usual_both_ms", "usual_best_both_ms", "bmm_both_ms")
    cells = (
        (
            f"{r['structure']}, {r['d_in']} → {r['d_out']}",
            r["impl"],
            *(milliseconds(r[k]) for k in times + others),
            *(ratio(r[k]) for k in QUANTITIES),
        )
        for r in rows("h200/layers.csv")
    )
    return table(
        "layer | kernel | forward | step | floor | nn.Linear | nn.Linear, same MACs | permute-and-bmm, authors' | "
        "permute-and-bmm, fastest | our bmm | " + " | ".join(QUANTITIES.values()),
        cells,
    )


def goals_table() -> str:
    measured = {(r["structure"], int(r["d_in"]), int(r["d_out"])): r for r in rows("h200/layers.csv")}
    cells = []
    for structure, d_in, d_out, goals in GOALS:
        for quantity, goal in goals.items():
            value = float(measured[structure, d_in, d_out][quantity])
            is_limit = quantity == "over_floor"
            reached = value <= goal if is_limit else value >= goal
            bound = f"{'at most' if is_limit else 'at least'} {ratio(f'{goal:.3g}', 2)}"
            layer = f"{structure}, {d_in} → {d_out}"
            cells.append((layer, QUANTITIES[quantity], bound, ratio(value, 3), "yes" if reached else "**no**"))
    return table("layer | quantity | goal | measured | reached", cells)


def decode_table() -> str:
    measured = rows("h200/decode.csv")
    counts = sorted({int(r["tokens"]) for r in measured})
    cells = []
    for structure, width in dict.fromkeys((r["structure"], r["width"]) for r in measured):
        by_count = {int(r["tokens"]): r for r in measured if (r["structure"], r["width"]) == (structure, width)}
        times = (f"{1e3 * float(r['forward_ms']):.1f} ({ratio(r['faster_than_linear'])})" for r in
                 (by_count[count] for count in counts))  # fmt: skip
        cells.append((f"{structure}, {width}", *times))
    return table("layer | " + " | ".join(f"{n} token{'s' if n > 1 else ''}" for n in counts), cells)


def gpt2_table() -> str:
    recomputed = {"": "", "*": ", all recomputed", "*.c_[fp]*": ", all but q, k and v recomputed"}
    cells = (
        (
            r["structure"] + recomputed.get(r["recompute"], f", `{r['recompute']}` recomputed"),
            f"{int(r['parameters']) / 1e6:.0f} M",
            *(f"{float(r[k]):.1f}" for k in ("graph_step_ms", "step_ms")),
            *(ratio(r[k]) for k in ("dense_over_graph_step_ms", "dense_over_step_ms")),
            f"{float(r['peak_gib']):.1f}",
        )
        for r in rows("h200/gpt2.csv")
    )
    return table(
        "linear layers | parameters | ms per step | ms per step, no CUDA graph | speedup over dense"
        " | speedup over dense, no CUDA graph | peak memory, GiB",
        cells,
    )


def cpu_table() -> str:
    record = json.loads((RESULTS / "cpu/layer.json").read_text())
    cells = (
        (f"`{r['structure']}`", str(r["width"]), ratio(r["ratio"], 1))
        for r in record["rows"]
        if r["question"].startswith("nn.Linear")
    )
    return table("structure | width | speedup over nn.Linear", cells)


PASSES = {"forward": "Forward pass", "both": "Training step"}
"""Columns of times in layers.csv, and their names."""


def time_figure() -> Figure:
    """Time per token of square layers against their MACs, of each structure and of nn.Linear."""
    square = sorted((r for r in rows("h200/layers.csv") if r["d_in"] == r["d_out"]), key=lambda r: int(r["d_in"]))
    structures = list(dict.fromkeys(r["structure"] for r in square))
    styles = LineStyles([BASELINE, *map(LineKey, structures)])
    figure, panels = new_panels(len(PASSES), size=(4.6, 3.6))
    for panel, (column, name) in zip(panels, PASSES.items(), strict=True):
        dense = {int(r["d_in"]): nanoseconds(r, f"linear_{column}_ms") for r in square}
        style = styles[BASELINE]
        panel.plot([w * w for w in dense], list(dense.values()), **style.line | style.points, label="nn.Linear")
        for structure in structures:
            line = [r for r in square if r["structure"] == structure]
            macs = [bt.parse(structure).chain(int(r["d_in"]), int(r["d_out"])).macs for r in line]
            style = styles[LineKey(structure)]
            panel.plot(
                macs, [nanoseconds(r, f"{column}_ms") for r in line], **style.line | style.points, label=structure
            )
        panel.set(xlabel="MACs per token", ylabel="nanoseconds per token")
        set_title(panel, name)
        set_log_axes(panel, "xy")
        set_plain_ticks(panel)
        set_cost_ticks(panel)
    add_legend(panels[0])
    return figure


def nanoseconds(row: dict[str, Any], column: str) -> float:
    """Time per token of a column in milliseconds per pass."""
    return 1e6 * float(row[column]) / int(row["tokens"])


FIGURES = {"layer_time.png": time_figure}

PASSES = {
    "forward": "forward, no gradients",
    "input_gradient": "gradient of x, weights frozen",
    "weight_gradients": "gradients of the weights",
    "step": "training step",
}


def on_chip_table() -> str:
    """Return the fastest right result of each pass in the trial of the on-chip kernels."""
    trials = rows("h200/on_chip.csv")
    cells = []
    for layer in dict.fromkeys((r["structure"], r["d_in"], r["d_out"]) for r in trials):
        for name, text in PASSES.items():
            times: dict[str, float] = {}
            for r in trials:
                if (r["structure"], r["d_in"], r["d_out"], r["pass"]) == (*layer, name):
                    kernels = "on chip" if r["kernels"].startswith("on chip") else r["kernels"]
                    times[kernels] = min(float(r["ms"]), times.get(kernels, float("inf")))
            faster = ratio(times["triton"] / times["on chip"]) if "triton" in times else ""
            shown = (milliseconds(times[k]) if k in times else "" for k in ("on chip", "triton", "nn.Linear"))
            cells.append((f"{layer[0]}, {layer[1]}", text, *shown, faster))
    return table("layer | pass | on chip, ms | Triton, ms | nn.Linear, ms | speedup over Triton", cells)


TABLES = {
    "on_chip": on_chip_table,
    "speed": summary_table,
    "layers": layers_table,
    "goals": goals_table,
    "decode": decode_table,
    "gpt2": gpt2_table,
    "cpu": cpu_table,
}
