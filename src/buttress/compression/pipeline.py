"""One command's work: a pretrained model's folder in, a compressed one's out, with what it cost.

For folders of transformers, of sentence-transformers and of timm, which are imported only when such a folder comes.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import math
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.compression.allocation import Budget, Candidate, Cost, Price, budget, curves
from buttress.compression.distillation import answer_of, apart
from buttress.compression.distillation import heal as run_heal
from buttress.compression.input_moments import moments
from buttress.errors import ButtressError, PlanError
from buttress.files import new_folder
from buttress.surgery import Plan, Report, replace_

FEW, CHECKED = 2, 8
"""Batches on which a layer's effect on the answer is measured, and those on which healing must have helped."""
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.onnx",
    "*.h5",
    "*.msgpack",
)
"""Files of a source folder that are not taken along: weights of the model as it was."""
HELD_OUT, MOST, FEWEST = 0.1, 64, 20
"""Part of the data on which quality is measured, the most batches of it, and the fewest pieces that will do."""
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What was done to a model and what became of it."""

    plan: Plan
    report: Report
    budget: Budget | None
    """None where a plan was given."""
    quality: dict[str, tuple[float, float]]
    """By name, before and after; empty where no text was given."""
    healed: tuple[float, float] | None
    """How far answers on what was held out were from the original's, before and after healing."""
    seconds: dict[str, float]

    @property
    def undone(self) -> bool:
        """Whether healing led away from the original, so that the model is left as it was before."""
        return self.healed is not None and _harmful(*self.healed)


def _harmful(before: float, after: float) -> bool:
    return not after < before


def compress(
    source: Path | str,
    out: Path | str,
    keep: float = 0.5,
    *,
    candidates: Sequence[Candidate] | None = None,
    cost: Cost | Price = "macs",
    plan: Plan | None = None,
    text: Path | str | None = None,
    heal: int = 0,
    lr: float = 3e-4,
    sweeps: int = 4,
    batch: int = 32,
    length: int = 128,
    calibrate: int = 64,
    device: torch.device | str = "cpu",
    tell: Tell | None = None,
) -> Outcome:
    """Compress the model in the folder `source` to the part `keep` of its linear layers' MACs, into a new folder `out`.

    Structures and ranks are chosen by `budget` among `candidates`, by MACs or another `cost` (`timed(...)` for one), or
    given by a `plan`. With `text`, a file of plain text or, for timm, a folder of images, weights are chosen for the
    nearest outputs on it (`calibrate` batches of it), quality is measured on a part that nothing else sees, and
    `heal` steps of distillation follow, which are undone if they led away from the original there. The folder is
    written whole or not at all. A healing that was stopped goes on when the same is asked again.
    """
    source, out, say = Path(source), Path(out), tell or (lambda what, done, of: None)
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise PlanError(f"{out} lies inside of {source}: choose another folder")
    if heal and text is None:
        raise PlanError("healing needs text: give a file of it")
    begin = time.perf_counter()
    took: dict[str, float] = {}

    def lap(name: str) -> None:
        took[name] = round(time.perf_counter() - begin - sum(took.values()), 2)

    with new_folder(out) as part:
        kind = (_Timm if _is_timm(source) else _Transformers)(source, device)
        model = kind.model
        original = copy.deepcopy(model)
        data = None if text is None else kind.data(Path(text), batch, length)
        lap("load")
        known = None
        if data is not None:
            shown = _counted(data.seen(calibrate), "calibrating", calibrate, say)
            known = moments(model, shown)
            lap("calibrate")
        chosen = None
        if plan is None:
            options = curves(
                model,
                candidates=candidates,
                moments=known,
                cost=cost,
                batches=[] if data is None else list(data.seen(FEW)),
                watch=lambda name, i, n: say("choosing", i, n),
            )
            chosen = budget(options, keep)
            plan = chosen.plan
            if not plan.entries:
                raise PlanError(f"nothing is worth replacing at keep={keep:g}: ask for less, or give a plan")
            lap("choose")
        inputs = {name: m for name, m in (known or {}).items() if name in {e.name for e in plan.entries}}
        say("projecting", 0, 1)
        report = replace_(model, plan, init="project", moments=inputs or None, sweeps=sweeps if inputs else 0)
        lap("project")
        healed = None
        if heal and data is not None:
            held = data.held_out(CHECKED)
            start, away = copy.deepcopy(model.state_dict()), apart(model, original, held)
            stopped = out.with_name(f".{out.name}.heal.pt")
            run_heal(
                model, original, data.drawn, heal, lr=lr, checkpoint=stopped, label=data.label,
                watch=lambda h: say(f"healing, loss {h.loss:.4f}", h.step, h.steps),
            )  # fmt: skip
            healed = away, apart(model, original, held)
            if _harmful(*healed):
                model.load_state_dict(start)
            lap("heal")
        quality = {} if data is None else data.quality(original, model)
        lap("measure")
        own = source / kind.inner
        shutil.copytree(source, part, dirs_exist_ok=True, ignore=lambda where, names: _left(own, Path(where), names))
        kind.save(part)
        (part / "buttress-plan.json").write_text(Plan.of(model).to_json() + "\n", encoding="utf-8")
        outcome = Outcome(plan, report, chosen, quality, healed, took)
        summary = {
            "keep": keep, "quality": quality, "healed": healed, "undone": outcome.undone, "seconds": took,
            "layers": [asdict(r) for r in report.rows],
        }  # fmt: skip
        (part / "buttress-report.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    out.with_name(f".{out.name}.heal.pt").unlink(missing_ok=True)
    return outcome


def _left(own: Path, where: Path, names: list[str]) -> set[str]:
    """What is not taken along: old weights of the model itself, those of other modules are; and what tools left."""
    tools = {name for name in names if name in (".git", ".cache")}
    if where != own:
        return tools
    return tools | {name for pattern in WEIGHTS for name in fnmatch.filter(names, pattern)}


def _inner(source: Path) -> Path:
    """Where in a folder the transformers model lies: sentence-transformers says so in modules.json."""
    if not (listing := source / "modules.json").is_file():
        return Path()
    try:
        first = json.loads(listing.read_text(encoding="utf-8"))[0]
        inner = Path(first["path"])
        if not str(first["type"]).endswith("Transformer"):
            raise ValueError(f"its first module is {first['type']}")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(f"{listing} is not sentence-transformers' list of modules: {error}") from None
    if inner.is_absolute() or ".." in inner.parts:
        raise PlanError(f"{listing} points outside of its folder: {inner}")
    return inner


def _is_timm(folder: Path) -> bool:
    """Whether config.json is timm's, which names an architecture where transformers' lists architectures."""
    try:
        return "architecture" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False  # the other kind says what is wrong


class _Transformers:
    """The model as its own class, and its tokenizer if it has one. Safetensors alone: nothing is unpickled."""

    def __init__(self, source: Path, device: torch.device | str) -> None:
        self.inner, self.device = _inner(source), device
        folder = source / self.inner
        if not (folder / "config.json").is_file():
            raise PlanError(f"{folder} holds no model of transformers or timm: there is no config.json in it")
        import transformers

        import buttress.integrations.transformers  # noqa: F401  (so that models that are structured already load, too)

        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
            self.model: Any = kind.from_pretrained(folder, use_safetensors=True).to(device).eval()
        except Exception as error:  # of many kinds, since it comes from files that anybody may have written
            raise ButtressError(f"the model in {folder} cannot be loaded: {error}") from error
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError):
            self.tokenizer = None

    def data(self, path: Path, batch: int, length: int) -> Data:
        return Text(path, self.tokenizer, self.model, batch, length, self.device)

    def save(self, folder: Path) -> None:
        from buttress.integrations import transformers as hf

        hf.attach(self.model)
        self.model.save_pretrained(folder / self.inner)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder / self.inner)


class _Timm:
    """A timm model and its own preprocessing."""

    def __init__(self, source: Path, device: torch.device | str) -> None:
        from buttress.integrations import timm as vision

        self.model: Any = vision.load(source, device)
        self.args, self.device, self.inner = vision.model_args(source), device, Path()

    def data(self, path: Path, batch: int, length: int) -> Data:
        return Images(path, self.model, batch, self.device)

    def save(self, folder: Path) -> None:
        from buttress.integrations import timm as vision

        vision.fill(self.model, folder, self.args)


class Data(ABC):
    """Pieces of whatever a model is given: most of them to learn from, some held out to measure on."""

    def __init__(self, pieces: Sequence[Any], path: Path, batch: int) -> None:
        if len(pieces) < FEWEST:
            raise PlanError(f"{path} is too short: it gives {len(pieces)} pieces, and {FEWEST} or more are needed")
        self.batch = batch
        self.label = f"{path.resolve()} {len(pieces)} {batch}"
        mixed = list(pieces)
        random.Random(0).shuffle(mixed)
        held = max(2, int(HELD_OUT * len(mixed)))
        self.test, self.train = mixed[:held], mixed[held:]

    @abstractmethod
    def made(self, pieces: Sequence[Any]) -> Any:
        """A batch of them for the model."""

    @abstractmethod
    def quality(self, before: nn.Module, after: nn.Module) -> dict[str, tuple[float, float]]:
        """Of the model as it was and as it is, on what was held out."""

    def seen(self, count: int) -> Iterator[Any]:
        """Batches to calibrate with."""
        for start in range(0, min(len(self.train), count * self.batch), self.batch):
            yield self.made(self.train[start : start + self.batch])

    def drawn(self, step: int) -> Any:
        """The batch of a step of healing."""
        return self.made(random.Random(step).sample(self.train, min(self.batch, len(self.train))))

    def held_out(self, most: int = MOST) -> list[Any]:
        pieces = self.test[: most * self.batch]
        return [self.made(pieces[i : i + self.batch]) for i in range(0, len(pieces), self.batch)]


class Images(Data):
    """Images anywhere in a folder, as the model's own configuration prepares them."""

    def __init__(self, path: Path, model: nn.Module, batch: int, device: torch.device | str) -> None:
        from timm.data.config import resolve_model_data_config
        from timm.data.transforms_factory import create_transform

        if not path.is_dir():
            raise PlanError(f"a timm model is calibrated with a folder of images, which {path} is not")
        suffixes = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}
        super().__init__(sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes), path, batch)
        self.prepare: Any = create_transform(**resolve_model_data_config(model), is_training=False)  # type: ignore[no-untyped-call]
        self.device = device

    def made(self, pieces: Sequence[Any]) -> Tensor:
        from PIL import Image

        found = []
        for path in pieces:
            with Image.open(path) as image:
                found.append(self.prepare(image.convert("RGB")))
        return torch.stack(found).to(self.device)

    @torch.no_grad()
    def quality(self, before: nn.Module, after: nn.Module) -> dict[str, tuple[float, float]]:
        same = torch.cat([before(x).argmax(-1) == after(x).argmax(-1) for x in self.held_out()])
        return {"same answers": (1.0, same.float().mean().item())}


class Text(Data):
    """Blocks of a text for a language model, its lines for any other."""

    def __init__(
        self, path: Path, tokenizer: Any, model: Any, batch: int, length: int, device: torch.device | str
    ) -> None:
        if tokenizer is None:
            raise PlanError("the model's folder has no tokenizer, so text cannot be used: leave it out")
        self.causal = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
        self.tokenizer, self.device = tokenizer, device
        self.length = min(length, getattr(model.config, "max_position_embeddings", length) or length)
        content = path.read_text(encoding="utf-8")
        pieces: list[Any]
        if self.causal:
            flat = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][0]
            pieces = list(flat[: len(flat) // self.length * self.length].view(-1, self.length))
        else:
            pieces = [line for line in map(str.strip, content.splitlines()) if line]
        super().__init__(pieces, path, batch)

    def made(self, pieces: Sequence[Any]) -> dict[str, Tensor]:
        if self.causal:
            return {"input_ids": torch.stack(list(pieces)).to(self.device)}
        found = self.tokenizer(
            list(pieces), padding=True, truncation=True, max_length=self.length, return_tensors="pt"
        )  # fmt: skip
        return {name: tensor.to(self.device) for name, tensor in found.items()}

    @torch.no_grad()
    def quality(self, before: nn.Module, after: nn.Module) -> dict[str, tuple[float, float]]:
        """Perplexity of a language model; of any other, agreement with what it was."""
        data = self.held_out()
        if self.causal:
            return {"perplexity": (_perplexity(before, data), _perplexity(after, data))}
        name = "cosine of embeddings"
        found = []
        for batch in data:
            mask = batch["attention_mask"]
            answers = before(**batch), after(**batch)
            x, y = map(answer_of, answers)
            if not hasattr(answers[0], "logits"):
                found.append(F.cosine_similarity(_pooled(x, mask), _pooled(y, mask)))
            elif x.shape[-1] == 1:
                name = "cosine of answers"
                found.append(F.cosine_similarity(x.flatten(), y.flatten(), dim=0)[None])
            else:
                name = "same answers"
                same = (x.argmax(-1) == y.argmax(-1)).float()
                found.append(same[mask.bool()] if same.shape == mask.shape else same.flatten())
        return {name: (1.0, torch.cat(found).mean().item())}


def _pooled(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(states)
    return (states * weights).sum(1) / weights.sum(1)


def _perplexity(model: nn.Module, data: Iterable[dict[str, Tensor]]) -> float:
    total, count = 0.0, 0
    for batch in data:
        ids = batch["input_ids"]
        logits = model(**batch).logits[:, :-1].flatten(0, 1).float()
        total += F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    return math.exp(total / count)


def _counted(batches: Iterable[Any], what: str, of: int, say: Tell) -> Iterator[Any]:
    for i, batch in enumerate(batches):
        say(what, i, of)
        yield batch
