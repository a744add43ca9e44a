"""Plan: which layers of a model are structured, and how, in a form that can be saved."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from buttress.errors import ButtressError, PlanError, quoted
from buttress.files import write_text
from buttress.inspection.names import suggest
from buttress.inspection.obstacles import find_obstacles
from buttress.inspection.sites import Site, check_not_wrapped, find_sites
from buttress.projection.closed_form import Projection
from buttress.surgery.entry import PlanEntry, entries_of, plan_data
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
        return cls(tuple(entries_of(model)))

    def to_json(self) -> str:
        """The plan as JSON, which `from_json` reads.

        Returns:
            A JSON object with the format, its version and one object per layer.

        Example:
            >>> Path("plan.json").write_text(Plan.of(model).to_json())
        """
        return json.dumps(plan_data(self.entries), indent=2)

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

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, completely or not at all.

        Args:
            path: The file; one that exists is replaced. Its folder is created if it is missing.

        Raises:
            PlanError: If the file cannot be written.

        Example:
            >>> Plan.of(model).save("plan.json")
        """
        try:
            write_text(Path(path), self.to_json() + "\n")
        except OSError as error:
            raise PlanError(f"the plan cannot be written to {path} ({error.strerror or error})") from None

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read the plan that `save` wrote.

        Args:
            path: The file.

        Returns:
            The plan.

        Raises:
            PlanError: If the file is missing, cannot be read, or is not a plan.

        Example:
            >>> report = Plan.load("plan.json").apply_(model)
        """
        try:
            size = Path(path).stat().st_size
            text = Path(path).read_text(encoding="utf-8") if size <= MAX_TEXT else None
        except OSError as error:
            raise PlanError(f"no plan can be read from {path} ({error.strerror or error})") from None
        except UnicodeDecodeError:
            raise PlanError(f"{path} is not a buttress plan: it is not text") from None
        if text is None:
            raise PlanError(f"{path} is not a buttress plan: it has {size:,} bytes, more than {MAX_TEXT:,}")
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path} cannot be used: {error}") from None

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
        self._check_fits(model, sites)
        return apply_entries(model, self.entries, sites, initialization)

    def _check_fits(self, model: nn.Module, sites: Mapping[str, Site]) -> None:
        names = [e.name for e in self.entries]
        obstacles = find_obstacles(model)
        for name in names:
            if name in obstacles:
                raise PlanError(f"{name}: {obstacles[name].reason}; the model is unchanged")
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
