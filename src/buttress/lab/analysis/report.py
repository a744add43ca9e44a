"""One self-contained HTML page about run records: the answer first, then figures, fits, tables, commands, hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import buttress
from buttress import ButtressError
from buttress.files import write_text
from buttress.lab.analysis.answers import answer
from buttress.lab.analysis.experiments import Experiment, experiments
from buttress.lab.analysis.figures import LineStyles
from buttress.lab.analysis.page import anchor, html_contents, html_page, html_table, html_verdict
from buttress.lab.analysis.sections import SECTIONS, command, differences, main_figure
from buttress.lab.analysis.verdict import Verdict, verdict
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

MIN_CONTENTS = 3
"""Smallest number of experiments for which the page has a list of contents."""


def report(records: Iterable[Record], path: Path | str, title: str = "Runs") -> Path:
    """Write a self-contained HTML page about runs.

    Runs that differ only in structure, size, learning rate or seed form one experiment, which gets a section. The page
    starts with the answer of the experiment that compares most runs.

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
    styles = LineStyles.of(all_records)
    answers = [(e, answer(e)) for e in experiments(all_records)]
    # What compares structures at equal cost comes first, and among that what rests on most runs.
    answers.sort(key=lambda pair: (not pair[0].compares_structures, pair[1] is None, -len(pair[0].done)))
    body = _first_screen(answers, styles, _summary(all_records))
    body += "".join(_experiment(e, finding, styles) for e, finding in answers)
    body += differences(all_records, styles)
    write_text(Path(path), html_page(title, body + _failures(all_records) + _machines(all_records)))
    return Path(path)


def _first_screen(answers: Sequence[tuple[Experiment, Verdict | None]], styles: LineStyles, summary: str) -> str:
    """The answer of the first experiment with its figure, the summary, and the contents."""
    links = [(anchor(e.heading), e.heading) for e, _ in answers]
    contents = html_contents(links) if len(links) >= MIN_CONTENTS else ""
    first = answers[0][0] if answers else None
    # One metric, that of the figure: the section has the rest.
    short = verdict(first.done, first.metrics[-1:]) if first and first.compares_structures else None
    if first is None or short is None:
        return f"<p class='soft'>{summary}</p>{contents}"
    source = f"From <a href='#{links[0][0]}'>{escape(first.heading)}</a>. {summary}"
    return (
        f"{html_verdict(short.text, short.certainty)}{main_figure(first, styles)}<p class='soft'>{source}</p>{contents}"
    )


def _summary(records: Sequence[Record]) -> str:
    done = [r for r in records if r.status == "done"]
    seconds = sum(r.results["seconds"] for r in done)
    text = f"{len(done)} runs, {seconds / 60:.1f} minutes of training, buttress {escape(buttress.__version__)}."
    statuses = Counter(r.status for r in records)
    return text + "".join(f" {statuses[status]} {status}." for status in ("failed", "diverged") if statuses[status])


def _experiment(e: Experiment, finding: Verdict | None, styles: LineStyles) -> str:
    head = f"<h2 id='{anchor(e.heading)}'>{escape(e.heading)}</h2>\n" + (
        html_verdict(finding.text, finding.certainty) if finding else ""
    )
    setting = f"<p class='soft'>{escape(_describe_setting(e.setting))}</p>\n"
    return head + setting + "".join(section(e, styles) for applies, section in SECTIONS if applies(e))


def _describe_setting(setting: Run) -> str:
    text = f"{setting.steps:,} steps of {setting.batch}, {setting.optimizer}, {setting.schedule} schedule"
    text += f", depth {setting.depth}" + (f", sequences of {setting.context} tokens" if setting.task == "text" else "")
    extras = [("mixup", setting.mixup), ("label smoothing", setting.smoothing), ("weight decay", setting.weight_decay)]
    text += "".join(f", {name} {value:g}" for name, value in extras if value)
    return f"{text}, {setting.precision}."


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
