"""The model card: README.md of a folder with a structured model, which says what the folder needs to be loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from buttress.errors import PlanError
from buttress.files import write_text
from buttress.integrations.missing import REQUIREMENTS
from buttress.surgery import Plan, Report
from buttress.text_table import show
from buttress.version import __version__

CARD_FILE = "README.md"
Library = Literal["transformers", "sentence-transformers", "timm"]

_LOADING: dict[Library, str] = {
    "transformers": "import buttress as bt\n\nmodel = bt.from_pretrained({folder})",
    "sentence-transformers": (
        "import buttress.hf\nfrom sentence_transformers import SentenceTransformer\n\n"
        "model = SentenceTransformer({folder})"
    ),
    "timm": "import buttress.vision\n\nmodel = buttress.vision.load({folder})",
}
_NEEDS: dict[Library, str] = {
    "transformers": (
        "After `import buttress.hf`, transformers' own `from_pretrained` loads it too. Without that import, loading "
        "fails with a message about `quant_method`: the weights cannot be read as those of the dense model."
    ),
    "sentence-transformers": (
        "Without `import buttress.hf`, loading fails with a message about `quant_method`: the weights cannot be read "
        "as those of the dense model."
    ),
    "timm": "timm alone cannot load it: its weights are not those of the dense model.",
}
_PACKAGES: dict[Library, str] = {
    "transformers": f"'{REQUIREMENTS['transformers']}'",
    "sentence-transformers": f"'{REQUIREMENTS['transformers']}' sentence-transformers",
    "timm": f"'{REQUIREMENTS['timm']}'",
}
_MAX_FRONT_MATTER = 1 << 16
_ORIGINAL = "## Card of the original model"


def model_card(
    rows: Report | Plan,
    *,
    library: Library = "transformers",
    base_model: str | None = None,
    quality: Mapping[str, tuple[float, float]] | None = None,
    existing: str | None = None,
    dequantized: Mapping[str, int] | None = None,
) -> str:
    """The text of a README.md for a folder with a structured model.

    Args:
        rows: What was replaced: the report of `replace_`, or the model's plan.
        library: The library that the model belongs to.
        base_model: Hub id or folder of the original model.
        quality: Measured metrics by name, each with its value before and after.
        existing: The card of the original model. Its metadata are kept, and its text follows the new one.
        dequantized: Number of the original's tensors of each quantized type, where it was quantized.

    Returns:
        Markdown with YAML front matter.

    Raises:
        PlanError: If the library is not one of the three.

    Example:
        >>> text = model_card(report, base_model="org/model", quality={"perplexity": (12.1, 12.9)})
    """
    if library not in _LOADING:
        raise PlanError(f"a model card is written for {', '.join(_LOADING)}, got {library!r}")
    metadata, original = _split_card(existing or "")
    if "buttress" in (metadata.get("tags") or ()):
        original = original.partition(_ORIGINAL)[2].strip()  # our own card is replaced, not repeated
    own_name = "Structured model" if base_model is None else f"{Path(base_model).name}, structured"
    sections = [
        _front_matter(_merged(metadata, library, base_model)),
        f"# {own_name}\n",
        _summary(rows, base_model) + _dequantized(dequantized or {}),
        _loading(library),
        _quality(quality or {}),
        _layers(rows),
    ]
    if original:
        sections.append(f"{_ORIGINAL}\n\n{original}\n")
    return "\n".join(s for s in sections if s)


def loading_example(library: Library, folder: str) -> str:
    """Python that loads a structured model.

    Args:
        library: The library that the model belongs to.
        folder: The model's folder.

    Returns:
        A few lines of code.
    """
    return _LOADING[library].format(folder=json.dumps(folder, ensure_ascii=False))


def write_card(folder: Path, card: str) -> None:
    """Write a card into a folder.

    Args:
        folder: The model's folder.
        card: The text, from `model_card`.
    """
    write_text(folder / CARD_FILE, card)


def existing_card(folder: Path) -> str | None:
    """The card in a model's folder.

    Args:
        folder: The folder.

    Returns:
        The text of its README.md; None if there is none, or it is not text.
    """
    try:
        return (folder / CARD_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _summary(rows: Report | Plan, base_model: str | None) -> str:
    # A folder is named without its path, which is nobody else's business.
    name = base_model if base_model is None or _is_hub_id(base_model) else Path(base_model).name
    origin = "" if name is None else f" It was made from {_code(name)}."
    count = len(rows.rows if isinstance(rows, Report) else rows.entries)
    sizes = ""
    if isinstance(rows, Report):
        sizes = f" {show(rows.model_params_before)} parameters became {show(rows.model_params_after)}."
    return (
        f"A model in which {count} layers are structured matrices instead of dense ones, "
        f"written by buttress.{origin}{sizes}\n"
    )


def _dequantized(types: Mapping[str, int]) -> str:
    if not types:
        return ""
    return (
        f"\nThe weights of the original were quantized ({listed_types(types)}) and have been dequantized: this model "
        "starts from rounded weights, and stores unquantized ones.\n"
    )


def listed_types(types: Mapping[str, int]) -> str:
    """Types of quantized tensors with their numbers, as text.

    Args:
        types: Number of tensors of each type.

    Returns:
        A list such as "Q4_1: 210 tensors, Q6_K: 1 tensor".
    """
    return ", ".join(f"{_cell(name)}: {count} tensor{'s' * (count > 1)}" for name, count in types.items())


def _loading(library: Library) -> str:
    example = loading_example(library, "path/to/this/folder")
    return (
        f"## Loading\n\nNeeded: Python >= 3.11, buttress >= {__version__}, and `pip install "
        f"{_PACKAGES[library]}`.\n\n```python\n{example}\n```\n\n{_NEEDS[library]}\n"
    )


def _quality(quality: Mapping[str, tuple[float, float]]) -> str:
    if not quality:
        return "## Quality\n\nThe quality of this model was not measured when it was written.\n"
    lines = [f"| {_cell(name)} | {show(before)} | {show(after)} |" for name, (before, after) in quality.items()]
    return _table("Quality", ("metric", "before", "after"), lines)


def _layers(rows: Report | Plan) -> str:
    if isinstance(rows, Report):
        lines = [
            f"| {_code(r.name)} | {_code(r.structure)} | {show(r.params_before)} | {show(r.params_after)} |"
            for r in rows.rows
        ]
        return _table("Replaced layers", ("layer", "structure", "parameters before", "parameters after"), lines)
    lines = [f"| {_code(e.name)} | {_code(str(e.structure))} |" for e in rows.entries]
    return _table("Replaced layers", ("layer", "structure"), lines)


def _table(title: str, columns: tuple[str, ...], lines: Iterable[str]) -> str:
    header = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return f"## {title}\n\n{header}\n" + "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text).replace('`', '')}`"


def _merged(metadata: Mapping[str, Any], library: Library, base_model: str | None) -> dict[str, Any]:
    """The original model's metadata with ours; what the new model does not inherit is left out."""
    tags = metadata.get("tags")
    kept = [tag for tag in tags if tag not in ("buttress", "structured-matrices")] if isinstance(tags, list) else []
    merged = {k: v for k, v in metadata.items() if k != "model-index"}  # those numbers are the original model's
    merged |= {"library_name": library, "tags": ["buttress", "structured-matrices", *kept]}
    if base_model is not None and _is_hub_id(base_model):
        merged["base_model"] = base_model  # a hub id; a folder of this machine means nothing to others
    return merged


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def _front_matter(metadata: Mapping[str, Any]) -> str:
    import yaml  # a dependency of transformers, timm and sentence-transformers alike

    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)}---\n"


def _split_card(text: str) -> tuple[dict[str, Any], str]:
    """Metadata and body of a card; metadata that cannot be read count as none, and stay in the body."""
    import yaml

    match = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", text, flags=re.DOTALL)
    if match is None or len(match[1]) > _MAX_FRONT_MATTER:
        return {}, text.strip()
    try:
        metadata = yaml.safe_load(match[1])
    except (yaml.YAMLError, RecursionError):
        return {}, text.strip()
    if not isinstance(metadata, dict):
        return {}, text.strip()
    return metadata, text[match.end() :].strip()
