"""Which modules and functions a forward pass calls, recorded by torch.fx without running it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from torch import fx, nn

from buttress.errors import first_line
from buttress.inspection.hooks import has_hooks_or_own_forward
from buttress.surgery.activation_places import Function, Place
from buttress.surgery.preserving import preserved

_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class NotFusableError(Exception):
    """Why no structured layer can apply an activation."""


def traced_method(root: nn.Module) -> str:
    """The method of a module that is traced.

    Args:
        root: The module.

    Returns:
        Its forward; of torch's transformer layers the FFN alone, because the rest depends on values.
    """
    for cls in _TRANSFORMER_LAYERS:
        if isinstance(root, cls) and type(root).forward is cls.forward and type(root)._ff_block is cls._ff_block:
            return "_ff_block"
    return "forward"


@dataclass(frozen=True)
class Case:
    """A way to call a module.

    Attributes:
        text: What is special about it, for messages.
        training: The mode.
        arguments: Arguments that have a fixed value.
    """

    text: str
    training: bool
    arguments: dict[str, Any]


def usual_cases(root: nn.Module) -> list[Case]:
    """A call with default arguments in both modes.

    Args:
        root: The module that is called.

    Returns:
        The two cases, evaluation first.
    """
    parameters = inspect.signature(getattr(type(root), traced_method(root))).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return [Case("", False, defaults), Case("in training mode: ", True, defaults)]


def all_cases(root: nn.Module) -> list[Case]:
    """Ways to call a module, the usual ones first: in both modes, and with each optional argument given.

    Two optional arguments together are not tried, and neither are names that a `**options` argument may take.

    Args:
        root: The module that is called.

    Returns:
        The usual cases, then the others.
    """
    cases = usual_cases(root)
    for usual in [*cases]:
        for name, value in usual.arguments.items():
            others = {key: default for key, default in usual.arguments.items() if key != name}
            if isinstance(value, bool):
                cases.append(replace(usual, text=f"with {name}={not value}: ", arguments={**others, name: not value}))
            else:
                # A forward that computes with the argument can be traced, one that decides by its value cannot.
                cases.append(replace(usual, text=f"with {name}: ", arguments=others))
    return cases


class Tracer(fx.Tracer):
    """Records the calls of a module's forward pass without running it.

    Args:
        root: The module.
        opened: Modules whose own calls are recorded; others are opaque.
        places: Activations.

    Attributes:
        marks: Functions that are called in place of the activations, in the same order. The activations themselves
            would not do: a function called by its name, or a module called under another name, looks the same.
    """

    def __init__(self, root: nn.Module, opened: list[nn.Module], places: list[Place]) -> None:
        super().__init__()
        self.traced_func_name = traced_method(root)
        self.marks = [self._mark() for _ in places]
        self._traced, self._opened, self._places = root, opened, places
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._methods: dict[fx.Node, frozenset[CodeType]] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls that were recorded, also those before an error."""
        return list(self.graph.nodes) if hasattr(self, "graph") else []

    def called(self, node: fx.Node) -> Any:
        """The module or function that a node calls."""
        return self._modules[str(node.target)] if node.op == "call_module" else node.target

    def methods_around(self, node: fx.Node) -> frozenset[CodeType]:
        """The methods of modules in which a call was recorded, without those that calling a module runs."""
        return self._methods[node]

    def run(self, case: Case) -> None:
        """Trace the module; its state stays as it was.

        Args:
            case: How it is called.

        Raises:
            NotFusableError: If it cannot be traced, or keeps something between calls.
        """
        self._check_opened()
        kind = type(self._traced).__name__
        with self._marked(), preserved(self._traced, case.training, parameters=False) as snapshot:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.trace(self._traced, concrete_args=case.arguments or None)
            except Exception as error:
                raise NotFusableError(f"the forward of {kind} cannot be traced: {first_line(error, 80)}") from None
            if snapshot.is_changed():
                raise NotFusableError(f"the forward of {kind} keeps something between calls")

    def _check_opened(self) -> None:
        """Check that a call of an opened module runs the forward of its class and nothing else."""
        if any("forward" in vars(module) for module in self._opened):
            raise NotFusableError("a forward around it was replaced on its module")
        for name, module in self._modules.items():
            # Hooks of the root see what it gets and returns, which stays the same.
            is_opened = module is not self._traced and any(module is other for other in self._opened)
            if is_opened and has_hooks_or_own_forward(module):
                raise NotFusableError(f"{name} has hooks")

    def _mark(self) -> Function:
        def activation(*arguments: Any, **options: Any) -> Any:
            return self.create_proxy("call_function", activation, arguments, options)

        return activation

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """While the block runs, the marks are in the places of the activations."""
        before = [place.slots[place.key] for place in self._places]
        try:
            for place, mark in zip(self._places, self.marks, strict=True):
                place.slots[place.key] = _module_with_forward(mark) if isinstance(place.value, nn.Module) else mark
            yield
        finally:
            for place, value in zip(self._places, before, strict=True):
                place.slots[place.key] = value

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the result of a call."""
        self._methods[node] = self._running_methods()
        return super().proxy(node)

    def _running_methods(self) -> frozenset[CodeType]:
        """The methods of modules that are running. Their frames would keep everything alive that they refer to."""
        methods: set[CodeType] = set()
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
            is_forward = code.co_name in vars(nn.Module) or code.co_name == self.traced_func_name
            if code.co_argcount > 0 and not is_forward:
                owner = frame.f_locals.get(code.co_varnames[0])
                if isinstance(owner, nn.Module) and hasattr(type(owner), code.co_name):
                    methods.add(code)
        return frozenset(methods)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is opaque."""
        return all(m is not other for other in self._opened)

    def keys(self, obj: fx.Proxy) -> Any:
        """Keys of a mapping. A module that takes any named arguments, `**options`, is called without."""
        is_options = obj.node.op == "placeholder" and str(obj.node.target).startswith("**")
        return () if is_options else super().keys(obj)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call, or look inside a module that is not the model's: a mark, or a slice of a Sequential."""
        if all(m is not module for module in self._modules.values()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def _module_with_forward(function: Function) -> nn.Module:
    module = nn.Module()
    module.forward = function
    return module
