"""Healing: a compressed model learns to answer as the original did."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.compression.input_moments import call, evaluating, mask_of
from buttress.errors import ButtressError
from buttress.optim.groups import param_groups

Loss = Callable[[Any, Any, Any], Tensor]


@dataclass(frozen=True)
class Healing:
    """How far it has got; a caller may show it."""

    step: int
    steps: int
    loss: float


def distance(answer: Any, wanted: Any, batch: Any) -> Tensor:
    """How far a model's answer is from the original's; padding does not count.

    Of logits the divergence of their distributions, of anything else the mean square of the difference over that of
    the original.
    """
    mine, theirs = _counted(answer, wanted, batch)
    if not hasattr(answer, "logits") or mine.shape[-1] == 1:  # a single number is a score, not a distribution
        return square(answer, wanted, batch)
    mine, theirs = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (mine, theirs))
    return F.kl_div(mine, theirs, log_target=True, reduction="batchmean")


def square(answer: Any, wanted: Any, batch: Any) -> Tensor:
    """The mean square of the difference over that of the original."""
    mine, theirs = _counted(answer, wanted, batch)
    return (mine - theirs).float().square().mean() / theirs.float().square().mean()


def distance_for(model: nn.Module) -> Loss:
    """`distance`, or `square` where a model's config says that its logits are no distribution over classes."""
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    return square if kind in ("regression", "multi_label_classification") else distance


def _counted(answer: Any, wanted: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Both answers without what the mask leaves out."""
    mine, theirs = answer_of(answer), answer_of(wanted)
    mask = mask_of(batch)
    if mask is not None and mine.dim() > mask.dim() and mask.shape == mine.shape[: mask.dim()]:
        return mine[mask.bool()], theirs[mask.bool()]
    return mine, theirs


def answer_of(answer: Any) -> Tensor:
    """The tensor that counts in what a model returns."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(answer, name, None), Tensor):
            return found
    found = answer[0] if isinstance(answer, tuple | list) else answer
    if not isinstance(found, Tensor):
        raise ButtressError(
            f"a {type(answer).__name__} has no logits and no last_hidden_state: give a loss of your own"
        )
    return found


@torch.no_grad()
def apart(model: nn.Module, teacher: nn.Module, batches: Iterable[Any]) -> float:
    """How far a model's answers are from another's, by `distance`: the mean over batches."""
    loss = distance_for(model)
    with evaluating(teacher), evaluating(model):
        found = [float(loss(call(model, batch), call(teacher, batch), batch)) for batch in batches]
    return sum(found) / len(found)


def heal(
    model: nn.Module,
    teacher: nn.Module,
    batches: Callable[[int], Any],
    steps: int,
    *,
    lr: float = 3e-4,
    weight_decay: float = 0.0,
    loss: Loss | None = None,
    run: Callable[[nn.Module, Any], Any] = call,
    checkpoint: Path | str | None = None,
    every: int = 50,
    label: str = "",
    watch: Callable[[Healing], None] | None = None,
) -> list[float]:
    """Train `model` for `steps` steps to answer as `teacher` does, and return the losses.

    `batches(step)` gives the batch of a step, so that a healing that was stopped goes on with the right one: with
    `checkpoint`, a file written whole every so many steps, it does. It is refused where models, rates or `label`, which
    may say what the batches are, differ from those it was begun with. The loss is `distance` unless another is given.
    Learning rates are structure-aware (`param_groups`), with a short warm-up and a cosine. Parameters that need no
    gradient stay as they are, and so do statistics of batch norms; there is no dropout. Weights in half precision are
    trained in float32 and rounded at the end.
    """
    loss = loss or distance_for(model)
    about = _fingerprint(model, teacher, f"{lr} {weight_decay} {steps} {label}")
    kinds = {name: t.dtype for name, t in model.state_dict().items() if t.is_floating_point()}
    if any(kind in (torch.float16, torch.bfloat16) for kind in kinds.values()):
        model.float()
    optimizer = torch.optim.AdamW(param_groups(model, lr, weight_decay=weight_decay))
    rise = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * step / max(steps, 1))))
    )
    losses: list[float] = []
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_file():
        losses = _resume(path, model, optimizer, schedule, about)
    model.eval()  # trained as it is used: the teacher's answers are certain, and dropout would blur the aim
    try:
        with evaluating(teacher):
            for step in range(len(losses), steps):
                batch = batches(step)
                with torch.no_grad():
                    wanted = run(teacher, batch)
                found = loss(run(model, batch), wanted, batch)
                if not bool(found.isfinite()):
                    raise ButtressError(
                        f"healing went wrong at step {step}: the loss is {found.item()}. Try lr < {lr:g}"
                    )
                found.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(found.item())
                if watch is not None:
                    watch(Healing(step + 1, steps, losses[-1]))
                if path is not None and ((step + 1) % every == 0 or step + 1 == steps):
                    _save(path, _state(model, optimizer, schedule, losses, about))
    finally:
        _rounded(model, kinds)
    return losses


@torch.no_grad()
def _rounded(model: nn.Module, kinds: Mapping[str, torch.dtype]) -> None:
    """Every tensor in the precision that it had."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in kinds and tensor.dtype != kinds[name]:
            tensor.data = tensor.data.to(kinds[name])


def _fingerprint(model: nn.Module, teacher: nn.Module, more: str) -> str:
    """Tells one healing from another: the weights it starts from, those it aims at, and how."""
    made = hashlib.sha256(more.encode())
    for part in (model, teacher):
        for name, t in part.state_dict().items():
            sums = (t.double().sum().item(), t.double().abs().sum().item()) if t.is_floating_point() else ()
            made.update(f"{name} {tuple(t.shape)} {sums}".encode())
    return made.hexdigest()


def _state(model: nn.Module, optimizer: Any, schedule: Any, losses: list[float], about: str) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "losses": losses,
        "about": about,
        "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])],
    }


def _save(path: Path, state: Mapping[str, Any]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), part)
    part.replace(path)


def _resume(path: Path, model: nn.Module, optimizer: Any, schedule: Any, about: str) -> list[float]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["about"] != about:
            raise ValueError("it is of another healing: of other models, rates, steps or data")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    except Exception as error:
        raise ButtressError(f"{path} cannot be gone on with ({error}): remove it to begin anew") from error
    here, *cards = state["random"]
    torch.set_rng_state(here)
    if len(cards) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cards)
    return list(state["losses"])
