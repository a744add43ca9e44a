"""Exceptions and their messages. `except ButtressError` catches every error that the library raises itself."""


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


def quoted(value: object, limit: int = 60) -> str:
    """A value as error messages quote it: on one line, and short whatever it is.

    Args:
        value: Any value.
        limit: Largest number of characters.

    Returns:
        Its repr, cut at the limit; for a value without one, such as an integer of a million digits, its type.

    Example:
        >>> quoted("a" * 100, limit=10)
        "'aaaaaa..."
    """
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):
        text = f"one {type(value).__name__} too large to show"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of another library's error, short enough to be part of a message of ours."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
