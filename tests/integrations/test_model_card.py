"""Model cards: what a folder is, what it needs, and the card of the original model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import buttress as bt
from buttress.integrations.model_card import existing_card, model_card, write_card

yaml = pytest.importorskip("yaml")


def replaced() -> bt.Report:
    return bt.replace_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), bt.BTT(rank=2))


def metadata(card: str) -> Any:
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


def test_a_card_says_what_the_folder_is_and_needs() -> None:
    card = model_card(replaced(), base_model="org/model", quality={"perplexity": (12.125, 13.5)})
    assert metadata(card) == {
        "library_name": "transformers", "tags": ["buttress", "structured-matrices"], "base_model": "org/model",
    }  # fmt: skip
    assert f"buttress >= {bt.__version__}" in card
    assert "import buttress.hf" in card
    assert 'bt.from_pretrained("' in card
    assert "| perplexity | 12.12 | 13.5 |" in card
    assert "| `0` | `btt(rank=2)` | 1,056 |" in card


@pytest.mark.parametrize(
    ("library", "line"),
    [("timm", "buttress.vision.load("), ("sentence-transformers", "SentenceTransformer("), ("transformers", "bt.from")],
)
def test_the_example_belongs_to_the_library(library: Any, line: str) -> None:
    card = model_card(bt.Plan(), library=library)
    assert line in card
    assert "was not measured" in card
    assert metadata(card)["library_name"] == library


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(bt.PlanError, match="a model card is written for"):
        model_card(bt.Plan(), library="keras")  # type: ignore[arg-type]


def test_a_folder_of_this_machine_is_not_named_as_a_hub_id() -> None:
    card = model_card(bt.Plan(), base_model="/home/me/model")
    assert "base_model" not in metadata(card)
    assert "# model, structured" in card
    assert "/home/me" not in card


def test_the_card_of_the_original_model_is_kept() -> None:
    original = "---\nlicense: mit\ntags: [text]\nmodel-index: [{name: x}]\n---\n\n# Original\n\nTrained on éclairs.\n"
    card = model_card(bt.Plan(), existing=original)
    assert metadata(card) == {
        "license": "mit", "tags": ["buttress", "structured-matrices", "text"], "library_name": "transformers",
    }  # fmt: skip
    assert card.rstrip().endswith("# Original\n\nTrained on éclairs.")
    assert card.count("library_name") == 1


def test_our_own_card_is_replaced_and_not_repeated() -> None:
    card = model_card(bt.Plan(), existing="---\nlicense: mit\n---\n# Original\n")
    again = model_card(replaced(), existing=card)
    assert again.count("## Loading") == 1
    assert again.rstrip().endswith("# Original")
    assert metadata(again)["license"] == "mit"
    assert metadata(again)["tags"].count("buttress") == 1


@pytest.mark.parametrize(
    "original", ["---\n: [broken\n---\nbody", "---\n- a list\n---\nbody", "---\n" + "[" * 1500 + "\n---\nbody", "body"]
)
def test_metadata_that_cannot_be_read_are_kept_as_text(original: str) -> None:
    card = model_card(bt.Plan(), existing=original)
    assert metadata(card)["library_name"] == "transformers"
    assert original in card


def test_names_cannot_break_the_table() -> None:
    plan = bt.Plan((bt.PlanEntry("a|b`\n# c", bt.Dense()),))
    assert "| `a\\|b # c` | `dense` |" in model_card(plan)


def test_a_card_is_written_and_read(tmp_path: Path) -> None:
    assert existing_card(tmp_path) is None
    write_card(tmp_path, "café\n")
    assert existing_card(tmp_path) == "café\n"
    (tmp_path / "README.md").write_bytes(b"\xff\xfe\x00")
    assert existing_card(tmp_path) is None
