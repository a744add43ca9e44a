"""One self-contained HTML page about a folder of runs: figures, fits, tables, commands, hardware."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

import buttress
from buttress import ButtressError
from buttress.files import write_text
from buttress.lab.analysis import FitError, difference, figures, fit, published, saving
from buttress.lab.analysis.figures import Metric, label, points
from buttress.lab.recipes import find
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

STYLE = """
:root { color-scheme: light; --ink: #1d2330; --soft: #5c6575; --line: #dde1e8; --paper: #ffffff; --tint: #f5f6f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { margin: 2.6rem 0 .4rem; font-size: 1.3rem;
  border-top: 1px solid var(--line); padding-top: 1.4rem; } h3 { margin: 1.6rem 0 .3rem; font-size: 1.02rem; }
p { max-width: 44rem; } .soft { color: var(--soft); font-size: .92rem; }
figure { margin: .8rem 0; } svg { width: 100%; height: auto; max-width: 46rem; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem .28rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
pre { background: var(--tint); padding: .7rem .9rem; overflow-x: auto; font-size: .82rem; border-radius: 6px; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--soft); }
@media print { body { font-size: 10.5pt; max-width: none; padding: 0; } .scroll { overflow: visible; }
  figure, table { break-inside: avoid; } }
"""
FEW = 24
"""Rows of a table that are shown without being asked for."""
VARIED = ("structure", "width", "heads", "layers", "aware", "lr", "seed", "normalize", "accumulate")
"""Fields that may differ within one experiment; all others are its setting."""


def report(records: Iterable[Record], path: Path | str, title: str = "Runs") -> Path:
    """Write the page. It needs nothing but itself: no script, no font, no link to follow."""
    every = list(records)
    if not every:
        raise ButtressError("there are no records to report on: run `buttress train` or `buttress sweep` first")
    groups: dict[Run, list[Record]] = defaultdict(list)
    for record in every:
        groups[_setting(record.run)].append(record)
    body = "".join(_experiment(setting, found) for setting, found in groups.items())
    page = (
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p class='soft'>{_summary(every)}</p>\n{body}"
        f"{_failures(every)}{_machines(every)}</body>\n</html>\n"
    )
    write_text(Path(path), page)
    return Path(path)


def _setting(run: Run) -> Run:
    """What a run has in common with the others of its experiment."""
    return Run.from_dict(asdict(run) | {f.name: f.default for f in fields(Run) if f.name in VARIED})


def _is(setting: Run, recipe: str) -> bool:
    """Whether an experiment has the setting of a recipe: then what was published of that can stand beside it."""
    return setting in map(_setting, find(recipe).runs())


def _summary(records: Sequence[Record]) -> str:
    done = [r for r in records if r.status == "done"]
    seconds = sum(r.results["seconds"] for r in done)
    failed = len(records) - len(done)
    text = f"{len(done)} runs, {seconds / 60:.1f} minutes of training, buttress {escape(buttress.__version__)}."
    return text + (f" {failed} failed." if failed else "")


def _experiment(setting: Run, records: Sequence[Record]) -> str:
    done = [r for r in records if r.status == "done"]
    if not done:
        return ""
    out = [
        f"<h2>{escape(setting.task)}, {escape(setting.model)}: {_kind(setting, done)}</h2>\n"
        f"<p class='soft'>{escape(_described(setting))}</p>\n"
    ]
    ours = _is(setting, "mlp-scaling")
    changes = published.FEATURE_UPDATES if _is(setting, "feature-updates") else None
    best = published.LANDSCAPE if _is(setting, "learning-rates") else None
    held = figures.stability(records)
    if held is not None:
        text = "The largest RMS among the outputs of all blocks, and the loss: stable where neither runs away."
        out.append("<h3>Stability</h3>" + _figure(held, text))
    if _language(done):
        if (rates := figures.landscape(done, "test_loss")) is not None:
            out.append(
                "<h3>Learning rates</h3>" + _figure(rates, "Validation loss against learning rate, best starred.")
            )
        elif (written := figures.language(done)) is not None:
            text = "Validation loss against what a token costs, with and without the head, and against time."
            out.append("<h3>Validation loss</h3>" + _figure(written, text))
    elif (moved := figures.feature_updates(done, changes)) is not None:
        text = "How much one step changes the last block's output, over the run; flat where the rates fit the width."
        out.append("<h3>Feature updates</h3>" + _figure(moved, text))
    elif (tuned := figures.landscape(done, published=best)) is not None:
        out.append("<h3>Learning rates</h3>" + _figure(tuned, "Train error against learning rate, best starred."))
        tested = figures.landscape(done, "test_error")
        assert tested is not None
        out.append(_figure(tested, "Test error against learning rate, best starred."))
    else:
        for metric, there in (("train_error", published.TRAIN_ERROR), ("test_error", published.TEST_ERROR)):
            out.append(_scaling(done, metric, there if ours else None))  # type: ignore[arg-type]
        bars = figures.exponents(done, published=published.EXPONENTS if ours else None)
        if bars is not None:
            out.append("<h3>Exponents of the train error</h3>" + _figure(bars, "With 95 % intervals of the bootstrap."))
        out.append(_savings(done))
        out.append("<h3>Against width</h3>" + _figure(figures.widths(done), "Train error against width."))
        if (pace := figures.runtime(done)) is not None:
            out.append("<h3>Time of a step</h3>" + _figure(pace, "Of runs that had their device to themselves."))
            timed = [r for r in done if figures.alone(r)]
            shown = figures.scaling(timed, against="seconds")
            out.append("<h3>Against time</h3>" + _figure(shown, "Train error against all seconds of training."))
        out.append("<h3>On the way</h3>" + _figure(figures.curves(done), "Train error against step."))
    out += [_table(done), _commands(done)]
    return "".join(out)


def _kind(setting: Run, done: Sequence[Record]) -> str:
    """What an experiment varies, in a word or two."""
    if setting.probe:
        return "feature updates"
    if setting.trace:
        return "stability"
    rates = max(Counter((label(r), r.run.width, r.run.seed) for r in done).values())
    return "learning rates" if rates > 1 else f"{'loss' if _language(done) else 'error'} against compute"


def _language(done: Sequence[Record]) -> bool:
    return "head_macs" in done[0].results


def _described(setting: Run) -> str:
    text = f"{setting.steps:,} steps of {setting.batch}, {setting.optimizer}, {setting.schedule} schedule"
    text += f", depth {setting.depth}" + (f", sequences of {setting.context} tokens" if setting.task == "text" else "")
    extras = [("mixup", setting.mixup), ("label smoothing", setting.smoothing), ("weight decay", setting.weight_decay)]
    text += "".join(f", {name} {value:g}" for name, value in extras if value)
    return f"{text}, {setting.precision}. Errors in percent; MACs are those of one example's forward pass."


def _scaling(done: Sequence[Record], metric: Metric, there: figures.Published | None) -> str:
    caption = "Power laws, exponents with standard errors." + (" Hollow: published." if there else "")
    name = figures.NAMES[metric].removesuffix(" (%)").capitalize()
    return f"<h3>{name}</h3>" + _figure(figures.scaling(done, metric, published=there), caption)


def _savings(done: Sequence[Record]) -> str:
    """Against dense: the difference of exponents, and how many times fewer MACs the same error takes."""
    lines = points(done)
    base = lines.get("dense")
    if base is None:
        return ""
    rows = []
    for name, line in lines.items():
        try:
            law = fit(line)
        except FitError:
            continue
        cells = [name, f"{law.exponent:.3f} ± {law.exponent_error:.3f}", f"{law.low:.3f} .. {law.high:.3f}"]
        if name != "dense":
            try:
                apart = difference(line, base)
                less = saving(line, base)
            except FitError:
                cells += ["", ""]
            else:
                cells += [
                    f"{apart.estimate:+.3f} (p = {apart.p_value:.2g})",
                    f"{less.ratio:.3g} x ({less.low:.2g} .. {less.high:.2g}) at {less.error:.3g} %",
                ]
        else:
            cells += ["", ""]
        rows.append(cells)
    if not rows:
        return ""
    head = ("structure", "exponent", "95 %", "against dense", "fewer MACs for the same error")
    return "<h3>Fits</h3>" + _rows(head, rows)


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
    ("head's MACs", lambda r: f"{r.results['head_macs']:,}"),
    ("train loss", lambda r: f"{r.results['train_loss']:.3f}"),
    ("validation loss", lambda r: f"{r.results['test_loss']:.3f}"),
    ("seconds", lambda r: f"{r.results['seconds']:.1f}"),
    ("tokens/s", lambda r: f"{r.results['tokens_per_second']:,.0f}"),
    ("MFU", lambda r: f"{100 * r.results['mfu']:.1f} %" if "mfu" in r.results else ""),
    ("peak GiB", lambda r: f"{r.results['peak_gib']:.1f}" if "peak_gib" in r.results else ""),
)


def _table(done: Sequence[Record]) -> str:
    columns = COMMON + (LOSSES if "head_macs" in done[0].results else ERRORS)
    ordered = sorted(done, key=lambda r: (label(r), r.macs, r.run.lr, r.run.seed))
    rows = [[show(r) for _, show in columns] for r in ordered]
    head = [name for name, _ in columns]
    body = _rows(head, rows)
    if len(rows) <= FEW:
        return "<h3>All runs</h3>" + body
    return f"<h3>All runs</h3><details><summary>{len(rows)} runs</summary>{body}</details>"


def _commands(done: Sequence[Record]) -> str:
    lines = "\n".join(escape(command(r.run)) for r in done)
    return f"<details><summary>Commands that repeat these runs</summary><pre>{lines}</pre></details>"


def command(run: Run) -> str:
    """The command line that makes this run."""
    given = asdict(run)
    shown = [f"{f.name}={_quoted(given[f.name])}" for f in fields(Run) if given[f.name] != f.default]
    return " ".join(["buttress train", *shown])


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if "(" in text else text


def _failures(records: Sequence[Record]) -> str:
    rows = [(command(r.run), r.error) for r in records if r.status != "done"]
    if not rows:
        return ""
    return "<h2>Failed</h2>" + _rows(("run", "what went wrong"), rows)


def _machines(records: Sequence[Record]) -> str:
    seen = list(dict.fromkeys(tuple(sorted(r.environment.items())) for r in records if r.environment))
    names = sorted({name for one in seen for name, _ in one})
    rows = [[dict(one).get(name, "") for name in names] for one in seen]
    return "<h2>Made on</h2>" + _rows(names, rows) if names else ""


def _figure(figure: Figure, caption: str) -> str:
    text = escape(caption)
    picture = figures.svg(figure)
    return f"<figure role='img' aria-label='{text}'>{picture}<figcaption class='soft'>{text}</figcaption></figure>\n"


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>\n"
