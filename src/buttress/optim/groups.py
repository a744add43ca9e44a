"""Learning rates: parameter groups for any torch optimizer, and a table that explains them.

The facts about a parameter come from the module that owns it, found by name. Nothing is attached to
parameters, so the groups are right after deepcopy, torch.compile, fully_shard and loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from buttress.core.chain import Chain
from buttress.core.scaling import lookup, lookup_multiplier, lr_multiplier, rate
from buttress.errors import RuleError
from buttress.inspection.names import first_match, is_conv1d, join, modules, parameters, suggest
from buttress.nn.attention import ProjectedAttention, SplitLinear
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import Structured
from buttress.text_table import render

Base = nn.Module | Mapping[str, int | tuple[int, int]]


@dataclass(frozen=True)
class ParameterRow:
    """One parameter's learning rate and where it comes from."""

    name: str
    shape: str
    fan_in: int
    std: float | None
    multiplier: float
    lr: float
    weight_decay: float
    why: str


@dataclass(frozen=True)
class Explanation:
    """Every parameter of a model with its rate; `str` gives a table."""

    rows: tuple[ParameterRow, ...]

    def __str__(self) -> str:
        return render(self.rows)


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    base: Base | None = None,
    weight_decay: float = 0.0,
    rule: str = "adam",
    scale: Mapping[str, float] | None = None,
    structure_aware: bool = True,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer with the right learning rate for every parameter.

    `lr` is the rate that suits the dense model, at the width of `base` if that is given: a model
    (which may live on the meta device), or {module name: d_in or (d_in, d_out)}. `rule` is "adam"
    (also AdamW), "sgd", "sign" (Lion) or "muon". `scale` maps globs over parameter names to extra
    factors, first match wins. `structure_aware=False` gives each factor the dense layer's rate: the
    naive rule, for comparison. Vectors, norms and gains get no weight decay.

    Groups are merged: one for each distinct (rate, decay, rule). Each carries two inert keys,
    "lr_multiplier" and "rule"; under "muon" the groups of vectors and embeddings say "adam".

    >>> optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3, weight_decay=0.1))
    """
    merged: dict[tuple[float, float, str], dict[str, Any]] = {}
    for p in _rates(model, lr, base, weight_decay, rule, scale, structure_aware):
        key = (p.multiplier, p.weight_decay, p.rule)
        group = merged.setdefault(
            key,
            {
                "params": [],
                "lr": lr * p.multiplier,
                "weight_decay": p.weight_decay,
                "lr_multiplier": p.multiplier,
                "rule": p.rule,
            },
        )
        group["params"].append(p.parameter)
    return list(merged.values())


def explain(
    model: nn.Module,
    lr: float,
    *,
    base: Base | None = None,
    weight_decay: float = 0.0,
    rule: str = "adam",
    scale: Mapping[str, float] | None = None,
    structure_aware: bool = True,
) -> Explanation:
    """The same rates as `param_groups` gives, parameter by parameter, with the reason for each."""
    return Explanation(
        tuple(
            ParameterRow(
                name=p.name,
                shape="x".join(map(str, p.parameter.shape)),
                fan_in=p.facts.d_in,
                std=p.facts.std,
                multiplier=p.multiplier,
                lr=lr * p.multiplier,
                weight_decay=p.weight_decay,
                why=p.why,
            )
            for p in _rates(model, lr, base, weight_decay, rule, scale, structure_aware)
        )
    )


@dataclass(frozen=True)
class _Facts:
    """What the owner of a parameter says about it: the sizes of the dense matrix it belongs to."""

    kind: str
    layer: str
    """Name of the module whose width counts."""
    d_in: int
    d_out: int
    matrix: bool
    """False for vectors and embeddings: one number a feature, no sum over inputs."""
    decays: bool
    chain: Chain | None = None
    factor: str | None = None
    std: float | None = None
    rows: float | None = None
    """For a factor of an embedding: the size of the entries of its rows."""
    share: float = 1.0
    """Which part of the outputs of a fused layer this one has."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Input and output size of the dense layer: of the whole layer for a factor."""
        return (self.chain.d_in, self.chain.d_out) if self.chain else (self.d_in, self.d_out)


@dataclass(frozen=True)
class _Rate:
    name: str
    parameter: nn.Parameter
    facts: _Facts
    multiplier: float
    weight_decay: float
    rule: str
    why: str


def _rates(
    model: nn.Module,
    lr: float,
    base: Base | None,
    weight_decay: float,
    rule: str,
    scale: Mapping[str, float] | None,
    structure_aware: bool,
) -> Iterator[_Rate]:
    if not lr >= 0:
        raise RuleError(f"lr must be a number >= 0, got {lr!r}")
    rate(rule, 1, 1)
    facts = _facts(model)
    every = parameters(model)
    names: dict[int, list[str]] = {}
    for name, parameter in every.items():
        names.setdefault(id(parameter), []).append(name)
    named = {found[0]: every[found[0]] for found in names.values()}
    extra, idle = first_match(scale or {}, every)
    for glob, reason in idle.items():
        raise RuleError(f"scale: no parameter matches {glob!r}; {reason}")
    widths = _Widths(base, facts)
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        f = facts[name]
        # Muon orthogonalises matrices; vectors and embeddings beside it are trained by Adam.
        used = rule if f.matrix or rule != "muon" else "adam"
        transfer, reason = widths.transfer(name, f, used)
        multiplier, why = transfer, [f.kind, reason]
        if f.chain and f.factor:
            kappa, reason = _kappa(f, f.chain, used)
            if structure_aware:
                multiplier *= kappa
                why.append(f"kappa = {kappa:.4g}: {reason}, 1 of {len(f.chain.factors)}")
            else:
                why.append("naive: the dense layer's rate")
        if scales := [extra[n] for n in names[id(parameter)] if n in extra]:
            multiplier *= scales[0]
            why.append(f"scale {scales[0]:.4g}")
        if others := names[id(parameter)][1:]:
            why.append(f"shared with {', '.join(others)}")
        decay = weight_decay if f.decays else 0.0
        # Equal rates found by different divisions differ in the last bit, and would make two groups.
        multiplier = float(f"{multiplier:.14g}")
        yield _Rate(name, parameter, f, multiplier, decay, used, "; ".join(w for w in why if w))


def _kappa(f: _Facts, chain: Chain, rule: str) -> tuple[float, str]:
    """A factor's rate over that of what it stands for, a dense layer or a dense embedding, and its reason."""
    factor = next(x for x in chain.factors if x.name == f.factor)
    if f.rows is None:
        slices = f"slice {factor.d_out}x{factor.d_in} of a {chain.d_out}x{chain.d_in} layer"
        return lr_multiplier(factor, chain, rule), slices
    kappa = lookup_multiplier(factor, chain, rule, f.rows)
    given = "numbers" if f.rows == 1 else f"numbers of size {f.rows:.3g}"
    return kappa, "read as it is" if factor is chain.factors[-1] else f"adds up {f.d_in} {given}"


class _Widths:
    """The sizes each layer had where the learning rate was tuned."""

    def __init__(self, base: Base | None, facts: Mapping[str, _Facts]) -> None:
        self.given: dict[str, tuple[int, int | None]] | None = None
        self.vectors: dict[str, _Facts] = {}
        if isinstance(base, nn.Module):
            self.vectors = _facts(base)
            self.given = {f.layer: f.sizes for f in self.vectors.values() if f.matrix}
            # A dense layer may stand where the base has parts.
            for name, module in modules(base):
                if isinstance(module, SplitLinear):
                    self.given[name] = (module.in_features, module.out_features)
                elif isinstance(module, ProjectedAttention):
                    self.given[name] = (module.embed_dim, module.embed_dim)
        elif base is not None:
            self.given = {n: v if isinstance(v, tuple) else (v, None) for n, v in base.items()}
            layers = {f.layer for f in facts.values()}
            for name in self.given:
                if not any(layer == name or layer.startswith(f"{name}.") for layer in layers):
                    raise RuleError(
                        f"base names a layer that the model does not have: {name!r}; {suggest(name, layers)}"
                    )

    def transfer(self, name: str, f: _Facts, rule: str) -> tuple[float, str]:
        """rate(this layer) / rate(the same layer of the base), and its reason."""
        if self.given is None:
            return 1.0, ""
        d_in, d_out = f.sizes
        if not f.matrix:
            return self._vector(name, f, rule)
        base_in, base_out = self._find(f)
        if base_out is None:
            if rate(rule, d_in, 1) != rate(rule, d_in, 2):
                raise RuleError(
                    f"the {rule} rule needs d_in and d_out of {f.layer} at the base width: "
                    "give base={name: (d_in, d_out)} or a base model"
                )
            base_out = d_out
        return rate(rule, d_in, d_out) / rate(rule, base_in, base_out), f"width {base_in} -> {d_in}"

    def _vector(self, name: str, f: _Facts, rule: str) -> tuple[float, str]:
        """Only a rule that looks at d_out tells vectors of different lengths apart."""
        if rate(rule, 1, 1) == rate(rule, 1, 2) or f.d_out == 1:
            return 1.0, "width does not count"
        then = self.vectors.get(name) or self._table(f)
        try:
            size = then.d_out if then else self._find(f)[1]
        except RuleError:
            size = None
        if size is None:
            raise RuleError(
                f"the {rule} rule needs the size of {name} at the base width: give base={{name: (d_in, d_out)}} "
                f"for {f.layer} (d_in is 1 for a vector) or a base model"
            )
        return rate(rule, 1, f.d_out) / rate(rule, 1, size), f"size {size:g} -> {f.d_out}"

    def _table(self, f: _Facts) -> _Facts | None:
        """The base's embedding of this name: a dense one may stand where the other is structured."""
        return next((v for v in self.vectors.values() if v.layer == f.layer and not v.matrix), None)

    def _find(self, f: _Facts) -> tuple[int, float | None]:
        """The base's layer of this name, or the part that it has in a fused one."""
        assert self.given is not None
        name = f.layer
        while name not in self.given and "." in name:
            name = name.rpartition(".")[0]
        if name not in self.given:
            raise RuleError(f"base has no layer {f.layer!r}: {suggest(f.layer, self.given)}")
        base_in, base_out = self.given[name]
        if base_out is None or name == f.layer:
            return base_in, base_out
        return base_in, base_out * f.share


def _facts(model: nn.Module) -> dict[str, _Facts]:
    """Facts about every parameter, by canonical name."""
    found: dict[str, _Facts] = {}
    shares: dict[int, float] = {}
    for name, module in modules(model):
        if isinstance(module, SplitLinear):
            shares |= {id(p): n / module.out_features for p, n in zip(module.parts, module.sizes, strict=True)}
        for key, f in _owned(name, module).items():
            # A structured layer speaks for its factors before the dictionary that holds them does.
            found.setdefault(join(name, key), replace(f, share=shares.get(id(module), 1.0)))
    return found


def _owned(name: str, module: nn.Module) -> dict[str, _Facts]:
    """Facts about the parameters that one module owns."""
    return _structured(name, module) if isinstance(module, Structured) else _plain(name, module)


def _plain(name: str, module: nn.Module) -> dict[str, _Facts]:
    facts = {}
    for key, p in module.named_parameters(recurse=False):
        d_in, d_out, kind = 1, p.shape[-1] if p.dim() else 1, "vector: one number a feature"
        if isinstance(module, nn.MultiheadAttention) and key == "in_proj_bias":
            d_out //= 3
        layer, matrix = name, False
        if isinstance(module, nn.Linear) and key == "weight":
            d_out, d_in = p.shape
            matrix, kind = True, "dense"
        elif is_conv1d(module) and key == "weight":
            d_in, d_out = p.shape
            matrix, kind = True, "dense (Conv1D)"
        elif isinstance(module, nn.modules.conv._ConvNd) and key == "weight":
            # Transposed convolutions store (in, out, ...).
            d_in, d_out = p[0].numel(), p.shape[0]
            if module.transposed:
                d_in, d_out = p[:, 0].numel() // module.groups, p.shape[1] * module.groups
            matrix, kind = True, "convolution"
        elif isinstance(module, nn.MultiheadAttention) and key.endswith("proj_weight"):
            d_out, d_in = p.shape
            # q_proj_weight is what q_proj's weight is elsewhere; the packed one is all three.
            d_out, part = (d_out // 3, "") if key == "in_proj_weight" else (d_out, f".{key.removesuffix('_weight')}")
            layer, matrix, kind = name + part, True, "dense (attention)"
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            kind = "embedding: one row a token"
        elif p.dim() >= 2:
            kind = "bare parameter: taken for a table, not a matrix"
        facts[key] = _Facts(kind, layer, d_in, d_out, matrix, decays=p.dim() >= 2)
    return facts


def _structured(name: str, module: Structured) -> dict[str, _Facts]:
    chain, kind = module.chain, f"factor of {module.structure}"
    if isinstance(module, StructuredEmbedding):
        # Like the rows of a dense embedding, what is looked up is no matrix that is applied to features.
        reads = lookup(chain)
        facts = {
            f"factors.{f.name}": _Facts(
                f"{kind}: rows are looked up", name, round(reads[f.name].fan_in), chain.d_in, False, True, chain,
                f.name, module.stds[f.name], rows=module.std or 1.0,
            )
            for f in chain.factors
        }  # fmt: skip
    else:
        facts = {
            f"factors.{f.name}": _Facts(
                kind, name, f.d_in, f.d_out, True, True, chain, f.name, module.stds[f.name]
            )
            for f in chain.factors
        }  # fmt: skip
    facts |= {
        f"gains.{key}": _Facts("gain: the base rate", f"{name}.gains", 1, 1, False, False) for key in module.gains
    }
    if isinstance(module, StructuredLinear):
        facts["bias"] = _Facts("vector: one number a feature", name, 1, module.out_features, False, False)
    return _plain(name, module) | facts
