"""Tables and figures of the CIFAR experiments, next to the paper's numbers."""

from __future__ import annotations

from buttress.lab.analysis import Point, figures, fit, published
from buttress.lab.analysis.figures import FrontierPanel
from buttress.lab.analysis.lines import points
from buttress.lab.runs.records import Record

from .cifar_comparison import METRICS, PRECISIONS, mlp_scaling
from .markdown import table
from .records import rows, runs


def scaling_table() -> str:
    curves = {"train_error": published.TRAIN_ERROR, "test_error": published.TEST_ERROR}
    lines = {metric: points(mlp_scaling(), metric) for metric in curves}
    cells = []
    for key, models in lines["train_error"].items():
        for i, model in enumerate(models):
            errors = []
            for metric, curve in curves.items():
                errors += [
                    f"{lines[metric][key][i].error:.1f}",
                    f"{published.interpolate(curve[key.structure], model.macs):.1f}",
                ]
            costs = f"{model.width}", f"{model.macs:,.0f}", f"{model.seeds}"
            cells.append((key.label, *costs, *errors, f"{model.seconds:.0f}"))
    return table(
        "structure | width | MACs | seeds | train error | published | test error | published | training seconds", cells
    )


def exponents_table() -> str:
    cells = []
    for key, line in points(mlp_scaling()).items():
        value, error = published.EXPONENTS[key.structure]
        ours = fit(line)
        window = (line[0].macs / 1.15, line[-1].macs * 1.15)
        paper = fit([Point(x, y) for x, y in published.TRAIN_ERROR[key.structure]], window=window)
        laws = (f"{law.exponent:.3f} ± {law.exponent_error:.3f}" for law in (ours, paper))
        cells.append((key.label, f"{len(line)}", *laws, f"{value:.3f} ± {error:.3f}"))
    return table(
        "structure | sizes | exponent | fit to the paper's points in our MAC range | exponent given in the paper", cells
    )


def vit_table() -> str:
    cells = []
    for r in sorted(runs("vit"), key=lambda r: (r.run.structure, r.macs)):
        errors = (f"{r.results[f'{split}_error']:.1f}" for split in ("train", "test"))
        costs = f"{r.macs:,}", f"{r.params:,}"
        times = f"{r.results['step_ms']:.2f}", f"{r.results['seconds']:.0f}"
        cells.append((r.run.structure or "dense", f"{r.run.width}", *costs, *errors, *times))
    return table("structure | width | MACs | parameters | train error | test error | ms per step | seconds", cells)


def utilization_table() -> str:
    cells = []
    for r in rows("h200/utilisation.csv"):
        name = f"{r['model']}{', compiled' if r['compiled'] == 'True' else ''}"
        busy = f"{100 * float(r['utilisation']):.0f} %"
        cells.append((name, r["structure"], r["width"], r["step_ms"], busy, r["kernels"], r["floor_ms"]))
    return table("model | structure | width | ms per step | GPU busy | kernels | matmuls alone at peak, ms", cells)


def feature_updates_table() -> str:
    updates = {
        (r.run.structure, r.run.aware, r.run.width): r.results["feature_update"] for r in runs("feature-updates")
    }
    widths = sorted({width for *_, width in updates})
    cells = []
    for name, aware in dict.fromkeys((s, a) for s, a, _ in sorted(updates, key=lambda k: (k[0], not k[1]))):
        paper = published.FEATURE_UPDATES["aware" if aware else "naive"][name]
        pairs = (f"{updates[name, aware, w]:.4f} / {paper[w]:.4f}" for w in widths)
        cells.append((name + ("" if aware else ", naive"), *pairs))
    return table("structure | " + " | ".join(f"width {w}" for w in widths), cells)


def learning_rates_table() -> str:
    groups: dict[tuple[str, bool, int], list[Record]] = {}
    for r in runs("learning-rates"):
        groups.setdefault((r.run.structure, r.run.aware, r.run.width), []).append(r)
    cells = []
    for (name, aware, width), records in sorted(groups.items(), key=lambda i: (i[0][0], not i[0][1], i[0][2])):
        best = min(records, key=lambda r: r.results["train_error"])
        paper = published.LANDSCAPE["aware" if aware else "naive"].get(name, {}).get(width, ())
        best_published = min(paper, key=lambda p: p[1], default=None)
        label = (name or "dense") + ("" if aware else ", naive")
        theirs = f"{best_published[0]:g} ({best_published[1]:.1f} %)" if best_published else "not published"
        cells.append((label, str(width), f"{best.run.lr:g} ({best.results['train_error']:.1f} %)", theirs))
    return table("structure | width | best learning rate (train error) | published best (train error)", cells)


TABLES = {
    "cifar": scaling_table,
    "exponents": exponents_table,
    "vit": vit_table,
    "utilisation": utilization_table,
    "features": feature_updates_table,
    "rates": learning_rates_table,
}

FIGURES = {
    "cifar_answer.png": lambda: figures.answer(mlp_scaling(), "test_error"),
    "cifar_train.png": lambda: figures.scaling(mlp_scaling(), published=published.TRAIN_ERROR),
    "cifar_seconds.png": lambda: figures.frontiers(
        [
            FrontierPanel(f"{name}, {precision}", records(), metric)
            for metric, name in METRICS.items()
            for precision, records in PRECISIONS.items()
        ]
    ),
    "cifar_updates.png": lambda: figures.feature_updates(runs("feature-updates"), published.FEATURE_UPDATES),
    "cifar_rates.png": lambda: figures.landscape(runs("learning-rates"), published=published.LANDSCAPE),
    "cifar_time.png": lambda: figures.runtime(mlp_scaling()),
}
