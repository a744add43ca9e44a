"""JSON from files that others may have written or damaged: every value is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from buttress import ButtressError

MAX_INTEGER = 2**62
"""Largest integer in a file: every count fits, and so do its sums with others in 64 bits."""
MAX_NUMBER = 1e100
"""Largest finite number in a file, so that its powers and products stay finite."""
CHECKSUM = "checksum"
"""Name of the entry that holds the checksum of all other entries."""


class JsonError(ButtressError, ValueError):
    """A text that is not the expected JSON. The message completes the sentence "the file is damaged: ..."."""


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: The text; bytes must be UTF-8.

    Returns:
        Its entries.

    Raises:
        JsonError: If it is not a JSON object, or is nested too deeply.
    """
    try:
        data = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError:
        raise JsonError("it is not UTF-8 text") from None
    except ValueError as error:
        raise JsonError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    return mapping(data, "the text")


def checksum(data: Mapping[str, Any]) -> str:
    """SHA-256 of an object's entries other than its checksum, as JSON with sorted keys.

    Args:
        data: The entries.

    Returns:
        64 hexadecimal digits. Neither the order of the entries nor white space in the file matters.

    Raises:
        JsonError: If the entries are nested too deeply.
    """
    rest = {name: value for name, value in data.items() if name != CHECKSUM}
    try:
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise JsonError("it is nested too deeply") from None


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the entries with their checksum added."""
    return {**data, CHECKSUM: checksum(data)}


def pop_checksum(data: dict[str, Any]) -> bool:
    """Verify an object's checksum and remove it.

    Args:
        data: The entries, as they were parsed.

    Returns:
        Whether there was one: version 0.1 wrote none.

    Raises:
        JsonError: If it is not that of the entries.
    """
    if CHECKSUM not in data:
        return False
    if data[CHECKSUM] != checksum(data):
        raise JsonError("its content does not match its checksum")
    del data[CHECKSUM]
    return True


def mapping(value: object, name: str) -> dict[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise _unexpected(value, name, "an object")
    return value


def rows(value: object, name: str, length: int) -> Iterator[list[Any]]:
    """The entries of a value, which must be a list of lists of this length."""
    if not isinstance(value, list):
        raise _unexpected(value, name, "a list")
    for row in value:
        if not isinstance(row, list) or len(row) != length:
            raise _unexpected(row, f"an entry of {name}", f"a list of {length}")
        yield row


def text(value: object, name: str) -> str:
    """The value, which must be a text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise _unexpected(value, name, "a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _unexpected(value, name, "a text in Unicode") from None
    return value


def integer(value: object, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """The value, which must be an integer between two bounds."""
    if type(value) is not int or not low <= value <= high:
        raise _unexpected(value, name, f"an integer between {low} and {high}")
    return value


def number(value: object, name: str, *, finite: bool = True) -> float:
    """The value, which must be a number, and a finite one unless stated otherwise."""
    is_finite = type(value) in (int, float) and abs(value) <= MAX_NUMBER  # type: ignore[arg-type]
    if not is_finite and (finite or type(value) is not float):
        raise _unexpected(value, name, f"a number below {MAX_NUMBER:g}" if finite else "a number")
    return float(value) if isinstance(value, int) and abs(value) > MAX_INTEGER else value  # type: ignore[return-value]


def _unexpected(value: object, name: str, expected: str) -> JsonError:
    return JsonError(f"{name} is {reprlib.repr(value)}, not {expected}")
