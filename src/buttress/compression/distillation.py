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

from buttress.compression.running import call, evaluating, mask_of
from buttress.errors import ButtressError
from buttress.files import replacing
from buttress.optim.groups import param_groups

Loss = Callable[[Any, Any, Any], Tensor]
"""A function of the model's output, the teacher's output and the batch, to a scalar."""


@dataclass(frozen=True)
class Healing:
    """Progress of `heal`, passed to its `watch` after every step."""

    step: int
    """Steps done."""
    steps: int
    """Steps in all."""
    loss: float
    """Loss of the last step."""


def distance(output: Any, reference: Any, batch: Any) -> Tensor:
    """Distance of a model's output from the teacher's, without padding.

    For logits it is the divergence KL(teacher, model) of the distributions, otherwise `relative_square_error`.

    Args:
        output: Output of the model: a tensor, a tuple that starts with one, or an object with `logits` or
            `last_hidden_state`.
        reference: Output of the teacher.
        batch: The batch; tokens outside its "attention_mask" are padding.

    Returns:
        A scalar.
    """
    own, reference_tensor = _unmasked(output, reference, batch)
    # A single number is a score, and an image of numbers has its classes elsewhere: no distribution over the last axis.
    if not gives_logits(output) or own.shape[-1] == 1 or own.dim() > 3:
        return relative_square_error(output, reference, batch)
    own, reference_tensor = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (own, reference_tensor))
    return F.kl_div(own, reference_tensor, log_target=True, reduction="batchmean")


def relative_square_error(output: Any, reference: Any, batch: Any) -> Tensor:
    """The mean square of the difference of two outputs, divided by that of the second; arguments as for `distance`."""
    own, reference_tensor = _unmasked(output, reference, batch)
    return (own - reference_tensor).float().square().mean() / reference_tensor.float().square().mean()


def distance_for(model: nn.Module) -> Loss:
    """`distance`, or `relative_square_error` if the model's config says that its logits are not those of classes."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return relative_square_error if problem in ("regression", "multi_label_classification") else distance


def _unmasked(output: Any, reference: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Both outputs as tensors, at the tokens that the batch's mask keeps."""
    own, other = output_tensor(output), output_tensor(reference)
    mask = mask_of(batch)
    if mask is not None and own.dim() > mask.dim() and mask.shape == own.shape[: mask.dim()]:
        return own[mask.bool()], other[mask.bool()]
    return own, other


def output_tensor(output: Any) -> Tensor:
    """The main tensor of a model's output.

    Its logits or its last hidden state; where there is neither, all outputs of the same shape whose names end in
    "logits" or "_embeds", joined. Of a tuple or list, the first item counts.

    Args:
        output: What the model returned: a tensor, a tuple or list, a mapping, or an object with such attributes.

    Returns:
        The tensor.

    Raises:
        ButtressError: If there is no such tensor.
    """
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    named = dict(output) if isinstance(output, Mapping) else {}
    for ending, join in (("logits", torch.stack), ("_embeds", torch.cat)):
        tensors = [t for name, t in named.items() if name.endswith(ending) and isinstance(t, Tensor)]
        if tensors:
            # Stacked before the classes: the start and the end of an answer are two questions.
            return join([t for t in tensors if t.shape == tensors[0].shape], -2 if ending == "logits" else 0)
    raise ButtressError(f"a {type(output).__name__} has no logits and no last_hidden_state: give a loss of your own")


def gives_logits(output: Any) -> bool:
    """Whether the main tensor of a model's output are logits."""
    if isinstance(getattr(output, "logits", None), Tensor):
        return True
    return (
        isinstance(output, Mapping)
        and not isinstance(output.get("last_hidden_state"), Tensor)
        and any(str(name).endswith("logits") for name in output)
    )


@torch.no_grad()
def mean_distance(model: nn.Module, teacher: nn.Module, batches: Iterable[Any]) -> float:
    """Mean over batches of the distance of a model's output from the teacher's."""
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
    """Distill a compressed model from the original model, in place.

    Learning rates are structure-aware (`param_groups`), with a short warm-up and a cosine decay. Both models run in
    eval mode: there is no dropout, and batch norm statistics do not change. Parameters that need no gradient do not
    change either. Half-precision weights are trained in float32 and rounded at the end.

    Args:
        model: The compressed model.
        teacher: The original model. It is not changed.
        batches: The batch of each step, as a function of the step, so that a resumed run continues with the right one.
        steps: Number of steps.
        lr: Base learning rate, as for `param_groups`.
        weight_decay: Weight decay.
        loss: Called with the model's output, the teacher's output and the batch. Default: `distance`.
        run: Called as `run(model, batch)`. Default: batches are passed as in `moments`.
        checkpoint: A file from which to resume, written atomically.
        every: Steps between two checkpoints.
        label: Identifies the batches. Resuming from a checkpoint with another label is an error.
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
    model.eval()  # the teacher's output is deterministic, and dropout would add noise to the student's
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
    """The state of healing, which a checkpoint stores."""

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
                f"healing diverged at step {len(self.losses)}: the loss is {loss.item()}. Try lr < {lr:g}"
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
    """Identifies a healing by the weights of both models and by the settings."""
    digest = hashlib.sha256(settings.encode())
    for module in (model, teacher):
        for name, t in module.state_dict().items():
            sums = (t.double().sum().item(), t.double().abs().sum().item()) if t.is_floating_point() else ()
            digest.update(f"{name} {tuple(t.shape)} {sums}".encode())
    return digest.hexdigest()
