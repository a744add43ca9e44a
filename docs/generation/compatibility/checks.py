"""What the library does with one architecture: surgery, saving and loading, compression."""

from __future__ import annotations

import copy
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import buttress as bt

from . import language_models, vision_models
from .case import AUDIO, IMAGES, TEXT, VOCABULARY, Case
from .record import FAILS, REFUSED, WORKS, Record, Row, installed_versions

CASES = {case.label: case for case in (*language_models.CASES, *vision_models.CASES)}

SMALL_SHARE = 0.03
"""Parameters that are a smaller share of the model are not named."""
EXAMPLES = 24


class WrongResultError(Exception):
    """An operation ended without an error, and its result is wrong."""


def check_all() -> Record:
    """Check every architecture."""
    return Record(installed_versions(), tuple(map(check, CASES.values())))


def check(case: Case) -> Row:
    """Run the checks of one row."""
    with quiet():
        torch.manual_seed(0)
        torch.set_num_threads(1)  # the matrices are tiny: more threads would only wait for each other
        model = case.build().eval()
        share, not_reached = coverage(case, model)
        return Row(
            case.label,
            case.library,
            share,
            not_reached,
            outcome(lambda _: check_surgery(case, model)),
            outcome(lambda folder: check_saving(case, model, folder)),
            outcome(lambda folder: check_compression(case, model, folder)),
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and messages of other libraries, which say nothing about the outcome."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def outcome(operation: Callable[[Path], None]) -> str:
    """Run an operation in a folder of its own, and say how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            operation(Path(folder))
        except bt.ButtressError as error:
            return f"{REFUSED}: {one_line(error, folder)}"
        except WrongResultError as error:
            return f"{FAILS}: {error}"
        except Exception as error:
            return f"{FAILS}: {type(error).__name__}: {one_line(error, folder)}"
    return WORKS


def one_line(error: Exception, folder: str) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return re.sub(r"\s+", " ", first.replace(f"{folder}/", ""))[:300]


def coverage(case: Case, model: nn.Module) -> tuple[float, dict[str, float]]:
    """Return the share of parameters in layers that are replaced, and the names and shares of the largest others."""
    structured = copy.deepcopy(model)
    try:
        rows = bt.replace_(structured, case.plan).rows
    except bt.ButtressError:
        rows = ()
    layers = {row.name.partition("[")[0] for row in rows}
    total = sum(p.numel() for p in model.parameters())
    kept = {name for name, _ in structured.named_parameters() if name.rpartition(".")[0] not in layers}
    groups: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if name in kept:
            group = group_of(model, name)
            groups[group] = groups.get(group, 0) + parameter.numel()
    large = {n: percent(s, total) for n, s in sorted(groups.items(), key=lambda g: -g[1]) if s >= SMALL_SHARE * total}
    return percent(total - sum(groups.values()), total), large


def group_of(model: nn.Module, parameter: str) -> str:
    """Return "embeddings", or the parameter's name with numbers as asterisks."""
    if isinstance(model.get_submodule(parameter.rpartition(".")[0]), nn.Embedding):
        return "embeddings"
    return re.sub(r"\.\d+(?=\.|$)", ".*", parameter.removesuffix(".weight").removesuffix(".bias"))


def percent(part: int, total: int) -> float:
    return round(100 * part / total, 1)


def check_surgery(case: Case, model: nn.Module) -> None:
    structured = replaced(case, model)
    outputs = run(structured, case)
    bt.densify_(structured)
    expect(not structured_layers(structured), "layers stay structured after densify_")
    expect_equal(run(structured, case), outputs, "after densify_")


def check_saving(case: Case, model: nn.Module, folder: Path) -> None:
    structured = replaced(case, model)
    loaded = {"transformers": through_pretrained, "timm": through_timm, "torchvision": through_plan}[case.library](
        case, structured, folder / "saved"
    )
    expect(structured_layers(loaded) == structured_layers(structured), "the loaded model has other structured layers")
    expect_equal(run(loaded, case), run(structured, case), "after loading")


def through_pretrained(case: Case, model: Any, folder: Path) -> nn.Module:
    import buttress.hf  # noqa: F401

    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def through_timm(case: Case, model: nn.Module, folder: Path) -> nn.Module:
    import buttress.vision

    buttress.vision.save(model, folder, **case.model_args)
    return buttress.vision.load(folder)


def through_plan(case: Case, model: nn.Module, folder: Path) -> nn.Module:
    text, state = bt.Plan.of(model).to_json(), copy.deepcopy(model.state_dict())
    rebuilt = case.build().eval()
    bt.Plan.from_json(text).apply_(rebuilt)
    rebuilt.load_state_dict(state)
    return rebuilt


def check_compression(case: Case, model: nn.Module, folder: Path) -> None:
    write_folder(case, model, folder / "original")
    options: dict[str, Any] = calibration(case, folder) | {
        "batch": 8,
        "length": 8,
        "calibration_batches": 2,
        "sweeps": 0,
    }
    if isinstance(case.plan, dict):
        options["layers"] = list(case.plan)
    bt.compress(folder / "original", folder / "small", keep=0.6, candidates=["low_rank(rank=4)"], **options)
    if case.library == "timm":
        import buttress.vision

        compressed = buttress.vision.load(folder / "small")
    else:
        compressed = type(model).from_pretrained(folder / "small").eval()  # type: ignore[attr-defined]
    plan = json.loads((folder / "small" / "buttress-plan.json").read_text())
    expect(len(structured_layers(compressed)) == len(plan["layers"]), "the loaded model has other structured layers")
    run(compressed, case)


def write_folder(case: Case, model: Any, folder: Path) -> None:
    """Write a model with its own library, as someone else would have."""
    if case.library == "transformers":
        copy.deepcopy(model).save_pretrained(folder)
        for build in case.preprocessors:
            build().save_pretrained(folder)
    elif case.library == "timm":
        from timm.models import save_for_hf

        save_for_hf(model, str(folder), model_args=case.model_args, safe_serialization=True)
    else:
        folder.mkdir()
        torch.save(model.state_dict(), folder / "model.pt")


def calibration(case: Case, folder: Path) -> dict[str, Path]:
    """Write calibration data of the kinds that a model reads, and return the options that name it."""
    options: dict[str, Path] = {}
    if TEXT in case.modalities or AUDIO in case.modalities:  # no option takes sound
        draw = torch.Generator().manual_seed(0)
        lines = torch.randint(6, VOCABULARY, (EXAMPLES, 10), generator=draw).tolist()
        (folder / "text.txt").write_text("\n".join(" ".join(f"w{i}" for i in line) for line in lines))
        options["text"] = folder / "text.txt"
    if IMAGES in case.modalities:
        from PIL import Image

        (folder / "images").mkdir()
        for i in range(EXAMPLES):
            pixels = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
            Image.fromarray(pixels.numpy()).resize((40, 40)).save(folder / "images" / f"{i}.png")
        options["images" if options else "text"] = folder / "images"
    return options


def replaced(case: Case, model: nn.Module) -> nn.Module:
    structured = copy.deepcopy(model)
    bt.replace_(structured, case.plan)
    expect(bool(structured_layers(structured)), "nothing was replaced")
    return structured


def structured_layers(model: nn.Module) -> list[str]:
    kinds = (bt.StructuredLinear, bt.StructuredEmbedding, bt.SplitLinear)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


@torch.no_grad()
def run(model: nn.Module, case: Case) -> list[Tensor]:
    """Return all floating-point outputs of a forward pass; they must be finite."""
    arguments = case.inputs()
    y = model(arguments[""]) if "" in arguments else model(**arguments)
    values = [y] if isinstance(y, Tensor) else list(y.values())
    outputs = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    expect(bool(outputs) and all(bool(v.isfinite().all()) for v in outputs), "the outputs are not finite")
    return outputs


def expect(condition: bool, problem: str) -> None:
    if not condition:
        raise WrongResultError(problem)


def expect_equal(outputs: list[Tensor], expected: list[Tensor], when: str) -> None:
    difference = max(float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True))
    expect(difference < 1e-4, f"the outputs {when} differ by {difference:.2g}")
