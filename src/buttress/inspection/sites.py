"""Linear layers and embeddings where they stand in a model: their names, how to read them, how to put another there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from buttress.errors import PlanError
from buttress.inspection.names import is_conv1d, join, modules
from buttress.nn.attention import PROJECTIONS, ProjectedAttention, linear_of, unpacked


@dataclass(frozen=True)
class Site:
    """One linear layer, or embedding, of a model."""

    name: str
    kind: str
    owner: nn.Module
    """The module that goes when the layer is replaced."""
    weight: Tensor | None
    """The parameter that holds its weight, perhaps with others."""
    refusal_reason: str | None
    """Why it cannot be replaced, and what to do."""
    read: Callable[[], nn.Linear]
    """The layer as an ordinary nn.Linear: the module itself where it is one, else views of its weights.

    An embedding reads as the head that would be tied to it: from embedding_dim to num_embeddings, without bias.
    """
    put: Callable[[nn.Module], None]

    @property
    def is_embedding(self) -> bool:
        """Whether it is an embedding."""
        return isinstance(self.owner, nn.Embedding)


def find(model: nn.Module, *, embeddings: bool = False) -> dict[str, Site]:
    """Every linear layer by name, in the model's order; one that has several names under the first.

    With `embeddings`, every nn.Embedding, too.
    """
    return {site.name: site for site in _sites(model) if embeddings or not site.is_embedding}


def _sites(model: nn.Module) -> Iterator[Site]:
    compiled = compiled_alone(model)
    inside: tuple[str, ...] = ()
    for name, module in unique(model):
        if name.startswith(inside):
            continue
        odd = _odd(module, id(module) in compiled)
        if type(module).forward is nn.MultiheadAttention.forward:
            assert isinstance(module, nn.MultiheadAttention)
            inside += (f"{name}." if name else "",)
            yield from _projections(model, name, module, odd)
        elif isinstance(module, nn.MultiheadAttention) and not isinstance(module, ProjectedAttention):
            # A kind of attention with a forward of its own, which reads out_proj's weight past the module.
            inside += (f"{name}.",)
        elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            weight = module._parameters.get("weight")
            yield Site(
                name, type(module).__name__, module, weight, odd, partial(_same, module), partial(put, model, name)
            )
        elif isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            weight = module._parameters.get("weight")
            yield Site(
                name, type(module).__name__, module, weight, odd, partial(_as_head, module), partial(put, model, name)
            )
        elif is_conv1d(module):
            weight = module._parameters.get("weight")
            yield Site(
                name,
                type(module).__name__,
                module,
                weight,
                odd,
                partial(_transposed, module),
                partial(put, model, name),
            )


def _projections(
    model: nn.Module, name: str, module: nn.MultiheadAttention, refusal_reason: str | None
) -> Iterator[Site]:
    packed = next((w for k, w in module._parameters.items() if k.endswith("proj_weight") and w is not None), None)
    for projection in PROJECTIONS:
        yield Site(
            join(name, projection),
            f"{type(module).__name__}.{projection}",
            module,
            module.out_proj._parameters.get("weight") if projection == "out_proj" else packed,
            refusal_reason,
            partial(_projection, module, projection),
            partial(_put_projection, model, name, projection),
        )


def _odd(module: nn.Module, compiled: bool) -> str | None:
    if compiled:
        return "it was compiled by itself, and the compiled code keeps the old layer: compile after replacing"
    holders = (module, module.out_proj) if isinstance(module, nn.MultiheadAttention) else (module,)
    for holder in holders:
        held = holder._parameters
        if any(isinstance(p, nn.UninitializedParameter) for p in held.values()):
            return "it is lazy and has no size yet: run the model once before replacing"
        if not any(k.endswith("weight") and p is not None for k, p in held.items()) or hasattr(
            holder, "parametrizations"
        ):
            return (
                "its weight is parametrized, that is made from something else (weight_norm, spectral_norm, pruning): "
                "remove that first, with torch.nn.utils.parametrize.remove_parametrizations or its like, or leave the "
                "layer out of the plan"
            )
    if isinstance(module, nn.Embedding):
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        if used := [name for name in options if getattr(module, name) not in (None, False)]:
            return (
                f"it was made with {', '.join(used)}, which a structured embedding does not know, since tokens share "
                "its factors: set that to nothing first, or leave the embedding out of the plan"
            )
    if isinstance(module, nn.Linear | nn.Embedding) and (
        set(module._parameters) - {"weight", "bias"} or module._buffers
    ):
        return "it has parameters or buffers besides weight and bias, which would be lost: leave it out of the plan"
    return None


def _same(module: nn.Linear) -> nn.Linear:
    return module


def _as_head(module: nn.Embedding) -> nn.Linear:
    return linear_of(module.weight, None).train(module.training)


def _transposed(module: nn.Module) -> nn.Linear:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None
    linear = linear_of(weight.detach().T, bias, requires_grad=weight.requires_grad)
    return linear.train(module.training)


def _projection(module: nn.MultiheadAttention, projection: str) -> nn.Linear:
    return unpacked(module)[projection]


def compiled_alone(model: nn.Module) -> set[int]:
    """Ids of the modules that torch.compile wraps directly: what is compiled there cannot be exchanged."""
    return {id(m._modules["_orig_mod"]) for m in model.modules() if "_orig_mod" in m._modules}


def refuse_wrapped(model: nn.Module) -> None:
    """DDP and FSDP keep lists of parameters: new ones would never be synchronised."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) or "FSDP" in type(module).__name__:
            raise PlanError("the model is wrapped for distributed training already: wrap it after replacing layers")


def unique(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under the first of its names."""
    seen: set[int] = set()
    for name, module in modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def put(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module under this name, and under every other name of the module that stood there."""
    old = _get(model, name)
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module is old:
                parent._modules[child] = new


def _put_projection(model: nn.Module, name: str, projection: str, new: nn.Module) -> None:
    attention = _get(model, name)
    if not isinstance(attention, ProjectedAttention):
        assert isinstance(attention, nn.MultiheadAttention)
        # Copies: a view would keep the whole packed weight alive, and tied to whoever else holds it.
        attention = ProjectedAttention(attention, dict(unpacked(attention, copy=True)))
        put(model, name, attention)
    attention.add_module(projection, new)


def _get(model: nn.Module, name: str) -> nn.Module:
    for found, module in modules(model):
        if found == name:
            return module
    raise PlanError(f"no module named {name!r}")
