"""The configuration of a training run: a frozen dataclass with a JSON form and a key. It needs no torch."""

from __future__ import annotations

import ast
import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from buttress import ButtressError, parse
from buttress.suggestions import did_you_mean


class ConfigError(ButtressError, ValueError):
    """A run that cannot be trained as configured, or a field that does not exist."""


Layers = Literal["all", "every", "hidden", "ffn"]
Schedule = Literal["cosine", "cosine_epochs", "constant"]
Resample = Literal["area", "bilinear"]
MixupOn = Literal["inputs", "pixels"]
Precision = Literal["float32", "tf32", "bfloat16"]

CHOICES: dict[str, tuple[str, ...]] = {
    "layers": get_args(Layers),
    "schedule": get_args(Schedule),
    "resample": get_args(Resample),
    "mixup_on": get_args(MixupOn),
    "precision": get_args(Precision),
    "optimizer": ("adam", "adamw", "sgd", "muon"),
}
"""Valid values of the fields that have a fixed set of them."""

AUGMENTATION_FIELDS = ("mixup_on", "resample")
"""Fields about augmentation that only tasks with augmented images follow; others refuse them."""

POSITIVE = {
    "width": 2**20, "depth": 2**12, "heads": 2**16, "batch": 2**31, "steps": 10**8, "base_width": 2**20,
    "context": 2**24, "accumulate": 2**31,
}  # fmt: skip
"""Fields that must be at least 1, with their largest values: a mistyped number is an error before anything is
allocated. A run keeps five numbers per step in memory."""

TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float}
"""Types by the annotation of a field; all other fields are strings."""

MAX_TEXT = 1000
"""Largest length of a text field."""

DESCRIPTIONS: dict[type, str] = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}
"""Types as error messages name them."""


@dataclass(frozen=True)
class Run:
    """The configuration of a training run: all settings that its result depends on.

    Two runs with equal fields are the same run, and have the same key.

    Example:
        >>> run = Run(task="digits", structure="btt(rank=2)", width=128)
        >>> run.key == Run.from_json(run.to_json()).key
        True

    Raises:
        ConfigError: If a field has the wrong type or an impossible value.
        StructureError: If `structure` names no structure.
    """

    task: str = "digits"
    """Name of the task, such as digits, cifar10, imagenet, teacher or text."""
    corpus: str = ""
    """Token folder of a text task, inside the data folder; empty uses the data folder itself."""
    context: int = 512
    """Tokens per sequence of a text task."""
    model: str = "mlp"
    """Architecture of the model: mlp, vit or gpt."""
    width: int = 64
    """Width of the model: the size of its hidden states."""
    depth: int = 3
    """Number of residual blocks of an MLP, or of pairs of attention and FFN in a ViT or GPT."""
    heads: int = 8
    """Number of attention heads of a ViT or GPT."""
    head_width: int = 0
    """Width of each attention head of a GPT; 0 divides the model's width among the heads."""
    bias: bool = True
    """Whether the linear layers of an MLP have biases."""
    structure: str = ""
    """Structure of the linear layers, in the form that `parse` reads; empty leaves the model dense."""
    grow_to: str = ""
    """Structure with larger ranks that the layers grow to after `grow_at` steps; empty keeps `structure` throughout."""
    grow_at: int = 0
    """Number of steps before the layers grow to `grow_to`; 0 if they do not."""
    layers: Layers = "all"
    """Linear layers that get the structure: all except the head (all), all including the head (every), all except the
    input layer and the head (hidden), or those of the FFNs (ffn)."""
    aware: bool = True
    """Whether factors get structure-aware learning rates; if false, they get the learning rate of the dense layer."""
    normalize: bool = False
    """Whether to normalize the weights of structured layers, with a learned gain per factor."""
    optimizer: str = "adam"
    """Optimizer of the run: adam, adamw, sgd or muon (with AdamW for vectors and embeddings)."""
    lr: float = 3e-3
    """Peak learning rate at `base_width`; it is transferred to `width`."""
    base_width: int = 64
    """Width at which `lr` was tuned."""
    input_scale: float = 1.0
    """Additional multiplier of the input layer's learning rate."""
    down_scale: float = 1.0
    """Additional multiplier of the learning rate of the second layer in each FFN."""
    adam_scale: float = 1.0
    """Additional learning-rate multiplier for the parameters that optimizer=muon trains with AdamW."""
    weight_decay: float = 0.0
    """Weight decay, as the optimizer defines it."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule after the warmup: cosine, cosine_epochs (a cosine that falls once per epoch), or
    constant."""
    warmup: int = 0
    """Number of steps of linear learning-rate warmup."""
    final: float = 0.0
    """Final value of a cosine schedule, as a fraction of the peak learning rate."""
    batch: int = 256
    """Number of examples per step."""
    accumulate: int = 1
    """Number of microbatches per batch, processed one at a time to save memory; the step stays the same."""
    steps: int = 1000
    """Number of training steps."""
    smoothing: float = 0.0
    """Label smoothing: the fraction of each target that is spread over all classes."""
    mixup: float = 0.0
    """Both parameters of the Beta distribution from which mixup draws its weights; 0 turns mixup off."""
    mixup_on: MixupOn = "inputs"
    """What mixup mixes: normalized inputs, or the pixels before normalization, rounded down to whole numbers."""
    resample: Resample = "area"
    """Interpolation of CIFAR's random crops: area (OpenCV's INTER_AREA, close to nearest-neighbor) or bilinear."""
    clip: float = 0.0
    """Norm to which the gradient of all parameters together is clipped; 0 turns clipping off."""
    beta2: float = 0.999
    """Decay rate of Adam's average of squared gradients."""
    precision: Precision = "float32"
    """Precision of matmuls: float32, tf32, or bfloat16 by autocast."""
    probe: bool = False
    """Whether to measure how much each step changes the output of the last block."""
    evaluate: int = 0
    """Number of steps between evaluations on the test set; 0 evaluates at the end only."""
    trace: int = 0
    """Number of steps between measurements of the norms of activations, factors, gains and gradients; 0 takes none."""
    seed: int = 0
    """Random seed of the initialization, the data order and the augmentation."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_values()
        for name in ("structure", "grow_to"):
            if text := getattr(self, name):
                # One text per structure, so that equal structures have equal keys.
                object.__setattr__(self, name, str(parse(text)))

    def _check_types(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            kind = TYPES.get(str(f.type), str)
            if kind is float and type(value) is int and abs(value) <= 2**62:
                object.__setattr__(self, f.name, float(value))
            elif type(value) is not kind:
                raise ConfigError(f"{f.name} must be {DESCRIPTIONS[kind]}, got {reprlib.repr(value)}")
            elif isinstance(value, str):
                self._check_text(f.name, value)

    @staticmethod
    def _check_text(name: str, value: str) -> None:
        if len(value) > MAX_TEXT or not value.isprintable():
            raise ConfigError(
                f"{name} must be at most {MAX_TEXT} printable characters, got {len(value)}: {reprlib.repr(value)}"
            )

    def _check_values(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                value = reprlib.repr(getattr(self, name))
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value}")
        for name, largest in POSITIVE.items():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
            if getattr(self, name) > largest:
                raise ConfigError(f"{name} must be at most {largest:,}, got {reprlib.repr(getattr(self, name))}")
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"lr must be above 0 and finite, got {self.lr}")
        bounds = (
            ("mixup", 0, 1e6), ("input_scale", 0, 1e6), ("down_scale", 0, 1e6), ("adam_scale", 0, 1e6),
            ("smoothing", 0, 1), ("weight_decay", 0, 1e6), ("seed", 0, 2**62), ("warmup", 0, self.steps),
            ("clip", 0, 1e6), ("beta2", 0, 1), ("final", 0, 1), ("head_width", 0, 2**20),
            ("evaluate", 0, 2**62), ("trace", 0, 2**62),
        )  # fmt: skip
        for name, low, high in bounds:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {getattr(self, name)}")
        if self.mixup_on != "inputs" and not self.mixup:
            raise ConfigError(f"mixup_on={self.mixup_on} has no effect without mixup: set mixup, or leave it out")
        if self.adam_scale != 1 and self.optimizer != "muon":
            raise ConfigError(
                f"adam_scale={self.adam_scale:g} has no effect with optimizer={self.optimizer}: set optimizer=muon, or "
                "leave it out"
            )
        self._check_growth()
        if self.batch % self.accumulate:
            raise ConfigError(
                f"a batch of {self.batch} does not divide into accumulate={self.accumulate} microbatches: "
                "choose a divisor of the batch"
            )

    def _check_growth(self) -> None:
        if bool(self.grow_to) != bool(self.grow_at):
            raise ConfigError(
                f"grow_to and grow_at are given together, got grow_to={self.grow_to!r} and grow_at={self.grow_at}"
            )
        if self.grow_to and not self.structure:
            raise ConfigError(f"a dense model cannot grow to {self.grow_to}: set structure to the one to start from")
        if self.grow_to and not 0 < self.grow_at < self.steps:
            raise ConfigError(
                f"grow_at must be between 1 and {self.steps - 1}, before the last step: got {self.grow_at}"
            )

    def structure_after(self, steps: int) -> str:
        """The structure of the model after this number of steps; empty for a dense model."""
        return self.grow_to if 0 < self.grow_at < steps else self.structure

    @property
    def growth(self) -> str:
        """How the structure grows, to follow its name: " grown to btt(rank=4) at step 500", or empty."""
        return f" grown to {self.grow_to} at step {self.grow_at}" if self.grow_to else ""

    @property
    def structure_label(self) -> str:
        """The structure as tables and legends name it, with the one that it grows to."""
        return (self.structure or "dense") + self.growth

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that identify the run: the name of its folder in a store.

        They are a hash of the fields that differ from their defaults, so that a field added later leaves old keys
        unchanged.
        """
        return hashlib.sha256(json.dumps(self._changes(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Run:
        """The run that `to_json` wrote; missing fields have their defaults."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Build a run from field names and values.

        Args:
            data: Values by field name; missing fields have their defaults.

        Returns:
            The run.

        Raises:
            ConfigError: If a name is no field of a run.
        """
        for name in data:
            _check_name(name)
        return cls(**data)

    def __str__(self) -> str:
        """The fields that differ from their defaults."""
        return f"Run({', '.join(f'{name}={value!r}' for name, value in self._changes().items())})"

    def _changes(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


def _check_name(name: str) -> None:
    names = [f.name for f in fields(Run)]
    if name not in names:
        raise ConfigError(f"a run has no field {reprlib.repr(name)}{did_you_mean(name[:MAX_TEXT], names)}")


def with_fields(run: Run, settings: Iterable[str]) -> Run:
    """Copy a run and set fields of the copy from texts.

    Args:
        run: The run to copy.
        settings: Texts of the form "name=value".

    Returns:
        The new run.

    Raises:
        ConfigError: If a text has another form, names no field, or gives an impossible value.

    Example:
        >>> with_fields(Run(), ["width=128", "structure=btt(rank=2)"])
    """
    changes: dict[str, Any] = {}
    annotations = {f.name: str(f.type) for f in fields(Run)}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"a setting has the form name=value, got {text!r}")
        _check_name(name)
        changes[name] = _parse_value(name, value, annotations[name])
    return replace(run, **changes)


def _parse_value(name: str, text: str, annotation: str) -> Any:
    if annotation not in TYPES:
        return text
    try:
        return ast.literal_eval(text.capitalize() if annotation == "bool" else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        expected = "True or False" if annotation == "bool" else "a number"
        raise ConfigError(f"{name} takes {expected}, got {reprlib.repr(text)}") from None
