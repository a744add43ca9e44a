"""Facts about parameters: the matrix that each belongs to, and its sizes.

They are derived from the module that owns a parameter, by name. Nothing is attached to parameters, so the facts are
the same after deepcopy, torch.compile, fully_shard and loading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from buttress.core.chain_sum import AnyChain
from buttress.core.scaling import lookup_slices
from buttress.inspection.names import join, modules
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured
from buttress.optim.matrices import STACK, Layout, dense_matrix, is_vector


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """Facts about one parameter.

    Attributes:
        kind: Description of the parameter, for `explain`.
        layer: Name of the layer whose width determines the learning rate.
        d_in: Input size of the matrix; 1 for a vector.
        d_out: Output size of the matrix, or length of the vector.
        is_matrix: False for vectors and embeddings, which add up no inputs.
        decays: Whether weight decay applies.
        chain: For a factor, the chain that it belongs to.
        factor: For a factor, its name in the chain.
        std: For a factor, the nominal standard deviation of its entries.
        row_std: For a factor of an embedding, the standard deviation of the entries of the rows.
        share: The fraction of a fused layer's outputs that this layer has.
        table_shape: For a parameter that is taken for a table, its shape; else None.
        layout: How it is read as a stack of matrices to be orthogonalized; None if it should not be.
    """

    kind: str
    layer: str
    d_in: int = 1
    d_out: int
    is_matrix: bool = False
    decays: bool
    chain: AnyChain | None = None
    factor: str | None = None
    std: float | None = None
    row_std: float | None = None
    share: float = 1.0
    table_shape: tuple[int, ...] | None = None
    layout: Layout | None = None

    @property
    def layer_sizes(self) -> tuple[int, int]:
        """Input and output size of the dense layer: for a factor, those of the whole layer."""
        return (self.chain.d_in, self.chain.d_out) if self.chain else (self.d_in, self.d_out)


def parameter_facts(model: nn.Module) -> dict[str, ParameterFacts]:
    """The facts about every parameter of a model.

    Args:
        model: The model; it may be on the meta device.

    Returns:
        Facts by parameter name. A tied parameter is listed under each of its names.
    """
    facts: dict[str, ParameterFacts] = {}
    shares: dict[int, float] = {}
    for name, module in modules(model):
        if isinstance(module, SplitLinear):
            shares |= {id(p): n / module.out_features for p, n in zip(module.parts, module.sizes, strict=True)}
        for key, f in _module_facts(name, module).items():
            # A structured layer precedes the ParameterDict that contains its factors.
            facts.setdefault(join(name, key), replace(f, share=shares.get(id(module), 1.0)))
    return facts


def _module_facts(name: str, module: nn.Module) -> dict[str, ParameterFacts]:
    """Facts about the parameters that one module owns, by their names in it."""
    facts = {key: _dense_facts(name, module, key, p) for key, p in module.named_parameters(recurse=False)}
    return facts | _structured_facts(name, module) if isinstance(module, Structured) else facts


def _dense_facts(name: str, module: nn.Module, key: str, p: nn.Parameter) -> ParameterFacts:
    """Facts about a parameter of a dense module."""
    if (matrix := dense_matrix(module, key, p)) is not None:
        layer = join(name, matrix.part) if matrix.part else name
        return ParameterFacts(
            kind=matrix.kind,
            layer=layer,
            d_in=matrix.d_in,
            d_out=matrix.d_out,
            is_matrix=True,
            decays=True,
            layout=matrix.layout,
        )
    d_out = p.shape[-1] if p.dim() else 1
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ParameterFacts(kind="embedding: one row per token", layer=name, d_out=d_out, decays=True)
    if not is_vector(key, p):
        kind = "bare parameter: taken for a table, not a matrix"
        return ParameterFacts(kind=kind, layer=name, d_out=d_out, decays=True, table_shape=tuple(p.shape))
    if isinstance(module, nn.MultiheadAttention) and key == "in_proj_bias":
        d_out //= 3
    elif p.dim() and p.numel() == max(p.shape):
        d_out = p.numel()
    return ParameterFacts(kind="vector: one number per feature", layer=name, d_out=d_out, decays=False)


def _structured_facts(name: str, module: Structured) -> dict[str, ParameterFacts]:
    """Facts about the factors, gains and bias of a structured module."""
    if isinstance(module, StructuredEmbedding):
        factors = _embedding_factors(name, module)
    else:
        factors = _linear_factors(name, module)
    facts = {f"factors.{key}": f for key, f in factors.items()}
    gain = ParameterFacts(kind="gain: the base rate", layer=f"{name}.gains", d_out=1, decays=False)
    facts |= {f"gains.{key}": gain for key in module.gains}
    if isinstance(module, StructuredLinear):
        facts["bias"] = ParameterFacts(
            kind="vector: one number per feature", layer=name, d_out=module.out_features, decays=False
        )
    return facts


def _linear_factors(name: str, module: Structured) -> dict[str, ParameterFacts]:
    return {
        f.name: ParameterFacts(
            kind=f"factor of {module.structure}",
            layer=name,
            d_in=f.d_in,
            d_out=f.d_out,
            is_matrix=True,
            decays=True,
            chain=module.chain,
            factor=f.name,
            std=module.stds[f.name],
            layout=STACK,
        )
        for f in module.chain.factors
    }


def _embedding_factors(name: str, module: StructuredEmbedding) -> dict[str, ParameterFacts]:
    """Like the rows of a dense embedding, factors whose rows are looked up are not applied to features."""
    slices = lookup_slices(module.chain)
    return {
        f.name: ParameterFacts(
            kind=f"factor of {module.structure}: rows are looked up",
            layer=name,
            d_in=round(slices[f.name].fan_in),
            d_out=module.chain.d_in,
            decays=True,
            chain=module.chain,
            factor=f.name,
            std=module.stds[f.name],
            row_std=module.std or 1.0,
        )
        for f in module.chain.factors
    }
