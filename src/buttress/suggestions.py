"""The end of an error message about an unknown name: what was probably meant, or what exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as the end of a sentence, or the list of all names where none is near.

    Args:
        name: The name that was not recognized.
        known: All valid names.

    Returns:
        A text to append to an error message.

    Example:
        >>> did_you_mean("bbt", ["btt", "dense"])
        "; did you mean 'btt'?"
        >>> did_you_mean("zzz", ["btt", "dense"])
        ': valid names are btt, dense'
    """
    names = sorted(known)
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f": valid names are {', '.join(names)}"
