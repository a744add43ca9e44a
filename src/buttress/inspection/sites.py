"""Sites: the linear layers and embeddings of a model, with how to read and how to replace each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from buttress.errors import PlanError
from buttress.inspection.names import is_conv1d, join, modules, unique_modules
from buttress.nn.attention import PROJECTIONS, ProjectedAttention, linear_from_tensors, unpacked


@dataclass(frozen=True)
class Site:
    """One linear layer or embedding of a model.

    Attributes:
        name: Name of the layer in the model.
        kind: Class of the module; for a projection of attention also the projection's name.
        owner: The module that is removed when the layer is replaced.
        weight: The parameter that contains the layer's weight, possibly together with other weights.
        unsupported_reason: Why the layer cannot be replaced, and what to do; None if it can be.
        read: Returns the layer as an nn.Linear: the module itself if it is one, else a layer around views of its
            weights. An embedding is returned as the head that would be tied to it: from embedding_dim to
            num_embeddings, without bias.
        put: Puts a module in the place of the layer.
    """

    name: str
    kind: str
    owner: nn.Module
    weight: Tensor | None
    unsupported_reason: str | None
    read: Callable[[], nn.Linear]
    put: Callable[[nn.Module], None]

    @property
    def is_embedding(self) -> bool:
        """Whether the layer is an embedding."""
        return isinstance(self.owner, nn.Embedding)


def find_sites(model: nn.Module, *, embeddings: bool = False) -> dict[str, Site]:
    """Every linear layer of a model by name.

    Args:
        model: The model.
        embeddings: Whether to include every nn.Embedding.

    Returns:
        The sites in the model's order; a layer with several names is listed under the first.
    """
    return {site.name: site for site in _sites(model) if embeddings or not site.is_embedding}


def _sites(model: nn.Module) -> Iterator[Site]:
    compiled = individually_compiled(model)
    handled_prefixes: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        if name.startswith(handled_prefixes):
            continue
        reason = unsupported_reason(module, compiled=id(module) in compiled)
        if type(module).forward is nn.MultiheadAttention.forward:
            assert isinstance(module, nn.MultiheadAttention)
            handled_prefixes += (f"{name}." if name else "",)
            yield from _projection_sites(model, name, module, reason)
        elif isinstance(module, nn.MultiheadAttention) and not isinstance(module, ProjectedAttention):
            # A subclass with its own forward, which reads out_proj's weight and never calls the module.
            handled_prefixes += (f"{name}.",)
        elif (read := _reader(module)) is not None:
            yield Site(
                name=name,
                kind=type(module).__name__,
                owner=module,
                weight=module._parameters.get("weight"),
                unsupported_reason=reason,
                read=read,
                put=partial(put_module, model, name),
            )


def _projection_sites(
    model: nn.Module, name: str, attention: nn.MultiheadAttention, reason: str | None
) -> Iterator[Site]:
    packed = next((w for k, w in attention._parameters.items() if k.endswith("proj_weight") and w is not None), None)
    for projection in PROJECTIONS:
        yield Site(
            name=join(name, projection),
            kind=f"{type(attention).__name__}.{projection}",
            owner=attention,
            weight=attention.out_proj._parameters.get("weight") if projection == "out_proj" else packed,
            unsupported_reason=reason,
            read=partial(_read_projection, attention, projection),
            put=partial(_put_projection, model, name, projection),
        )


def _reader(module: nn.Module) -> Callable[[], nn.Linear] | None:
    """A function that returns a module as an nn.Linear; None if the module is neither a linear layer nor an embedding.

    A subclass with its own forward computes something else and does not count.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(_read_linear, module)
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return partial(_read_embedding, module)
    return partial(_read_conv1d, module) if is_conv1d(module) else None


def _read_linear(module: nn.Linear) -> nn.Linear:
    return module


def _read_embedding(module: nn.Embedding) -> nn.Linear:
    return linear_from_tensors(module.weight, None).train(module.training)


def _read_conv1d(module: nn.Module) -> nn.Linear:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    linear = linear_from_tensors(weight.detach().T, bias, requires_grad=weight.requires_grad)
    return linear.train(module.training)


def _read_projection(attention: nn.MultiheadAttention, projection: str) -> nn.Linear:
    return unpacked(attention)[projection]


def unsupported_reason(module: nn.Module, *, compiled: bool = False) -> str | None:
    """Why a linear layer, embedding or attention cannot be replaced, and what to do about it.

    Args:
        module: The module that would be removed.
        compiled: Whether torch.compile wraps the module itself.

    Returns:
        The reason with its remedy, or None if the module can be replaced.
    """
    if compiled:
        return "it was compiled by itself, and the compiled code keeps the old layer: compile after replacing"
    holders = (module, module.out_proj) if isinstance(module, nn.MultiheadAttention) else (module,)
    for holder in holders:
        if any(isinstance(p, nn.UninitializedParameter) for p in holder._parameters.values()):
            return "it is lazy and has no size yet: run the model once before replacing"
        if _is_parametrized(holder):
            return (
                "its weight is parametrized, that is, computed from other tensors (weight_norm, spectral_norm, "
                "pruning): remove that first, for example with torch.nn.utils.parametrize.remove_parametrizations, "
                "or leave the layer out of the plan"
            )
    if isinstance(module, nn.Embedding) and (options := _unsupported_options(module)):
        return (
            f"it was created with {', '.join(options)}, which a structured embedding does not support, because tokens "
            "share its factors: unset that first, or leave the embedding out of the plan"
        )
    if isinstance(module, nn.Linear | nn.Embedding) and (
        set(module._parameters) - {"weight", "bias"} or module._buffers
    ):
        return "it has parameters or buffers besides weight and bias, which would be lost: leave it out of the plan"
    return None


def _is_parametrized(module: nn.Module) -> bool:
    has_weight = any(k.endswith("weight") and p is not None for k, p in module._parameters.items())
    return not has_weight or hasattr(module, "parametrizations")


def _unsupported_options(embedding: nn.Embedding) -> list[str]:
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    return [name for name in options if getattr(embedding, name) not in (None, False)]


def individually_compiled(model: nn.Module) -> set[int]:
    """Ids of the modules that torch.compile wraps directly: their compiled code keeps the old module."""
    return {id(m._modules["_orig_mod"]) for m in model.modules() if "_orig_mod" in m._modules}


def check_not_wrapped(model: nn.Module) -> None:
    """Check that a model is not wrapped for distributed training.

    DDP and FSDP keep lists of parameters, so new ones would never be synchronized.

    Args:
        model: The model.

    Raises:
        PlanError: If any module of the model is wrapped by DDP or FSDP.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) or "FSDP" in type(module).__name__:
            raise PlanError("the model is wrapped for distributed training already: wrap it after replacing layers")


def put_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module under this name, and under every other name of the module that it replaces.

    Args:
        model: The model to change.
        name: One of the names of the module to replace.
        new: The module to put there.

    Raises:
        PlanError: If the model has no module of this name.
    """
    old = _module_named(model, name)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new


def _put_projection(model: nn.Module, name: str, projection: str, new: nn.Module) -> None:
    attention = _module_named(model, name)
    if not isinstance(attention, ProjectedAttention):
        assert isinstance(attention, nn.MultiheadAttention)
        # Copies: a view would keep the whole packed weight alive, and tied to every other module that holds it.
        attention = ProjectedAttention(attention, dict(unpacked(attention, copy=True)))
        put_module(model, name, attention)
    attention.add_module(projection, new)


def _module_named(model: nn.Module, name: str) -> nn.Module:
    by_name = dict(modules(model))
    if name not in by_name:
        raise PlanError(f"no module named {name!r}")
    return by_name[name]
