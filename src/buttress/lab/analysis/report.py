"""One self-contained HTML page about run records: figures, fits, tables, commands, hardware."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path

import buttress
from buttress import ButtressError
from buttress.files import write_text
from buttress.lab.analysis import figures, published
from buttress.lab.analysis.fits import MIN_SIZES, difference, fit, saving
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, alone, label, points, tuned
from buttress.lab.analysis.page import html_figure, html_page, html_table
from buttress.lab.analysis.point import FitError, Point
from buttress.lab.recipes import find
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

SHOWN_ROWS = 24
"""Largest number of rows of a table that is shown unfolded."""
VARIED = ("structure", "width", "heads", "layers", "aware", "lr", "seed", "normalize", "accumulate")
"""Fields that may differ within one experiment; all others are its setting."""


def report(records: Iterable[Record], path: Path | str, title: str = "Runs") -> Path:
    """Write a self-contained HTML page about runs.

    Runs that differ only in structure, size, learning rate or seed form one experiment, which gets a section.

    Args:
        records: Run records, of failed runs as well.
        path: The HTML file to write.
        title: Title of the page.

    Returns:
        The path.

    Raises:
        ButtressError: If there are no records.
        MissingExtraError: If matplotlib or scipy is not installed.
    """
    all_records = list(records)
    if not all_records:
        raise ButtressError("there are no records to report on: run `buttress train` or `buttress sweep` first")
    groups: dict[Run, list[Record]] = defaultdict(list)
    for record in all_records:
        groups[_setting(record.run)].append(record)
    body = "".join(_experiment(Experiment(setting, group)) for setting, group in groups.items())
    appendix = _failures(all_records) + _machines(all_records)
    write_text(Path(path), html_page(title, _summary(all_records), body + appendix))
    return Path(path)


def _setting(run: Run) -> Run:
    """The settings that a run shares with the others of its experiment, as a run."""
    return Run.from_dict(asdict(run) | {f.name: f.default for f in fields(Run) if f.name in VARIED})


def _summary(records: Sequence[Record]) -> str:
    done = [r for r in records if r.status == "done"]
    seconds = sum(r.results["seconds"] for r in done)
    text = f"{len(done)} runs, {seconds / 60:.1f} minutes of training, buttress {escape(buttress.__version__)}."
    statuses = Counter(r.status for r in records)
    return text + "".join(f" {statuses[status]} {status}." for status in ("failed", "diverged") if statuses[status])


@dataclass(frozen=True)
class Experiment:
    """Runs that share all fields except those in `VARIED`."""

    setting: Run
    records: Sequence[Record]

    @cached_property
    def done(self) -> list[Record]:
        return [r for r in self.records if r.status == "done"]

    @property
    def is_language(self) -> bool:
        return "head_macs" in self.done[0].results

    @property
    def is_tuned(self) -> bool:
        """Whether it varies the learning rate."""
        return bool(tuned(self.done))

    @property
    def measures_updates(self) -> bool:
        return any("feature_update" in r.results for r in self.done)

    @property
    def is_scaling_study(self) -> bool:
        return not (self.is_language or self.measures_updates or self.is_tuned)

    def has_setting_of(self, recipe: str) -> bool:
        """Whether its setting is that of a recipe, so that published values can be shown next to its own."""
        return self.setting in map(_setting, find(recipe).runs())

    @property
    def topic(self) -> str:
        """The varied quantity, for the heading."""
        if self.setting.probe:
            return "feature updates"
        if self.setting.trace:
            return "stability"
        rates = max(Counter((LineKey.of(r.run), r.run.width, r.run.seed) for r in self.done).values())
        return "learning rates" if rates > 1 else f"{'loss' if self.is_language else 'error'} against compute"


def _experiment(e: Experiment) -> str:
    if not e.done:
        return ""
    head = f"<h2>{escape(e.setting.task)}, {escape(e.setting.model)}: {e.topic}</h2>\n"
    head += f"<p class='soft'>{escape(_describe_setting(e.setting))}</p>\n"
    return head + "".join(section(e) for applies, section in SECTIONS if applies(e))


def _describe_setting(setting: Run) -> str:
    text = f"{setting.steps:,} steps of {setting.batch}, {setting.optimizer}, {setting.schedule} schedule"
    text += f", depth {setting.depth}" + (f", sequences of {setting.context} tokens" if setting.task == "text" else "")
    extras = [("mixup", setting.mixup), ("label smoothing", setting.smoothing), ("weight decay", setting.weight_decay)]
    text += "".join(f", {name} {value:g}" for name, value in extras if value)
    return f"{text}, {setting.precision}. Errors in percent; MACs are those of one example's forward pass."


def _stability(e: Experiment) -> str:
    figure = figures.stability(e.records)
    if figure is None:
        return ""
    text = "The largest RMS among the outputs of all blocks, and the loss. A stable run keeps both bounded."
    return "<h3>Stability</h3>" + html_figure(figure, text)


def _language_rates(e: Experiment) -> str:
    figure = figures.landscape(e.done, "test_loss")
    assert figure is not None
    return "<h3>Learning rates</h3>" + html_figure(figure, "Validation loss against learning rate, best starred.")


def _language_costs(e: Experiment) -> str:
    figure = figures.language(e.done)
    if figure is None:
        return ""
    text = "Validation loss against MACs per token, with and without the head, and against time."
    return "<h3>Validation loss</h3>" + html_figure(figure, text)


def _feature_updates(e: Experiment) -> str:
    paper = published.FEATURE_UPDATES if e.has_setting_of("feature-updates") else None
    figure = figures.feature_updates(e.done, paper)
    assert figure is not None
    text = "Change of the last block's output per step, averaged over the run; flat where the rates fit the width."
    return "<h3>Feature updates</h3>" + html_figure(figure, text)


def _learning_rates(e: Experiment) -> str:
    paper = published.LANDSCAPE if e.has_setting_of("learning-rates") else None
    train, test = figures.landscape(e.done, published=paper), figures.landscape(e.done, "test_error")
    assert train is not None
    assert test is not None
    return (
        "<h3>Learning rates</h3>"
        + html_figure(train, "Train error against learning rate, best starred.")
        + html_figure(test, "Test error against learning rate, best starred.")
    )


def _scaling(e: Experiment) -> str:
    paper = e.has_setting_of("mlp-scaling")
    caption = "Power laws, exponents with standard errors." + (" Hollow: published." if paper else "")
    curves: tuple[tuple[Metric, figures.compute.Curves], ...] = (
        ("train_error", published.TRAIN_ERROR),
        ("test_error", published.TEST_ERROR),
    )
    out = []
    for metric, curve in curves:
        name = figures.AXIS_LABELS[metric].removesuffix(" (%)").capitalize()
        figure = figures.scaling(e.done, metric, published=curve if paper else None)
        out.append(f"<h3>{name}</h3>" + html_figure(figure, caption))
    bars = figures.exponents(e.done, published=published.EXPONENTS if paper else None)
    if bars is not None:
        out.append("<h3>Exponents of the train error</h3>" + html_figure(bars, "With 95 % bootstrap intervals."))
    return "".join(out)


def _fits(e: Experiment) -> str:
    """A table of all fits: exponents, their differences from the dense model's, and savings of MACs."""
    lines = points(e.done)
    base = lines.get(BASELINE)
    if base is None:
        return ""
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
        rows.append(cells + (["", ""] if key == BASELINE else _comparison(line, base)))
    head = ("structure", "exponent", "95 %", "against dense", "fewer MACs for the same error")
    return "<h3>Fits</h3>" + html_table(head, rows)


def _comparison(line: Sequence[Point], base: Sequence[Point]) -> list[str]:
    try:
        apart, less = difference(line, base), saving(line, base)
    except FitError:
        return ["", ""]
    return [
        f"{apart.estimate:+.3f} (p = {apart.p_value:.2g})",
        f"{less.ratio:.3g}× ({less.low:.2g} .. {less.high:.2g}) at {less.error:.3g} %",
    ]


def _widths(e: Experiment) -> str:
    return "<h3>Against width</h3>" + html_figure(figures.widths(e.done), "Train error against width.")


def _time(e: Experiment) -> str:
    figure = figures.runtime(e.done)
    if figure is None:
        return ""
    seconds = figures.scaling([r for r in e.done if alone(r)], against="seconds")
    return (
        "<h3>Time per step</h3>"
        + html_figure(figure, "Of runs that had their device to themselves.")
        + "<h3>Against time</h3>"
        + html_figure(seconds, "Train error against all seconds of training.")
    )


def _curves(e: Experiment) -> str:
    return "<h3>Training curves</h3>" + html_figure(figures.curves(e.done), "Train error against step.")


Column = tuple[str, Callable[[Record], str]]

COMMON: tuple[Column, ...] = (
    ("structure", label),
    ("width", lambda r: f"{r.run.width:,}"),
    ("lr", lambda r: f"{r.run.lr:g}"),
    ("MACs", lambda r: f"{r.macs:,}"),
    ("parameters", lambda r: f"{r.params:,}"),
)
ERRORS: tuple[Column, ...] = (
    ("train error", lambda r: f"{r.results['train_error']:.2f}"),
    ("test error", lambda r: f"{r.results['test_error']:.2f}"),
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


def _table(e: Experiment) -> str:
    columns = COMMON + (LOSSES if e.is_language else ERRORS)
    runs = sorted(e.done, key=lambda r: (label(r), r.macs, r.run.lr, r.run.seed))
    table = html_table([name for name, _ in columns], [[cell(r) for _, cell in columns] for r in runs])
    if len(runs) <= SHOWN_ROWS:
        return "<h3>All runs</h3>" + table
    return f"<h3>All runs</h3><details><summary>{len(runs)} runs</summary>{table}</details>"


def _commands(e: Experiment) -> str:
    lines = "\n".join(escape(command(r.run)) for r in e.done)
    return f"<details><summary>Commands that repeat these runs</summary><pre>{lines}</pre></details>"


def _always(e: Experiment) -> bool:
    return True


SECTIONS: tuple[tuple[Callable[[Experiment], bool], Callable[[Experiment], str]], ...] = (
    (_always, _stability),
    (lambda e: e.is_language and e.is_tuned, _language_rates),
    (lambda e: e.is_language and not e.is_tuned, _language_costs),
    (lambda e: not e.is_language and e.measures_updates, _feature_updates),
    (lambda e: not e.is_language and not e.measures_updates and e.is_tuned, _learning_rates),
    (lambda e: e.is_scaling_study, _scaling),
    (lambda e: e.is_scaling_study, _fits),
    (lambda e: e.is_scaling_study, _widths),
    (lambda e: e.is_scaling_study, _time),
    (lambda e: e.is_scaling_study, _curves),
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


def _failures(records: Sequence[Record]) -> str:
    """Tables of the runs that failed and of those that diverged, which is a result rather than a failure."""
    out = []
    for status, title in (("failed", "Failed"), ("diverged", "Diverged")):
        rows = [(command(r.run), r.error) for r in records if r.status == status]
        if rows:
            out.append(f"<h2>{title}</h2>" + html_table(("run", "what went wrong"), rows))
    return "".join(out)


def _machines(records: Sequence[Record]) -> str:
    machines = list(dict.fromkeys(tuple(sorted(r.environment.items())) for r in records if r.environment))
    names = sorted({name for machine in machines for name, _ in machine})
    rows = [[dict(machine).get(name, "") for name in names] for machine in machines]
    return "<h2>Hardware and versions</h2>" + html_table(names, rows) if names else ""
