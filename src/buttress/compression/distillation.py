"""Healing: a short distillation of a compressed model from the original model, which is its teacher."""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from buttress.compression.distances import Loss, distance_for, hidden_state_distance
from buttress.compression.running import call, evaluating
from buttress.errors import ButtressError, PlanError
from buttress.files import replacing
from buttress.optim.groups import param_groups

HIDDEN_KEYWORD = "output_hidden_states"
"""The keyword by which models of transformers are asked for their hidden states."""

CHECKS = 10
"""How often the loss on held-out batches is measured, unless `check_every` says otherwise."""


@dataclass(frozen=True)
class Healing:
    """Progress of `heal`, passed to its `watch` after every step."""

    step: int
    """Steps done."""
    steps: int
    """Steps in all."""
    loss: float
    """Loss of the last step."""
    held_out_loss: float | None = None
    """Loss on the held-out batches, if it was measured after this step."""


class HealingLosses(list[float]):
    """The result of `heal`: the loss of every step, and those on held-out batches.

    Args:
        losses: The loss of every step.
        held_out: Loss on the held-out batches, by the number of steps before it; 0 is the start.

    Example:
        >>> losses = bt.heal(model, teacher, batches, 500, held_out=validation)
        >>> losses.held_out[0], losses.held_out[losses.best_step]
    """

    def __init__(self, losses: Sequence[float] = (), held_out: Mapping[int, float] | None = None) -> None:
        super().__init__(losses)
        self.held_out = dict(held_out or {})
        """Loss on the held-out batches, by the number of steps before it; empty if there are none."""

    @property
    def best_step(self) -> int:
        """Number of steps after which the model had the weights that it has now."""
        finite = {step: loss for step, loss in self.held_out.items() if math.isfinite(loss)}
        return min(finite, key=lambda step: (finite[step], step)) if finite else len(self)


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
    hidden: float = 0.0,
    dtype: torch.dtype | None = None,
    held_out: Sequence[Any] = (),
    check_every: int | None = None,
    checkpoint: Path | str | None = None,
    every: int = 50,
    label: str = "",
    watch: Callable[[Healing], None] | None = None,
) -> HealingLosses:
    """Distill a compressed model from the original model, in place.

    Learning rates are structure-aware (`param_groups`), with a short warm-up and a cosine decay, and gradients are
    clipped to a norm of 1. Both models run in eval mode: there is no dropout, and batch norm statistics do not change.
    Parameters that need no gradient do not change either. Half-precision weights are trained in float32 and rounded at
    the end.

    With held-out batches, the model ends with the weights whose loss on them was least; those before the first step
    count too, so that healing never makes this loss worse.

    Args:
        model: The compressed model.
        teacher: The original model. It is not changed.
        batches: The batch of each step, as a function of the step, so that a resumed run continues with the right one.
        steps: Number of steps.
        lr: Base learning rate, as for `param_groups`.
        weight_decay: Weight decay.
        loss: Called with the model's output, the teacher's output and the batch. Default: `distance`.
        run: Called as `run(model, batch)`. Default: batches are passed as in `moments`.
        hidden: Weight of the distance between the hidden states of both models, which is added to the loss of a step,
            but not to that on held-out batches. It is the mean over the blocks of the relative square error. The models
            are those of transformers, or a `run` of your own returns outputs with `hidden_states`.
        dtype: torch.bfloat16 to compute the outputs of both models in it, by autocast; the weights and the optimizer
            stay in float32. Default: the models' own types.
        held_out: Batches that are not learned from, on which the loss is measured.
        check_every: Steps between two measurements on them. Default: a tenth of all steps.
        checkpoint: A file from which to resume, written atomically.
        every: Steps between two checkpoints.
        label: Identifies the batches. Resuming from a checkpoint with another label is an error.
        watch: Called after every step.

    Returns:
        The loss of every step, those before a resumption included, and the losses on the held-out batches.

    Raises:
        PlanError: If no parameter needs a gradient, `dtype` is another one, `check_every` is below 1, or `hidden` is
            negative or needs hidden states that the model does not return.
        ButtressError: If the loss is not finite, or the checkpoint belongs to other models, rates, steps or data, or to
            a loss of another name or another dtype.

    Example:
        >>> teacher = copy.deepcopy(model)
        >>> bt.replace_(model, bt.BTT(rank=4), init="project")
        >>> losses = bt.heal(model, teacher, lambda step: batches[step], steps=500)
    """
    if dtype not in (None, torch.bfloat16):  # the gradients of float16 would need scaling
        raise PlanError(f"dtype is torch.bfloat16 or None, got {dtype!r}")
    if check_every is not None and check_every < 1:
        raise PlanError(f"check_every is a number of steps of at least 1, got {check_every!r}")
    if not any(p.requires_grad for p in model.parameters()):
        raise PlanError("healing trains the parameters that need a gradient, and this model has none: unfreeze some")
    interval = check_every or max(1, steps // CHECKS)
    dtypes = {n: t.dtype for n, t in _parameters_and_buffers(model) if t.is_floating_point()}
    is_half = any(half in (torch.float16, torch.bfloat16) for half in dtypes.values())
    pair = _Pair(model, teacher, loss or distance_for(model), _running(model, run, hidden), dtype, is_half)
    settings = f"{lr} {weight_decay} {steps} {label}"
    if held_out:
        settings += f" {interval} {len(held_out)}"
    fingerprint = _fingerprint(model, teacher, settings + _unusual(pair, hidden))
    path = None if checkpoint is None else Path(checkpoint)
    try:
        if is_half:
            model.float()
        optimizer = torch.optim.AdamW(param_groups(model, lr, weight_decay=weight_decay))
        optimizer.zero_grad()  # gradients of the caller's would count in the first step
        state = _State(model, optimizer, steps, fingerprint)
        if path is not None and path.is_file():
            state.resume(path)
        model.eval()  # the teacher's output is deterministic, and dropout would add noise to the student's
        with evaluating(teacher):
            if held_out and not state.losses.held_out:
                state.check(pair.mean_loss(held_out))
            for step in range(len(state.losses), steps):
                state.update(pair.loss_of(batches(step), hidden), lr)
                measured = None
                if held_out and ((step + 1) % interval == 0 or step + 1 == steps):
                    measured = state.check(pair.mean_loss(held_out))
                if watch is not None:
                    watch(Healing(step + 1, steps, state.losses[-1], measured))
                if path is not None and ((step + 1) % every == 0 or step + 1 == steps):
                    state.save(path)
        state.restore_best()
    finally:
        _restore_dtypes(model, dtypes)
    return state.losses


def _running(model: nn.Module, run: Callable[[nn.Module, Any], Any], hidden: float) -> Callable[[nn.Module, Any], Any]:
    """How models are run so that they return hidden states, if these have a weight."""
    if not hidden >= 0 or not math.isfinite(hidden):
        raise PlanError(f"hidden is the weight of the hidden states, a number of at least 0; got {hidden!r}")
    if not hidden or run is not call:
        return run
    parameters = inspect.signature(model.forward).parameters
    if HIDDEN_KEYWORD not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise PlanError(
            f"hidden={hidden!r} compares hidden states, but a {type(model).__name__} does not take {HIDDEN_KEYWORD}: "
            "pass a `run` that returns outputs with hidden_states, or heal with hidden=0"
        )
    keywords: dict[str, Any] = {HIDDEN_KEYWORD: True}
    return partial(call, **keywords)


@dataclass(frozen=True)
class _Pair:
    """A model and its teacher, and how they are compared."""

    model: nn.Module
    teacher: nn.Module
    loss: Loss
    run: Callable[[nn.Module, Any], Any]
    dtype: torch.dtype | None
    is_half: bool
    """Whether the model was in half precision before it was healed in float32, as its batches still are."""

    def loss_of(self, batch: Any, hidden: float = 0.0) -> Tensor:
        """The loss on a batch, with the distance of the hidden states if it has a weight."""
        with self._precision():
            with torch.no_grad():
                reference = self.run(self.teacher, batch)
            output = self.run(self.model, _widened(batch) if self.is_half else batch)
        loss = self.loss(output, reference, batch)
        return loss + hidden * hidden_state_distance(output, reference, batch) if hidden else loss

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Any]) -> float:
        """The mean of the losses on batches."""
        return sum(float(self.loss_of(batch)) for batch in batches) / len(batches)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, self.dtype)


class _State:
    """The state of healing, which a checkpoint stores."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, fingerprint: str) -> None:
        self.model, self.optimizer, self.fingerprint = model, optimizer, fingerprint
        warm_up = max(1, min(100, steps // 10))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / max(steps, 1))))
        )
        self.losses = HealingLosses()
        self.best: dict[str, Tensor] | None = None
        """The weights with the least loss on held-out batches, if they are not those of now."""

    def update(self, loss: Tensor, lr: float) -> None:
        """One step of the optimizer."""
        if not bool(loss.isfinite()):
            raise ButtressError(
                f"healing diverged at step {len(self.losses)}: the loss is {loss.item()}. Try lr < {lr:g}"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())

    def check(self, held_out_loss: float) -> float:
        """Note the loss on held-out batches, and keep the weights if it is the least so far."""
        step = len(self.losses)
        self.losses.held_out[step] = held_out_loss
        if self.losses.best_step == step:
            self.best = copy.deepcopy(self.model.state_dict())
        return held_out_loss

    def restore_best(self) -> None:
        """Go back to the weights with the least loss on held-out batches."""
        if self.best is not None:
            self.model.load_state_dict(self.best)

    def save(self, path: Path) -> None:
        random = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "losses": list(self.losses),
            "held_out": self.losses.held_out,
            "best": self.best,
            "about": self.fingerprint,
            "random": random,
        }
        with replacing(path) as part:
            torch.save(content, part)

    def resume(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["about"] != self.fingerprint:
                raise ValueError("it belongs to other models, rates, steps or data, or to another loss or dtype")
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.schedule.load_state_dict(content["schedule"])
        except Exception as error:
            raise ButtressError(f"cannot resume from {path} ({error}): remove it to start over") from error
        cpu_state, *gpu_states = content["random"]
        torch.set_rng_state(cpu_state)
        if len(gpu_states) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(gpu_states)
        self.losses = HealingLosses(content["losses"], content.get("held_out"))
        self.best = content.get("best")


def _parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model, also buffers that its state dict leaves out."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _widened(batch: Any) -> Any:
    """A batch with its half-precision tensors in float32."""
    half = (torch.float16, torch.bfloat16)
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in half else t, batch)


@torch.no_grad()
def _restore_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, tensor in _parameters_and_buffers(model):
        if name in dtypes and tensor.dtype != dtypes[name]:
            tensor.data = tensor.data.to(dtypes[name])


def _unusual(pair: _Pair, hidden: float) -> str:
    """The dtype and the loss where they are not the defaults: checkpoints of version 0.1 name neither."""
    name = getattr(pair.loss, "__qualname__", type(pair.loss).__qualname__)
    loss = "" if pair.loss is distance_for(pair.model) else f" loss={name}"
    loss += f" hidden={hidden}" if hidden else ""
    return loss if pair.dtype is None else f"{loss} dtype={pair.dtype}"


def _fingerprint(model: nn.Module, teacher: nn.Module, settings: str) -> str:
    """Identifies a healing by the weights of both models and by the settings."""
    digest = hashlib.sha256(settings.encode())
    for module in (model, teacher):
        for name, t in module.state_dict().items():
            sums = (t.double().sum().item(), t.double().abs().sum().item()) if t.is_floating_point() else ()
            digest.update(f"{name} {tuple(t.shape)} {sums}".encode())
    return digest.hexdigest()
