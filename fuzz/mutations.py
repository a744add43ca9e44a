"""Damage to valid inputs: to their structure, to their text and to their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

EXTREME_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, -(2**63),
    0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
EXTREMES: tuple[Any, ...] = (
    *EXTREME_NUMBERS, None, True, False, "", " ", "a", "0", "-1", "\x00", "é東京😀", "\ud800", "null", "btt",
    "../../secret", "/etc/passwd", "x" * 3000, "<script>alert(1)</script>", "'; touch executed; '", [], {}, [[]],
    [None], {"a": 1}, [0] * 300,
)  # fmt: skip
CHARACTERS = "abcxyz0123456789()[]{}=,.:;_-+*/'\"\\ \t\n\r\x00\x7f\u00a0\u200b\u2028é²東😀\ud800"


def mutate_json(value: Any, random: Random, count: int = 1) -> Any:
    """A copy of decoded JSON with `count` places changed: types, deletions, duplications, extremes, nesting."""
    value = deepcopy(value)
    for _ in range(count):
        places = list(_places(value))
        if not places:
            return deepcopy(random.choice(EXTREMES))
        holder, key = random.choice(places)
        random.choice(_CHANGES)(holder, key, random)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of decoded JSON."""
    if isinstance(value, dict | list):
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(child)


def _set_extreme(holder: Any, key: Any, random: Random) -> None:
    holder[key] = deepcopy(random.choice(EXTREMES))


def _delete(holder: Any, key: Any, random: Random) -> None:
    del holder[key]


def _duplicate(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    else:
        holder[f"{key}{random.choice(('', ' ', '_', '2'))}"] = deepcopy(holder[key])


def _rename(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder, dict):
        holder[mutate_text(str(key), random)] = holder.pop(key)
    else:
        random.shuffle(holder)


def _swap(holder: Any, key: Any, random: Random) -> None:
    other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]  # of one container, so that no cycle arises


def _tweak(holder: Any, key: Any, random: Random) -> None:
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int | float):
        holder[key] = random.choice((value + 1, value - 1, -value, value * 2, value * 1000, float(value), str(value)))
    elif isinstance(value, str):
        holder[key] = mutate_text(value, random)
    else:
        _set_extreme(holder, key, random)


def _nest(holder: Any, key: Any, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 50))):
        holder[key] = [holder[key]] if random.random() < 0.5 else {str(key): holder[key]}


_CHANGES = (_set_extreme, _set_extreme, _delete, _duplicate, _rename, _swap, _tweak, _tweak, _nest)


def mutate_text(text: str, random: Random) -> str:
    """A text with one change: a span deleted, doubled, repeated or replaced; a number made extreme."""
    start, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    kind = random.randrange(8)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:]
    if kind == 2:
        return text[:start] + "".join(random.choices(CHARACTERS, k=random.randint(1, 4))) + text[start:]
    if kind == 3:
        return text[:start] + random.choice(CHARACTERS) + text[start + 1 :]
    if kind == 4:
        return text[:start] + text[start : start + 20] * random.choice((2, 30, 2000)) + text[end:]
    if kind == 5:
        digits = [i for i, c in enumerate(text) if c.isascii() and c.isdigit()]
        at = random.choice(digits) if digits else start
        return text[:at] + str(random.choice(EXTREME_NUMBERS)) + text[at + 1 :]
    if kind == 6:
        return text.swapcase() if random.random() < 0.5 else text[::-1]
    bracket = random.choice(("(", "[", "{", "-", "~", '{"a":', "[1,"))
    return text[:start] + bracket * random.choice((1, 2, 90, 5000)) + text[start:]


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with one change: a bit, a span, the end, or everything."""
    start, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    kind = random.randrange(9)
    if kind <= 1 and data:
        at = random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:start]
    if kind == 3:
        return data[:start] + data[end:]
    if kind == 4:
        return data[:start] + random.randbytes(random.randint(1, 20)) + data[start:]
    if kind == 5:
        return data[:start] + bytes(end - start) + data[end:]
    if kind == 6:
        return data + random.randbytes(random.randint(1, 50))
    if kind == 7:
        return b"" if random.random() < 0.3 else random.randbytes(random.randint(1, 200))
    return data[:end] + data[start:]


def remove(path: Path, random: Random, secret: Path) -> None:
    """Remove a file and, sometimes, leave a folder or a link to a file outside in its place."""
    path.unlink()
    if random.random() < 0.3:
        path.mkdir()
    elif random.random() < 0.4:
        path.symlink_to(secret)


def dump_json(value: Any, random: Random) -> bytes:
    """JSON of a value; now and then with damage to the text, or with deep nesting."""
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    kind = random.random()
    if kind < 0.15:
        return mutate_bytes(data, random)
    if kind < 0.25:
        return mutate_text(data.decode(), random).encode("utf-8", "surrogatepass")
    if kind < 0.27:
        opening = random.choice((b"[", b'{"a":'))
        return opening * 100_000
    return data


def mutate_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file with damage to its header or its length; the numbers themselves stay.

    The format has no checksum, so that other numbers are simply other weights.
    """
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = random.randrange(6)
    if kind == 0:
        return data[: random.randrange(len(data))]
    if kind == 1:
        return (
            struct.pack("<Q", random.choice((0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1))) + data[8:]
        )
    if kind == 2:
        return data[:8] + mutate_bytes(data[8 : 8 + length], random) + body
    if kind == 3:
        return random.choice((b"", data[:8], random.randbytes(40), bytes(len(data)), data + b"\0" * 8))
    damaged = json.dumps(mutate_json(header, random, random.choice((1, 1, 2)))).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(damaged)) + damaged + body
