"""Sites: what can be replaced in a model, with how to read and how to replace each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from buttress.errors import PlanError, quoted
from buttress.inspection.names import is_conv1d, join, last_part, modules, unique_modules
from buttress.inspection.obstacles import find_obstacles
from buttress.nn.attention import PROJECTIONS, ProjectedAttention, linear_from_tensors, unpacked
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import POINTWISE_CLASSES, Pointwise, StructuredPointwiseConv

_SHARDING_CLASSES = {"FullyShardedDataParallel", "FSDPModule"}


@dataclass(frozen=True)
class Site:
    """One linear layer, embedding or 1 × 1 convolution of a model.

    Attributes:
        name: Name of the layer in the model.
        kind: Class of the module; for a projection of attention also the projection's name.
        owner: The module that is removed when the layer is replaced.
        weight: The parameter that contains the layer's weight, possibly together with other weights.
        unsupported_reason: Why the layer cannot be replaced at present, and what to do; None if it can be.
        read: Returns the layer as an nn.Linear: the module itself if it is one, else a layer around views of its
            weights. An embedding is returned as the head that would be tied to it: from embedding_dim to
            num_embeddings, without bias. A convolution is returned as the layer between its channels.
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

    @property
    def is_convolution(self) -> bool:
        """Whether the layer is a 1 × 1 convolution."""
        return isinstance(self.owner, POINTWISE_CLASSES)

    @property
    def stride(self) -> tuple[int, ...]:
        """Stride of a 1 × 1 convolution in each spatial dimension; empty for a layer that has its inputs last."""
        return self.owner.stride if isinstance(self.owner, POINTWISE_CLASSES) else ()

    @property
    def by_name_only(self) -> bool:
        """Whether the layer is replaced only by a glob that ends in its own name."""
        return self.is_embedding or self.is_convolution

    @property
    def description(self) -> str:
        """What the layer is, in words."""
        if self.is_embedding:
            return "embedding"
        return "1 × 1 convolution" if self.is_convolution else "linear layer"

    def tensors(self) -> list[tuple[object, Tensor]]:
        """The layer's weight and bias, each with a key that layers which share it have in common."""
        if not isinstance(self.owner, nn.MultiheadAttention) or self.weight is self.owner.out_proj.weight:
            holder = self.owner.out_proj if isinstance(self.owner, nn.MultiheadAttention) else self.owner
            return [(id(p), p) for p in holder.parameters(recurse=False)]
        # The projections share one packed weight and one packed bias, of which each has a part.
        projection, linear = last_part(self.name), self.read()
        keyed: list[tuple[object, Tensor]] = [((id(self.weight), projection), linear.weight)]
        return keyed if linear.bias is None else [*keyed, ((id(self.owner.in_proj_bias), projection), linear.bias)]


def find_sites(model: nn.Module, *, embeddings: bool = False, convolutions: bool | None = None) -> dict[str, Site]:
    """Every linear layer of a model by name.

    Args:
        model: The model.
        embeddings: Whether to include every nn.Embedding.
        convolutions: Whether to include every 1 × 1 convolution. Default: as for embeddings.

    Returns:
        The sites in the model's order; a layer with several names is listed under the first.
    """
    convolutions = embeddings if convolutions is None else convolutions

    def is_included(site: Site) -> bool:
        return (embeddings or not site.is_embedding) and (convolutions or not site.is_convolution)

    return {site.name: site for site in _sites(model) if is_included(site)}


def _sites(model: nn.Module) -> Iterator[Site]:
    compiled, offloaded, obstacles = individually_compiled(model), offloaded_modules(model), find_obstacles(model)
    handled_prefixes: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        if name in obstacles or name.startswith(handled_prefixes):
            continue
        reason = unsupported_reason(module, compiled=id(module) in compiled, offloaded=id(module) in offloaded)
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, ProjectedAttention):
            handled_prefixes += (join(name, ""),)
            yield from _projection_sites(model, name, module, reason)
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
    """A function that returns a layer as an nn.Linear; None for other modules."""
    if isinstance(module, nn.Linear):
        return partial(_read_linear, module)
    if isinstance(module, nn.Embedding):
        return partial(_read_embedding, module)
    if isinstance(module, POINTWISE_CLASSES):
        return partial(_read_convolution, module)
    return partial(_read_conv1d, module) if is_conv1d(module) else None


def _read_linear(module: nn.Linear) -> nn.Linear:
    return module


def _read_embedding(module: nn.Embedding) -> nn.Linear:
    return linear_from_tensors(module.weight, None).train(module.training)


def _read_convolution(module: Pointwise) -> nn.Linear:
    kernel = module.weight
    linear = linear_from_tensors(kernel.detach().flatten(1), module.bias, requires_grad=kernel.requires_grad)
    return linear.train(module.training)


def _read_conv1d(module: nn.Module) -> nn.Linear:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    linear = linear_from_tensors(weight.detach().T, bias, requires_grad=weight.requires_grad)
    return linear.train(module.training)


def _read_projection(attention: nn.MultiheadAttention, projection: str) -> nn.Linear:
    return unpacked(attention)[projection]


def unsupported_reason(module: nn.Module, *, compiled: bool = False, offloaded: bool = False) -> str | None:
    """Why a linear layer, embedding or attention cannot be replaced at present, and what to do about it.

    Args:
        module: The module that would be removed.
        compiled: Whether torch.compile wraps the module itself.
        offloaded: Whether accelerate offloads the module's weights.

    Returns:
        The reason with its remedy, or None if the module can be replaced.
    """
    if compiled:
        return "it was compiled by itself, and the compiled code keeps the old layer: compile after replacing"
    if offloaded:
        return (
            "accelerate offloads its weights, which would be lost: load the model without offloading "
            "(device_map='cpu'), or leave the layer out of the plan"
        )
    holders = (module, module.out_proj) if isinstance(module, nn.MultiheadAttention) else (module,)
    if any(isinstance(p, nn.UninitializedParameter) for holder in holders for p in holder._parameters.values()):
        return "it is lazy and has no size yet: run the model once before replacing"
    if isinstance(module, nn.Embedding) and (options := _unsupported_options(module)):
        return (
            f"it was created with {', '.join(options)}, which a structured embedding does not support, because tokens "
            "share its factors: unset that first, or leave the embedding out of the plan"
        )
    return None


def whole_model_reason(model: nn.Module, site: Site) -> str | None:
    """Why a layer that is the whole model cannot be replaced, and what to do; None for any other layer."""
    if site.owner not in (model, model._modules.get("_orig_mod")):
        return None
    convolution = StructuredPointwiseConv if site.is_convolution else StructuredLinear
    structured_class = StructuredEmbedding if site.is_embedding else convolution
    return (
        "the model is itself one layer, which cannot be replaced in place: use "
        f"{structured_class.__name__}.from_dense, or wrap it in nn.Sequential"
    )


def _unsupported_options(embedding: nn.Embedding) -> list[str]:
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    return [name for name in options if getattr(embedding, name) not in (None, False)]


def individually_compiled(model: nn.Module) -> set[int]:
    """Ids of the modules that torch.compile wraps directly: their compiled code keeps the old module."""
    return {id(m._modules["_orig_mod"]) for m in model.modules() if "_orig_mod" in m._modules}


def offloaded_modules(model: nn.Module) -> set[int]:
    """Ids of the modules whose weights accelerate keeps elsewhere between calls."""
    ids: set[int] = set()
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if getattr(part, "offload", False):
                ids.update(map(id, module.modules() if part.place_submodules else (module,)))
    return ids


def check_is_model(model: object) -> None:
    """Raise a PlanError where something else is given in place of the model, such as its parameters.

    Args:
        model: The first argument of a function that changes a model.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"the first argument must be the model, an nn.Module, got {quoted(model)}")


def check_not_wrapped(model: nn.Module, action: str = "replacing layers") -> None:
    """Check that a model is not wrapped or sharded for distributed training.

    DDP and FSDP keep lists of parameters, so new ones would never be synchronized. A sharded weight is not whole.

    Args:
        model: The model.
        action: What is to be done to it, for the error.

    Raises:
        PlanError: If it is no model, any module of it is wrapped by DDP or FSDP, or a parameter is sharded.
    """
    check_is_model(model)
    for module in model.modules():
        # By name, because importing FSDP takes long: FullyShardedDataParallel wraps, fully_shard derives a class.
        classes = {c.__name__ for c in type(module).__mro__}
        if isinstance(module, nn.parallel.DistributedDataParallel) or classes & _SHARDING_CLASSES:
            raise PlanError(f"the model is wrapped for distributed training already: wrap it after {action}")
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("torch.distributed.") or hasattr(parameter, "ds_id"):
            raise PlanError(f"{name} is sharded over several processes: shard the model after {action}")


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
    for part in old.modules():
        if isinstance(part, StructuredLinear) and part.shared_input is not None:
            part.shared_input.dissolve()
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


def tied_embeddings(model: nn.Module, site: Site) -> dict[str, nn.Embedding]:
    """The embeddings that share the weight of a linear layer, as those of a tied output head do.

    Args:
        model: The model.
        site: The layer.

    Returns:
        The embeddings by name.
    """
    weight = getattr(site.owner, "weight", None)
    named = ((name, m) for name, m in unique_modules(model) if isinstance(m, nn.Embedding) and m is not site.owner)
    return {name: m for name, m in named if weight is not None and m.weight is weight}


def tie_obstacle(model: nn.Module, site: Site) -> str | None:
    """Why a linear layer cannot be replaced together with the embeddings that share its weight.

    Args:
        model: The model.
        site: The layer.

    Returns:
        The reason; None if there are no such embeddings, or a structured one can take their place.
    """
    names = list(tied_embeddings(model, site))
    if not names:
        return None
    obstacles, sites = find_obstacles(model), find_sites(model, embeddings=True)
    for name in names:
        reason = obstacles[name].reason if name in obstacles else sites[name].unsupported_reason
        if reason is not None:
            return f"its weight is also {name}, which cannot be replaced: {reason}"
    return f"its weight is also {' and '.join(names)}, which are several embeddings" if len(names) > 1 else None
