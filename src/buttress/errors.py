"""One family of exceptions: `except ButtressError` catches everything the library raises on purpose."""


class ButtressError(Exception):
    """Base of every error raised by buttress. The message says what was asked, what is needed and what to do."""


class ChainError(ButtressError, ValueError):
    """A chain's axes or sizes do not fit together."""


class StructureError(ButtressError, ValueError):
    """A structure was given impossible options, or a text that names no structure."""


class ShapeError(ButtressError, ValueError):
    """A tensor has the wrong shape for the layer or chain it was given to."""


class RuleError(ButtressError, ValueError):
    """An optimizer rule, a base width or a scale that cannot be used."""


class PlanError(ButtressError, ValueError):
    """A plan that does not fit the model: nothing was changed."""


class MissingExtraError(ButtressError, ImportError):
    """An optional dependency is needed for this."""
