"""Output files of the benchmarks, written atomically."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from buttress.files import write_text


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with the same columns to a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write a record to a JSON file."""
    write_text(path, json.dumps(record, indent=1) + "\n")
