"""The plan file that is saved next to a model's weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from buttress.surgery import Plan

PLAN_FILE = "buttress-plan.json"


def write_plan(model: nn.Module, folder: Path) -> None:
    """Write a model's plan into a folder."""
    Plan.of(model).save(folder / PLAN_FILE)


def read_plan(folder: Path) -> Plan | None:
    """Read the plan in a model's folder, None if it has none."""
    path = folder / PLAN_FILE
    return Plan.load(path) if path.is_file() else None
