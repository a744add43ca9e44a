"""Muon for models with structured factors: orthogonalized momentum for matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from buttress.errors import RuleError, quoted
from buttress.optim import shards
from buttress.optim.layer_bound import LayerBound
from buttress.optim.matrices import STACK, Layout
from buttress.optim.orthogonalization import Coefficients, largest_norm, minimax_coefficients, orthogonalize
from buttress.optim.updates import Update

BATCH_NUMBERS = 2**26
"""Most numbers that are orthogonalized in one call: larger batches are no faster, and would need more memory."""

RULES = ("muon", "adam")
UNSUPPORTED = ("amsgrad", "dampening", "differentiable", "maximize")
"""Options of other optimizers' groups that would change an update."""


class Muon(torch.optim.Optimizer):
    """Muon for dense matrices and stacks of slices, with AdamW for the other parameters.

    The update of each matrix is the nearest semi-orthogonal matrix to its momentum, whose singular values are all 1,
    times the learning rate. There is no further scale: `param_groups` with the rule "muon" gives every factor the rate
    that suits its sizes. Slices of equal shape are orthogonalized in one batch, whichever parameters they belong to.
    A step never waits for the device, so it can be captured in a CUDA graph if the learning rates are tensors.

    Parameters that FSDP2 shards are supported. Shards of factors have whole slices and are orthogonalized where they
    are; the momentum of other sharded matrices is gathered, and each process keeps its shard of the update.

    Args:
        params: Groups of `param_groups(model, lr, rule="muon")`, or any parameters or groups. A group may have "rule":
            "muon" or "adam"; and "matrices": how its parameters are read as stacks of matrices. By default the last
            two of two or three dimensions are a matrix. ("rows", n) is for n matrices below each other, each with all
            further dimensions as its columns, such as the weight of a convolution (n = 1).
        lr: Learning rate of groups without their own: a number, or a tensor without dimensions.
        momentum: Weight of the past in the average of gradients.
        nesterov: Whether the average counts the present gradient once more.
        weight_decay: Decoupled weight decay, for both rules: a parameter is multiplied by 1 - lr * weight_decay.
        rule: Rule of groups without their own.
        betas: Adam's decay rates.
        eps: Adam's smallest divisor.
        coefficients: Coefficients of the steps of the orthogonalization. Default: `minimax_coefficients()`, which
            gives singular values between 0.995 and 1.005 in float32, for condition numbers up to 100.
        dtype: Data type of the orthogonalization. Default: bfloat16 on a GPU; elsewhere float32, or float64 for
            parameters of that type.
        bound: Largest change of the matrix of a structured layer in one step, in spectral norm and without weight
            decay, relative to the change that its learning rates give factors of their nominal norms. A step of a
            layer that would exceed it is shortened, with one scale for all factors of the layer. Needs the groups of
            `param_groups`. Default: no bound.
        foreach: Whether to orthogonalize slices of equal shape in one batch. If False, each parameter is
            orthogonalized alone, which needs less memory.

    Raises:
        RuleError: If a rate, decay or momentum is out of range, a rule is neither "muon" nor "adam", or a parameter
            of the rule "muon" is no stack of matrices.

    Example:
        >>> groups = bt.param_groups(model, lr=0.02, rule="muon", weight_decay=0.1)
        >>> optimizer = bt.optim.Muon(groups)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        rule: str = "muon",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        coefficients: Sequence[Coefficients] | None = None,
        dtype: torch.dtype | None = None,
        bound: float | None = None,
        foreach: bool = True,
    ) -> None:
        if bound is not None and not bound > 0:
            raise RuleError(f"bound must be a number > 0, or None for no bound, got {bound!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise RuleError(f"dtype must be a floating-point type such as torch.bfloat16, got {dtype}")
        self.coefficients = tuple(coefficients or minimax_coefficients())
        self.dtype, self.foreach = dtype, foreach
        self.bound = None if bound is None else LayerBound(bound, largest_norm(self.coefficients))
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "rule": rule,
            "betas": betas,
            "eps": eps,
            "matrices": None,
            "layers": None,
            # Tells torch that Adam's step counts are on the device, so that load_state_dict puts them there.
            "capturable": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see the class for its keys.

        Raises:
            RuleError: As for the class; the optimizer is then unchanged.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except RuleError:
            del self.param_groups[-1]
            raise

    def _check(self, group: dict[str, Any]) -> None:
        _check_numbers(group)
        if group["rule"] not in RULES:
            raise RuleError(
                f"Muon trains groups of the rules 'muon' and 'adam', got {quoted(group['rule'])}: make them with "
                'param_groups(model, lr, rule="muon")'
            )
        if group["rule"] == "adam":
            return
        for p in group["params"]:
            _check_is_stack(p, group["matrices"])
        if self.bound is not None and len(group["layers"] or ()) != len(group["params"]):
            raise RuleError(
                "bound needs the layer of every factor, which these groups do not have: make them with "
                'param_groups(model, lr, rule="muon")'
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients again; optional.

        Returns:
            The closure's result, or None.

        Raises:
            RuleError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[Update] = []
        for group in self.param_groups:
            members = [(p, i) for i, p in enumerate(group["params"]) if p.grad is not None]
            _check_gradients(members)
            if group["rule"] == "adam":
                self._step_adam([p for p, _ in members], group)
            else:
                updates += self._average(members, group)
        self._orthogonalize(updates)
        scales = {} if self.bound is None else self.bound.scales(updates)
        for update in updates:
            if update.layer in scales:
                update.direction.mul_(scales[update.layer].to(update.direction.dtype))
        for group in self.param_groups:
            _apply([u for u in updates if u.group is group], group)
        return loss

    def _average(self, members: list[tuple[nn.Parameter, int]], group: dict[str, Any]) -> list[Update]:
        """Update the averages of the gradients of a group; they are the directions to be orthogonalized."""
        if not members:
            return []
        for p, _ in members:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        gradients = [shards.local_gradient(p) for p, _ in members]
        averages = [shards.local(self.state[p]["momentum_buffer"]) for p, _ in members]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, averages, group["momentum"]) if group["nesterov"] else averages
        layers = group["layers"] or [None] * len(group["params"])
        return [
            Update(p, group, d, group["matrices"] or STACK, layers[i])
            for (p, i), d in zip(members, directions, strict=True)
        ]

    def _orthogonalize(self, updates: list[Update]) -> None:
        """Replace directions by the nearest semi-orthogonal matrices."""
        stacks = [update.stack(self._dtype(update.parameter)) for update in updates]
        for batch in self._batches(stacks):
            joined = torch.cat([_wide(stacks[i]) for i in batch])
            results = orthogonalize(joined, self.coefficients).split([stacks[i].shape[0] for i in batch])
            for i, result in zip(batch, results, strict=True):
                is_tall = stacks[i].shape[1] > stacks[i].shape[2]
                updates[i].unstack(result.mT if is_tall else result)

    def _batches(self, stacks: Sequence[Tensor]) -> list[list[int]]:
        """Indices of the stacks that are orthogonalized together: of one shape up to transposition."""
        if not self.foreach:
            return [[i] for i in range(len(stacks))]
        batches: dict[object, list[list[int]]] = defaultdict(lambda: [[]])
        for i, stack in enumerate(stacks):
            same = batches[(*sorted(stack.shape[1:]), stack.dtype, stack.device)]
            if same[-1] and stack.numel() + sum(stacks[j].numel() for j in same[-1]) > BATCH_NUMBERS:
                same.append([])
            same[-1].append(i)
        return [batch for same in batches.values() for batch in same]

    def _dtype(self, p: Tensor) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return torch.bfloat16 if p.device.type == "cuda" else torch.promote_types(p.dtype, torch.float32)

    def _step_adam(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not params:
            return
        for p in params:
            if not self.state[p]:
                # On the device and of this type, as fused Adam needs it.
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        is_fused = not torch.compiler.is_compiling()  # the fused kernel would break the graph
        adamw(
            [shards.local(p) for p in params],
            [shards.local_gradient(p) for p in params],
            [shards.local(self.state[p]["exp_avg"]) for p in params],
            [shards.local(self.state[p]["exp_avg_sq"]) for p in params],
            [],
            [self.state[p]["step"] for p in params],
            fused=is_fused,
            foreach=not is_fused,
            capturable=not is_fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _wide(stack: Tensor) -> Tensor:
    """A stack of matrices, transposed if they have more rows than columns."""
    return stack.mT if stack.shape[1] > stack.shape[2] else stack


def _apply(updates: list[Update], group: dict[str, Any]) -> None:
    """Decay the parameters of a group, and take the step."""
    if not updates:
        return
    params = [shards.local(u.parameter) for u in updates]
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    # Not as `alpha` of the addition, which is a number: a rate on the device would have to be read.
    torch._foreach_add_(params, torch._foreach_mul([u.direction for u in updates], -group["lr"]))


def _check_numbers(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps"):
        if not isinstance(group[name], Tensor) and not group[name] >= 0:
            raise RuleError(f"{name} must be a number >= 0, got {group[name]!r}")
    for name, value in (("momentum", group["momentum"]), ("betas", group["betas"][0]), ("betas", group["betas"][1])):
        if not 0 <= value < 1:
            raise RuleError(f"{name} must be at least 0 and below 1, got {value!r}")
    for name in UNSUPPORTED:
        if group.get(name):
            raise RuleError(f"Muon has no option {name}={group[name]!r}: leave it out of the group")


def _check_is_stack(p: Tensor, layout: Layout | None) -> None:
    shape = tuple(p.shape)
    if not p.is_floating_point():
        raise RuleError(f"Muon trains real floating-point parameters, got one of {p.dtype}")
    if p.dim() < 2:
        raise RuleError(
            f"a parameter of shape {shape} has no matrix to orthogonalize: give its group rule='adam', or make the "
            'groups with param_groups(model, lr, rule="muon")'
        )
    if layout is None and p.dim() > 3:
        raise RuleError(
            f"which axes of a parameter of shape {shape} form its matrices cannot be told: make the groups with "
            "param_groups(model, lr, rule=\"muon\"), or give the group matrices=('rows', 1) for a matrix of "
            f"{shape[0]} x {prod(shape[1:])}"
        )
    if layout is not None and layout[0] == "rows" and shape[0] % layout[1]:
        raise RuleError(f"matrices={layout}: {shape[0]} rows do not divide into {layout[1]} matrices")


def _check_gradients(members: list[tuple[nn.Parameter, int]]) -> None:
    for p, _ in members:
        if p.grad is not None and p.grad.is_sparse:
            raise RuleError(
                f"the gradient of a parameter of shape {tuple(p.shape)} is sparse, and Muon needs dense ones: use "
                "sparse=False in its embedding"
            )
