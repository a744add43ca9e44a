"""Which structured layer alone reads the result of an activation, found by tracing the forward pass around both."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
_KINK = 1e-3
"""Gradients are not compared this near to zero, where relu has two."""
_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LAYERS = (StructuredLinear, StructuredPointwiseConv, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.GroupNorm, nn.LayerNorm)
_ALLOCATING = {module.forward for module in (*_LAYERS, *_NORMS)}
"""Computations whose result is always a new tensor that nothing else holds."""


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
        in_place: Whether it writes its result over its argument.
    """

    ancestors: tuple[tuple[str, nn.Module], ...]
    key: str
    activation: str
    value: Function
    in_place: bool = False

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


class _Snapshot:
    """Attributes, containers and tensors of a module and of those in it, to compare with later and to restore.

    Args:
        root: The module.
        parameters: Whether the values of parameters are copied, too.
    """

    def __init__(self, root: nn.Module, parameters: bool) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        visited: set[int] = set()

        def visit(value: Any, in_module: bool = True) -> None:
            if in_module and hasattr(value, "__dict__") and not (callable(value) or isinstance(value, Tensor)):
                # Such as a configuration; what it refers to in turn may be anything, a trainer for example.
                visit(vars(value), False)
            if not isinstance(value, dict | list | set | deque | tuple | Tensor) or id(value) in visited:
                return
            visited.add(id(value))
            if isinstance(value, Tensor):
                is_plain = type(value) is Tensor or (parameters and type(value) is nn.Parameter)
                if is_plain and not value.is_meta and value.layout == torch.strided:
                    self._tensors.append((value, value.detach().clone()))
                return
            items = {**value} if isinstance(value, dict) else [*value]
            self._containers.append((value, items))
            for item in items.values() if isinstance(items, dict) else items:
                visit(item, in_module)

        for module in root.modules():
            visit(vars(module))

    def is_changed(self) -> bool:
        """Whether an attribute or an item of a container is another object now; values of tensors may differ."""
        return any(_has_changed(container, items) for container, items in self._containers)

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything the value that it had."""
        for container, items in self._containers:
            if _has_changed(container, items):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(items)
        for tensor, values in self._tensors:
            if not torch.equal(tensor, values):
                tensor.data.copy_(values)


def _has_changed(container: Any, items: Any) -> bool:
    now, before = (
        [*value.keys(), *value.values()] if isinstance(value, dict) else [*value] for value in (container, items)
    )
    return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))


@contextmanager
def preserved(root: nn.Module, training: bool, *, parameters: bool = True) -> Iterator[_Snapshot]:
    """Set the mode of a module, and undo this and all that happens to its state when the block ends.

    Args:
        root: The module.
        training: The mode for it and all modules in it. Their `train` methods, which may do more, are not called.
        parameters: Whether parameters may change in the block, too.

    Yields:
        The state in this mode.
    """
    modes = [(module, module.training) for module in root.modules()]
    devices = {tensor.device for tensor in (*root.parameters(), *root.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=[*devices]):
        try:
            for module, _ in modes:
                module.training = training
            snapshot = _Snapshot(root, parameters)
            try:
                yield snapshot
            finally:
                snapshot.restore()
        finally:
            for module, mode in modes:
                module.training = mode


def activation_name(function: Function) -> str | None:
    """Which of the activations a function or module computes, judged by its values and gradients in both modes.

    Args:
        function: Any function of one tensor.

    Returns:
        The name of the activation; None if it computes something else.
    """
    try:
        probed = [_probed(function, training) for training in (False, True)]
    except Exception:
        return None
    for name, activation in ACTIVATIONS.items():
        expected = _probed(activation.forward, False)
        if all(_is_near(one, other) for pair in probed for one, other in zip(pair, expected, strict=True)):
            return name
    return None


def _is_near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)


def _probed(function: Function, training: bool) -> tuple[Tensor, Tensor]:
    """Values of a function in one mode, and its derivatives away from zero.

    Args:
        function: A function of one tensor. It is copied, so that it cannot keep anything.
        training: The mode of a module.

    Returns:
        The values and the derivatives.

    Raises:
        UnreadError: If it is no elementwise function, or keeps something between calls.
        Exception: Whatever the function raises.
    """
    x = _PROBE.clone().requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        function = _copied(function)
        if isinstance(function, nn.Module):
            with preserved(function, training) as snapshot:
                y = function(x.clone())
                if snapshot.is_changed():
                    raise UnreadError("it keeps something between calls")
        else:
            y = function(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            raise UnreadError("it is not elementwise")
        (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx[_PROBE.abs() > _KINK]


def _copied(function: Function) -> Function:
    """A copy that can be called without leaving anything behind: one of a module has no hooks."""
    hooks: dict[int, Any] = (
        {id(getattr(function, name)): OrderedDict() for name in _HOOKS} if isinstance(function, nn.Module) else {}
    )
    return copy.deepcopy(function, hooks)


def _works_in_place(function: Function) -> bool:
    """Whether a function that is an activation writes over its argument."""
    x = _PROBE.clone()
    with torch.no_grad():
        _copied(function)(x)
    return not torch.equal(x, _PROBE)


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
                yield Place(ancestors, key, name, value, _works_in_place(value))
        for key, child in owner._modules.items():
            if child is None or isinstance(child, FusedActivation | StructuredLinear):
                continue
            is_leaf = not child._modules and not child._parameters and not child._buffers
            if is_leaf and (name := activation_name(child)):
                yield Place(ancestors, key, name, child, _works_in_place(child))
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
        if type(root).forward is nn.Module.forward:
            reader, width = None, None
        else:
            reader, width = _reader_in_any_case(root, place, opened)
        if isinstance(reader, StructuredLinear):
            name = join(root_name, next(n for n, m in root.named_modules() if m is reader))
            _check_layer(model, reader, name)
            _path(model, root, place.owner)
            _path(model, root, reader)
            return Reading(name, reader, (root_name, root), _method(root), width)
        if reader is not None:
            opened.append(reader)
        elif depth == 0:
            raise UnreadError("its result is that of the model")
        else:
            depth -= 1
            opened.append(place.ancestors[depth][1])


def used_from_outside(model: nn.Module, readings: Sequence[tuple[Place, Reading]]) -> dict[int, str]:
    """Which activations and layers are used by a module around the root of their reading, past that root.

    A forward that cannot be traced is checked up to where tracing fails.

    Args:
        model: The model.
        readings: Activations, each with what is in its place now, and what reads them.

    Returns:
        Reasons, by index in `readings`.
    """
    reasons: dict[int, str] = {}
    places = [place for place, _ in readings]
    inside = [_inside(model, place, reading) for place, reading in readings]
    for module in model.modules():
        within = set(map(id, module.modules())) - {id(module)}
        indices = [i for i, (_, reading) in enumerate(readings) if id(reading.root[1]) in within]
        if not indices or type(module).forward is nn.Module.forward:
            continue
        owned = dict(module.named_parameters(remove_duplicate=False))
        for case in _cases(module)[:2]:
            tracer = _Tracer(module, [module], places)
            with suppress(UnreadError):
                tracer.run(case)
            used = {id(owned.get(str(n.target)) if n.op == "get_attr" else tracer.called(n)) for n in tracer.nodes}
            for i in indices:
                if not used.isdisjoint({id(places[i].value), id(tracer.marks[i]), *inside[i]}):
                    reasons[i] = f"the forward of {type(module).__name__} uses what is inside {readings[i][1].root[0]}"
    return reasons


def _inside(model: nn.Module, place: Place, reading: Reading) -> set[int]:
    """Identities of what only the root of a reading may use: modules on the way to both, and the layer's parameters."""
    root = reading.root[1]
    modules = {*_path(model, root, place.owner), *_path(model, root, reading.layer)} - {root}
    return set(map(id, [*modules, *reading.layer.parameters()]))


def _method(root: nn.Module) -> str:
    """The method that is traced: of torch's transformer layers the FFN alone, because the rest depends on values."""
    for cls in _ENCODERS:
        if isinstance(root, cls) and type(root).forward is cls.forward and type(root)._ff_block is cls._ff_block:
            return "_ff_block"
    return "forward"


@dataclass(frozen=True)
class _Case:
    """A way to call a module.

    Attributes:
        text: What is special about it, for messages.
        training: The mode.
        arguments: Arguments that have a fixed value.
        options: Names of additional arguments, where the module takes any.
    """

    text: str
    training: bool
    arguments: dict[str, Any]
    options: tuple[str, ...] = ()


def _cases(root: nn.Module) -> list[_Case]:
    """Ways to call a module, the usual one first: in both modes, and with each optional argument given.

    Args:
        root: The module.

    Returns:
        The two modes with default arguments, then the others.
    """
    parameters = inspect.signature(getattr(type(root), _method(root))).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    usual = [_Case("", False, defaults), _Case("in training mode: ", True, defaults)]
    cases = [*usual]
    for case in usual:
        for name, value in defaults.items():
            others = {key: default for key, default in defaults.items() if key != name}
            if isinstance(value, bool):
                cases.append(replace(case, text=f"with {name}={not value}: ", arguments={**others, name: not value}))
            else:
                # A forward that computes with the argument can be traced, one that decides by its value cannot.
                cases.append(replace(case, text=f"with {name}: ", arguments=others))
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            cases.append(replace(case, text="with another argument: ", options=("another_argument",)))
    return cases


class _Tracer(fx.Tracer):
    """Records the calls of a module's forward pass without running it.

    Args:
        root: The module.
        opened: Modules whose own calls are recorded; others are opaque.
        places: Activations. `marks` has, in this order, functions that are called instead of those that are functions,
            and instead of the forward of a module that fuse_ put there, which would leave no trace.
    """

    def __init__(self, root: nn.Module, opened: list[nn.Module], places: list[Place]) -> None:
        super().__init__()
        self.traced_func_name = _method(root)
        self.marks = [self._mark() for _ in places]
        self._traced, self._opened, self._places = root, opened, places
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._proxies: dict[fx.Node, weakref.ref[fx.Proxy]] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls that were recorded."""
        return list(self.graph.nodes) if hasattr(self, "graph") else []

    def run(self, case: _Case) -> None:
        """Trace the module; its state stays as it was.

        Args:
            case: How it is called.

        Raises:
            UnreadError: If it cannot be traced, or keeps something between calls.
        """
        if any("forward" in vars(m) for m in self._opened):
            raise UnreadError("a forward around it was replaced on its module")
        names = {module: name for name, module in self._modules.items()}
        if changed := [names[m] for m in self._opened if m is not self._traced and m in names and _is_changed(m)]:
            raise UnreadError(f"{changed[0]} has hooks")
        kind = type(self._traced).__name__
        self._options = case.options
        with self._marked(), preserved(self._traced, case.training, parameters=False) as snapshot:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.trace(self._traced, concrete_args=case.arguments or None)
            except Exception as error:
                raise UnreadError(f"the forward of {kind} cannot be traced: {first_line(error, 80)}") from None
            if snapshot.is_changed():
                raise UnreadError(f"the forward of {kind} keeps something between calls")

    def _mark(self) -> Function:
        def activation(*arguments: Any, **options: Any) -> Any:
            return self.create_proxy("call_function", activation, arguments, options)

        return activation

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """While the block runs, the marks are in their places."""
        marked: list[tuple[dict[str, Any], str, Function]] = []
        for place, mark in zip(self._places, self.marks, strict=True):
            if isinstance(place.value, FusedActivation):
                marked.append((vars(place.value), "forward", mark))
            elif not isinstance(place.value, nn.Module):
                # The graph does not tell a function that is an attribute from the same function called by its name.
                marked.append((vars(place.owner), place.key, mark))
        before = [attributes.get(key) for attributes, key, _ in marked]
        try:
            for attributes, key, mark in marked:
                attributes[key] = mark
            yield
        finally:
            for (attributes, key, _), value in zip(marked, before, strict=True):
                if value is None:
                    del attributes[key]
                else:
                    attributes[key] = value

    def called(self, node: fx.Node) -> Any:
        """The module or function that a node calls."""
        return self._modules[str(node.target)] if node.op == "call_module" else node.target

    def is_kept(self, node: fx.Node) -> bool:
        """Whether the result of a call is still referred to from somewhere, such as a list, after the forward pass."""
        if self._proxies[node]() is not None:
            gc.collect()
        return self._proxies[node]() is not None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is opaque."""
        return all(m is not other for other in self._opened)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the result of a call."""
        proxy = super().proxy(node)
        self._proxies[node] = weakref.ref(proxy)
        return proxy

    def keys(self, obj: fx.Proxy) -> Any:
        """Keys of a mapping; the case decides which additional arguments the module that is traced gets."""
        is_named_arguments = obj.node.op == "placeholder" and str(obj.node.target).startswith("**")
        return self._options if is_named_arguments else super().keys(obj)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call, or look inside a module that the forward pass itself made, such as a slice of a Sequential."""
        if all(m is not module for module in self._modules.values()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def _reader_in_any_case(root: nn.Module, place: Place, opened: list[nn.Module]) -> tuple[nn.Module | None, int | None]:
    """What reads the activation's result, however the root is called, and the width of its first layer.

    Args:
        root: The module that is traced.
        place: The activation.
        opened: Modules whose own calls are recorded.

    Returns:
        A structured layer, a module to open, or None where the root returns the result; and inputs of the first layer.

    Raises:
        UnreadError: If something else reads it, or if that depends on how the root is called.
    """
    found: list[tuple[nn.Module | None, int | None]] = []
    for case in _cases(root):
        tracer = _Tracer(root, opened, [place])
        try:
            tracer.run(case)
            found.append((_reader(tracer, place, type(root).__name__), _first_width(tracer)))
        except UnreadError as error:
            raise UnreadError(f"{case.text}{error}") from None
        if found[-1][0] is not found[0][0]:
            raise UnreadError(f"{case.text}its result goes elsewhere")
    return found[0]


def _reader(tracer: _Tracer, place: Place, kind: str) -> nn.Module | None:
    """What reads the activation's result in a trace, see `_reader_in_any_case`."""
    target = place.value if isinstance(place.value, nn.Module) else tracer.marks[0]
    calls = [node for node in tracer.nodes if tracer.called(node) is target]
    if (
        not calls
        and not isinstance(place.value, nn.Module)
        and any(tracer.called(node) is place.value for node in tracer.nodes)
    ):
        raise UnreadError("its owner calls the function by name")
    if len(calls) != 1:
        raise UnreadError(f"the forward of {kind} calls it {len(calls)} times")
    (node,) = calls
    argument = _arguments(node)
    if not isinstance(argument, fx.Node):
        raise UnreadError("it is called with several arguments")
    if isinstance(place.value, nn.Module) and _is_changed(place.value):
        raise UnreadError("it has hooks")
    if place.in_place:
        _check_argument(tracer, argument)
    while True:
        if tracer.is_kept(node):
            raise UnreadError(f"the forward of {kind} keeps its result")
        users = list(node.users)
        if len(users) != 1:
            raise UnreadError(f"its result is used in {len(users)} places" if users else "its result is not used")
        (user,) = users
        if user.op == "output":
            if user.args != (node,):
                raise UnreadError("its result is returned among others")
            return None
        reader = tracer.called(user)
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
            if sum(tracer.called(n) is reader for n in tracer.nodes) > 1:
                raise UnreadError(f"{user.target} is called several times")
            between = tracer.nodes[tracer.nodes.index(calls[0]) + 1 : tracer.nodes.index(user)]
            if any(argument in n.all_input_nodes for n in between):
                # It may be overwritten there, and the layer is to read it afterwards.
                raise UnreadError(f"its argument is used again before {user.target} is called")
            return reader
        if isinstance(reader, _DropoutNd):
            raise UnreadError(f"dropout with p={reader.p} follows")
        if not any(isinstance(m, StructuredLinear) for m in reader.modules()):
            raise UnreadError(f"it is read by {user.target}, {type(reader).__name__}, which is not structured")
        return reader


def _check_argument(tracer: _Tracer, argument: fx.Node) -> None:
    """Check that nothing else sees what an activation that works in place does to its argument.

    Args:
        tracer: The trace.
        argument: The argument.

    Raises:
        UnreadError: If something may see it.
    """
    if len(argument.users) > 1:
        raise UnreadError("it works in place, on a tensor that is used elsewhere")
    producer = tracer.called(argument)
    if isinstance(producer, nn.Identity) and not _is_changed(producer) and _arguments(argument) is not None:
        _check_argument(tracer, _arguments(argument))
    elif getattr(type(producer), "forward", None) not in _ALLOCATING or _is_changed(producer):
        raise UnreadError("it works in place, on a tensor that may be used elsewhere")


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


def _path(model: nn.Module, root: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules from one inside a root up to the root.

    Args:
        model: The model.
        root: The root.
        module: A module in it, or the root itself.

    Returns:
        The module first, the root last.

    Raises:
        UnreadError: If one of them, apart from the root, has several parents: it may be called from elsewhere.
    """
    path = [module]
    while path[-1] is not root:
        parents = _parents(model, path[-1])
        if any(parent is not parents[0] for parent in parents):
            name = next(n for n, m in model.named_modules() if m is path[-1])
            raise UnreadError(f"{name} is used by several modules")
        path.append(parents[0])
    return path


def _parents(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that have another as a child, once for each of its names there."""
    return [m for m in model.modules() for child in m._modules.values() if child is module]


def _first_width(tracer: _Tracer) -> int | None:
    """Inputs of the first layer of a known width that was called."""
    for node in tracer.nodes:
        module = tracer.called(node)
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.Module):
            width = getattr(module, "in_features", None) or getattr(module, "nx", None)
            if isinstance(width, int):
                return width
    return None
