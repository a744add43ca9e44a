"""A run is data: one frozen dataclass, its text, and its key. No torch here."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from buttress import ButtressError, parse


class ConfigError(ButtressError, ValueError):
    """A run that cannot be made, or a field that does not exist."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist: what was probably meant, or what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f": there are {', '.join(names)}"


Layers = Literal["all", "every", "hidden", "ffn"]
Schedule = Literal["cosine", "constant"]
Precision = Literal["float32", "tf32", "bfloat16"]

CHOICES: dict[str, tuple[str, ...]] = {
    "layers": ("all", "every", "hidden", "ffn"),
    "schedule": ("cosine", "constant"),
    "precision": ("float32", "tf32", "bfloat16"),
    "optimizer": ("adam", "adamw", "sgd"),
}


@dataclass(frozen=True)
class Run:
    """Everything that decides a result. Two runs with equal fields are the same run."""

    task: str = "digits"
    corpus: str = ""
    """Where the task is text: the folder of tokens, inside that of the data; empty, if it is that one itself."""
    context: int = 512
    """Tokens of a sequence, where the task is text."""
    model: str = "mlp"
    width: int = 64
    depth: int = 3
    heads: int = 8
    """Of attention, where the model has any."""
    head_width: int = 0
    """Of each head of a GPT; 0 shares the model's width among them."""
    bias: bool = True
    structure: str = ""
    """As `parse` reads it; empty leaves the model dense."""
    layers: Layers = "all"
    """Which linear layers are structured: all but the head; every one; neither input nor head; those of the FFNs."""
    aware: bool = True
    """Structure-aware learning rates; off, every factor gets the dense layer's."""
    normalize: bool = False
    optimizer: str = "adam"
    lr: float = 3e-3
    """At `base_width`."""
    base_width: int = 64
    input_scale: float = 1.0
    """Further factor of the input layer's rate."""
    down_scale: float = 1.0
    """Further factor of the rate of the FFNs' second layers."""
    weight_decay: float = 0.0
    schedule: Schedule = "cosine"
    warmup: int = 0
    """Steps in which the rate rises to the schedule's start."""
    final: float = 0.0
    """Part of the rate that a cosine ends at."""
    batch: int = 256
    accumulate: int = 1
    """Pieces that a batch is cut into, one after the other: less memory, the same step."""
    steps: int = 1000
    smoothing: float = 0.0
    """Label smoothing."""
    mixup: float = 0.0
    """Both parameters of the Beta distribution that mixes neighbours in a batch; 0 mixes nothing."""
    clip: float = 0.0
    """Largest norm of all gradients together; 0 clips nothing."""
    beta2: float = 0.999
    """Adam's decay of squared gradients."""
    precision: Precision = "float32"
    probe: bool = False
    """Measure by how much each step changes the last block's output."""
    evaluate: int = 0
    """Steps between looks at the test set; 0 looks at the end alone."""
    trace: int = 0
    """Steps between looks at the sizes of activations, factors, gains and gradients; 0 takes none."""
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            kind = {"bool": bool, "int": int, "float": float}.get(str(f.type), str)
            if kind is float and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif type(value) is not kind:
                raise ConfigError(f"{f.name} must be {_article(kind)}, got {value!r}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("width", "depth", "heads", "batch", "steps", "base_width", "context", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"lr must be above 0 and finite, got {self.lr}")
        bounds = (
            ("mixup", 0, 1e6), ("input_scale", 0, 1e6), ("down_scale", 0, 1e6), ("smoothing", 0, 1),
            ("weight_decay", 0, 1e6), ("seed", 0, 2**62), ("warmup", 0, self.steps), ("clip", 0, 1e6), ("beta2", 0, 1),
            ("final", 0, 1), ("head_width", 0, 2**20), ("evaluate", 0, 2**62), ("trace", 0, 2**62),
        )  # fmt: skip
        for name, low, high in bounds:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must lie between {low:g} and {high:g}, got {getattr(self, name)}")
        if self.batch % self.accumulate:
            raise ConfigError(f"a batch of {self.batch} does not divide into accumulate={self.accumulate} pieces")
        if self.structure:
            # One text for one structure, whatever way it was written.
            object.__setattr__(self, "structure", str(parse(self.structure)))

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits of a hash: where the run's results are kept.

        Of the fields that differ from their defaults, so that a field that is added later leaves old keys alone.
        """
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Run:
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Run:
        """From field names and values; names that do not exist are an error."""
        for name in data:
            _known(name)
        return cls(**data)

    def __str__(self) -> str:
        """What differs from the defaults."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Run({', '.join(shown)})"


def _article(kind: type) -> str:
    return {bool: "True or False", int: "an integer", float: "a number", str: "a text"}[kind]


def _known(name: str) -> None:
    names = [f.name for f in fields(Run)]
    if name not in names:
        raise ConfigError(f"a run has no field {name!r}{nearest(name, names)}")


def with_fields(run: Run, settings: Iterable[str]) -> Run:
    """A run with fields set by texts such as "width=128" and "structure=btt(rank=2)"."""
    changes: dict[str, Any] = {}
    kinds = {f.name: str(f.type) for f in fields(Run)}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"a setting reads name=value, got {text!r}")
        _known(name)
        changes[name] = _value(name, value, kinds[name])
    return replace(run, **changes)


def _value(name: str, text: str, kind: str) -> Any:
    if kind not in ("bool", "int", "float"):
        return text
    try:
        return ast.literal_eval(text.capitalize() if kind == "bool" else text)
    except (ValueError, SyntaxError):
        raise ConfigError(f"{name} takes {'True or False' if kind == 'bool' else 'a number'}, got {text!r}") from None
