"""`compress`: from a pretrained model's folder to a folder with the compressed model and a report."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from buttress.compression.allocation import Budget, Curves, budget, curves
from buttress.compression.calibration_data import CalibrationData
from buttress.compression.calibration_files import CalibrationFiles, read_calibration_files
from buttress.compression.distillation import heal
from buttress.compression.hub import local_folder
from buttress.compression.input_moments import InputMoments, MomentSums, moments_of
from buttress.compression.judgement import DenseLayer
from buttress.compression.model_folders import ModelFolder, open_model_folder
from buttress.compression.options import CompressOptions
from buttress.compression.outcome import Outcome, Provenance, report_row
from buttress.compression.projection_store import ProjectionStore
from buttress.compression.remainder import RemainderBefore, cannot_be_judged
from buttress.compression.work_folder import LOG, ProgressLog, WorkFolder, fingerprint_of, work_folder_of
from buttress.errors import ButtressError, PlanError, first_line
from buttress.files import new_folder
from buttress.inspection.head import output_head
from buttress.inspection.names import first_match, last_part
from buttress.inspection.sites import Site, find_sites, tie_obstacle, tied_embeddings
from buttress.integrations.model_card import model_card, write_card
from buttress.projection.closed_form import Projection, project
from buttress.surgery import Plan, PlanEntry, Report, chosen_layers, replace_

ENOUGH_TOKENS = 32
"""Tokens per input of a layer after which calibration stops: more change the moments little."""
SAVE_SECONDS = 60.0
"""Time between two states of the calibration on disk, which may have hundreds of megabytes."""
HEALING_CHECK_BATCHES = 8
"""Batches on which healing must have helped; it does not learn from them."""
REPORT_FILE = "buttress-report.json"


def compress(
    folder: Path | str, out: Path | str, options: CompressOptions | float | None = None, **keywords: Any
) -> Outcome:
    """Compress the pretrained model in a folder into a new folder.

    Structures and ranks are chosen by `budget`, the layers are projected, and the model is healed if `heal` is above 0:
    distilled from the original model for that many steps. Layers that calibration cannot judge stay dense. The new
    folder has the compressed weights, copies of the data files, a model card, the plan ("buttress-plan.json") and a
    report ("buttress-report.json"). It is written atomically. No code of the folder runs, and none is copied.
    Interrupted at any stage, it resumes when it is called again with the same arguments: what was computed is in the
    folder ".OUT.compress" next to `out`, with a log (log.txt), until it succeeds.

    Args:
        folder: Model folder of transformers, sentence-transformers or timm, a GGUF file or a folder that holds one, or
            the id of a model on the hub. Quantized weights of a GGUF file are dequantized.
        out: The folder to write. It must not exist, or be empty.
        options: The options. A number stands for `CompressOptions(keep=number)`.
        **keywords: Fields of `CompressOptions`, instead of `options`.

    Returns:
        The plan, a report on every layer, what stays as it was, the quality before and after, and the seconds of each
        stage.

    Raises:
        PlanError: If an option cannot be used, `out` is not empty, or nothing is worth replacing.
        ButtressError: If the model cannot be loaded or run on the data, the result cannot be written, or healing
            diverges.

    Example:
        >>> outcome = bt.compress("minilm", "minilm-half", keep=0.5, text="sentences.txt", heal=500)
        >>> print(outcome.report, outcome.quality, *outcome.remainder.lines(), sep="\\n")
    """
    settings = _settings(options, keywords)
    target = Path(out)
    if Path(folder).is_dir() and Path(folder).resolve() in (target.resolve(), *target.resolve().parents):
        raise PlanError(f"{target} is inside {folder}: choose another folder")
    data_files = read_calibration_files(settings.text, settings.images)
    checkpoint = target.with_name(f".{target.name}.heal.pt")
    try:
        # In this order: the work is removed when the result is in place.
        with WorkFolder.opened(work_folder_of(target)) as work, new_folder(target) as part:
            log = ProgressLog(work.folder / LOG, settings.progress)
            outcome = _compress(folder, part, checkpoint, work, data_files, replace(settings, progress=log))
        checkpoint.unlink(missing_ok=True)
    except OSError as error:
        raise ButtressError(f"{target} cannot be written: {error.strerror or error} ({error.filename})") from error
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


def _compress(
    name: Path | str,
    part: Path,
    checkpoint: Path,
    work: WorkFolder,
    data_files: CalibrationFiles | None,
    options: CompressOptions,
) -> Outcome:
    """All stages, with the new folder written to `part`."""
    clock = _StageClock()
    folder = open_model_folder(local_folder(name), options.device, data_files)
    model = folder.model
    data = None if data_files is None else folder.open_data(options.batch, options.length)
    if data is not None:
        data.try_out(model)
    original, before = copy.deepcopy(model), RemainderBefore(model)
    work.claim(fingerprint_of(model, settings_of_work(data_files, options)))
    clock.end("load")
    blocked = _tie_obstacles(model) if options.head or options.layers is not None else {}
    sites, inputs = _sites_to_judge(model, options), dict[str, Tensor]()
    if data is not None:
        inputs = _calibrated(model, sites, data, work, options)
        clock.end("calibrate")
    plan, chosen, store = options.plan, None, ProjectionStore()
    if plan is None:
        chosen = _choose(folder, data, inputs, store, work, options)
        plan = _with_embeddings(chosen.plan, model)
        clock.end("choose")
    by_weights = cannot_be_judged(sites, [e.name for e in plan.entries], inputs)
    inputs = {name: inputs[name] for name in inputs if name not in {layer.name for layer in by_weights}}
    report = _project(model, plan, inputs, store, work, options)
    clock.end("project")
    healed = None
    if options.heal and data is not None:
        healed = _heal(model, original, data, checkpoint, options)
        clock.end("heal")
    quality = {} if data is None else data.quality(original, model)
    clock.end("measure")
    remainder = before.after(chosen, by_weights, plan, options.unselected_reason, blocked)
    outcome = Outcome(plan, report, chosen, quality, healed, clock.seconds, remainder, _provenance(name, folder))
    _save(folder, part, outcome, options)
    return outcome


def _sites_to_judge(model: nn.Module, options: CompressOptions) -> dict[str, Site]:
    """The layers to choose among, or those that a given plan replaces."""
    if options.plan is None:
        return chosen_layers(model, _layer_rules(model, options))
    sites = find_sites(model, convolutions=True)
    return {e.name: sites[e.name] for e in options.plan.entries if e.name in sites}


def _layer_rules(model: nn.Module, options: CompressOptions) -> dict[str, bool] | None:
    """The globs that select layers; None for all but the output head."""
    rules = options.layer_rules()
    if not options.head:
        selected = rules or None
    else:
        head = output_head(model).module_ids
        names = [name for name, site in find_sites(model).items() if id(site.owner) in head]
        if not names:
            raise PlanError(f"{type(model).__name__} has no linear output head: leave head out")
        selected = dict.fromkeys(names, True) | (rules or dict.fromkeys(chosen_layers(model, None), True))
    if selected is None:
        return None
    obstacles = _tie_obstacles(model)
    for name, glob in ((name, glob) for name in obstacles for glob, is_selected in rules.items() if is_selected):
        if last_part(glob) == last_part(name) and name in first_match({glob: True}, [name]).values:
            raise PlanError(f"{name} cannot be replaced: {obstacles[name]}; leave {glob!r} out of layers")
    return dict.fromkeys(obstacles, False) | {name: value for name, value in selected.items() if name not in obstacles}


def _tie_obstacles(model: nn.Module) -> dict[str, str]:
    """Why layers cannot be replaced together with the embeddings that share their weights, by name."""
    reasons = {name: tie_obstacle(model, site) for name, site in find_sites(model).items() if site.weight is not None}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _with_embeddings(plan: Plan, model: nn.Module) -> Plan:
    """A plan in which embeddings that share the weights of its layers share their factors as well."""
    sites = find_sites(model, convolutions=True)
    entries: list[PlanEntry] = []
    for entry in plan.entries:
        leader = next(iter(tied_embeddings(model, sites[entry.name])), None)
        if leader is not None:
            entries.append(PlanEntry(leader, entry.structure))
        entries.append(replace(entry, tied=leader))
    return Plan(tuple(entries))


def settings_of_work(files: CalibrationFiles | None, options: CompressOptions) -> dict[str, Any]:
    """What moments, options of layers and projections depend on besides the model."""
    from buttress import __version__

    names = ("candidates", "cost", "layers", "head", "batch", "length", "calibration_batches", "device")
    settings = {name: value for name, value in options.to_row().items() if name in names}
    data = None if files is None else [hashlib.sha256(files.text.encode()).hexdigest(), *files.image_states()]
    return settings | {"data": data, "versions": [__version__, torch.__version__]}


def _calibrated(
    model: nn.Module, sites: Mapping[str, Site], data: CalibrationData, work: WorkFolder, options: CompressOptions
) -> InputMoments:
    """The moments of an earlier call, or new ones."""
    inputs = work.moments()
    if inputs is None or {*inputs, *inputs.unreached} != set(sites):
        inputs = _calibrate(model, sites, data, work, options)
        work.save_moments(inputs)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return InputMoments({n: t.to(device) for n, t in inputs.items()}, inputs.tokens, inputs.unreached)


def _calibrate(
    model: nn.Module, sites: Mapping[str, Site], data: CalibrationData, work: WorkFolder, options: CompressOptions
) -> InputMoments:
    count, saved_at = options.calibration_batches, time.monotonic()

    def is_enough(sums: MomentSums) -> bool:
        nonlocal saved_at
        done, tokens_per_input = sums.batches, sums.fewest_tokens_per_input(sites)
        needed = math.ceil(done * ENOUGH_TOKENS / tokens_per_input) if tokens_per_input else count
        options.report("calibrating", done, max(done, min(count, needed)))
        if time.monotonic() - saved_at > SAVE_SECONDS:
            work.save_sums(sites, sums)
            saved_at = time.monotonic()
        return tokens_per_input >= ENOUGH_TOKENS

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sums = work.sums(sites, device) or MomentSums()
    options.report("calibrating", sums.batches, count)
    batches = islice(data.calibration_batches(count), sums.batches, None)
    return moments_of(model, batches, sites, sums=sums, is_enough=is_enough)


def _choose(
    folder: ModelFolder,
    data: CalibrationData | None,
    inputs: Mapping[str, Tensor],
    store: ProjectionStore,
    work: WorkFolder,
    options: CompressOptions,
) -> Budget:
    choices = curves(
        folder.model,
        candidates=options.candidates,
        moments=inputs,
        cost=options.cost,
        layers=_layer_rules(folder.model, options),
        batches=[] if data is None else data.effect_batches(),
        watch=lambda name, done, total: options.report("choosing", done, total),
        projections=store,
        memory=None if options.identity_of_cost is None else work,
    )
    choices = _without_random_layers(choices, folder)
    chosen = budget(choices, options.keep)
    if not chosen.plan.entries:
        raise PlanError(f"nothing is worth replacing at keep={options.keep:g}: set a smaller keep, or give a plan")
    return chosen


def _without_random_layers(choices: Curves, folder: ModelFolder) -> Curves:
    """Leave out layers whose weights are not in the folder: there is nothing to keep."""
    absent = {name.rpartition(".")[0] for name in folder.missing} & set(choices)
    if not absent:
        return choices
    sites = find_sites(folder.model, convolutions=True)
    rows = [DenseLayer.of(sites[name], "its weights are not in the folder") for name in absent]
    kept = {name: options for name, options in choices.items() if name not in absent}
    return Curves(kept, (*choices.unjudged, *rows), choices.refused)


def _project(
    model: nn.Module,
    plan: Plan,
    inputs: Mapping[str, Tensor],
    store: ProjectionStore,
    work: WorkFolder,
    options: CompressOptions,
) -> Report:
    """Replace the plan's layers, starting from the projections that the choice or an earlier call has stored."""
    inputs = {e.name: inputs[e.name] for e in plan.entries if e.name in inputs}
    sweeps = options.sweeps if inputs else 0
    sites = find_sites(model, convolutions=True)
    projections: dict[str, Projection] = {}
    for index, entry in enumerate(plan.entries):
        options.report("projecting", index, len(plan.entries))
        if options.plan is not None or entry.name not in sites:
            continue  # a given plan may say more than the structure; an embedding has the factors of its head
        projection = work.projection(entry.name, entry.structure, sweeps)
        if projection is None:
            weight, moments = sites[entry.name].read().weight, inputs.get(entry.name)
            projection = store.finish(entry.name, entry.structure, weight, moments, sweeps)
            if projection is None:
                projection = project(entry.structure, weight, moments=moments, sweeps=sweeps).to("cpu")
            work.save_projection(entry.name, entry.structure, sweeps, projection)
        projections |= dict.fromkeys((entry.name, *([entry.tied] if entry.tied else [])), projection)
    return replace_(model, plan, init="project", moments=inputs or None, sweeps=sweeps, projections=projections)


def _heal(
    model: nn.Module, original: nn.Module, data: CalibrationData, checkpoint: Path, options: CompressOptions
) -> tuple[float, float]:
    """Heal the model as far as that helps. Returns its distances from the original before and after.

    Where no step helped, the model stays as it was, and the second distance is that after the last step.
    """
    losses = heal(
        model,
        original,
        data.healing_batch,
        options.heal,
        lr=options.lr,
        dtype=options.healing_dtype,
        held_out=data.validation(HEALING_CHECK_BATCHES),
        checkpoint=checkpoint,
        label=data.label,
        watch=lambda healing: options.report(f"healing, loss {healing.loss:.4f}", healing.step, healing.steps),
    )
    return losses.held_out[0], losses.held_out[losses.best_step or options.heal]


def _provenance(name: Path | str, folder: ModelFolder) -> Provenance:
    files = folder.data_files
    return Provenance(
        source=str(name) if folder.source != Path(name) else folder.source.resolve().name,
        library=folder.library,
        class_name=type(folder.model).__name__,
        left_out=dict(folder.files.left_out),
        missing=folder.missing,
        unreadable=() if files is None else tuple(path.name for path in files.unreadable),
        dequantized=dict(folder.quantized_types),
    )


def _save(folder: ModelFolder, part: Path, outcome: Outcome, options: CompressOptions) -> None:
    """Write the model, its card and the report."""
    try:
        folder.save(part)
    except ButtressError:
        raise
    except Exception as error:  # a full disk raises errors of several types
        raise ButtressError(f"the compressed model cannot be written: {first_line(error)}") from error
    provenance = outcome.provenance
    card = model_card(
        outcome.report,
        library=provenance.library,
        base_model=provenance.source,
        quality=outcome.quality,
        existing=folder.original_card(),
        dequantized=provenance.dequantized,
    )
    write_card(part, card)
    (part / REPORT_FILE).write_text(json.dumps(report_row(outcome, options), indent=2) + "\n", encoding="utf-8")


class _StageClock:
    """Seconds of consecutive stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def end(self, stage: str) -> None:
        self.seconds[stage] = round(time.perf_counter() - self._start - sum(self.seconds.values()), 2)
