"""What a compression has computed so far, on disk, so that an interrupted one continues where it was.

The folder lies next to the output. It holds the moments of the layers' inputs, the options of each layer that is
compared, the projections, and a log. Everything in it is written atomically and carries a checksum; what is damaged is
computed again. It belongs to one model, one set of data and one set of options, which its fingerprint identifies.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from buttress.compression.input_moments import InputMoments, MomentSums
from buttress.core.structures import Structure
from buttress.errors import ButtressError, PlanError
from buttress.files import flush, locked, make_folder, remove, replacing, write_text
from buttress.projection.closed_form import Projection

ABOUT, MOMENTS, SUMS, LAYERS, LOG, LOCK = "about.json", "moments", "sums", "layers.jsonl", "log.txt", "lock"
LOG_SECONDS = 5.0
"""Least time between two lines of the log within one stage."""


class WorkFolder:
    """The folder of one compression; open it with `WorkFolder.opened`.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers: dict[str, dict[str, Any]] = {}
        """What is known of each layer that was compared, by name."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[WorkFolder]:
        """Create or open a work folder, for this process alone. It is removed if the block ends without an error.

        After an error of any kind it stays if it holds results.

        Args:
            folder: The folder.

        Yields:
            The work folder.

        Raises:
            PlanError: If another process uses it.
        """
        with locked(folder / LOCK, wait=False) as granted:
            if not granted:
                target = folder.name.removeprefix(".").removesuffix(".compress")
                raise PlanError(f"another process compresses into {folder.with_name(target)}: wait for it")
            work = cls(folder)
            try:
                yield work
            except BaseException:
                if not work.has_results:
                    remove(folder)
                raise
            remove(folder)

    @property
    def has_results(self) -> bool:
        """Whether the folder holds anything that took long to compute."""
        return any((self.folder / name).exists() for name in (f"{MOMENTS}.json", f"{SUMS}.json", LAYERS))

    def claim(self, fingerprint: str) -> None:
        """Note what the folder belongs to, and read what it holds already.

        Args:
            fingerprint: Identifies the model, the data and the options.

        Raises:
            ButtressError: If the folder holds results of something else.
        """
        path = self.folder / ABOUT
        if self.has_results:
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
            except (ValueError, KeyError, TypeError, OSError):
                saved = None
            if saved != fingerprint:
                raise ButtressError(
                    f"cannot resume from {self.folder} (it belongs to another model, other data or other options): "
                    "remove it to start over"
                )
        else:
            write_text(path, json.dumps({"format": "buttress-work", "fingerprint": fingerprint}) + "\n")
        self.layers = {row["name"]: row for row in self._rows() if isinstance(row.get("name"), str)}

    def add_layer(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep what is known of a layer.

        Args:
            name: Its name.
            row: Plain data.
        """
        text = json.dumps({**row, "name": name})
        line = json.dumps({"sha256": _digest(text.encode()), "row": text}) + "\n"
        path = self.folder / LAYERS
        with path.open("ab") as file:
            # A kill may have left half a line, which must not swallow this one.
            start = b"\n" if file.tell() and not _ends_with_newline(path) else b""
            file.write(start + line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.layers[name] = {**row, "name": name}

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            lines = (self.folder / LAYERS).read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                saved = json.loads(line)
                if saved["sha256"] == _digest(saved["row"].encode()):
                    yield json.loads(saved["row"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # half a line, or a damaged one: that layer is compared again

    def moments(self) -> InputMoments | None:
        """The moments of the layers' inputs; None if they are not there or damaged."""
        loaded = self._load_by_layer(MOMENTS)
        if loaded is None:
            return None
        means, row = loaded
        return InputMoments(means, row["tokens"], row["unreached"])

    def save_moments(self, moments: InputMoments) -> None:
        """Keep the moments, in place of the sums."""
        row = {"tokens": moments.tokens, "unreached": moments.unreached}
        self._save_by_layer(MOMENTS, moments, row)
        for suffix in (".json", ".safetensors"):
            (self.folder / f"{SUMS}{suffix}").unlink(missing_ok=True)

    def sums(self, layers: Collection[str], device: torch.device) -> MomentSums | None:
        """The sums of an interrupted calibration of these layers; None if there are none, or they are damaged."""
        loaded = self._load_by_layer(SUMS)
        if loaded is None:
            return None
        sums, row = loaded
        if {*sums, *row["unreached"]} != set(layers):
            return None
        return MomentSums({name: t.to(device) for name, t in sums.items()}, row["tokens"], row["batches"])

    def save_sums(self, layers: Collection[str], sums: MomentSums) -> None:
        """Keep the sums of a calibration of these layers that goes on."""
        unreached = [name for name in layers if name not in sums.sums]
        self._save_by_layer(SUMS, sums.sums, {"tokens": sums.tokens, "batches": sums.batches, "unreached": unreached})

    def _save_by_layer(self, key: str, tensors: Mapping[str, Tensor], row: Mapping[str, Any]) -> None:
        """Write a tensor for each layer; neighbors with the same inputs, such as q, k and v, share one."""
        keys, distinct = {}, dict[str, Tensor]()
        for name, tensor in tensors.items():
            latest = list(distinct.items())[-2:]
            same = (key for key, t in latest if t.shape == tensor.shape and torch.equal(t, tensor))
            keys[name] = next(same, str(len(distinct)))
            distinct.setdefault(keys[name], tensor)
        self._save(key, distinct, {"tensors": keys, **row})

    def _load_by_layer(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        loaded = self._load(key)
        if loaded is None:
            return None
        tensors, row = loaded
        try:
            by_layer = {name: tensors[key].clone() for name, key in row["tensors"].items()}
            known = set(row["tokens"]) == set(by_layer) and isinstance(row["unreached"], list)
        except (KeyError, TypeError, AttributeError):
            return None
        return (by_layer, row) if known else None

    def projection(self, name: str, structure: Structure, sweeps: int) -> Projection | None:
        """A layer's projection; None if it is not there, damaged, or one of another kind."""
        loaded = self._load(_projection_key(name, structure, sweeps))
        if loaded is None:
            return None
        tensors, row = loaded
        try:
            factors = {factor: tensors[factor] for factor in row["factors"]}
            return Projection(factors, float(row["relative_error"]), float(row["output_error"]))
        except (KeyError, TypeError, ValueError):
            return None

    def save_projection(self, name: str, structure: Structure, sweeps: int, projection: Projection) -> None:
        """Keep a layer's projection."""
        row = {
            "factors": list(projection.factors),
            "relative_error": projection.relative_error,
            "output_error": projection.output_error,
        }
        self._save(_projection_key(name, structure, sweeps), projection.factors, row)

    def _save(self, key: str, tensors: Mapping[str, Tensor], row: Mapping[str, Any]) -> None:
        from safetensors.torch import save

        content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        with replacing(self.folder / f"{key}.safetensors") as part:
            part.write_bytes(content)
        write_text(self.folder / f"{key}.json", json.dumps({"sha256": _digest(content), **row}) + "\n")

    def _load(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            row = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            content = (self.folder / f"{key}.safetensors").read_bytes()
            return (load(content), row) if row["sha256"] == _digest(content) else None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None


class ProgressLog:
    """Progress in a file that can be followed while a compression runs in the background.

    Args:
        path: The file; lines are appended.
        progress: Also called with every report; None for nobody.
    """

    def __init__(self, path: Path, progress: Callable[[str, int, int], None] | None) -> None:
        self.path, self.progress = path, progress
        self._stage, self._first, self._start, self._written = "", 0, 0.0, -LOG_SECONDS

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that so many steps of a stage are done."""
        if self.progress is not None:
            self.progress(stage, done, total)
        now, kind = time.monotonic(), stage.partition(",")[0]
        if kind != self._stage:
            self._stage, self._first, self._start = kind, done, now
        elif now - self._written < LOG_SECONDS:
            return
        self._written = now
        left = seconds_left(done - self._first, total - done, now - self._start)
        note = "" if left is None else f", about {duration(left)} left"
        self.write(f"{stage}: {done} of {total}{note}")

    def write(self, text: str) -> None:
        """Append a line with the time of day."""
        make_folder(self.path.parent)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        flush(self.path)


def seconds_left(done: int, remaining: int, elapsed: float) -> float | None:
    """The time that the remaining steps take at the pace of those that are done; None before the first."""
    return elapsed / done * remaining if done > 0 else None


def duration(seconds: float) -> str:
    """Seconds as people say them, such as "50 s" or "12 min"."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def fingerprint_of(model: nn.Module, settings: Mapping[str, Any]) -> str:
    """Identifies a compression by the model's weights and by settings.

    Args:
        model: The model.
        settings: Plain data.

    Returns:
        A checksum.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def work_folder_of(target: Path) -> Path:
    """The work folder of an output folder."""
    return target.with_name(f".{target.name}.compress")


def _projection_key(name: str, structure: Structure, sweeps: int) -> str:
    return "projection-" + _digest(f"{name} {structure} {sweeps}".encode())[:32]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
