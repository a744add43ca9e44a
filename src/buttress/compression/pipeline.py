"""`compress`: from a pretrained model's folder to a folder with the compressed model and a report."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from buttress.compression.allocation import Budget, budget, curves
from buttress.compression.calibration_data import CalibrationData
from buttress.compression.distillation import heal, mean_distance
from buttress.compression.input_moments import moments
from buttress.compression.model_folders import open_model_folder
from buttress.compression.options import CompressOptions
from buttress.compression.projection_store import ProjectionStore
from buttress.errors import PlanError
from buttress.files import new_folder
from buttress.inspection.sites import find_sites
from buttress.surgery import Plan, Report, replace_

EFFECT_BATCHES = 2
"""Batches on which the effect of each layer's loss on the model's output is measured."""
HEALING_CHECK_BATCHES = 8
"""Held-out batches on which healing must have helped."""
REPORT_FILE = "buttress-report.json"


@dataclass(frozen=True)
class Outcome:
    """Results of `compress`: the plan, a report on the layers, and the quality before and after."""

    plan: Plan
    """The plan that was applied."""
    report: Report
    """Every layer that was replaced, with its errors."""
    budget: Budget | None
    """The choice of the plan; None if the plan was an option."""
    quality: dict[str, tuple[float, float]]
    """Metrics of the original and of the compressed model on held-out data, by name; empty without data."""
    healed: tuple[float, float] | None
    """Distance of the outputs on held-out data from the original's, before and after healing; None without healing."""
    seconds: dict[str, float]
    """Duration of each stage."""

    @property
    def undone(self) -> bool:
        """Whether healing moved the outputs away from the original's and was therefore undone."""
        return self.healed is not None and _harmful(*self.healed)


def _harmful(before: float, after: float) -> bool:
    return not after < before


def compress(
    folder: Path | str, out: Path | str, options: CompressOptions | float | None = None, **keywords: Any
) -> Outcome:
    """Compress the pretrained model in a folder into a new folder.

    Structures and ranks are chosen by `budget`, the layers are projected, and the model is healed if `heal` is above 0:
    distilled from the original model for that many steps. The new folder has the compressed weights, copies of the
    other files, the plan ("buttress-plan.json") and a report ("buttress-report.json"). It is written atomically.
    Interrupted healing resumes when `compress` is called again with the same arguments.

    Args:
        folder: Model folder of transformers, sentence-transformers or timm.
        out: The folder to write. It must not exist, or be empty.
        options: The options. A number stands for `CompressOptions(keep=number)`.
        **keywords: Fields of `CompressOptions`, instead of `options`.

    Returns:
        The plan, a report on every layer, the quality before and after, and the seconds of each stage.

    Raises:
        PlanError: If an option cannot be used, `out` is not empty, or nothing is worth replacing.
        ButtressError: If the model cannot be loaded, or healing diverges.

    Example:
        >>> outcome = bt.compress("minilm", "minilm-half", keep=0.5, text="sentences.txt", heal=500)
        >>> print(outcome.report, outcome.quality)
    """
    settings = _settings(options, keywords)
    source, target = Path(folder), Path(out)
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise PlanError(f"{target} is inside {source}: choose another folder")
    if settings.text is not None and not Path(settings.text).exists():
        raise PlanError(f"{settings.text} does not exist: give a text file, or an image folder for timm")
    checkpoint = target.with_name(f".{target.name}.heal.pt")
    with new_folder(target) as part:
        outcome = _compress(source, part, checkpoint, settings)
    checkpoint.unlink(missing_ok=True)
    return outcome


def _settings(options: CompressOptions | float | None, keywords: Mapping[str, Any]) -> CompressOptions:
    if isinstance(options, CompressOptions):
        if keywords:
            names = ", ".join(keywords)
            raise PlanError(f"compress takes CompressOptions or keywords, not both: put {names} into the options")
        return options
    if options is None:
        return CompressOptions.from_keywords(keywords)
    if "keep" in keywords:
        raise PlanError("keep was given twice: as the third argument and as a keyword")
    return CompressOptions.from_keywords({"keep": options, **keywords})


def _compress(source: Path, part: Path, checkpoint: Path, options: CompressOptions) -> Outcome:
    """All stages, with the new folder written to `part`."""
    clock = _StageClock()
    folder = open_model_folder(source, options.device)
    model, original = folder.model, copy.deepcopy(folder.model)
    data = None if options.text is None else folder.data(Path(options.text), options.batch, options.length)
    clock.end("load")
    inputs: Mapping[str, Tensor] = {}
    if data is not None:
        inputs = _calibrate(model, data, options)
        clock.end("calibrate")
    plan, chosen, store = options.plan, None, ProjectionStore()
    if plan is None:
        chosen = _choose(model, data, inputs, store, options)
        plan = chosen.plan
        clock.end("choose")
    report = _project(model, plan, inputs, store, options)
    clock.end("project")
    healed = None
    if options.heal and data is not None:
        healed = _heal_or_revert(model, original, data, checkpoint, options)
        clock.end("heal")
    quality = {} if data is None else data.quality(original, model)
    clock.end("measure")
    folder.save(part)
    outcome = Outcome(plan, report, chosen, quality, healed, clock.seconds)
    _write_report(part / REPORT_FILE, outcome, options.keep)
    return outcome


def _calibrate(model: nn.Module, data: CalibrationData, options: CompressOptions) -> dict[str, Tensor]:
    count = options.calibration_batches

    def counted(batches: Iterable[Any]) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            options.report("calibrating", index, count)
            yield batch

    return moments(model, counted(data.calibration_batches(count)))


def _choose(
    model: nn.Module,
    data: CalibrationData | None,
    inputs: Mapping[str, Tensor],
    store: ProjectionStore,
    options: CompressOptions,
) -> Budget:
    choices = curves(
        model,
        candidates=options.candidates,
        moments=inputs,
        cost=options.cost,
        batches=[] if data is None else list(data.calibration_batches(EFFECT_BATCHES)),
        watch=lambda name, done, total: options.report("choosing", done, total),
        projections=store,
    )
    chosen = budget(choices, options.keep)
    if not chosen.plan.entries:
        raise PlanError(f"nothing is worth replacing at keep={options.keep:g}: set a smaller keep, or give a plan")
    return chosen


def _project(
    model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], store: ProjectionStore, options: CompressOptions
) -> Report:
    """Replace the plan's layers, starting from the projections that the choice has stored."""
    inputs = {e.name: inputs[e.name] for e in plan.entries if e.name in inputs}
    sweeps = options.sweeps if inputs else 0
    sites = find_sites(model)
    projections = {}
    for index, entry in enumerate(plan.entries):
        options.report("projecting", index, len(plan.entries))
        if entry.name in store:
            weight = sites[entry.name].read().weight
            projection = store.finish(entry.name, entry.structure, weight, inputs.get(entry.name), sweeps)
            if projection is not None:
                projections[entry.name] = projection
    return replace_(model, plan, init="project", moments=inputs or None, sweeps=sweeps, projections=projections)


def _heal_or_revert(
    model: nn.Module, original: nn.Module, data: CalibrationData, checkpoint: Path, options: CompressOptions
) -> tuple[float, float]:
    """Heal the model, and undo it if that does not help. Returns the distances before and after healing."""
    held_out = data.held_out(HEALING_CHECK_BATCHES)
    start, before = copy.deepcopy(model.state_dict()), mean_distance(model, original, held_out)
    heal(
        model,
        original,
        data.healing_batch,
        options.heal,
        lr=options.lr,
        checkpoint=checkpoint,
        label=data.label,
        watch=lambda healing: options.report(f"healing, loss {healing.loss:.4f}", healing.step, healing.steps),
    )
    after = mean_distance(model, original, held_out)
    if _harmful(before, after):
        model.load_state_dict(start)
    return before, after


def _write_report(path: Path, outcome: Outcome, keep: float) -> None:
    summary = {
        "keep": keep,
        "quality": outcome.quality,
        "healed": outcome.healed,
        "undone": outcome.undone,
        "seconds": outcome.seconds,
        "layers": [asdict(row) for row in outcome.report.rows],
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


class _StageClock:
    """Seconds of consecutive stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def end(self, stage: str) -> None:
        self.seconds[stage] = round(time.perf_counter() - self._start - sum(self.seconds.values()), 2)
