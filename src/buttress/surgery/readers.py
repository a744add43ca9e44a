"""Which structured layer alone reads the result of an activation, found by tracing the forward pass around both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from buttress.inspection.hooks import has_hooks_or_own_forward
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv
from buttress.surgery.activation_places import Place
from buttress.surgery.destinations import Destination, find_destination
from buttress.surgery.tracing import NotFusableError, Tracer, all_cases, traced_method, usual_cases


@dataclass(frozen=True)
class Reader:
    """A structured layer that alone reads the result of an activation.

    Attributes:
        name: Name of the layer in the model.
        layer: The layer.
        root_name: Name in the model of a module that contains both.
        root: That module.
        method: The method of it that calls both.
        width: Input size of the first layer of known size that the method calls; None if there is none.
        shares_argument: Whether something else in the root uses the activation's argument.
    """

    name: str
    layer: StructuredLinear
    root_name: str
    root: nn.Module
    method: str
    width: int | None
    shares_argument: bool


def find_reader(model: nn.Module, place: Place) -> Reader:
    """The structured layer that alone reads the result of an activation.

    The forward pass of the owner is traced without running it, with the modules inside as opaque calls. Where the
    result leaves the owner, or goes into a module with structured layers, that module is opened and traced, too.

    Args:
        model: The model.
        place: The activation.

    Returns:
        The layer.

    Raises:
        NotFusableError: If there is none, with the reason.
    """
    opened: list[nn.Module] = []
    for root_name, root in reversed(place.ancestors):
        opened.append(root)
        if type(root).forward is nn.Module.forward:
            continue  # A list of modules is never called itself.
        destination = _destination_in_root(root, place, opened)
        layer = destination.module
        if isinstance(layer, StructuredLinear):
            name = next(name for name, module in model.named_modules() if module is layer)
            _check_layer(layer, name)
            _ancestors(model, root, place.owner)
            _ancestors(model, root, layer)
            return Reader(
                name=name,
                layer=layer,
                root_name=root_name,
                root=root,
                method=traced_method(root),
                width=destination.width,
                shares_argument=destination.shares_argument,
            )
    raise NotFusableError("the model returns its result")


def used_from_outside(model: nn.Module, fused: Sequence[tuple[Place, Reader]]) -> dict[int, str]:
    """Activations and layers that a module outside the traced one uses directly.

    A forward that cannot be traced is checked up to where tracing fails.

    Args:
        model: The model.
        fused: Activations, each with the layer that applies it now.

    Returns:
        Reasons, by index in `fused`.
    """
    reasons: dict[int, str] = {}
    places = [place for place, _ in fused]
    inside = [_ids_inside(model, place, reader) for place, reader in fused]
    for module in model.modules():
        within = set(map(id, module.modules())) - {id(module)}
        indices = [i for i, (_, reader) in enumerate(fused) if id(reader.root) in within]
        if not indices or type(module).forward is nn.Module.forward:
            continue
        for case in usual_cases(module):
            tracer = Tracer(module, [module], places)
            with suppress(NotFusableError):
                tracer.run(case)
            called = {id(tracer.called(node)) for node in tracer.nodes}
            for i in indices:
                if not called.isdisjoint({id(tracer.marks[i]), *inside[i]}):
                    reasons[i] = f"the forward of {type(module).__name__} uses what is inside {fused[i][1].root_name}"
    return reasons


def _ids_inside(model: nn.Module, place: Place, reader: Reader) -> set[int]:
    """Identities of the modules on the way from a root to the activation and the layer: only the root may use them."""
    modules = {*_ancestors(model, reader.root, place.owner), *_ancestors(model, reader.root, reader.layer)}
    return set(map(id, modules - {reader.root}))


def _destination_in_root(root: nn.Module, place: Place, opened: list[nn.Module]) -> Destination:
    """Where the activation's result goes in a module, past the modules in it that pass it on.

    Args:
        root: The module.
        place: The activation.
        opened: Modules whose own calls are recorded. Those that turn out to be on the way are added.

    Returns:
        A structured layer, or no module where the root returns the result.

    Raises:
        NotFusableError: If something else reads it, or if that depends on how the root is called.
    """
    while True:
        destination = _destination_in_every_case(root, place, opened)
        if destination.module is None or isinstance(destination.module, StructuredLinear):
            return destination
        opened.append(destination.module)


def _destination_in_every_case(root: nn.Module, place: Place, opened: list[nn.Module]) -> Destination:
    """Where the activation's result goes, however the root is called.

    Args:
        root: The module that is traced.
        place: The activation.
        opened: Modules whose own calls are recorded.

    Returns:
        The destination.

    Raises:
        NotFusableError: If something else reads it, or if that depends on how the root is called.
    """
    destinations: list[Destination] = []
    for case in all_cases(root):
        tracer = Tracer(root, opened, [place])
        try:
            tracer.run(case)
            destinations.append(find_destination(tracer, place))
        except NotFusableError as error:
            raise NotFusableError(f"{case.text}{error}") from None
        if destinations[-1].module is not destinations[0].module:
            raise NotFusableError(f"{case.text}its result goes elsewhere")
    return replace(destinations[0], shares_argument=any(destination.shares_argument for destination in destinations))


def _check_layer(layer: StructuredLinear, name: str) -> None:
    """Check that a layer can apply an activation.

    Args:
        layer: The layer.
        name: Its name in the model.

    Raises:
        NotFusableError: If it cannot.
    """
    if type(layer).forward not in (StructuredLinear.forward, StructuredPointwiseConv.forward):
        raise NotFusableError(f"{name} is a subclass with a forward of its own")
    if has_hooks_or_own_forward(layer):
        raise NotFusableError(f"{name} has hooks")
    if layer.input_activation is not None:
        raise NotFusableError(f"{name} applies {layer.input_activation} to its input already")


def _ancestors(model: nn.Module, root: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules from one inside a root up to the root.

    Args:
        model: The model.
        root: The root.
        module: A module in it, or the root itself.

    Returns:
        The module first, the root last.

    Raises:
        NotFusableError: If one of them, apart from the root, has several parents: it may be called from elsewhere.
    """
    ancestors = [module]
    while ancestors[-1] is not root:
        parents = _parents(model, ancestors[-1])
        if len(parents) > 1:
            name = next(name for name, m in model.named_modules() if m is ancestors[-1])
            raise NotFusableError(f"{name} belongs to several modules")
        ancestors += parents
    return ancestors


def _parents(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that have another as a child."""
    return [m for m in model.modules() if any(child is module for child in m._modules.values())]
