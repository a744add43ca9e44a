"""transformers: saving and loading structured models like any other, without remote code.

    import buttress.hf

    buttress.hf.save(model, "small", tokenizer)             # written atomically
    model = AutoModelForCausalLM.from_pretrained("small")   # anywhere, after `import buttress.hf`

The plan is in the model's config under "quantization_config", where transformers looks up how weights are stored.
Surgery writes it there. Importing this module registers how such models are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buttress.files import new_folder
from buttress.integrations.missing import FAILURES, import_failure
from buttress.integrations.model_card import existing_card, model_card, write_card
from buttress.surgery import Plan
from buttress.surgery.config_entry import record_plan

try:
    from transformers import PreTrainedModel

    from buttress.integrations import transformers_hooks
    from buttress.integrations.structured_loader import StructuredConfig, adapted
except FAILURES as error:
    raise import_failure("buttress.hf", "transformers", error) from error

__all__ = ["StructuredConfig", "adapted", "attach", "save"]

transformers_hooks.install()


def attach(model: PreTrainedModel) -> None:
    """Write a model's plan into its config, or remove it if no layer is structured any more.

    `replace_`, `densify_` and saving do so by themselves. Call it where another tool writes `model.config`.

    Args:
        model: The model whose config is changed.

    Example:
        >>> hf.attach(model)
        >>> model.config.save_pretrained("small")
    """
    record_plan(model)


def save(model: PreTrainedModel, folder: Path | str, *others: Any) -> Path:
    """Save a model to a new folder, atomically, with a model card.

    The card of the folder that the model was loaded from is kept below the new one.

    Args:
        model: The model, structured or not.
        folder: The folder to write. It must not exist, or be empty.
        *others: A tokenizer, or anything else with `save_pretrained`.

    Returns:
        The folder.

    Raises:
        PlanError: If the folder is not empty, or the model is quantized as well.

    Example:
        >>> buttress.hf.save(model, "small", tokenizer)
        >>> model = AutoModelForCausalLM.from_pretrained("small")
    """
    plan = Plan.of(model)
    with new_folder(folder) as part:
        model.save_pretrained(part)
        for other in others:
            other.save_pretrained(part)
        if plan.entries:
            origin = getattr(model, "name_or_path", None) or None
            card = None if origin is None else existing_card(Path(origin))
            write_card(part, model_card(plan, base_model=origin, existing=card))
    return Path(folder)
