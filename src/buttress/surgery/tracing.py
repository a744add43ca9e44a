"""Which structured layer alone reads the result of an activation, found by tracing the forward pass around both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from buttress.errors import first_line
from buttress.inspection.names import join
from buttress.nn.fused_activation import FusedActivation
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv
from buttress.ops.activations import ACTIVATIONS

Function = Callable[[Tensor], Tensor]

_PROBE = torch.cat([torch.linspace(-12, 12, 2401, dtype=torch.float64), torch.tensor([-1e4, 1e4, 1e12]).double()])
_PROBE_TOLERANCE = 1e-9
_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnreadError(Exception):
    """Why no structured layer can apply an activation."""


@dataclass(frozen=True)
class Place:
    """An activation in a model.

    Attributes:
        ancestors: The modules around it, the model first and its owner last, each with its name in the model.
        key: Attribute of the owner: a submodule, or a function.
        activation: Name of the activation.
        value: The submodule or function.
    """

    ancestors: tuple[tuple[str, nn.Module], ...]
    key: str
    activation: str
    value: Function

    @property
    def name(self) -> str:
        """Name in the model."""
        return join(self.ancestors[-1][0], self.key)

    @property
    def owner(self) -> nn.Module:
        """The module that calls it."""
        return self.ancestors[-1][1]


@dataclass(frozen=True)
class Reading:
    """A structured layer that alone reads the result of an activation.

    Attributes:
        name: Name of the layer in the model.
        layer: The layer.
        root: A module that contains both, with its name in the model.
        method: The method of it that calls both.
        width: Inputs of the first layer that the method calls; None where it calls none.
    """

    name: str
    layer: StructuredLinear
    root: tuple[str, nn.Module]
    method: str
    width: int | None


def activation_name(function: Function) -> str | None:
    """Which of the activations a function or module computes, judged by its values.

    Args:
        function: Any function of one tensor.

    Returns:
        The name of the activation; None if it computes something else.
    """
    state = {key: id(value) for key, value in vars(function).items()} if isinstance(function, nn.Module) else {}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            y = function(_PROBE.clone())
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != _PROBE.shape or y.dtype != _PROBE.dtype:
        return None
    if isinstance(function, nn.Module) and {key: id(value) for key, value in vars(function).items()} != state:
        return None  # it keeps something between calls
    for name, activation in ACTIVATIONS.items():
        if torch.allclose(y, activation.forward(_PROBE), rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE):
            return name
    return None


def find_activations(model: nn.Module) -> Iterator[Place]:
    """Activations that are submodules, or functions of torch that a module has as an attribute.

    Args:
        model: The model.

    Yields:
        Each place once, in the model's order.
    """
    visited: set[int] = set()

    def walk(ancestors: tuple[tuple[str, nn.Module], ...]) -> Iterator[Place]:
        owner_name, owner = ancestors[-1]
        if id(owner) in visited:
            return
        visited.add(id(owner))
        for key, value in [*vars(owner).items()]:
            from_torch = (getattr(value, "__module__", None) or "").startswith("torch.")
            if callable(value) and from_torch and not inspect.isclass(value) and (name := activation_name(value)):
                yield Place(ancestors, key, name, value)
        for key, child in owner._modules.items():
            if child is None or isinstance(child, FusedActivation | StructuredLinear):
                continue
            is_leaf = not child._modules and not child._parameters and not child._buffers
            if is_leaf and (name := activation_name(child)):
                yield Place(ancestors, key, name, child)
            else:
                yield from walk((*ancestors, (join(owner_name, key), child)))

    return walk((("", model),))


def find_reader(model: nn.Module, place: Place) -> Reading:
    """The structured layer that alone reads the result of an activation.

    The forward pass of the owner is traced without running it, with the modules inside as opaque calls. Where the
    result leaves the owner, or goes into a module with structured layers, that module is opened and traced, too.

    Args:
        model: The model.
        place: The activation.

    Returns:
        The layer.

    Raises:
        UnreadError: If there is none, with the reason.
    """
    opened = [place.owner]
    depth = len(place.ancestors) - 1
    while True:
        root_name, root = place.ancestors[depth]
        # A list of modules is never called itself.
        reader = None if type(root).forward is nn.Module.forward else _reader_in(root, place, opened)
        if isinstance(reader, nn.Module):
            opened.append(reader)
        elif reader is not None:
            graph, layer = reader
            name = next(n for n, m in root.named_modules() if m is layer)
            _check_layer(model, layer, join(root_name, name))
            return Reading(join(root_name, name), layer, (root_name, root), _method(root), _first_width(root, graph))
        elif depth == 0:
            raise UnreadError("its result is that of the model")
        else:
            if len(set(map(id, _parents(model, root)))) > 1:
                raise UnreadError(f"{root_name} is used by several modules")
            depth -= 1
            opened.append(place.ancestors[depth][1])


def _method(root: nn.Module) -> str:
    """The method that is traced: of torch's transformer layers the FFN alone, because the rest depends on values."""
    for cls in _ENCODERS:
        if isinstance(root, cls) and type(root).forward is cls.forward and type(root)._ff_block is cls._ff_block:
            return "_ff_block"
    return "forward"


def _trace(root: nn.Module, opened: list[nn.Module]) -> fx.Graph:
    """The calls of a module's forward pass; optional arguments have their defaults.

    Args:
        root: The module.
        opened: Modules whose own calls are traced; others are opaque.

    Returns:
        The graph.

    Raises:
        UnreadError: If it cannot be traced.
    """
    if any("forward" in vars(m) for m in opened):
        raise UnreadError("a forward around it was replaced on its module")
    ids = set(map(id, opened))

    class Tracer(fx.Tracer):
        traced_func_name = _method(root)

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return id(m) not in ids

    parameters = inspect.signature(getattr(type(root), Tracer.traced_func_name)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        return Tracer().trace(root, concrete_args=defaults or None)
    except Exception as error:
        raise UnreadError(f"the forward of {type(root).__name__} cannot be traced: {first_line(error, 80)}") from None


def _trace_counting(root: nn.Module, place: Place, opened: list[nn.Module]) -> tuple[fx.Graph, int]:
    """As `_trace`, with the number of times that the owner's attribute was called; 1 for a submodule."""
    if isinstance(place.value, nn.Module):
        return _trace(root, opened), 1
    calls = 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return place.value(*arguments, **options)

    # The graph does not tell a function that is an attribute from the same function called by its name.
    attributes = vars(place.owner)
    attributes[place.key] = counting
    try:
        return _trace(root, opened), calls
    finally:
        attributes[place.key] = place.value


def _reader_in(
    root: nn.Module, place: Place, opened: list[nn.Module]
) -> tuple[fx.Graph, StructuredLinear] | nn.Module | None:
    """What reads the activation's result: a structured layer, a module to open, or None where the root returns it."""
    graph, attribute_calls = _trace_counting(root, place, opened)
    modules = dict(root.named_modules(remove_duplicate=False))
    calls = [node for node in graph.nodes if _called(node, modules) is place.value]
    if len(calls) != 1:
        raise UnreadError(f"the forward of {type(root).__name__} calls it {len(calls)} times")
    if attribute_calls == 0:
        raise UnreadError("its owner calls the function by name")
    (node,) = calls
    if _arguments(node) is None:
        raise UnreadError("it is called with several arguments")
    if getattr(place.value, "inplace", False) and len(_arguments(node).users) > 1:
        raise UnreadError("it works in place, on a tensor that is used elsewhere")
    if isinstance(place.value, nn.Module) and _is_changed(place.value):
        raise UnreadError("it has hooks")
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise UnreadError(f"its result is used in {len(users)} places" if users else "its result is not used")
        (user,) = users
        if user.op == "output":
            if user.args != (node,):
                raise UnreadError("its result is returned among others")
            return None
        reader = _called(user, modules)
        if not isinstance(reader, nn.Module):
            raise UnreadError(f"its result goes into {_text(user)}")
        if isinstance(reader, nn.Identity) or (isinstance(reader, _DropoutNd) and reader.p == 0):
            if _is_changed(reader):
                raise UnreadError(f"{user.target} after it has hooks")
            node = user
            continue
        if isinstance(reader, StructuredLinear):
            if _arguments(user) is not node:
                raise UnreadError(f"{user.target} is called with several arguments")
            if sum(_called(n, modules) is reader for n in graph.nodes) > 1:
                raise UnreadError(f"{user.target} is called several times")
            return graph, reader
        if isinstance(reader, _DropoutNd):
            raise UnreadError(f"dropout with p={reader.p} follows")
        if not any(isinstance(m, StructuredLinear) for m in reader.modules()):
            raise UnreadError(f"it is read by {user.target}, {type(reader).__name__}, which is not structured")
        return reader


def _called(node: fx.Node, modules: Mapping[str, nn.Module]) -> Any:
    """The module or function that a node calls."""
    return modules[str(node.target)] if node.op == "call_module" else node.target


def _arguments(node: fx.Node) -> Any:
    """The only argument of a call, apart from `inplace=False`; None if there are others."""
    options = {key: value for key, value in node.kwargs.items() if (key, value) != ("inplace", False)}
    return node.args[0] if len(node.args) == 1 and not options else None


def _text(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _is_changed(module: nn.Module) -> bool:
    """Whether something else watches or replaces a module's computation."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS)


def _check_layer(model: nn.Module, layer: StructuredLinear, name: str) -> None:
    if type(layer).forward not in (StructuredLinear.forward, StructuredPointwiseConv.forward):
        raise UnreadError(f"{name} is a subclass with a forward of its own")
    if _is_changed(layer):
        raise UnreadError(f"{name} has hooks")
    if layer.input_activation is not None:
        raise UnreadError(f"{name} applies {layer.input_activation} to its input already")
    if len(_parents(model, layer)) > 1:
        raise UnreadError(f"{name} is used by several modules")


def _parents(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that have another as a child, once for each of its names there."""
    return [m for m in model.modules() for child in m._modules.values() if child is module]


def _first_width(root: nn.Module, graph: fx.Graph) -> int | None:
    """Inputs of the first layer of a known width that a graph calls."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        module = _called(node, modules)
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.Module):
            width = getattr(module, "in_features", None) or getattr(module, "nx", None)
            if isinstance(width, int):
                return width
    return None
