"""The coordinate check: do features, and their changes, keep their size as the model gets wider?

With the right learning rates the RMS of each layer's output, and of its change per step, does not depend on width. A
rate that is wrong by a power of width shows as a slope. For a structured layer the check also measures each factor
alone, because the right rate of one factor can hide the wrong rate of another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import RuleError, StructuredLinear, optim, param_groups
from buttress.files import replacing
from buttress.inspection.hooks import removing
from buttress.ops.norms import rms

Quantity = Literal["feature", "change"]
Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""
Loss = Callable[[Tensor, Tensor], Tensor]
Watch = Callable[[str, nn.Module], bool]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "muon": optim.Muon}


@dataclass(frozen=True)
class Coordinate:
    """One measurement: RMS of a module's output, or of its change in one step."""

    width: int
    seed: int
    step: int
    name: str
    """Name of the module, or of one factor of it, such as `up.factors.R`."""
    quantity: Quantity
    rms: float


@dataclass(frozen=True)
class CoordinateCheck:
    """All measurements of a check. Names like `up.factors.R` are the change due to that factor alone."""

    rows: tuple[Coordinate, ...]

    def names(self, quantity: Quantity = "change") -> list[str]:
        """Names of the modules and factors that were measured, in the model's order; "" is the model itself."""
        return list(dict.fromkeys(r.name for r in self.rows if r.quantity == quantity))

    def series(self, name: str, quantity: Quantity = "change") -> dict[int, float]:
        """Average the RMS over steps and seeds.

        Args:
            name: One of `names`.
            quantity: "feature" or "change".

        Returns:
            The RMS by width.

        Raises:
            RuleError: If nothing was measured under this name.
        """
        values: dict[int, list[float]] = defaultdict(list)
        for r in self.rows:
            if r.name == name and r.quantity == quantity:
                values[r.width].append(r.rms)
        if not values:
            raise RuleError(f"nothing was measured under {name!r}: there are {', '.join(self.names(quantity))}")
        return {width: sum(v) / len(v) for width, v in sorted(values.items())}

    def slope(self, name: str, quantity: Quantity = "change") -> float:
        """Fit RMS ~ width^p by least squares. p = 0 is flat, p = -0.5 falls as 1 / sqrt(width).

        Args:
            name: One of `names`.
            quantity: "feature" or "change".

        Returns:
            The exponent p; NaN if fewer than two widths have a positive RMS.
        """
        points = [(math.log(w), math.log(v)) for w, v in self.series(name, quantity).items() if v > 0]
        if len(points) < 2:
            return float("nan")
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)

    def plot(self, path: str | Path, names: Sequence[str] | None = None, title: str = "") -> Path:
        """Draw features and changes against width, one line per name; see `plot`."""
        return plot({title: self}, path, names)


def coordinate_check(
    build: Callable[[int], nn.Module],
    widths: Sequence[int],
    batches: Callable[[int], Batch],
    *,
    lr: float,
    base_width: int | None = None,
    steps: int = 10,
    seeds: int = 1,
    rule: str = "adam",
    structure_aware: bool = True,
    scale: Mapping[str, float] | None = None,
    loss: Loss = F.cross_entropy,
    optimizer: MakeOptimizer | None = None,
    watch: Watch | None = None,
) -> CoordinateCheck:
    """Train a model for a few steps at each width and measure its features and their changes.

    Args:
        build: Returns the model of a given width.
        widths: Widths to compare.
        batches: Returns the inputs and targets of a step. The batch of step -1 is the probe on which everything is
            measured.
        lr: Learning rate at `base_width`.
        base_width: Width at which `lr` is tuned. Default: the smallest of `widths`.
        steps: Training steps at each width.
        seeds: Number of initializations at each width.
        rule: Rule for the learning rates, as for `param_groups`.
        structure_aware: Whether factors get their own learning rates, as for `param_groups`.
        scale: Further multipliers of the learning rates, as for `param_groups`.
        loss: Loss of outputs and targets.
        optimizer: Builds an optimizer from parameter groups; needed for the rule "sign".
        watch: Called with a module's name and the module; returns whether to measure it. Default: all linear layers and
            the model itself.

    Returns:
        All measurements.

    Raises:
        RuleError: If an optimizer is needed and none is given.

    Example:
        >>> check = coordinate_check(build, [64, 256, 1024], batches, lr=3e-3)
        >>> check.slope("head")  # near 0
    """
    make_optimizer = optimizer or OPTIMIZERS.get(rule)
    if make_optimizer is None:
        raise RuleError(f"rule {rule!r} has no default optimizer: give one as optimizer=lambda groups: ...")
    base = build(base_width or min(widths))
    rows: list[Coordinate] = []
    for width in widths:
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = build(width)
            groups = param_groups(model, lr, base=base, rule=rule, scale=scale, structure_aware=structure_aware)
            measured = _measure(model, make_optimizer(groups), batches, steps, loss, watch or _is_linear_or_model)
            rows += (Coordinate(width, seed, step, name, quantity, size) for step, name, quantity, size in measured)
    return CoordinateCheck(tuple(rows))


def plot(checks: Mapping[str, CoordinateCheck], path: str | Path, names: Sequence[str] | None = None) -> Path:
    """Draw several checks next to each other: a column each, features above, changes below, slopes in the legend.

    Args:
        checks: Checks by title.
        path: The image file to write; its suffix chooses the format.
        names: Names to draw. Default: all.

    Returns:
        The path.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    from buttress.lab.analysis.figures.style import plt

    figure, panels = plt.subplots(
        2, len(checks), figsize=(6 * len(checks), 7), squeeze=False, sharex=True, sharey="row"
    )
    for column, (title, check) in enumerate(checks.items()):
        for row, quantity in enumerate(get_args(Quantity)):
            drawn = [name for name in check.names(quantity) if names is None or name in names]
            _draw(panels[row][column], check, drawn, quantity)
        panels[0][column].set_title(title)
        panels[1][column].set_xlabel("width")
    panels[0][0].set_ylabel("RMS of features")
    panels[1][0].set_ylabel("RMS of their change per step")
    figure.tight_layout()
    target = Path(path)
    with replacing(target) as part:
        figure.savefig(part, dpi=150, format=target.suffix.removeprefix(".") or "png")
    plt.close(figure)
    return target


def _draw(panel: Any, check: CoordinateCheck, names: Sequence[str], quantity: Quantity) -> None:
    for name in names:
        series, slope = check.series(name, quantity), check.slope(name, quantity)
        panel.plot(list(series), list(series.values()), "o-", ms=4, label=f"{name or 'model'} ({slope:+.2f})")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, title="slope in brackets", title_fontsize=7, frameon=False, loc=2, bbox_to_anchor=(1, 1))


def _is_linear_or_model(name: str, module: nn.Module) -> bool:
    return not name or isinstance(module, nn.Linear | StructuredLinear)


Measurement = tuple[int, str, Quantity, float]
"""Step, name, quantity and RMS."""


def _measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], Batch],
    steps: int,
    loss: Loss,
    watch: Watch,
) -> Iterator[Measurement]:
    """Train and measure after every step, on the probe."""
    probe, _ = batches(-1)
    inputs, before = _activations(model, probe, watch)
    for step in range(steps):
        parameters = {
            name: {key: p.detach().clone() for key, p in model.get_submodule(name).named_parameters()}
            for name in inputs
        }
        x, y = batches(step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        next_inputs, after = _activations(model, probe, watch)
        for name, features in after.items():
            yield step, name, "feature", rms(features).item()
            yield step, name, "change", rms(features - before[name]).item()
        for name, old in parameters.items():
            layer = model.get_submodule(name)
            yield from _changes_by_factor(step, name, layer, old, inputs[name], before[name])
        inputs, before = next_inputs, after


def _changes_by_factor(
    step: int, name: str, layer: nn.Module, old: dict[str, Tensor], x: Tensor, y: Tensor
) -> Iterator[Measurement]:
    """Change of a layer's output, on the input before the step, if only one factor had taken the step."""
    with torch.no_grad():
        for key, new in layer.named_parameters():
            if key.startswith("factors."):
                output = torch.func.functional_call(layer, old | {key: new}, (x,))
                yield step, f"{name}.{key}" if name else key, "change", rms(output - y).item()


def _activations(model: nn.Module, probe: Tensor, watch: Watch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of the watched structured layers and outputs of all watched modules, on the probe."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(module, StructuredLinear):
                inputs[name] = args[0]
            if isinstance(output, Tensor):
                outputs[name] = output

        return hook

    watched = [(name, module) for name, module in model.named_modules() if watch(name, module)]
    with torch.no_grad(), removing(*(module.register_forward_hook(hook_for(name)) for name, module in watched)):
        model(probe)
    return inputs, outputs
