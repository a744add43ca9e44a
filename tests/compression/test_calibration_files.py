"""Text files and image folders: what is read, what is left out and named, and what is refused in one line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import buttress as bt
from buttress.compression import calibration_files, pipeline
from buttress.compression.calibration_files import read_calibration_files


def refusal(text: Path | None = None, images: Path | None = None) -> str:
    with pytest.raises(bt.PlanError) as caught:
        read_calibration_files(text, images)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_given_is_nothing() -> None:
    assert read_calibration_files(None, None) is None


def test_latin_1_is_refused_with_the_byte_and_how_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("one\ntwo\ncaf\u00e9 au lait\n".encode("latin-1"))
    message = refusal(path)
    assert "latin.txt is not UTF-8: byte 0xe9 at 11 in line 3" in message
    assert "iconv -f latin1 -t utf-8 latin.txt" in message


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfone")
    files = read_calibration_files(path, None)
    assert files is not None
    assert files.text == "one"


def test_empty_missing_and_huge_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    assert f"{path} does not exist: give a text file" in refusal(path)
    path.write_text(" \n\n")
    assert "is empty" in refusal(path)
    monkeypatch.setattr(calibration_files, "MAX_TEXT_BYTES", 2)
    assert "GiB of text" in refusal(path)
    assert "GiB of text" in refusal(Path("/dev/zero"))


def test_a_folder_given_as_text_counts_as_images(pictures: Path) -> None:
    files = read_calibration_files(pictures, None)
    assert files is not None
    assert (files.text_file, files.image_folder, len(files.images)) == (None, pictures, 40)
    assert "give one text file and one image folder" in refusal(pictures, pictures)


def test_images_that_cannot_be_read_are_left_out_and_named(pictures: Path, tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    for path in list(pictures.iterdir())[:3]:
        os.link(path, tmp_path / path.name)
    (tmp_path / "torn.png").write_bytes(next(pictures.iterdir()).read_bytes()[:40])
    (tmp_path / "text.jpg").write_text("no image")
    Image.new("RGB", (300, 300), "red").save(tmp_path / "half.jpeg")
    (tmp_path / "half.jpeg").write_bytes((tmp_path / "half.jpeg").read_bytes()[:-600])
    (tmp_path / "notes.txt").write_text("not looked at")
    files = read_calibration_files(None, tmp_path)
    assert files is not None
    assert len(files.images) == 3
    assert [path.name for path in files.unreadable] == ["half.jpeg", "text.jpg", "torn.png"]


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    assert "has no images: files that end in .bmp, " in refusal(None, tmp_path)
    (tmp_path / "a.png").write_text("no image")
    assert "no image that can be read: a.png" in refusal(None, tmp_path)
    assert "is not a folder" in refusal(None, tmp_path / "a.png")


def test_an_image_larger_than_memory_allows_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image = pytest.importorskip("PIL.Image")
    Image.new("RGB", (64, 64)).save(tmp_path / "large.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    files = read_calibration_files(None, tmp_path)
    assert files is not None
    assert [path.name for path in files.unreadable] == ["large.png"]


def test_an_exchanged_image_is_noticed(pictures: Path, tmp_path: Path) -> None:
    """The same path with other pixels, or another time: a compression must not resume with it."""
    for name in ("0.png", "1.png"):
        shutil.copy(pictures / name, tmp_path / name)

    def settings() -> dict[str, object]:
        options = bt.CompressOptions(images=tmp_path)
        return pipeline.settings_of_work(read_calibration_files(None, tmp_path), options)

    before = settings()
    assert settings() == before
    state = (tmp_path / "0.png").stat()
    os.utime(tmp_path / "0.png", ns=(state.st_atime_ns, state.st_mtime_ns + 1000))
    touched = settings()
    assert touched != before
    with (tmp_path / "0.png").open("ab") as file:
        file.write(b"more")
    os.utime(tmp_path / "0.png", ns=(state.st_atime_ns, state.st_mtime_ns + 1000))
    assert settings() not in (before, touched)
