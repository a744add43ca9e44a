"""The sections that a report has on one experiment: figures, fits, all runs, commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from html import escape

from buttress.lab.analysis import figures, published
from buttress.lab.analysis.comparison import Comparison, compare_all
from buttress.lab.analysis.experiments import Experiment
from buttress.lab.analysis.figures import LineStyles
from buttress.lab.analysis.fits import MIN_SIZES, fit, saving
from buttress.lab.analysis.lines import BASELINE, METRIC_NAMES, Metric, label, points
from buttress.lab.analysis.page import html_figure, html_folded, html_row, html_table
from buttress.lab.analysis.point import FitError, Point
from buttress.lab.recipes import find
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

PUBLISHED_RECIPES = {"cifar10": "mlp-scaling", "cifar100": "mlp-scaling-cifar100"}
"""Recipes whose results are published, by task."""


def _stability(e: Experiment, styles: LineStyles) -> str:
    figure = figures.stability(e.records, styles)
    if figure is None:
        return ""
    text = "The largest RMS among the outputs of all blocks, and the loss. A stable run keeps both bounded."
    return html_figure(figure, text)


def _language_rates(e: Experiment, styles: LineStyles) -> str:
    figure = figures.landscape(e.done, "test_loss", styles=styles)
    assert figure is not None
    return html_figure(figure, "Validation loss against learning rate, best starred.")


def _language_costs(e: Experiment, styles: LineStyles) -> str:
    figure = figures.language(e.done, styles)
    if figure is None:
        return ""
    return html_figure(figure, "Validation loss against MACs per token, with and without the head, and against time.")


def _feature_updates(e: Experiment, styles: LineStyles) -> str:
    paper = published.FEATURE_UPDATES if e.has_setting_of("feature-updates") else None
    figure = figures.feature_updates(e.done, paper, styles)
    assert figure is not None
    text = "Change of the last block's output per step, averaged over the run; flat where the rates fit the width."
    return html_figure(figure, text)


def _learning_rates(e: Experiment, styles: LineStyles) -> str:
    paper = published.LANDSCAPE if e.has_setting_of("learning-rates") else None
    train = figures.landscape(e.done, published=paper, styles=styles)
    test = figures.landscape(e.done, "test_error", styles=styles)
    assert train is not None
    assert test is not None
    hollow = " Hollow: published." if paper else ""
    by_width = figures.rates_by_width(e.done, "test_error", styles)
    folded = html_figure(test, "Test error against learning rate, best starred.")
    if by_width:
        folded += html_figure(by_width, "Test error against learning rate, models of equal width together.")
    return html_figure(train, "Train error against learning rate, best starred." + hollow) + html_folded(
        "The same for the test error", folded
    )


def main_figure(e: Experiment, styles: LineStyles) -> str:
    """The figure that shows an experiment's verdict: its last metric at equal costs. Empty if there are no costs."""
    if e.is_language:
        return _language_costs(e, styles)
    return _error(e, e.metrics[-1], styles)


def _error(e: Experiment, metric: Metric, styles: LineStyles) -> str:
    figure = figures.answer(e.done, metric, styles)
    if figure is None:
        return ""
    text = f"{METRIC_NAMES[metric].capitalize()} of every model; lines join those that no cheaper model matches."
    if any(panel.texts for panel in figure.axes):
        text += " Dotted: where the lowest line overtakes dense, with the 95 % interval over seeds if it is known."
    return html_figure(figure, text)


def _errors(e: Experiment, styles: LineStyles) -> str:
    return "".join(_error(e, metric, styles) for metric in e.metrics)


def _power_laws(e: Experiment, styles: LineStyles) -> str:
    """Errors against MACs with power laws, all exponents, and what the fits say."""
    paper = _published_study(e)
    drawings = []
    for metric in e.metrics:
        figure = figures.scaling(e.done, metric, published=paper.errors[metric] if paper else None, styles=styles)
        drawings.append(
            html_figure(
                figure,
                f"{METRIC_NAMES[metric].capitalize()} with power laws." + (" Hollow: published." if paper else ""),
            )
        )
    bars = figures.exponents(e.done, published=paper.exponents if paper else None, styles=styles)
    if bars:
        drawings.append(
            html_figure(
                bars, "Exponents of the train error, each over its own range of MACs, with 95 % bootstrap intervals."
            )
        )
    title = "Power laws" + (", next to the published results" if paper else "")
    return html_folded(title, html_row(*drawings) + _fits(e))


def _published_study(e: Experiment) -> published.ScalingStudy | None:
    """The paper's study with the setting of an experiment."""
    for task, recipe in PUBLISHED_RECIPES.items():
        if e.has_setting_of(recipe):
            return published.MLP[task]
    return None


def _variants(e: Experiment, styles: LineStyles) -> str:
    """Naive learning rates next to structure-aware ones, and structures with several values of their options."""
    paper = _published_study(e)
    curves = {"aware": paper.train_error} if paper else {}
    if e.has_setting_of("mlp-scaling"):
        curves["naive"] = published.NAIVE_TRAIN_ERROR
    naive = figures.naive_rates(e.done, published=curves, styles=styles)
    drawings = [html_figure(naive, "Train error with structure-aware and with naive learning rates.")] if naive else []
    sizes: dict[figures.variants.Size, str] = {"macs": "MACs", "width": "width"}
    for against, name in sizes.items():
        figure = figures.options(e.done, against=against, styles=styles)
        text = (
            f"Train error against {name} for several values of a structure's options, darker for more MACs per width."
        )
        drawings += [html_figure(figure, text)] if figure else []
    return html_folded("Variants of a structure", "".join(drawings)) if drawings else ""


def _fits(e: Experiment) -> str:
    """A table of all fits: exponents, their differences from the dense model's, and savings of MACs."""
    lines = points(e.done)
    base = lines.get(BASELINE)
    if base is None:
        return ""
    comparisons = compare_all(lines, BASELINE)
    rows = []
    for key, line in lines.items():
        try:
            law = fit(line)
        except FitError as error:
            sizes = len({p.macs for p in line})
            why = f"too few points ({sizes} of {MIN_SIZES})" if sizes < MIN_SIZES else f"no power law: {error}"
            rows.append([key.label, why, "", "", ""])
            continue
        cells = [key.label, f"{law.exponent:.3f} ± {law.exponent_error:.3f}", f"{law.low:.3f} .. {law.high:.3f}"]
        rows.append(cells + (["", ""] if key == BASELINE else [_trend(comparisons.get(key)), _saving(line, base)]))
    head = ("structure", "exponent", "95 %", "minus dense, on common MACs", "fewer MACs for the same error")
    return html_table(head, rows)


def _trend(comparison: Comparison | None) -> str:
    """The difference of two exponents on the MACs that both lines span."""
    trend = comparison.trend if comparison is not None else None
    if trend is None:
        return "no range of MACs in common"
    error = "" if trend.standard_error is None else f" ± {trend.standard_error:.3f}"
    return f"{-trend.value:+.3f}{error}"


def _saving(line: Sequence[Point], base: Sequence[Point]) -> str:
    """How many times fewer MACs a line needs for the same error; empty if no error is reached by both."""
    try:
        less = saving(line, base)
    except FitError:
        return ""
    return f"{less.ratio:.3g}× ({less.low:.2g} .. {less.high:.2g}) at {less.error:.3g} %"


def _widths(e: Experiment, styles: LineStyles) -> str:
    return html_figure(figures.widths(e.done, styles=styles), "Train error against width.")


def _step_time(e: Experiment, styles: LineStyles) -> str:
    figure = figures.runtime(e.done, styles)
    return html_figure(figure, "Time per step of runs that had their device to themselves.") if figure else ""


def _width_and_time(e: Experiment, styles: LineStyles) -> str:
    return html_folded("Widths and time per step", html_row(_widths(e, styles), _step_time(e, styles)))


def _curves(e: Experiment, styles: LineStyles) -> str:
    text = "Train error against step, darker for more MACs; in grey the dense runs."
    return html_folded("Training curves", html_figure(figures.curves(e.done, styles), text))


def differences(records: Sequence[Record], styles: LineStyles) -> str:
    """The section on the authors' choices, which compares several experiments; empty if there are no such runs."""
    runs = set(find("mlp-differences").runs())
    chosen = [r for r in records if r.run in runs]
    paper = published.MLP[next(iter(runs)).task]
    figure = figures.differences(chosen, paper.errors, styles)
    if figure is None:
        return ""
    text = "Change of the errors by choices of the authors' code, alone and together, and by bilinear resampling."
    return "<h2>Choices of the authors</h2>" + html_figure(figure, text + " Hollow: distance to the published errors.")


Column = tuple[str, Callable[[Record], str]]

COMMON: tuple[Column, ...] = (
    ("structure", label),
    ("width", lambda r: f"{r.run.width:,}"),
    ("lr", lambda r: f"{r.run.lr:g}"),
    ("MACs per example", lambda r: f"{r.macs:,}"),
    ("parameters", lambda r: f"{r.params:,}"),
)
ERRORS: tuple[Column, ...] = (
    ("train error (%)", lambda r: f"{r.results['train_error']:.2f}"),
    ("test error (%)", lambda r: f"{r.results['test_error']:.2f}"),
    ("seconds", lambda r: f"{r.results['seconds']:.1f}"),
    ("examples/s", lambda r: f"{r.results['examples_per_second']:,.0f}"),
)
LOSSES: tuple[Column, ...] = (
    ("head's MACs", lambda r: _optional(r, "head_macs", ",")),
    ("train loss", lambda r: f"{r.results['train_loss']:.3f}"),
    ("validation loss", lambda r: f"{r.results['test_loss']:.3f}"),
    ("seconds", lambda r: f"{r.results['seconds']:.1f}"),
    ("tokens/s", lambda r: _optional(r, "tokens_per_second", ",.0f")),
    ("MFU", lambda r: _optional(r, "mfu", ".1%")),
    ("peak GiB", lambda r: _optional(r, "peak_gib", ".1f")),
)


def _optional(record: Record, name: str, form: str) -> str:
    """A result that not every run has; empty if it is missing."""
    return format(record.results[name], form) if name in record.results else ""


def _table(e: Experiment, styles: LineStyles) -> str:
    columns = COMMON + (LOSSES if e.is_language else ERRORS)
    runs = sorted(e.done, key=lambda r: (label(r), r.macs, r.run.lr, r.run.seed))
    table = html_table([name for name, _ in columns], [[cell(r) for _, cell in columns] for r in runs])
    return html_folded(f"All {len(runs)} runs", table)


def _commands(e: Experiment, styles: LineStyles) -> str:
    lines = "\n".join(escape(command(r.run)) for r in e.done)
    return html_folded("Commands that repeat these runs", f"<pre>{lines}</pre>")


def _always(e: Experiment) -> bool:
    return True


SECTIONS: tuple[tuple[Callable[[Experiment], bool], Callable[[Experiment, LineStyles], str]], ...] = (
    (_always, _stability),
    (lambda e: e.is_language and e.is_tuned, _language_rates),
    (lambda e: e.is_language and not e.is_tuned, _language_costs),
    (lambda e: not e.is_language and e.measures_updates, _feature_updates),
    (lambda e: not e.is_language and not e.measures_updates and e.is_tuned, _learning_rates),
    (lambda e: not e.is_language and e.compares_structures, _errors),
    (lambda e: not e.is_language and e.compares_structures, _power_laws),
    (lambda e: not e.is_language and e.compares_structures, _variants),
    (lambda e: not e.is_language and e.compares_structures, _width_and_time),
    (lambda e: not e.is_language and e.compares_structures, _curves),
    (_always, _table),
    (_always, _commands),
)
"""Sections in the order of the page: whether an experiment has the section, and its HTML, which may be empty."""


def command(run: Run) -> str:
    """The command line that trains this run, quoted for a shell."""
    values = asdict(run)
    settings = [f"{f.name}={values[f.name]}" for f in fields(Run) if values[f.name] != f.default]
    # Values come from records, which anyone may have written: a shell must not interpret them.
    return shlex.join(["buttress", "train", *settings])
