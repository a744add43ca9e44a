"""Figures: each a pure function of records."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from buttress.lab.analysis import Point, fit
from buttress.lab.analysis.fits import FitError
from buttress.lab.runs.records import Record

Against = Literal["macs", "seconds"]
Metric = Literal["train_error", "test_error", "test_loss"]
Published = Mapping[str, Sequence[tuple[float, float]]]

NAMES = {
    "train_error": "train error (%)",
    "test_error": "test error (%)",
    "test_loss": "validation loss (nats a token)",
    "macs": "MACs",
    "seconds": "seconds of training",
}


def label(record: Record) -> str:
    """What tells a run's line from the others."""
    run = record.run
    more = ("" if run.aware else ", naive rates") + (", normalised" if run.normalize else "")
    if not run.structure:
        return "dense" + more
    return run.structure + ("" if run.layers == "all" else f", {run.layers}") + more


def points(records: Iterable[Record], metric: Metric = "train_error") -> dict[str, list[Point]]:
    """Points of each line, by MACs: the mean over seeds, and of several learning rates the best, as in the paper."""
    found: dict[tuple[str, int], dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.status == "done":
            found[label(record), record.macs][record.run.lr].append(record)

    def mean(same: Sequence[Record], what: str) -> float:
        return sum(r.results[what] for r in same) / len(same)

    lines: dict[str, list[Point]] = defaultdict(list)
    for (name, macs), rates in sorted(found.items()):
        same = min(rates.values(), key=lambda records: mean(records, metric))
        seconds = mean(same, "seconds") if all(map(alone, same)) else None
        lines[name].append(Point(macs, mean(same, metric), seconds, f"width {same[0].run.width}"))
    return {name: lines[name] for name in _ordered(lines)}


def alone(record: Record) -> bool:
    """Whether a run had its device to itself, so that its times mean something."""
    return record.environment.get("at_once", "1") == "1"


def _ordered(names: Iterable[str]) -> list[str]:
    """The baseline first, so that a structure has the same colour in every figure."""
    return sorted(set(names), key=lambda name: (name != "dense", name))


def scaling(
    records: Iterable[Record],
    metric: Metric = "train_error",
    against: Against = "macs",
    published: Published | None = None,
) -> Figure:
    """Error against MACs or time, one line a structure, with its power law; published points hollow."""
    figure, panel = plt.subplots(figsize=(7, 5), layout="constrained")
    for i, (name, every) in enumerate(points(records, metric).items()):
        colour = f"C{i}"
        line = [p for p in every if against == "macs" or p.seconds is not None]
        xs = [p.macs if against == "macs" else p.seconds or 0.0 for p in line]
        panel.plot(xs, [p.error for p in line], "o", color=colour, ms=5)
        text = name
        try:
            law = fit(line, against=against, resamples=200)
        except FitError:
            panel.plot(xs, [p.error for p in line], "-", color=colour, lw=1, alpha=0.5, label=text)
        else:
            ends = law.window
            text += f"  ({law.exponent:.3f} ± {law.exponent_error:.3f})"
            panel.plot(ends, [law.predict(x) for x in ends], "-", color=colour, lw=1.2, label=text)
        structure = name.partition(",")[0]
        if published and structure in published and "naive" not in name and against == "macs":
            there = published[structure]
            panel.plot([x for x, _ in there], [y for _, y in there], "o", mfc="none", color=colour, ms=6, alpha=0.6)
    panel.set(xscale="log", yscale="log", xlabel=NAMES[against], ylabel=NAMES[metric])
    _plain_ticks(panel)
    panel.grid(alpha=0.3, which="both")
    _legend(panel, "exponent in brackets" + ("; hollow: published" if published else ""))
    return figure


def exponents(
    records: Iterable[Record],
    metric: Metric = "train_error",
    published: Mapping[str, tuple[float, float]] | None = None,
) -> Figure | None:
    """Fitted exponents with their intervals, the published ones beside them; None where nothing can be fitted."""
    laws = {}
    colours = {}
    for i, (name, line) in enumerate(points(records, metric).items()):
        colours[name] = f"C{i}"
        try:
            laws[name] = fit(line)
        except FitError:
            continue
    if not laws:
        return None
    figure, panel = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for i, (name, law) in enumerate(laws.items()):
        low, high = law.exponent - law.low, law.high - law.exponent
        panel.bar(i - 0.2, law.exponent, 0.36, yerr=[[max(low, 0)], [max(high, 0)]], color=colours[name], capsize=3)
        if published and name.partition(",")[0] in published and "naive" not in name:
            value, error = published[name.partition(",")[0]]
            panel.bar(i + 0.2, value, 0.36, yerr=error, color="none", edgecolor=colours[name], capsize=3, hatch="//")
    panel.set_xticks(range(len(laws)), list(laws), rotation=20, ha="right")
    panel.set_ylabel("exponent" + (" (hatched: published)" if published else ""))
    panel.grid(alpha=0.3, axis="y")
    return figure


def widths(records: Iterable[Record], metric: Metric = "train_error") -> Figure:
    """Error against width: what a structure makes of the same memory for activations."""
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    seen: set[int] = set()
    for i, (name, line) in enumerate(points(records, metric).items()):
        there = [(int(p.label.removeprefix("width ")), p.error) for p in line]
        seen |= {width for width, _ in there}
        panel.plot(*zip(*sorted(there), strict=True), "o-", color=f"C{i}", ms=4, lw=1.2, label=name)
    panel.set(xscale="log", yscale="log", xlabel="width", ylabel=NAMES[metric])
    _plain_ticks(panel)
    panel.set_xticks(sorted(seen), [str(width) for width in sorted(seen)], rotation=45)
    panel.grid(alpha=0.3, which="both")
    _legend(panel)
    return figure


def runtime(records: Iterable[Record]) -> Figure | None:
    """Time of a training step against MACs, of runs that had their device to themselves."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for r in records:
        if r.results.get("step_ms") and alone(r):
            lines[label(r)].append((r.macs, r.results["step_ms"]))
    if not lines:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for i, name in enumerate(_ordered(lines)):
        panel.plot(*zip(*sorted(lines[name]), strict=True), "o-", color=f"C{i}", ms=4, lw=1.2, label=name)
    panel.set(xscale="log", yscale="log", xlabel="MACs", ylabel="milliseconds a step")
    _plain_ticks(panel)
    panel.grid(alpha=0.3, which="both")
    _legend(panel)
    return figure


Landscape = Mapping[str, Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]]


def landscape(
    records: Iterable[Record], metric: Metric = "train_error", published: Landscape | None = None
) -> Figure | None:
    """Error or loss against learning rate: a panel a structure and rule, a line a width, the best starred."""
    panels: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if r.status == "done":
            panels[label(r)][r.run.width].append((r.run.lr, r.results[metric]))
    panels = {n: p for n, p in panels.items() if max(len({lr for lr, _ in line}) for line in p.values()) > 2}
    if not panels:
        return None
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, name in zip(axes[0], _ordered(panels), strict=True):
        lines = panels[name]
        for i, (width, line) in enumerate(sorted(lines.items())):
            ordered = sorted(line)
            axis.plot(
                [x for x, _ in ordered], [y for _, y in ordered], "o-", ms=4, color=f"C{i}", label=f"width {width}"
            )
            best = min(ordered, key=lambda p: p[1])
            axis.plot(*best, "*", ms=12, color=f"C{i}")
            rates = (published or {}).get("naive" if "naive" in name else "aware", {})
            there = rates.get(name.partition(",")[0], {}).get(width, ())
            axis.plot([x for x, _ in there], [y for _, y in there], "o", mfc="none", color=f"C{i}", ms=7, alpha=0.6)
        axis.set(xscale="log", title=name, xlabel="learning rate")
        tried = sorted({lr for line in lines.values() for lr, _ in line})
        if tried[-1] < 100 * tried[0]:
            axis.set_xticks(tried, [f"{lr:g}" for lr in tried])
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    axes[0][0].set_ylabel(NAMES[metric] + (", hollow: published" if published else ""))
    return figure


def feature_updates(
    records: Iterable[Record], published: Mapping[str, Mapping[str, Mapping[int, float]]] | None = None
) -> Figure | None:
    """By how much a step changes the last block's output, against width: flat if the rates are right."""
    lines: dict[tuple[str, bool], dict[int, float]] = defaultdict(dict)
    for r in records:
        if "feature_update" in r.results:
            lines[r.run.structure or "dense", r.run.aware][r.run.width] = r.results["feature_update"]
    if not lines:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.9), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(_ordered(name for name, _ in lines))}
    for (name, aware), line in sorted(
        lines.items(), key=lambda item: (_ordered(colours).index(item[0][0]), not item[0][1])
    ):
        ordered = sorted(line.items())
        text = name + ("" if aware else ", naive rates")
        panel.plot(*zip(*ordered, strict=True), "o-" if aware else "o--", color=colours[name], ms=4, label=text)
        there = (published or {}).get("aware" if aware else "naive", {}).get(name)
        if there:
            panel.plot(list(there), list(there.values()), "o", mfc="none", color=colours[name], ms=7, alpha=0.6)
    panel.set(xscale="log", yscale="log", xlabel="width", ylabel="RMS change of features per step")
    panel.grid(alpha=0.3, which="both")
    _legend(panel, "hollow: published" if published else "")
    return figure


def curves(records: Iterable[Record]) -> Figure:
    """Training error against step, one line a run."""
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    ordered = sorted((r for r in records if r.curve), key=lambda r: (label(r), r.macs))
    names = _ordered(label(r) for r in ordered)
    for r in ordered:
        same = [s for s in ordered if label(s) == label(r)]
        shade = 0.35 + 0.65 * (same.index(r) + 1) / len(same)
        panel.plot(
            [s for s, _, _ in r.curve], [e for _, _, e in r.curve], lw=1, alpha=shade, color=f"C{names.index(label(r))}"
        )
    for i, name in enumerate(names):
        panel.plot([], [], color=f"C{i}", label=name)
    panel.set(xlabel="step", ylabel="train error (%)", yscale="log")
    _plain_ticks(panel)
    panel.grid(alpha=0.3)
    _legend(panel, "darker: more MACs")
    return figure


COSTS: dict[str, Callable[[Record], float | None]] = {
    "MACs a token": lambda r: r.macs / r.run.context,
    "MACs a token, without the head's": lambda r: (r.macs - r.results["head_macs"]) / r.run.context,
    "seconds of training": lambda r: r.results["seconds"] if alone(r) else None,
}
"""What a language model's loss is held against."""


def language(records: Iterable[Record]) -> Figure | None:
    """Validation loss against all MACs, those without the head's, and time; None where all models cost the same."""
    done = [r for r in records if r.status == "done" and "head_macs" in r.results]
    if len({r.macs for r in done}) < 2:
        return None
    figure, axes = plt.subplots(1, len(COSTS), figsize=(10.5, 3.8), sharey=True, layout="constrained")
    names = _ordered(map(label, done))
    for axis, (text, cost) in zip(axes, COSTS.items(), strict=True):
        for i, name in enumerate(names):
            line = [(cost(r), r.results["test_loss"], r.run.width) for r in done if label(r) == name]
            known = sorted((x, y, width) for x, y, width in line if x is not None)
            axis.plot([x for x, _, _ in known], [y for _, y, _ in known], "o-", color=f"C{i}", ms=5, label=name)
            for x, y, width in known:
                axis.annotate(f"{width}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        axis.set(xlabel=text, xscale="log")
        axis.margins(x=0.12, y=0.08)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(NAMES["test_loss"])
    _legend(axes[0], "numbers: width")
    return figure


def largest(record: Record) -> list[tuple[int, float]]:
    """By step, the largest RMS among all blocks' outputs; empty where nobody looked."""
    blocks = [seen for name, seen in record.metrics.items() if name.startswith("activation/")]
    return [(at[0][0], max(size for _, size in at)) for at in zip(*blocks, strict=True)]


def stability(records: Iterable[Record]) -> Figure | None:
    """The largest RMS among all blocks' outputs, that of a layer's own output, and the training loss, against step."""
    traced = [r for r in records if largest(r)]
    if not traced:
        return None
    own = any("median output" in r.metrics for r in traced)
    figure, panels = plt.subplots(1, 3 if own else 2, figsize=(12 if own else 9, 3.8), layout="constrained")
    sizes, losses = panels[0], panels[-1]
    names = _ordered(map(label, traced))
    rates = sorted({r.run.lr for r in traced})
    for r in sorted(traced, key=lambda r: (names.index(label(r)), r.run.lr)):
        style = {
            "color": f"C{names.index(label(r))}",
            "ls": ("-", "--", ":", "-.")[rates.index(r.run.lr) % 4],
            "lw": 1.2,
        }
        text = label(r) + (f", lr {r.run.lr:g}" if len(rates) > 1 else "")
        sizes.plot(*zip(*largest(r), strict=True), label=text, **style)
        # Of its first tenth, in which all fall alike, the loss would leave no room for the rest.
        late = [(step, loss) for step, loss, _ in r.curve if 10 * step >= r.curve[-1][0]]
        losses.plot([step for step, _ in late], [loss for _, loss in late], **style)
        if "median output" in r.metrics:
            # Before the first step most layers make nothing: they start at zero.
            pairs = [pair for pair in r.metrics["median output"] if pair[1] > 0]
            panels[1].plot([step for step, _ in pairs], [size for _, size in pairs], **style)
    sizes.set(xlabel="step", ylabel="largest RMS of a block's output", yscale="log")
    losses.set(xlabel="step", ylabel="training loss")
    if own:
        panels[1].set(xlabel="step", ylabel="median RMS of what a layer makes", yscale="log")
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
    _legend(sizes)
    return figure


def svg(figure: Figure) -> str:
    """A figure as SVG for a page, closed afterwards; the same records give the same text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "buttress", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _legend(panel: Any, title: str = "") -> None:
    """Below the axes, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    columns = 3 if max(map(len, labels), default=0) < 30 else 2
    panel.figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, title=title or None
    )


def _plain_ticks(panel: Any) -> None:
    low, high = panel.get_ylim()
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 60, 80, 100) if low <= t <= high]
    if ticks:
        panel.set_yticks(ticks, [f"{t:g}" for t in ticks])
        panel.minorticks_off()
