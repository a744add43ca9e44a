"""The fastest structure for a layer of given size on a given device, compared with nn.Linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import torch
from torch import nn

from buttress.core.structures import Structure, parse, structures
from buttress.costs.alignment import alignment_note
from buttress.costs.layer_times import Layer, Progress, TimedDevice, Timing, layer_timings
from buttress.errors import ButtressError, ShapeError
from buttress.nn.linear import StructuredLinear
from buttress.ops.speeds import store_rows
from buttress.text_table import render

TOLERANCE = 1.05
"""A time within five percent of another counts as the same."""
NOISY = 0.2
"""If times spread by more than this, differences between structures are not to be trusted."""


@dataclass(frozen=True)
class Option:
    """One structure for a layer, with its time and size."""

    structure: str
    """The structure as text."""
    implementation: str
    """Name of its fastest implementation."""
    ms: float
    """Milliseconds of that implementation."""
    against_dense: float
    """Speedup over nn.Linear; below 1 it is slower."""
    parameters: int
    """Number of parameters."""
    against_dense_parameters: float
    """Number of parameters divided by that of nn.Linear."""
    rank: int
    """Largest possible rank of the matrix."""
    basis: str
    """"measured", or the measured sizes from which the time was scaled."""


@dataclass(frozen=True)
class Advice:
    """Structures for one layer, fastest first, and a recommendation. `str` gives a table and a verdict."""

    d_in: int
    d_out: int
    tokens: int
    device: str
    what: str
    """The timed computation: a training step or the forward pass, and its dtype."""
    dense_ms: float
    """Milliseconds of nn.Linear."""
    options: tuple[Option, ...]
    """The structures, fastest first."""
    spread: float = 0.0
    """How much repeated times differ: interquartile range over median, or the change of nn.Linear's time meanwhile."""
    skipped: tuple[str, ...] = ()
    """Structures that do not take these sizes, each with the reason."""
    notes: tuple[str, ...] = ()
    """Structures whose slices another split would make multiples of what a GPU reads at once; not about time."""

    @property
    def fastest(self) -> Option | None:
        """The fastest option, or None if nn.Linear is no slower or the times vary too much to tell."""
        best = self.options[0] if self.options else None
        return best if best and best.against_dense > max(TOLERANCE, 1 + self.spread) else None

    @property
    def undecided(self) -> bool:
        """Whether the times vary by more than the fastest structure differs from nn.Linear."""
        if self.fastest is not None or not self.options:
            return False
        return self.spread > TOLERANCE - 1 and self.options[0].against_dense * (1 + self.spread) > 1

    @property
    def largest(self) -> Option | None:
        """The option with the most parameters among those no slower than nn.Linear."""
        fits = [o for o in self.options if o.against_dense * TOLERANCE >= 1]
        return max(fits, key=lambda o: (o.parameters, o.against_dense), default=None)

    @property
    def stay_dense(self) -> bool:
        """Whether no structure would save time."""
        return self.fastest is None and not self.undecided

    def __str__(self) -> str:
        head = f"{self.d_in} -> {self.d_out}, {self.tokens:,} tokens, {self.what}, {self.device}"
        lines = [head, f"nn.Linear takes {self.dense_ms:.4g} ms", "", render(self.options), ""]
        lines += [f"left out: {reason}" for reason in self.skipped]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """The advice in one to three sentences."""
        percent = f"{100 * self.spread:.0f} %"
        if self.undecided:
            return (
                f"Undecided: times vary by {percent}, more than the fastest structure differs from nn.Linear. "
                "Close other programs and measure again."
            )
        caution = (
            f" Times vary by {percent}: close other programs to compare structures." if self.spread > NOISY else ""
        )
        return self._recommendation() + caution

    def _recommendation(self) -> str:
        if self.fastest is None:
            return "Stay dense: no structure here saves time. Fewer parameters may still be reason enough."
        text = f"{self.fastest.structure} is fastest: {self.fastest.against_dense:.3g}× as fast as nn.Linear."
        if self.largest and self.largest != self.fastest:
            text += (
                f" {self.largest.structure} has the most parameters of those that are no slower "
                f"({self.largest.parameters:,}, {self.largest.against_dense:.3g}× as fast)."
            )
        if "scaled" in self.fastest.basis:
            text += f" The time of {self.fastest.structure} is {self.fastest.basis}: measure before relying on it."
        return text


def _option(timing: Timing, *, training: bool, compiled: bool) -> Option:
    """The fastest implementation of a structure, compared with nn.Linear."""
    chain, row, basis = timing
    ms = {name: times.of(training=training, compiled=compiled) for name, times in row.times.items()}
    best = min(ms, key=lambda name: ms[name])
    return Option(
        structure=row.structure,
        implementation=best,
        ms=ms[best],
        against_dense=timing.linear_ms(training=training, compiled=compiled) / ms[best],
        parameters=chain.params,
        against_dense_parameters=chain.params / (chain.d_in * chain.d_out),
        rank=chain.max_rank,
        basis=basis,
    )


def advise(
    d_in: int,
    d_out: int,
    tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    candidates: Iterable[Structure | str] | Structure | str | None = None,
    training: bool = True,
    compiled: bool = True,
    progress: Progress | None = None,
) -> Advice:
    """Compare the speed of structures for one layer and recommend one.

    On a CPU, a step that would take long is measured with fewer tokens and scaled, which `Option.basis` states.

    Args:
        d_in: Inputs of the layer.
        d_out: Outputs of the layer.
        tokens: Tokens at a time.
        device: A device of this machine, on which times that its table lacks are measured and, for a GPU, stored; or
            the name of a GPU with a table ("NVIDIA H200"), whose times are looked up or scaled from the nearest size.
            Default: "cuda" if there is a GPU, else "cpu".
        dtype: Dtype of the computation. Default: bfloat16 on a GPU, float32 on a CPU.
        candidates: Structures or their texts, or a single one. Default: a few of every structure.
        training: Time a training step; otherwise the forward pass alone.
        compiled: Leave out the time that Python takes to launch kernels.
        progress: Called before a structure is measured, with its text, the number of those before it and of all.

    Returns:
        The options, fastest first. A structure that does not take these sizes is left out and named in `skipped`.

    Raises:
        ShapeError: If a size is not an integer of at least 1.
        ButtressError: If there are no candidates, or none takes these sizes; if the device is unknown, or its table
            has nothing near these sizes.

    Example:
        >>> print(bt.advise(4096, 4096, 32768, device="NVIDIA H200"))
    """
    _check_sizes(d_in, d_out, tokens)
    if candidates is None:
        chosen = _default_candidates()
    else:
        chosen = [parse(c) for c in ([candidates] if isinstance(candidates, Structure | str) else candidates)]
    if not chosen:
        raise ButtressError("there is nothing to compare: give at least one candidate, such as BTT(rank=2)")
    timed_device = TimedDevice.of(device)
    layer = Layer(d_in, d_out, tokens, dtype or timed_device.default_dtype)
    timings, skipped = layer_timings(timed_device, chosen, layer, progress)
    linear_ms = min(t.linear_ms(training=training, compiled=compiled) for t in timings)
    options = [_option(t, training=training, compiled=compiled) for t in timings]
    timed_ones = [c for c in chosen if str(c) in {t.row.structure for t in timings}]
    what = f"{'a training step' if training else 'forward'}, {str(layer.dtype).removeprefix('torch.')}"
    what += "" if compiled else ", launched by Python"
    return Advice(
        d_in, d_out, tokens, timed_device.name, what, linear_ms, tuple(sorted(options, key=lambda o: o.ms)),
        spread=max(t.row.spread for t in timings), skipped=tuple(skipped),
        notes=tuple(note for structure in timed_ones if (note := alignment_note(structure, d_in, d_out))),
    )  # fmt: skip


class TimedCost:
    """The milliseconds of a layer as a function of its structure (None for nn.Linear), d_in and d_out; see `timed`.

    Args:
        tokens: Tokens at a time.
        device: Where layers are timed.
        dtype: Dtype of the computation.
        training: Time a training step; otherwise the forward pass alone.
    """

    def __init__(self, tokens: int, device: TimedDevice, dtype: torch.dtype, training: bool) -> None:
        self.tokens, self.device, self.dtype, self.training = tokens, device, dtype, training
        self._cached = lru_cache(maxsize=4096)(self._milliseconds)

    def __str__(self) -> str:
        what = "a training step" if self.training else "a forward pass"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"milliseconds of {what} with {self.tokens} tokens in {dtype} on {self.device.name}"

    def __call__(self, structure: Structure | None, d_in: int, d_out: int) -> float:
        return self._cached(structure, d_in, d_out)

    def _milliseconds(self, structure: Structure | None, d_in: int, d_out: int) -> float:
        if structure is None:
            # Every row includes the time of nn.Linear: measuring one candidate is enough. A table may have rows for
            # only some of them.
            candidates = _default_candidates()[: None if self.device.local is None else 1]
            timings = self._timings(candidates, d_in, d_out)
            return min(t.linear_ms(training=self.training, compiled=True) for t in timings)
        try:
            return _option(self._timings([structure], d_in, d_out)[0], training=self.training, compiled=True).ms
        except ButtressError:
            return inf

    def _timings(self, candidates: Sequence[Structure], d_in: int, d_out: int) -> list[Timing]:
        _check_sizes(d_in, d_out, self.tokens)
        return layer_timings(self.device, candidates, Layer(d_in, d_out, self.tokens, self.dtype))[0]


def timed(
    tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    training: bool = False,
) -> TimedCost:
    """A cost function for `curves`: the milliseconds of a layer, measured or looked up as in `advise`.

    On a CPU, a step that would take long is measured with fewer tokens and scaled.

    Args:
        tokens: Tokens at a time.
        device: As for `advise`.
        dtype: As for `advise`.
        training: Time a training step; otherwise the forward pass alone.

    Returns:
        A function of a structure (None for nn.Linear), d_in and d_out. A structure that is not in a GPU's table
        costs infinity, so that it is never chosen.

    Raises:
        ButtressError: If the device is unknown; from the function, if a table has nothing near a layer's sizes.

    Example:
        >>> options = bt.curves(model, cost=bt.timed(16384, device="NVIDIA H200"))
    """
    timed_device = TimedDevice.of(device)
    return TimedCost(tokens, timed_device, dtype or timed_device.default_dtype, training)


def calibrate(model: nn.Module, tokens: int, *, dtype: torch.dtype | None = None) -> list[Option]:
    """Time every distinct structured layer of a model on its GPU, so that each uses its fastest implementation there.

    The times are stored in the user's table, and apply in this process and in later ones.

    Args:
        model: A model on a GPU.
        tokens: Tokens at a time.
        dtype: Dtype of the computation under autocast. Default: the dtype of each layer.

    Returns:
        One option per distinct layer.

    Raises:
        ButtressError: If the model has no structured layers, or is not on a GPU.

    Example:
        >>> bt.calibrate(model, tokens=16384, dtype=torch.bfloat16)
    """
    from buttress.ops.measuring import measure_layer

    layers: dict[tuple[object, ...], StructuredLinear] = {}
    for module in model.modules():
        if isinstance(module, StructuredLinear):
            weight = next(iter(module.factors.values()))
            key = str(module.structure), module.in_features, module.out_features, weight.dtype, weight.device
            layers[key] = module
    if not layers:
        raise ButtressError("the model has no structured layers: replace_ some first")
    options = []
    for layer in layers.values():
        weight = next(iter(layer.factors.values()))
        if weight.device.type != "cuda":
            raise ButtressError(f"layers are calibrated on a GPU, but this model is on {weight.device}")
        row = measure_layer(layer.chain, str(layer.structure), tokens, dtype or weight.dtype, weight.device)
        timing = Timing(layer.chain, row, f"{layer.in_features} -> {layer.out_features}, measured")
        options.append(_option(timing, training=True, compiled=True))
        store_rows(torch.cuda.get_device_name(weight.device), [row])
    return options


def _check_sizes(d_in: int, d_out: int, tokens: int) -> None:
    for label, value in (("d_in", d_in), ("d_out", d_out), ("tokens", tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{label} must be an integer >= 1, got {value!r}")


def _default_candidates() -> list[Structure]:
    return [member for cls in structures().values() for member in cls.default_candidates()]
