"""Which structured layer alone reads the result of an activation, found by tracing the forward pass around both."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

        def visit(value: Any) -> None:
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
                visit(item)

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
        if isinstance(function, nn.Module):
            # Without its hooks, which would see the probe.
            module = copy.deepcopy(function, {id(getattr(function, hooks)): OrderedDict() for hooks in _HOOKS})
            with preserved(module, training) as snapshot:
                y = module.forward(x.clone())
                if snapshot.is_changed():
                    raise UnreadError("it keeps something between calls")
        else:
            y = copy.deepcopy(function)(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            raise UnreadError("it is not elementwise")
        (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx[_PROBE.abs() > _KINK]


def _works_in_place(function: Function) -> bool:
    """Whether a function that is an activation writes over its argument."""
    x = _PROBE.clone()
    with torch.no_grad():
        copy.deepcopy(function)(x)
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


def check_calls_from_outside(model: nn.Module, place: Place, reading: Reading) -> None:
    """Check that the modules around a root use its activation and its layer through the root alone.

    A forward that cannot be traced is checked up to where tracing fails.

    Args:
        model: The model.
        place: The activation, as it is now.
        reading: What reads it.

    Raises:
        UnreadError: If one of them calls a module inside the root.
    """
    root = reading.root[1]
    inside = {*_path(model, root, place.owner), *_path(model, root, reading.layer)} - {root}
    if isinstance(place.value, nn.Module):
        inside.add(place.value)
    parameters = {id(p) for p in reading.layer.parameters()}
    for module in model.modules():
        if module is root or type(module).forward is nn.Module.forward or all(m is not root for m in module.modules()):
            continue
        owned = dict(module.named_parameters(remove_duplicate=False))
        for training in (False, True):
            tracer = _Tracer(module, place, [module])
            with suppress(UnreadError):
                tracer.run(training, _defaults(module))
            for node in tracer.nodes:
                called = tracer.called(node)
                is_read = node.op == "get_attr" and id(owned.get(str(node.target))) in parameters
                if is_read or called is tracer.activation or (isinstance(called, nn.Module) and called in inside):
                    raise UnreadError(f"the forward of {type(module).__name__} uses what is inside {reading.root[0]}")


def _method(root: nn.Module) -> str:
    """The method that is traced: of torch's transformer layers the FFN alone, because the rest depends on values."""
    for cls in _ENCODERS:
        if isinstance(root, cls) and type(root).forward is cls.forward and type(root)._ff_block is cls._ff_block:
            return "_ff_block"
    return "forward"


def _defaults(root: nn.Module) -> dict[str, Any]:
    """The optional arguments of the method that is traced, with their defaults."""
    parameters = inspect.signature(getattr(type(root), _method(root))).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _cases(root: nn.Module) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Ways to call a module, the usual one first: in both modes, and with each optional flag or tensor given.

    Args:
        root: The module.

    Yields:
        What is special, for messages; the mode; and the arguments that have a fixed value.
    """
    defaults = _defaults(root)
    for training in (False, True):
        mode = "in training mode: " if training else ""
        yield mode, training, defaults
        for name, value in defaults.items():
            others = {key: default for key, default in defaults.items() if key != name}
            if isinstance(value, bool):
                yield f"{mode}with {name}={not value}: ", training, {**others, name: not value}
            elif value is None:
                yield f"{mode}with {name}: ", training, others


class _Tracer(fx.Tracer):
    """Records the calls of a module's forward pass without running it.

    Args:
        root: The module.
        place: An activation. Calls of it are told from others by their target, `activation`.
        opened: Modules whose own calls are recorded; others are opaque.
    """

    def __init__(self, root: nn.Module, place: Place, opened: list[nn.Module]) -> None:
        super().__init__()
        self.traced_func_name = _method(root)
        self.activation: Any = place.value
        self._traced, self._place, self._opened = root, place, opened
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._proxies: dict[fx.Node, weakref.ref[fx.Proxy]] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls that were recorded."""
        return list(self.graph.nodes) if hasattr(self, "graph") else []

    def run(self, training: bool, arguments: dict[str, Any]) -> None:
        """Trace the module; its state stays as it was.

        Args:
            training: The mode.
            arguments: Arguments that have a fixed value.

        Raises:
            UnreadError: If it cannot be traced, or keeps something between calls.
        """
        if any("forward" in vars(m) for m in self._opened):
            raise UnreadError("a forward around it was replaced on its module")
        names = {module: name for name, module in self._modules.items()}
        if changed := [names[m] for m in self._opened if m is not self._traced and m in names and _is_changed(m)]:
            raise UnreadError(f"{changed[0]} has hooks")
        kind = type(self._traced).__name__
        with self._marked(), preserved(self._traced, training, parameters=False) as snapshot:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.trace(self._traced, concrete_args=arguments or None)
            except Exception as error:
                raise UnreadError(f"the forward of {kind} cannot be traced: {first_line(error, 80)}") from None
            if snapshot.is_changed():
                raise UnreadError(f"the forward of {kind} keeps something between calls")

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """While the block runs, an activation that is a function leaves calls with a target of their own."""
        if isinstance(self._place.value, nn.Module):
            yield
            return

        def activation(*arguments: Any, **options: Any) -> Any:
            return self.create_proxy("call_function", activation, arguments, options)

        # The graph does not tell a function that is an attribute from the same function called by its name.
        self.activation = activation
        attributes = vars(self._place.owner)
        attributes[self._place.key] = activation
        try:
            yield
        finally:
            attributes[self._place.key] = self._place.value

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
        """Keys of a mapping: the additional named arguments of the module that is traced are taken to be none."""
        is_named_arguments = obj.node.op == "placeholder" and str(obj.node.target).startswith("**")
        return () if is_named_arguments else super().keys(obj)


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
    for case, training, arguments in _cases(root):
        tracer = _Tracer(root, place, opened)
        try:
            tracer.run(training, arguments)
            found.append((_reader(tracer, place, type(root).__name__), _first_width(tracer)))
        except UnreadError as error:
            raise UnreadError(f"{case}{error}") from None
        if found[-1][0] is not found[0][0]:
            raise UnreadError(f"{case}its result goes elsewhere")
    return found[0]


def _reader(tracer: _Tracer, place: Place, kind: str) -> nn.Module | None:
    """What reads the activation's result in a trace, see `_reader_in_any_case`."""
    calls = [node for node in tracer.nodes if tracer.called(node) is tracer.activation]
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
    if argument is None:
        raise UnreadError("it is called with several arguments")
    if isinstance(place.value, nn.Module) and _is_changed(place.value):
        raise UnreadError("it has hooks")
    if place.in_place:
        if len(argument.users) > 1:
            raise UnreadError("it works in place, on a tensor that is used elsewhere")
        producer = tracer.called(argument)
        if getattr(type(producer), "forward", None) not in _ALLOCATING or _is_changed(producer):
            raise UnreadError("it works in place, on a tensor that may be used elsewhere")
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
            return reader
        if isinstance(reader, _DropoutNd):
            raise UnreadError(f"dropout with p={reader.p} follows")
        if not any(isinstance(m, StructuredLinear) for m in reader.modules()):
            raise UnreadError(f"it is read by {user.target}, {type(reader).__name__}, which is not structured")
        return reader


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
