"""quantize_: the weights of linear layers, structured and dense, stored in int8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from buttress.errors import PlanError
from buttress.inspection.coverage import Unreached, coverage
from buttress.inspection.head import output_head
from buttress.inspection.hooks import HOOKS
from buttress.inspection.names import first_match, is_conv1d, join, unique_modules
from buttress.inspection.obstacles import find_obstacles
from buttress.inspection.sites import check_is_model, check_not_wrapped, find_sites, individually_compiled, put_module
from buttress.nn.attention import PROJECTIONS
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.linear import StructuredLinear
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured
from buttress.surgery.report import count_parameters
from buttress.surgery.torch_encoders import set_fused_path, structured_encoders

_HOOKS_WOULD_BE_LOST = "it has hooks, which an int8 layer in its place would not have: remove them first"
_OWN_FORWARD = "its forward was replaced on the instance"
_IN_ATTENTION = "projection of nn.MultiheadAttention"
_NOT_NAMED = "no glob names it"


@dataclass(frozen=True)
class Quantization:
    """What `quantize_` did; `str` gives the totals and one line per reason.

    Attributes:
        layers: Names of the layers that were converted.
        unreached: What holds matrices and is not in int8, each with the reason.
        bytes_before: Bytes of the converted layers before.
        bytes_after: Bytes of the converted layers now.
        params_in_int8: Parameters of all int8 layers of the model, including those of earlier calls.
        model_params: Parameters of the model, including those of int8 layers, each counted once.

    Example:
        >>> quantization = quantize_(model)
        >>> quantization.share_in_int8, [layer.name for layer in quantization.unreached]
    """

    layers: tuple[str, ...]
    unreached: tuple[Unreached, ...]
    bytes_before: int
    bytes_after: int
    params_in_int8: int
    model_params: int

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the modules and bare parameters that hold matrices and are not in int8."""
        return tuple(item.name for item in self.unreached)

    @property
    def share_in_int8(self) -> float:
        """Share of the model's parameters that int8 layers hold now, from 0 to 1."""
        # Layers quantized by other libraries may store their weights outside of parameters.
        listed = self.params_in_int8 + sum(item.params for item in self.unreached)
        return self.params_in_int8 / max(self.model_params, listed, 1)

    def __str__(self) -> str:
        sizes = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        count = f"{len(self.layers)} {'layer' if len(self.layers) == 1 else 'layers'}"
        share = f"{self.share_in_int8:.1%} of the model's parameters are in int8 layers"
        return "\n".join([f"{count} in int8, {sizes}; {share}", *self._not_in_int8()])

    def _not_in_int8(self) -> list[str]:
        """A heading and one line per reason, the largest share first."""
        groups: dict[str, list[Unreached]] = {}
        for item in self.unreached:
            groups.setdefault(item.reason, []).append(item)
        lines = []
        for reason, items in sorted(groups.items(), key=lambda group: -sum(i.params for i in group[1])):
            params = sum(item.params for item in items)
            # A weight that two layers share is counted once.
            share = f"{params / max(self.model_params, 1):7.1%}" if params else " shared"
            more = f" and {len(items) - 1} more" if len(items) > 1 else ""
            lines.append(f"{share}  {items[0].name}{more} ({reason})")
        return ["not in int8:", *lines] if lines else []


def quantize_(model: nn.Module, layers: str | Sequence[str] | None = None) -> Quantization:
    """Store the weights of linear layers in int8, with one scale per row, for inference.

    A row is one output of a slice of a factor, or of a dense weight. Each weight changes by at most half a scale, which
    is the largest weight of its row divided by 127. Activations keep their dtype. Quantize after training, compressing
    and saving: int8 layers cannot be trained or saved to a folder, and rounding takes a moment.

    Layers that compute something else than their stored weight says stay as they are: layers with hooks, a
    parametrized weight (weight_norm, pruning) or a forward of their own, and adapters of peft with the layers around
    which they are. The result names them, and everything else that holds matrices and is not in int8.

    Args:
        model: The model to change.
        layers: Globs of the names of layers to convert. Default: all layers of StructuredLinear and nn.Linear except
            the output head.

    Returns:
        The names of the layers that were converted, the share of the parameters that is in int8 now, and what is not,
        with the reasons.

    Raises:
        PlanError: If a glob matches no layer that can be converted (the error says why), the model is wrapped for
            distributed training, or a layer is on the meta device or was compiled by itself.
        StructureError: If a layer's weights are not finite, or `fuse_` gave it an input activation. The model is then
            as it was.

    Example:
        >>> model = bt.from_pretrained("small")
        >>> print(bt.quantize_(model))
    """
    check_is_model(model)
    reasons = _reasons_against(model)
    candidates = {name: m for name, m in _linear_layers(model) if name and name not in reasons}
    chosen, kept = _choose(model, candidates, reasons, layers)
    _check_state(model, {name: candidates[name] for name in chosen})
    converted = {name: Int8Linear.of(candidates[name]) for name in chosen}  # all of them before any is put in place
    before = sum(t.nbytes for name in chosen for t in candidates[name].parameters())
    for name, layer in converted.items():
        put_module(model, name, layer.train(candidates[name].training))
    set_fused_path(structured_encoders(model), allowed=False)
    params_in_int8 = sum(m.params for m in model.modules() if isinstance(m, Int8Linear))
    return Quantization(
        layers=tuple(converted),
        unreached=tuple(_unreached(model, reasons | kept)),
        bytes_before=before,
        bytes_after=sum(t.nbytes for layer in converted.values() for t in layer.buffers()),
        params_in_int8=params_in_int8,
        model_params=params_in_int8 + count_parameters(model.parameters()),
    )


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear | StructuredLinear]]:
    """The layers of the two classes that have an int8 form; a subclass may compute something else."""
    for name, module in unique_modules(model):
        if isinstance(module, StructuredLinear | nn.Linear) and type(module) in (StructuredLinear, nn.Linear):
            yield name, module


def _reasons_against(model: nn.Module) -> dict[str, str]:
    """Why modules and bare parameters that hold matrices cannot be converted, by name."""
    reasons = {name: _without_replacing(o.reason) for name, o in find_obstacles(model).items()}
    attention_prefixes: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        if isinstance(module, nn.MultiheadAttention):
            attention_prefixes += (join(name, ""),)
            # Most projections are not modules, but parts of one packed weight.
            reasons = dict.fromkeys((join(name, projection) for projection in PROJECTIONS), _IN_ATTENTION) | reasons
        reason = _IN_ATTENTION if name.startswith(attention_prefixes) else _reason_against(module)
        if reason is not None:
            reasons.setdefault(name, reason)
    for name, site in find_sites(model, embeddings=True).items():
        if site.by_name_only:
            reasons.setdefault(name, site.description)
    return reasons


def _without_replacing(reason: str) -> str:
    """The reason of an obstacle, whose remedy is about replacing layers, in words for quantizing."""
    return reason.removesuffix(": replace layers before quantizing").replace("replace layers before", "quantize before")


def _reason_against(module: nn.Module) -> str | None:
    """Why a layer that is no obstacle to other surgery cannot be converted; None for other modules, too."""
    if not (isinstance(module, nn.Linear | Structured) or is_conv1d(module)):
        return None
    if type(module) not in (nn.Linear, StructuredLinear):
        return f"{type(module).__name__} is neither nn.Linear nor StructuredLinear"
    if any(getattr(module, hooks) for hooks in HOOKS):
        return _HOOKS_WOULD_BE_LOST
    # accelerate wraps the forward of a layer to move its inputs and weights between devices.
    return _OWN_FORWARD if "forward" in vars(module) and not hasattr(module, "_hf_hook") else None


def _check_state(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    check_not_wrapped(model, "quantizing")
    compiled = individually_compiled(model)
    for name, layer in chosen.items():
        if id(layer) in compiled:
            raise PlanError(f"{name} was compiled by itself, and the compiled code keeps it: compile after quantizing")
        if any(p.is_meta for p in layer.parameters()):
            raise PlanError(f"{name} is on the meta device and has no weights to round: load them before quantizing")


def _choose(
    model: nn.Module,
    candidates: Mapping[str, nn.Module],
    reasons: Mapping[str, str],
    layers: str | Sequence[str] | None,
) -> tuple[list[str], dict[str, str]]:
    """The candidates to convert, and why the others are not."""
    if layers is None:
        head = output_head(model)
        kept = {n: f"output head, {head.rule}" for n, m in candidates.items() if id(m) in head.module_ids}
        if len(kept) == len(candidates):
            raise PlanError(f"nothing to store in int8: {_nothing_reason(reasons, kept)}")
        return [name for name in candidates if name not in kept], kept
    globs = [layers] if isinstance(layers, str) else list(layers)
    matches = first_match(dict.fromkeys(globs, True), candidates)
    for glob, suggestion in matches.unmatched.items():
        is_taken = bool(first_match({glob: True}, candidates).values)
        passed_over = [] if is_taken else list(first_match({glob: True}, reasons).values)
        reason = f"{passed_over[0]}: {reasons[passed_over[0]]}" if passed_over else suggestion
        raise PlanError(f"{glob!r} names no linear layer that can be stored in int8: {reason}")
    return list(matches.values), {name: _NOT_NAMED for name in candidates if name not in matches.values}


def _nothing_reason(reasons: Mapping[str, str], kept: Mapping[str, str]) -> str:
    """Why there is no layer to convert besides the output head."""
    if reasons:
        name, reason = next(iter(reasons.items()))
        more = f", and so {len(reasons) - 1} more" if len(reasons) > 1 else ""
        return f"{name or 'the model itself'} cannot be converted ({reason}){more}"
    if kept:
        name, reason = next(iter(kept.items()))
        return f"{name} stays in floating point ({reason}): name it to convert it"
    return "the model has no linear layer inside it"


def _unreached(model: nn.Module, reasons: Mapping[str, str]) -> Iterator[Unreached]:
    """What holds matrices and is not in int8, after the conversion.

    Args:
        model: The model.
        reasons: Why layers are not in int8, by name.

    Yields:
        One entry per module or bare parameter; the parts of a split layer have one each.
    """
    by_name = dict(unique_modules(model))
    for item in coverage(model, find_sites(model, embeddings=True), (), reasons).unreached:
        module = by_name.get(item.name)
        if isinstance(module, SplitLinear):
            for i, part in enumerate(module.parts):
                name = join(item.name, f"parts.{i}")
                if not isinstance(part, Int8Linear):
                    params = count_parameters(part.parameters())
                    yield Unreached(name, type(part).__name__, params, reasons.get(name, item.reason))
        elif not isinstance(module, Int8Linear):
            yield Unreached(item.name, item.kind, item.params, reasons.get(item.name, item.reason))
