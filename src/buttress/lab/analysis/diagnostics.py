"""The coordinate check: do features, and their changes, keep their size as the model gets wider?

With the right rates the RMS of each layer's output, and of its change in one step, does not depend on
width. A rate that is wrong by a power of width shows as a slope. For a structured layer the check also
looks at each factor alone, because the right rate of one can hide the wrong rate of another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import MissingExtraError, RuleError, StructuredLinear, param_groups

Quantity = Literal["feature", "change"]
Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Coordinate:
    """One measurement: RMS of a module's output, or of its change in one step."""

    width: int
    seed: int
    step: int
    name: str
    quantity: Quantity
    rms: float


@dataclass(frozen=True)
class CoordinateCheck:
    """All measurements of a check. Names like `up.factors.R` are the change due to that factor alone."""

    rows: tuple[Coordinate, ...]

    def names(self, quantity: Quantity = "change") -> list[str]:
        """What was measured, in the model's order."""
        return list(dict.fromkeys(r.name for r in self.rows if r.quantity == quantity))

    def series(self, name: str, quantity: Quantity = "change") -> dict[int, float]:
        """RMS against width, averaged over steps and seeds."""
        found: dict[int, list[float]] = defaultdict(list)
        for r in self.rows:
            if r.name == name and r.quantity == quantity:
                found[r.width].append(r.rms)
        if not found:
            raise RuleError(f"nothing was measured under {name!r}: there are {', '.join(self.names(quantity))}")
        return {width: sum(v) / len(v) for width, v in sorted(found.items())}

    def slope(self, name: str, quantity: Quantity = "change") -> float:
        """Exponent p of the least-squares fit RMS ~ width^p: 0 is flat, -0.5 falls as 1 / sqrt(width)."""
        points = [(math.log(w), math.log(v)) for w, v in self.series(name, quantity).items() if v > 0]
        if len(points) < 2:
            return float("nan")
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)

    def plot(self, path: str | Path, names: Sequence[str] | None = None, title: str = "") -> Path:
        """Features and changes against width, one line a name, saved as a figure."""
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
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    watch: Callable[[str, nn.Module], bool] | None = None,
) -> CoordinateCheck:
    """Train `build(width)` for a few steps at each width and record its features and their changes.

    `batches(step)` gives (inputs, targets); the batch of step -1 is the probe on which everything is
    measured. `lr` is the rate at `base_width` (the smallest of `widths` if not given). `watch` chooses
    modules by name; by default all linear layers and the model itself. `optimizer` makes one from
    parameter groups where `rule` is not "adam" or "sgd".

    >>> check = coordinate_check(build, [64, 256, 1024], batches, lr=3e-3)
    >>> check.slope("head")  # near 0
    """
    make = optimizer or OPTIMIZERS.get(rule)
    if make is None:
        raise RuleError(f"no optimizer is known for rule {rule!r}: give one as optimizer=lambda groups: ...")
    base = build(base_width or min(widths))
    rows: list[Coordinate] = []
    for width in widths:
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = build(width)
            groups = param_groups(model, lr, base=base, rule=rule, scale=scale, structure_aware=structure_aware)
            for step, name, quantity, rms in _measure(model, make(groups), batches, steps, loss, watch or _linear):
                rows.append(Coordinate(width, seed, step, name, quantity, rms))
    return CoordinateCheck(tuple(rows))


def plot(checks: Mapping[str, CoordinateCheck], path: str | Path, names: Sequence[str] | None = None) -> Path:
    """Several checks side by side: a column each, features above, changes below, slopes in the legend."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise MissingExtraError("plots need matplotlib: pip install 'buttress[lab]'") from None
    figure, axes = plt.subplots(2, len(checks), figsize=(6 * len(checks), 7), squeeze=False, sharex=True, sharey="row")
    for column, (title, check) in enumerate(checks.items()):
        for row, quantity in enumerate(("feature", "change")):
            panel = axes[row][column]
            for name in check.names(quantity):  # type: ignore[arg-type]
                if names is not None and name not in names:
                    continue
                series = check.series(name, quantity)  # type: ignore[arg-type]
                slope = check.slope(name, quantity)  # type: ignore[arg-type]
                panel.plot(list(series), list(series.values()), "o-", ms=4, label=f"{name or 'model'} ({slope:+.2f})")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
            panel.legend(
                fontsize=7, title="slope in brackets", title_fontsize=7, frameon=False, loc=2, bbox_to_anchor=(1, 1)
            )
        axes[0][column].set_title(title)
        axes[1][column].set_xlabel("width")
    axes[0][0].set_ylabel("RMS of features")
    axes[1][0].set_ylabel("RMS of their change per step")
    figure.tight_layout()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.stem}.part{target.suffix}")
    figure.savefig(part, dpi=150)
    part.replace(target)
    plt.close(figure)
    return target


def _linear(name: str, module: nn.Module) -> bool:
    return not name or isinstance(module, nn.Linear | StructuredLinear)


def _measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], Batch],
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    watch: Callable[[str, nn.Module], bool],
) -> Iterator[tuple[int, str, Quantity, float]]:
    probe, _ = batches(-1)
    inputs, before = _look(model, probe, watch)
    for step in range(steps):
        kept = {n: {k: p.detach().clone() for k, p in _layer(model, n).named_parameters()} for n in inputs}
        x, y = batches(step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        next_inputs, after = _look(model, probe, watch)
        for name, features in after.items():
            yield step, name, "feature", _rms(features)
            yield step, name, "change", _rms(features - before[name])
        for name, old in kept.items():
            yield from _by_factor(step, name, _layer(model, name), old, inputs[name], before[name])
        inputs, before = next_inputs, after


def _by_factor(
    step: int, name: str, layer: nn.Module, old: dict[str, Tensor], x: Tensor, y: Tensor
) -> Iterator[tuple[int, str, Quantity, float]]:
    """Change of a layer's output, on the input it had, if only one factor had taken this step."""
    with torch.no_grad():
        for key, new in layer.named_parameters():
            if key.startswith("factors."):
                alone = torch.func.functional_call(layer, old | {key: new}, (x,))
                yield step, f"{name}.{key}" if name else key, "change", _rms(alone - y)


def _look(
    model: nn.Module, probe: Tensor, watch: Callable[[str, nn.Module], bool]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of the watched structured layers and outputs of all watched modules, on the probe."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    with torch.no_grad(), _hooked(model, watch, inputs, outputs):
        model(probe)
    return inputs, outputs


@contextmanager
def _hooked(
    model: nn.Module, watch: Callable[[str, nn.Module], bool], inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> Iterator[None]:
    def record(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            if isinstance(module, StructuredLinear):
                inputs[name] = given[0]
            if isinstance(made, Tensor):
                outputs[name] = made

        return hook

    handles = [m.register_forward_hook(record(n)) for n, m in model.named_modules() if watch(n, m)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name)


def _rms(t: Tensor) -> float:
    return t.float().square().mean().sqrt().item()
