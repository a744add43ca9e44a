"""The header of a GGUF file, checked against the file's length before anything is read or allocated by others.

A GGUF file is: magic, version, two counts, metadata as typed key-value pairs, one record per tensor, and the tensors'
data, aligned. Lengths and counts in it are anybody's claims, so nothing is trusted that the file is too short for.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from buttress.errors import MissingExtraError, PlanError, quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28
"""Most bytes before the tensors' data. Vocabularies of a quarter of a million tokens take about 15 MB."""
MAX_ITEMS = 1 << 22
"""Most items of all arrays of the metadata: each becomes several Python objects when the file is loaded."""
MAX_PAIRS = MAX_TENSORS = 1 << 16
"""Most keys of the metadata, and most tensors. Models have less than a hundred keys and some thousand tensors."""
MAX_AXES = 4
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct formats of the scalar types, by their number in the file."""
UNQUANTIZED = ("F32", "F16", "BF16", "F64")
"""Tensor types that hold numbers as they are."""


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says that it holds; read it with `read_gguf_header`."""

    metadata: Mapping[str, Any]
    """Values by key; of an array, its length."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by tensor name, as torch has them."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Names of the tensors' types, such as "Q4_1", by tensor name."""

    @property
    def architecture(self) -> str:
        """The architecture, such as "llama"."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def quantized_types(self) -> dict[str, int]:
        """Number of tensors of each quantized type, the most frequent first."""
        counts = Counter(name for name in self.types.values() if name not in UNQUANTIZED)
        return dict(counts.most_common())


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the metadata and the tensors' names, shapes and types, and check that the file is long enough for them.

    Args:
        path: The file.

    Returns:
        The header.

    Raises:
        PlanError: If the file is damaged, cut off, of an unknown version, or in several parts.
        MissingExtraError: If the package gguf is missing.

    Example:
        >>> read_gguf_header(Path("model.Q4_1.gguf")).quantized_types
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}") from None


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.place = self.items = 0

    def header(self) -> GgufHeader:
        if self.size < 24 or self._bytes(4) != MAGIC:
            raise PlanError(f"{self.path} is not a GGUF file: it does not start with GGUF, or is cut off")
        (version,) = self._numbers("I")
        if version & 0xFFFF == 0:
            raise PlanError(f"{self.path} is a big-endian GGUF file, which is not read: convert it again")
        if version not in VERSIONS:
            raise PlanError(f"{self.path} is a GGUF file of version {version}: versions 2 and 3 are read")
        tensor_count, pair_count = self._numbers("QQ")
        for count, limit, what in ((pair_count, MAX_PAIRS, "keys"), (tensor_count, MAX_TENSORS, "tensors")):
            if count > limit:
                self._fail(f"it says that it holds {count:,} {what}, more than {limit:,}")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in metadata:
                self._fail(f"the key {quoted(key)} occurs twice")
            metadata[key] = self._value(*self._numbers("I"))
        self._check_metadata(metadata, tensor_count)
        return self._tensors(metadata, tensor_count)

    def _tensors(self, metadata: Mapping[str, Any], count: int) -> GgufHeader:
        sizes = _type_sizes()
        shapes: dict[str, tuple[int, ...]] = {}
        types: dict[str, str] = {}
        ends, total = [0], 0
        for _ in range(count):
            name = self._string()
            if name in shapes:
                self._fail(f"the tensor {quoted(name)} occurs twice")
            (axes,) = self._numbers("I")
            if not 1 <= axes <= MAX_AXES:
                self._fail(f"the tensor {quoted(name)} has {axes} axes")
            *lengths, kind, offset = self._numbers(f"{axes}QIQ")
            if kind not in sizes:
                self._fail(f"the tensor {quoted(name)} has the unknown type {kind}: update gguf if the file is newer")
            type_name, block, block_bytes = sizes[kind]
            if min(lengths) < 1 or lengths[0] % block:
                self._fail(f"the tensor {quoted(name)} has the shape {tuple(lengths)}, which {type_name} cannot have")
            shapes[name], types[name] = tuple(reversed(lengths)), type_name
            nbytes = prod(lengths) // block * block_bytes
            total += nbytes
            ends.append(offset + nbytes)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-self.place // alignment) * alignment
        missing = start + max(*ends, total) - self.size
        if missing > 0:
            self._fail(f"its tensors need {missing:,} bytes more than it has: download or copy it again")
        return GgufHeader(metadata, shapes, types)

    def _check_metadata(self, metadata: Mapping[str, Any], tensors: int) -> None:
        if not isinstance(metadata.get("general.architecture"), str):
            self._fail("general.architecture is missing")
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
            self._fail(f"its alignment is {quoted(alignment)}")
        if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
            raise PlanError(
                f"{self.path} is one of {parts} parts of a model: merge them first, with llama-gguf-split --merge"
            )
        for key, value in metadata.items():
            # Every layer has tensors of its own. A config lists its layers, so their number must be believable.
            if key.endswith("block_count") and not (isinstance(value, int) and 0 <= value <= tensors):
                self._fail(f"{key} is {quoted(value)}, but it holds {tensors} tensors")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._numbers("IQ")
            self.items += length
            if self.items > MAX_ITEMS:
                self._fail(f"the arrays of its metadata have more than {MAX_ITEMS:,} items")
            if item == _STRING:
                for _ in range(length):
                    self._bytes(*self._numbers("Q"))
            else:
                self._bytes(length * struct.calcsize(f"<{self._format(item)}"))
            return length
        (value,) = self._numbers(self._format(kind))
        return value

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:  # arrays of arrays have no use in a model, and others read them by recursion
            self._fail(f"its metadata have the unknown type {kind}")
        return _FORMATS[kind]

    def _string(self) -> str:
        try:
            return self._bytes(*self._numbers("Q")).decode("utf-8")
        except UnicodeDecodeError:
            self._fail("a name or text in it is not UTF-8")

    def _numbers(self, format: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{format}", self._bytes(struct.calcsize(f"<{format}")))

    def _bytes(self, count: int) -> bytes:
        if self.place + count > self.size:
            self._fail("it is cut off: download or copy it again")
        if self.place + count > MAX_HEADER_BYTES:
            self._fail(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")
        self.place += count
        return self.file.read(count)

    def _fail(self, problem: str) -> NoReturn:
        raise PlanError(f"{self.path} is a damaged GGUF file: {problem}")


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, numbers per block and bytes per block of each tensor type that can be dequantized, by its number."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise MissingExtraError("GGUF files need gguf: pip install 'gguf>=0.17'") from None
    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}
