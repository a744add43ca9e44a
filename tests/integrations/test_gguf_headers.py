"""Headers of GGUF files: read as they are, and refused where the file does not hold what they say."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import pytest

from buttress.errors import MissingExtraError, PlanError
from buttress.integrations import gguf_headers
from buttress.integrations.gguf_headers import GgufHeader, read_gguf_header
from gguf_files import LAYERS, llama, write_gguf

STRING, ARRAY, UINT32 = 8, 9, 4


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", llama())


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))


def tensor(name: str = "a", lengths: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset)


def write(
    path: Path, pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3, magic: bytes = b"GGUF"
) -> Path:
    header = magic + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(header + b"\0" * (-len(header) % 32 + data))
    return path


class TestReadGgufHeader:
    def test_it_agrees_with_the_package(self, good: Path) -> None:
        header, reader = read_gguf_header(good), gguf.GGUFReader(good)
        assert header.architecture == "llama"
        assert header.metadata["llama.block_count"] == LAYERS
        assert header.metadata["tokenizer.ggml.tokens"] == len(reader.fields["tokenizer.ggml.tokens"].data)
        assert header.shapes == {t.name: tuple(reversed(t.shape.tolist())) for t in reader.tensors}
        assert header.types == {t.name: t.tensor_type.name for t in reader.tensors}
        assert header.quantized_types == {"Q4_1": 7 * LAYERS + 1}

    def test_a_file_written_by_hand_is_read(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", [ARCHITECTURE], [tensor(), tensor("b", (32,), 8, 256)], 256 + 34)
        expected = GgufHeader({"general.architecture": "llama"}, {"a": (2, 32), "b": (32,)}, {"a": "F32", "b": "Q8_0"})
        assert read_gguf_header(path) == expected

    def test_every_truncation_is_refused(self, good: Path, tmp_path: Path) -> None:
        content = good.read_bytes()
        cut = tmp_path / "cut"
        for length in [*range(0, 2000, 7), *range(2000, len(content), 997), len(content) - 1]:
            cut.write_bytes(content[:length])
            with pytest.raises(PlanError, match=r"cut off|bytes more"):
                read_gguf_header(cut)

    @pytest.mark.parametrize(
        ("pairs", "tensors", "data", "problem"),
        [
            ([ARCHITECTURE], [tensor()], 255, "its tensors need 1 bytes more than it has"),
            ([ARCHITECTURE], [tensor(offset=2**63)], 256, "bytes more"),
            ([ARCHITECTURE], [tensor(lengths=(2**40, 2**40))], 256, "bytes more"),
            ([ARCHITECTURE], [tensor(str(i)) for i in range(3)], 512, "its tensors need 256 bytes more"),
            ([ARCHITECTURE], [tensor(lengths=(32, 0))], 256, r"the shape \(32, 0\)"),
            ([ARCHITECTURE], [tensor(lengths=(33, 2), kind=8)], 256, "which Q8_0 cannot have"),
            ([ARCHITECTURE], [tensor(lengths=(1,) * 5)], 256, "5 axes"),
            ([ARCHITECTURE], [tensor(kind=999)], 256, "unknown type 999"),
            ([ARCHITECTURE], [tensor(), tensor()], 512, "the tensor 'a' occurs twice"),
            ([ARCHITECTURE, ARCHITECTURE], [], 0, "the key 'general.architecture' occurs twice"),
            ([], [], 0, "general.architecture is missing"),
            ([ARCHITECTURE, pair("a", 77, b"")], [], 64, "unknown type 77"),
            ([ARCHITECTURE, pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], 64, "unknown type 9"),
            ([ARCHITECTURE, pair("a", ARRAY, struct.pack("<IQ", 0, 2**60))], [], 64, "more than 4,194,304 items"),
            ([ARCHITECTURE, pair("a", ARRAY, struct.pack("<IQ", 10, 2**20))], [], 64, "cut off"),
            ([ARCHITECTURE, pair("a", STRING, struct.pack("<Q", 2**62))], [], 64, "cut off"),
            ([ARCHITECTURE, pair("a", STRING, struct.pack("<Q", 1) + b"\xff")], [], 64, "not UTF-8"),
            ([ARCHITECTURE, pair("general.alignment", UINT32, struct.pack("<I", 3))], [], 64, "its alignment is 3"),
            (
                [ARCHITECTURE, pair("llama.block_count", UINT32, struct.pack("<I", 2**31))],
                [tensor()],
                256,
                "llama.block_count is 2147483648, but it holds 1 tensors",
            ),
        ],
    )
    def test_claims_that_the_file_does_not_keep_are_refused(
        self, tmp_path: Path, pairs: list[bytes], tensors: list[bytes], data: int, problem: str
    ) -> None:
        with pytest.raises(PlanError, match=f"is a damaged GGUF file: .*{problem}"):
            read_gguf_header(write(tmp_path / "a", pairs, tensors, data))

    @pytest.mark.parametrize(
        ("magic", "version", "problem"),
        [(b"GGML", 3, "is not a GGUF file"), (b"GGUF", 1, "of version 1"), (b"GGUF", 3 << 24, "big-endian")],
    )
    def test_other_formats_are_named(self, tmp_path: Path, magic: bytes, version: int, problem: str) -> None:
        with pytest.raises(PlanError, match=problem):
            read_gguf_header(write(tmp_path / "a", [ARCHITECTURE], [], 64, version, magic))

    def test_one_part_of_several_is_refused(self, tmp_path: Path) -> None:
        parts = pair("split.count", 2, struct.pack("<H", 3))
        with pytest.raises(PlanError, match=r"one of 3 parts of a model: .* --merge"):
            read_gguf_header(write(tmp_path / "a", [ARCHITECTURE, parts], [], 64))

    def test_a_header_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gguf_headers, "MAX_HEADER_BYTES", 1 << 20)
        long = pair("a", STRING, struct.pack("<Q", 1 << 20) + b"x" * (1 << 20))
        with pytest.raises(PlanError, match="header has more than 1 MiB"):
            read_gguf_header(write(tmp_path / "a", [ARCHITECTURE, long], []))

    @pytest.mark.parametrize(("counts", "what"), [((1, 1 << 17), "keys"), ((1 << 17, 1), "tensors")])
    def test_counts_are_bounded_before_anything_is_read(
        self, tmp_path: Path, counts: tuple[int, int], what: str
    ) -> None:
        (tmp_path / "a").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        with pytest.raises(PlanError, match=f"it says that it holds 131,072 {what}, more than 65,536"):
            read_gguf_header(tmp_path / "a")

    def test_without_the_package_it_says_what_to_install(self, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        monkeypatch.setitem(sys.modules, "gguf.constants", None)
        with pytest.raises(MissingExtraError, match=r"GGUF files need gguf: pip install 'gguf>=0\.17'"):
            read_gguf_header(good)
