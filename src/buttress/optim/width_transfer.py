"""Width transfer: using a learning rate that was tuned at one width for a model of another width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral

from torch import nn

from buttress.core.scaling import rate
from buttress.errors import RuleError, quoted
from buttress.inspection.names import modules, suggest
from buttress.nn.attention import ProjectedAttention
from buttress.nn.split_linear import SplitLinear
from buttress.optim.facts import ParameterFacts, parameter_facts

Base = nn.Module | Mapping[str, int | tuple[int, int]]
"""The model at the width where the rate was tuned, or the sizes of its layers: d_in or (d_in, d_out) by name."""


class WidthTransfer:
    """Ratios between the learning rate of a layer and that of the same layer of the base.

    Args:
        base: The base, or None if the rate was tuned for the model itself.
        facts: Facts about the parameters of the model, to check the names of a base given by sizes.

    Raises:
        RuleError: If the base is neither a model nor sizes by layer, or names a layer that the model does not have.
    """

    def __init__(self, base: Base | None, facts: Mapping[str, ParameterFacts]) -> None:
        self._base_sizes: dict[str, tuple[int, int | None]] | None = None
        self._base_facts: dict[str, ParameterFacts] = {}
        if isinstance(base, nn.Module):
            self._base_facts = parameter_facts(base)
            self._base_sizes = _layer_sizes(base, self._base_facts)
        elif base is not None:
            self._base_sizes = _given_sizes(base)
            _check_layers_exist(self._base_sizes, {f.layer for f in facts.values()})

    def multiplier(self, name: str, facts: ParameterFacts, rule: str) -> tuple[float, str]:
        """The rate of a parameter's layer divided by that of the same layer of the base.

        Args:
            name: Name of the parameter.
            facts: Facts about it.
            rule: The optimizer rule that trains it.

        Returns:
            The ratio, and its reason as text; 1 and an empty text without a base.

        Raises:
            RuleError: If the base lacks the layer, or a size that the rule needs.
        """
        if self._base_sizes is None:
            return 1.0, ""
        if not facts.is_matrix:
            return self._vector_multiplier(name, facts, rule)
        d_in, d_out = facts.layer_sizes
        base_in, base_out = self._sizes_in_base(facts, self._base_sizes)
        if base_out is None:
            if _depends_on_d_out(rule, d_in):
                raise RuleError(
                    f"the {rule} rule needs d_in and d_out of {facts.layer} at the base width: "
                    "give base={name: (d_in, d_out)} or a base model"
                )
            base_out = d_out
        return rate(rule, d_in, d_out) / rate(rule, base_in, base_out), f"width {base_in} -> {d_in}"

    def fan_in_is_unknown(self, name: str, facts: ParameterFacts) -> bool:
        """Whether a parameter that is taken for a table looks like a matrix next to the base.

        The rows of a table have one number per feature, so only its last axis grows with the width.

        Args:
            name: Name of the parameter.
            facts: Facts about it.

        Returns:
            Whether another axis differs from the base. A base given by sizes does not tell.
        """
        in_base = self._base_facts.get(name)
        if facts.table_shape is None or in_base is None or in_base.table_shape is None:
            return False
        return facts.table_shape[:-1] != in_base.table_shape[:-1]

    def _vector_multiplier(self, name: str, facts: ParameterFacts, rule: str) -> tuple[float, str]:
        """Only a rule that depends on d_out treats vectors of different lengths differently."""
        if not _depends_on_d_out(rule, 1) or facts.d_out == 1:
            return 1.0, "width does not count"
        size = self._vector_size_in_base(name, facts)
        if size is None:
            raise RuleError(
                f"the {rule} rule needs the size of {name} at the base width: give base={{name: (d_in, d_out)}} "
                f"for {facts.layer} (d_in is 1 for a vector) or a base model"
            )
        return rate(rule, 1, facts.d_out) / rate(rule, 1, size), f"size {size:g} -> {facts.d_out}"

    def _vector_size_in_base(self, name: str, facts: ParameterFacts) -> float | None:
        # A dense embedding of the model may be structured in the base, where no parameter has its name.
        embedding = (f for f in self._base_facts.values() if f.layer == facts.layer and not f.is_matrix)
        if (in_base := self._base_facts.get(name) or next(embedding, None)) is not None:
            return in_base.d_out
        assert self._base_sizes is not None
        try:
            return self._sizes_in_base(facts, self._base_sizes)[1]
        except RuleError:
            return None

    @staticmethod
    def _sizes_in_base(
        facts: ParameterFacts, base_sizes: Mapping[str, tuple[int, int | None]]
    ) -> tuple[int, float | None]:
        """Sizes of the base's layer of this name, or of this layer's share of a fused layer of the base."""
        name = facts.layer
        while name not in base_sizes and "." in name:
            name = name.rpartition(".")[0]
        if name not in base_sizes:
            raise RuleError(f"base has no layer {facts.layer!r}: {suggest(facts.layer, base_sizes)}")
        base_in, base_out = base_sizes[name]
        if base_out is None or name == facts.layer:
            return base_in, base_out
        return base_in, base_out * facts.share


def _given_sizes(base: object) -> dict[str, tuple[int, int | None]]:
    """A base that is given by sizes, with None for a d_out that is not given."""
    if not isinstance(base, Mapping):
        raise RuleError(f"base must be a model, or {{layer: d_in or (d_in, d_out)}}, got {quoted(base)}")
    sizes = {}
    for name, value in base.items():
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        d_in, d_out = value if is_pair else (value, None)
        if not all(isinstance(n, Integral) and int(n) >= 1 for n in (d_in, 1 if d_out is None else d_out)):
            raise RuleError(f"base needs d_in or (d_in, d_out) for {quoted(name)}, integers >= 1, got {quoted(value)}")
        sizes[name] = (d_in, d_out)
    return sizes


def _layer_sizes(base: nn.Module, facts: Mapping[str, ParameterFacts]) -> dict[str, tuple[int, int | None]]:
    sizes: dict[str, tuple[int, int | None]] = {f.layer: f.layer_sizes for f in facts.values() if f.is_matrix}
    # A layer that is split in the base may be in one piece in the model.
    for name, module in modules(base):
        if isinstance(module, SplitLinear):
            sizes[name] = (module.in_features, module.out_features)
        elif isinstance(module, ProjectedAttention):
            sizes[name] = (module.embed_dim, module.embed_dim)
    return sizes


def _check_layers_exist(names: Iterable[str], layers: set[str]) -> None:
    for name in names:
        if not any(layer == name or layer.startswith(f"{name}.") for layer in layers):
            raise RuleError(f"base names a layer that the model does not have: {name!r}; {suggest(name, layers)}")


def _depends_on_d_out(rule: str, d_in: int) -> bool:
    return rate(rule, d_in, 1) != rate(rule, d_in, 2)
