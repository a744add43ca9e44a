"""Plan: which layers of a model are structured, and how, in a form that can be saved."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from buttress.errors import ButtressError, PlanError, quoted
from buttress.inspection.names import suggest, unique_modules
from buttress.inspection.sites import Site, check_not_wrapped, find_sites
from buttress.inspection.ties import tied_modules
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.split_linear import SplitLinear
from buttress.projection.closed_form import Projection
from buttress.surgery.entry import PlanEntry
from buttress.surgery.exchange import apply_entries
from buttress.surgery.replacement import Init, Initialization, checked_sizes
from buttress.surgery.report import Report

MAX_TEXT = 64 << 20
"""Longest JSON of a plan, in characters."""

MAX_LAYERS = 1 << 20
"""Largest number of layers of a plan in JSON."""


@dataclass(frozen=True)
class Plan:
    """Which layers of a model are structured, and how. Layers are listed by name, so that a plan can be saved.

    Attributes:
        entries: One entry per replaced layer, in the model's order.

    Example:
        >>> text = Plan.of(model).to_json()
        >>> with torch.device("meta"):
        ...     fresh = build_dense_model()
        >>> report = Plan.from_json(text).apply_(fresh)  # no dense weight is ever allocated
        >>> fresh.load_state_dict(model.state_dict(), assign=True)
    """

    entries: tuple[PlanEntry, ...] = field(default=())

    @classmethod
    def of(cls, model: nn.Module) -> Plan:
        """The plan that turns the dense model into this one.

        Args:
            model: A model after `replace_`; torch.compile and other wrappers leave the names unchanged.

        Returns:
            A plan with one entry per structured layer; empty for a dense model.

        Example:
            >>> report = replace_(model, BTT(rank=2))
            >>> [entry.name for entry in Plan.of(model).entries]
        """
        entries = []
        split_prefixes: tuple[str, ...] = ()
        tied = tied_modules(model)
        for name, module in unique_modules(model):
            if isinstance(module, SplitLinear):
                entries.append(_split_entry(name, module))
                split_prefixes += (f"{name}.",)
            elif isinstance(module, StructuredEmbedding):
                entries.append(PlanEntry(name, module.structure, module.normalize, std=module.std, tied=tied.get(name)))
            elif isinstance(module, StructuredLinear) and not name.startswith(split_prefixes):
                zero_init = (module.zero_init,)
                entries.append(PlanEntry(name, module.structure, module.normalize, zero_init, tied=tied.get(name)))
        return cls(tuple(entries))

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads.

        Returns:
            A JSON object with the format, its version and one object per layer.

        Example:
            >>> Path("plan.json").write_text(Plan.of(model).to_json())
        """
        rows = [entry.to_row() for entry in self.entries]
        return json.dumps({"format": "buttress-plan", "version": 1, "layers": rows}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The plan.

        Raises:
            PlanError: If the text is not a plan, is a plan of another version, or names a layer twice.

        Example:
            >>> Plan.from_json(plan.to_json()) == plan
            True
        """
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise PlanError(f"a plan is a text of at most {MAX_TEXT:,} characters")
        try:
            data = json.loads(text)
            form, version, rows = data["format"], data["version"], data["layers"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise PlanError("this is not a buttress plan: JSON with format, version and layers is needed") from None
        if (form, version) != ("buttress-plan", 1):
            raise PlanError(
                f"this plan is of format {quoted(form)}, version {quoted(version)}; "
                "buttress-plan version 1 is understood"
            )
        if not isinstance(rows, list) or len(rows) > MAX_LAYERS:
            raise PlanError(f"the layers of a plan are a list of at most {MAX_LAYERS:,}, got {quoted(rows)}")
        plan = cls(tuple(PlanEntry.from_row(row) for row in rows))
        plan._check_names()
        return plan

    def apply_(
        self,
        model: nn.Module,
        *,
        init: Init = "mup",
        moments: Mapping[str, Tensor] | None = None,
        sweeps: int | None = None,
        projections: Mapping[str, Projection] | None = None,
        dry_run: bool = False,
    ) -> Report:
        """Replace exactly the layers of this plan, in place; on the meta device nothing is computed or allocated.

        Args:
            model: The dense model.
            init: "mup" draws new weights, "project" keeps the nearest to the old ones.
            moments: Second moments of the layers' inputs by name, from `moments()`, for init="project".
            sweeps: Sweeps of `project`, for init="project".
            projections: Results of `project` that were computed before, by layer name, for init="project".
            dry_run: Whether to report only, and leave the model as it is.

        Returns:
            What was replaced.

        Raises:
            PlanError: If the plan does not fit the model; the model is then unchanged.

        Example:
            >>> report = Plan.from_json(text).apply_(model, init="project")
        """
        initialization = Initialization.checked(init, moments, sweeps, projections, dry_run=dry_run)
        check_not_wrapped(model)
        sites = find_sites(model, embeddings=True)
        self._check_fits(sites)
        return apply_entries(model, self.entries, sites, initialization)

    def _check_fits(self, sites: Mapping[str, Site]) -> None:
        if not sites:
            raise PlanError("nothing to replace: the model has no linear layer")
        names = [e.name for e in self.entries]
        for name in names:
            if name not in sites:
                raise PlanError(
                    f"the plan names a layer that the model does not have: {quoted(name)}; {suggest(name[:200], sites)}"
                )
        self._check_names()
        leaders = {e.name for e in self.entries if e.tied is None and e.split is None}
        for e in self.entries:
            if e.tied is not None and (e.split is not None or e.tied not in leaders):
                raise PlanError(
                    f"the plan ties {quoted(e.name)} to {quoted(e.tied)}: both must be whole layers of it, and the "
                    "second not tied itself"
                )
        if not names:
            raise PlanError("nothing to replace: the plan is empty")
        self._check_sizes(sites)

    def _check_names(self) -> None:
        names = Counter(e.name for e in self.entries)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise PlanError(f"the plan names a layer twice: {quoted(repeated[0])}")

    def _check_sizes(self, sites: Mapping[str, Site]) -> None:
        """Build every chain, which allocates nothing, before any module is built."""
        for entry in self.entries:
            site = sites[entry.name]
            if site.unsupported_reason:
                continue  # refused with that reason
            try:
                linear = site.read()
                for d_out in set(checked_sizes(site, entry, linear)):
                    entry.structure.chain(linear.in_features, d_out)
            except ButtressError as error:
                raise PlanError(f"{entry.name or '(model)'}: {error}; the model is unchanged") from error


def _split_entry(name: str, module: SplitLinear) -> PlanEntry:
    parts = [p for p in module.parts if isinstance(p, StructuredLinear)]
    zero_init = tuple(p.zero_init for p in parts)
    return PlanEntry(name, parts[0].structure, parts[0].normalize, zero_init, module.sizes)
