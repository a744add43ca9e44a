"""Healing: a short distillation of a compressed model from the original model, which is its teacher."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.compression.input_moments import call, evaluating, mask_of
from buttress.errors import ButtressError
from buttress.files import replacing
from buttress.optim.groups import param_groups

Loss = Callable[[Any, Any, Any], Tensor]
"""Of a model's answer, the teacher's answer and the batch."""


@dataclass(frozen=True)
class Healing:
    """Progress of `heal`, passed to its `watch` after every step."""

    step: int
    """Steps done."""
    steps: int
    """Steps in all."""
    loss: float
    """Of the last step."""


def distance(answer: Any, reference: Any, batch: Any) -> Tensor:
    """How far a model's answer is from the teacher's; padding does not count.

    For logits it is the divergence KL(teacher, model) of the distributions. For anything else it is the mean square of
    the difference divided by that of the teacher's answer.

    Args:
        answer: What the model returns: a tensor, a tuple with one first, or an object with `logits` or
            `last_hidden_state`.
        reference: What the teacher returns.
        batch: The batch, whose "attention_mask" says what counts.

    Returns:
        A scalar.
    """
    own, reference_tensor = _unmasked(answer, reference, batch)
    if not hasattr(answer, "logits") or own.shape[-1] == 1:  # a single number is a score, not a distribution
        return square(answer, reference, batch)
    own, reference_tensor = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (own, reference_tensor))
    return F.kl_div(own, reference_tensor, log_target=True, reduction="batchmean")


def square(answer: Any, reference: Any, batch: Any) -> Tensor:
    """The mean square of the difference of two answers divided by that of the second."""
    own, reference_tensor = _unmasked(answer, reference, batch)
    return (own - reference_tensor).float().square().mean() / reference_tensor.float().square().mean()


def distance_for(model: nn.Module) -> Loss:
    """`distance`, or `square` where a model's config says that its logits are not a distribution over classes."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return square if problem in ("regression", "multi_label_classification") else distance


def _unmasked(answer: Any, reference: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Both answers at the tokens that the batch's mask keeps."""
    own, other = answer_of(answer), answer_of(reference)
    mask = mask_of(batch)
    if mask is not None and own.dim() > mask.dim() and mask.shape == own.shape[: mask.dim()]:
        return own[mask.bool()], other[mask.bool()]
    return own, other


def answer_of(output: Any) -> Tensor:
    """The tensor that counts in what a model returns: logits, the last hidden state, or the first of a tuple."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    tensor = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(tensor, Tensor):
        raise ButtressError(
            f"a {type(output).__name__} has no logits and no last_hidden_state: give a loss of your own"
        )
    return tensor


@torch.no_grad()
def mean_distance(model: nn.Module, teacher: nn.Module, batches: Iterable[Any]) -> float:
    """How far a model's answers are from another's, by `distance`: the mean over batches."""
    loss = distance_for(model)
    with evaluating(teacher), evaluating(model):
        losses = [float(loss(call(model, batch), call(teacher, batch), batch)) for batch in batches]
    return sum(losses) / len(losses)


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
    """Train a compressed model to answer as the original model does, in place.

    Learning rates are structure-aware (`param_groups`), with a short warm-up and a cosine decay. Both models run in
    eval mode: there is no dropout, and batch norm statistics stay as they are. Parameters that need no gradient stay as
    they are, too. Half-precision weights are trained in float32 and rounded at the end.

    Args:
        model: The compressed model.
        teacher: The original model. It is not changed.
        batches: The batch of each step, as a function of the step, so that a resumed run continues with the right one.
        steps: Number of steps.
        lr: Base learning rate, as for `param_groups`.
        weight_decay: Weight decay.
        loss: Called with the model's answer, the teacher's answer and the batch. Default: `distance`.
        run: Called as `run(model, batch)`. Default: as `moments` passes batches.
        checkpoint: A file from which to resume, written atomically.
        every: Steps between two checkpoints.
        label: What the batches are. A checkpoint with another label is refused.
        watch: Called after every step.

    Returns:
        The loss of every step, those before a resumption included.

    Raises:
        ButtressError: If the loss is not finite, or the checkpoint belongs to other models, rates, steps or data.

    Example:
        >>> teacher = copy.deepcopy(model)
        >>> bt.replace_(model, bt.BTT(rank=4), init="project")
        >>> losses = bt.heal(model, teacher, lambda step: loader[step], steps=500)
    """
    loss = loss or distance_for(model)
    fingerprint = _fingerprint(model, teacher, f"{lr} {weight_decay} {steps} {label}")
    dtypes = {name: t.dtype for name, t in model.state_dict().items() if t.is_floating_point()}
    if any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes.values()):
        model.float()
    state = _State(model, torch.optim.AdamW(param_groups(model, lr, weight_decay=weight_decay)), steps, fingerprint)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_file():
        state.resume(path)
    model.eval()  # trained as it is used: the teacher's answers are deterministic, and dropout would blur the target
    try:
        with evaluating(teacher):
            for step in range(len(state.losses), steps):
                batch = batches(step)
                with torch.no_grad():
                    reference = run(teacher, batch)
                state.update(loss(run(model, batch), reference, batch), lr)
                if watch is not None:
                    watch(Healing(step + 1, steps, state.losses[-1]))
                if path is not None and ((step + 1) % every == 0 or step + 1 == steps):
                    state.save(path)
    finally:
        _restore_dtypes(model, dtypes)
    return state.losses


class _State:
    """What changes from step to step, and its checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, fingerprint: str) -> None:
        self.model, self.optimizer, self.fingerprint = model, optimizer, fingerprint
        warm_up = max(1, min(100, steps // 10))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / max(steps, 1))))
        )
        self.losses: list[float] = []

    def update(self, loss: Tensor, lr: float) -> None:
        """One step of the optimizer."""
        if not bool(loss.isfinite()):
            raise ButtressError(
                f"healing went wrong at step {len(self.losses)}: the loss is {loss.item()}. Try lr < {lr:g}"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())

    def save(self, path: Path) -> None:
        random = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "losses": self.losses,
            "about": self.fingerprint,
            "random": random,
        }
        with replacing(path) as part:
            torch.save(content, part)

    def resume(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["about"] != self.fingerprint:
                raise ValueError("it belongs to other models, rates, steps or data")
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.schedule.load_state_dict(content["schedule"])
        except Exception as error:
            raise ButtressError(f"cannot resume from {path} ({error}): remove it to start over") from error
        cpu_state, *gpu_states = content["random"]
        torch.set_rng_state(cpu_state)
        if len(gpu_states) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(gpu_states)
        self.losses = list(content["losses"])


@torch.no_grad()
def _restore_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in dtypes and tensor.dtype != dtypes[name]:
            tensor.data = tensor.data.to(dtypes[name])


def _fingerprint(model: nn.Module, teacher: nn.Module, settings: str) -> str:
    """Tells one healing from another: by the weights of both models and by the settings."""
    digest = hashlib.sha256(settings.encode())
    for module in (model, teacher):
        for name, t in module.state_dict().items():
            sums = (t.double().sum().item(), t.double().abs().sum().item()) if t.is_floating_point() else ()
            digest.update(f"{name} {tuple(t.shape)} {sums}".encode())
    return digest.hexdigest()
