"""Progress bars on stderr."""

from __future__ import annotations

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from buttress.cli.output import console, describe
from buttress.lab.runs.config import Run
from buttress.lab.sweeps.engine import SweepEvent
from buttress.lab.training.loop import Progress


def bars(amount: ProgressColumn | None = None) -> Bars:
    """Create progress bars that vanish when they are done.

    Args:
        amount: The column that shows how much is done. Default: "3/20".

    Returns:
        The display, to use as a context.
    """
    description, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (description, BarColumn(), amount or MofNCompleteColumn(), note, TimeElapsedColumn())
    return Bars(*columns, console=console, transient=True)


def add_run(display: Bars, run: Run) -> TaskID:
    """Add a bar for one run."""
    return display.add_task(escape(describe(run)), total=run.steps, note="")


def show_run(display: Bars, bar: TaskID, p: Progress) -> None:
    """Update a run's bar."""
    note = f"loss {p.loss:.3f}  error {p.error:.1f} %  {p.examples_per_second:,.0f}/s  {p.seconds_left:.0f} s left"
    display.update(bar, completed=p.step, note=note)


class SweepBars:
    """One bar for a sweep and one for each run in training; listens to the events of `sweep`."""

    def __init__(self, display: Bars, title: str, runs: int) -> None:
        self.display = display
        self.total = display.add_task(f"[bold]{escape(title)}", total=runs, note="")
        self.running: dict[str, TaskID] = {}

    def __call__(self, event: SweepEvent) -> None:
        key, name = event.run.key, escape(describe(event.run))
        if event.record is not None:
            if key in self.running:
                self.display.remove_task(self.running.pop(key))
            if event.record.status != "done":
                failure = f"[red]{event.record.status}[/]: {name}: {escape(event.record.error)}"
                self.display.console.print(failure, highlight=False)
            self.display.advance(self.total)
        elif event.elsewhere:
            self.display.console.print(f"waiting for another process that trains {name}", highlight=False)
        elif event.progress is None:
            self.running[key] = add_run(self.display, event.run)
        else:
            show_run(self.display, self.running[key], event.progress)
