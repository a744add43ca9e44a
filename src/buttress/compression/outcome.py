"""The result of `compress`, and its form in buttress-report.json."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from buttress.compression.allocation import Budget
from buttress.compression.options import CompressOptions
from buttress.compression.remainder import Remainder
from buttress.integrations.model_card import Library
from buttress.surgery import Plan, Report

LIBRARIES = ("torch", "transformers", "timm", "safetensors", "gguf")
"""Libraries whose versions are reported."""


@dataclass(frozen=True)
class Provenance:
    """Where a compressed model is from."""

    source: str
    """Name of the original folder or GGUF file, or id of the model on the hub."""
    library: Library
    """The library that loads it."""
    class_name: str
    """Class of the model."""
    left_out: dict[str, str]
    """Why files of the folder were not copied, by path."""
    missing: tuple[str, ...]
    """Tensors of the model that its files do not hold, so that they have random values."""
    unreadable: tuple[str, ...]
    """Images that could not be read and were left out."""
    dequantized: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors of each type that was quantized in the source and has been dequantized."""


@dataclass(frozen=True)
class Outcome:
    """Results of `compress`: the plan, a report on the layers, what stays as it was, and the quality."""

    plan: Plan
    """The plan that was applied."""
    report: Report
    """Every layer that was replaced, with its errors."""
    budget: Budget | None
    """The choice of the plan; None if the plan was an option."""
    quality: dict[str, tuple[float, float]]
    """Metrics of the original and of the compressed model on held-out data, by name; empty without data."""
    healed: tuple[float, float] | None
    """Distance of the outputs on held-out data from the original's, before and after healing; None without healing."""
    seconds: dict[str, float]
    """Duration of each stage."""
    remainder: Remainder
    """What stays as it was, and what share of the model could not be judged."""
    provenance: Provenance
    """Where the model is from."""

    @property
    def undone(self) -> bool:
        """Whether healing moved the outputs away from the original's and was therefore undone."""
        return self.healed is not None and is_harmful(*self.healed)


def is_harmful(before: float, after: float) -> bool:
    """Whether healing did not bring the outputs nearer to the original's."""
    return not after < before


def report_row(outcome: Outcome, options: CompressOptions) -> dict[str, Any]:
    """What buttress-report.json holds.

    Args:
        outcome: The result.
        options: The options that gave it.

    Returns:
        Plain data.
    """
    remainder = outcome.remainder
    return {
        "format": "buttress-report",
        "version": 1,
        "source": outcome.provenance.source,
        "library": outcome.provenance.library,
        "class": outcome.provenance.class_name,
        "dequantized": dict(outcome.provenance.dequantized),
        "options": options.to_row(),
        "versions": _versions(),
        "keep": options.keep,
        "quality": outcome.quality,
        "healed": outcome.healed,
        "undone": outcome.undone,
        "seconds": outcome.seconds,
        "layers": [asdict(row) for row in outcome.report.rows],
        "dense_layers": [asdict(layer) for layer in remainder.dense],
        "unjudged": {
            "share_of_parameters": remainder.unjudged_params,
            "share_of_macs": remainder.unjudged_macs,
            "layers": [asdict(layer) for layer in remainder.unjudged],
        },
        "head": asdict(remainder.head),
        "replaced_by_weights": [asdict(layer) for layer in remainder.by_weights],
        "structured_before": list(remainder.structured),
        "not_reached": [asdict(row) for row in outcome.report.unreached],
        "refused_candidates": remainder.refused,
        "random_tensors": list(outcome.provenance.missing),
        "files_not_copied": outcome.provenance.left_out,
        "unreadable_images": list(outcome.provenance.unreadable),
    }


def _versions() -> dict[str, str]:
    from buttress import __version__

    versions = {"buttress": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return versions
