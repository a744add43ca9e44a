"""Exceptions. `except ButtressError` catches every error that the library raises itself."""


class ButtressError(Exception):
    """Base class of all errors raised by buttress. Messages state the problem and what to do about it."""


class ChainError(ButtressError, ValueError):
    """A chain's axes or sizes do not fit together."""


class StructureError(ButtressError, ValueError):
    """Options of a structure are invalid, or a text does not name a structure."""


class ShapeError(ButtressError, ValueError):
    """A tensor or a size does not fit a layer or chain."""


class RuleError(ButtressError, ValueError):
    """An optimizer rule, a learning rate, a base width or a scale cannot be used."""


class PlanError(ButtressError, ValueError):
    """A plan does not fit the model, which is unchanged."""


class ReadOnlyError(ButtressError, RuntimeError):
    """A write to a tensor that is computed on each access, such as the weight of a structured layer, would be lost."""


class MissingExtraError(ButtressError, ImportError):
    """An optional dependency is missing."""
