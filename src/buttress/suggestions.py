"""Suggestions for error messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, valid_names: Iterable[str], *, listed: bool = False) -> str:
    """Suggest the closest valid name, or list all names if none is close.

    Args:
        name: The name that was not recognized.
        valid_names: All valid names.
        listed: Whether the message lists the valid names already, so that they are not listed again.

    Returns:
        A text to append to an error message.

    Example:
        >>> did_you_mean("bbt", ["btt", "dense"])
        "; did you mean 'btt'?"
        >>> did_you_mean("zzz", ["btt", "dense"])
        ': valid names are btt, dense'
        >>> did_you_mean("zzz", ["btt", "dense"], listed=True)
        ''
    """
    names = sorted(valid_names)
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return "" if listed else f": valid names are {', '.join(names)}"


def closest_names(name: str, valid_names: Iterable[str], *, limit: int = 8) -> str:
    """List the valid names closest to one that was not recognized, or the first few if none is close.

    Args:
        name: The name that was not recognized.
        valid_names: All valid names, at least one.
        limit: How many names to list where none is close.

    Returns:
        A clause for an error message.

    Example:
        >>> closest_names("blocks.0.qvk", ["blocks.0.qkv", "head"])
        'the nearest are blocks.0.qkv and 1 more'
    """
    names = list(valid_names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = close or names[:limit]
    more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
    return f"{'the nearest are' if close else 'there are'} {', '.join(listed)}{more}"
