"""What a run leaves behind: a record, kept under its key. A figure is a function of records and nothing else."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch

import buttress
from buttress import ButtressError
from buttress.lab.runs.config import Run

Status = Literal["done", "failed"]


@dataclass(frozen=True)
class Record:
    """One finished run: what it was, how it went, on what."""

    run: Run
    status: Status
    results: Mapping[str, float] = field(default_factory=dict)
    """train_error, train_loss, test_error, test_loss (errors in percent); seconds of all of training; step_ms, the
    median of a step since the run was last begun; examples_per_second; examples there were to train on. Of text also
    tokens_per_second and head_macs, of a GPU peak_gib and mfu, the part of its promised speed that was used."""
    params: int = 0
    macs: int = 0
    """Multiply-accumulates of one example's forward pass."""
    curve: tuple[tuple[int, float, float], ...] = ()
    """(step, loss, error in percent), averaged over stretches of the run."""
    error: str = ""
    """What went wrong, where something did."""
    made_on: Mapping[str, str] = field(default_factory=dict)
    looks: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    """What was seen on the way, by name: (step, number) of test_loss, of the sizes of activations and the like."""

    def to_json(self) -> str:
        told = asdict(self) | {"key": self.run.key}
        if not self.looks:
            del told["looks"]
        return json.dumps(told, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Record:
        data: dict[str, Any] = json.loads(text)
        data.pop("key", None)
        data["run"] = Run.of(data["run"])
        data["looks"] = {name: [(int(s), float(v)) for s, v in seen] for name, seen in data.get("looks", {}).items()}
        data["curve"] = tuple((int(s), float(a), float(b)) for s, a, b in data["curve"])
        return cls(**data)


def machine(device: torch.device) -> dict[str, str]:
    """Hardware and versions, for the record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "buttress": buttress.__version__,
        "python": platform.python_version(),
    }


class Held(ButtressError):
    """Another process is training the run."""


class Store:
    """A folder of runs, one subfolder a key. Whatever is written is written whole or not at all.

    Files of JSON lines in the folder, as `write_records` makes them, count too: their runs are done.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.archived = {r.run.key: r for path in sorted(self.folder.glob("*.jsonl")) for r in read_records(path)}

    def place(self, run: Run) -> Path:
        return self.folder / run.key

    def get(self, run: Run) -> Record | None:
        """The record of a run, if it has one."""
        path = self._file(run)
        return read_record(path) if path.is_file() else self.archived.get(run.key)

    def put(self, record: Record) -> Path:
        path = self._file(record.run)
        write_text(path, record.to_json() + "\n")
        return path

    def written(self, run: Run) -> int:
        """When its record was last put here, in nanoseconds; 0 if it never was."""
        path = self._file(run)
        return path.stat().st_mtime_ns if path.is_file() else 0

    def _file(self, run: Run) -> Path:
        return self.place(run) / "record.json"

    def claim(self, run: Run) -> AbstractContextManager[bool]:
        """Whether a sweep may see to a run, of which no other sweep then does; who trains it holds its lock besides."""
        return self.lock(run, "claim")

    @contextmanager
    def lock(self, run: Run, name: str = "lock") -> Iterator[bool]:
        """Whether this process may work on a run; another that does holds the lock until it ends, however that is."""
        place = self.place(run)
        place.mkdir(parents=True, exist_ok=True)
        with (place / name).open("w") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass  # no such locks on this system
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise ButtressError(
                    f"{place / name} cannot be locked, and two processes must not train one run: {error}. Some "
                    "shared disks have no locks, or only if they are mounted so: ask for flock, or keep runs elsewhere"
                ) from error
            yield True

    def __iter__(self) -> Iterator[Record]:
        own = {r.run.key: r for r in map(read_record, sorted(self.folder.glob("*/record.json")))}
        yield from (self.archived | own).values()


def read_record(path: Path) -> Record:
    """The record in a file of its own."""
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise ButtressError(
            f"{path} is not a record of this version: {error}; remove its folder to run it again"
        ) from error


def read_records(path: Path) -> list[Record]:
    """The records of a file of JSON lines."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(Record.from_json(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ButtressError(f"line {number} of {path} is not a record of this version: {error}") from error
    return found


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Records as a file of JSON lines, in an order that depends on nothing but them."""
    ordered = sorted(records, key=lambda r: (r.run.task, r.run.model, r.run.structure, r.macs, r.run.to_json()))
    write_text(path, "".join(record.to_json() + "\n" for record in ordered))


def write_text(path: Path, text: str) -> None:
    """A file replaced in one step, so that nobody ever sees half of it."""
    with _replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Weights as a safetensors file, replaced in one step."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _replacing(path) as part:
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, part)
        except SafetensorError as error:
            raise ButtressError(f"{path} could not be written ({error})") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A new file, which takes the place of `path` when it is whole; else nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")  # machines that share a disk may share process ids
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ButtressError(f"{path} cannot be read ({error}): remove its folder to train the run again") from error
