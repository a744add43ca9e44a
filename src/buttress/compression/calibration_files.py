"""The text file and the image folder that a model is calibrated with, checked before any model is loaded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from buttress.errors import MissingExtraError, PlanError

IMAGE_SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}
MAX_TEXT_BYTES = 1 << 30
"""Largest text file that is read."""


@dataclass(frozen=True)
class CalibrationFiles:
    """Text, images, or both."""

    text_file: Path | None = None
    """The text file."""
    text: str = ""
    """Its contents."""
    image_folder: Path | None = None
    """The folder with images."""
    images: tuple[Path, ...] = ()
    """Its images, and those of its subfolders."""
    unreadable: tuple[Path, ...] = ()
    """Images that cannot be read and are left out."""

    def image_states(self) -> list[tuple[str, int, int]]:
        """Path, size and time of the last change of each image, which tell when one was exchanged."""
        states = ((path, path.stat()) for path in self.images)
        return [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]

    @property
    def label(self) -> str:
        """The paths, for messages."""
        return " and ".join(str(path) for path in (self.text_file, self.image_folder) if path is not None)


def read_calibration_files(text: Path | str | None, images: Path | str | None) -> CalibrationFiles | None:
    """Read the text and list the images.

    Args:
        text: A text file. A folder counts as one with images.
        images: A folder with images.

    Returns:
        What was read; None if nothing was given.

    Raises:
        PlanError: If a path does not exist, is of the wrong kind, or holds nothing that can be used.
    """
    text_file, image_folder = (None if path is None else Path(path) for path in (text, images))
    for path in (text_file, image_folder):
        if path is not None and not path.exists():
            raise PlanError(f"{path} does not exist: give a text file, or a folder with images")
    if text_file is not None and text_file.is_dir():
        if image_folder is not None:
            raise PlanError(f"{text_file} is a folder, as {image_folder} is: give one text file and one image folder")
        text_file, image_folder = None, text_file
    if text_file is None and image_folder is None:
        return None
    content = "" if text_file is None else _read_text(text_file)
    readable, unreadable = ((), ()) if image_folder is None else _list_images(image_folder)
    return CalibrationFiles(text_file, content, image_folder, readable, unreadable)


def _read_text(path: Path) -> str:
    with path.open("rb") as file:  # a pipe does not tell its size
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        limit = MAX_TEXT_BYTES / 2**30
        raise PlanError(f"{path} has more than {limit:.0f} GiB of text: some MB are enough, cut it with head -c 100M")
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlanError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at {error.start} in line {line}; if it is Latin-1, "
            f"convert it with: iconv -f latin1 -t utf-8 {path.name} > utf8.txt"
        ) from None
    if not content.strip():
        raise PlanError(f"{path} is empty: give text like that which the model will read")
    return content


def _list_images(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The images of a folder that can be read, and those that cannot."""
    if not folder.is_dir():
        raise PlanError(f"{folder} is not a folder: give a folder with images")
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("images need pillow: pip install pillow") from None
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    if not paths:
        raise PlanError(f"{folder} has no images: files that end in {', '.join(sorted(IMAGE_SUFFIXES))} are read")
    unreadable: set[Path] = set()
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path) as image:
                    if image.format == "PNG":
                        image.verify()  # checksums, without decoding
                    else:
                        image.draft("RGB", (64, 64))  # decodes a JPEG at a fraction of its size
                        image.load()
        except Exception:  # damaged files raise errors of many types
            unreadable.add(path)
    if len(unreadable) == len(paths):
        raise PlanError(f"{folder} has no image that can be read: {paths[0].name} is damaged or too large")
    return tuple(p for p in paths if p not in unreadable), tuple(sorted(unreadable))
