"""from_pretrained: the model in a folder, of whichever library. Libraries are imported when such a folder is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from buttress.errors import ButtressError, PlanError, first_line, quoted

Library = Literal["transformers", "sentence-transformers", "timm"]


def from_pretrained(folder: Path | str, cls: type | None = None, **kwargs: Any) -> Any:
    """Load the model in a folder, structured or dense, of transformers, sentence-transformers or timm.

    A folder is data: code in it never runs, only safetensors files are read, and nothing is downloaded. Every weight of
    the model comes from its files; in a sentence-transformers folder, those that do not are named in a warning.

    Args:
        folder: The folder on this machine.
        cls: A class of transformers with `from_pretrained`. By default it is the class that the config names. Weights
            of the folder that it does not have, such as those of a head, are named in a warning.
        **kwargs: Options of that `from_pretrained`, such as dtype and device_map; of SentenceTransformer; or, for
            timm, device.

    Returns:
        The model, in eval mode.

    Raises:
        PlanError: If the folder holds no such model, or its files are damaged or do not belong together; if
            transformers does not have the class that the config names; or if the model would have new, random weights.
        MissingExtraError: If the library is not installed.

    Example:
        >>> model = bt.from_pretrained("small")
        >>> model = bt.from_pretrained("small", dtype=torch.bfloat16, device_map="auto")
    """
    source = Path(folder)
    if not source.is_dir():
        raise PlanError(f"{folder} is not a folder on this machine: download the model first, or check the path")
    if kwargs.pop("trust_remote_code", False):
        raise PlanError("trust_remote_code is not supported: code of a model's folder is never run here")
    match library_of(source):
        case "timm":
            return _from_timm(source, cls, kwargs)
        case "sentence-transformers":
            return _from_sentence_transformers(source, cls, kwargs)
        case _:
            return _from_transformers(source, cls, kwargs)


def library_of(folder: Path) -> Library:
    """The library that a model's folder belongs to.

    Args:
        folder: The folder.

    Returns:
        sentence-transformers lists modules, and timm names an architecture; anything else is transformers'.

    Raises:
        PlanError: If the folder holds no model's config, or it is damaged.
    """
    if (folder / "modules.json").is_file():
        return "sentence-transformers"
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise PlanError(f"{folder} holds an adapter, not a model: load the model, then the adapter with peft")
        if (folder / "buttress-adapter.json").is_file():
            raise PlanError(f"{folder} holds an adapter, not a model: load the model, then call bt.load_adapter_")
        raise PlanError(f"{folder} holds no model: there is no config.json in it")
    data = _read_json(path)
    if not isinstance(data, dict):
        raise PlanError(f"{path} does not hold a JSON object: save the model again")
    return "timm" if "architecture" in data else "transformers"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({first_line(error)}): save the model again") from None


def _from_timm(source: Path, cls: type | None, kwargs: dict[str, Any]) -> Any:
    from buttress.integrations import timm as vision

    device: torch.device | str = kwargs.pop("device", "cpu")
    if cls is not None or kwargs:
        raise PlanError(f"a timm folder is loaded with device alone, got {', '.join(kwargs) or 'cls'}: leave it out")
    return vision.load(source, device)


def _from_sentence_transformers(source: Path, cls: type | None, kwargs: dict[str, Any]) -> Any:
    import buttress.integrations.transformers  # noqa: F401  (registers the loader)
    from buttress.integrations import transformers_folder
    from buttress.integrations.missing import FAILURES, import_failure

    try:
        from sentence_transformers import SentenceTransformer
    except FAILURES as error:
        raise import_failure("bt.from_pretrained", "sentence-transformers", error) from error
    if cls is not None:
        raise PlanError("a sentence-transformers folder names its own classes: leave cls out")
    folders = _module_folders(source)
    options = kwargs | {"model_kwargs": (kwargs.get("model_kwargs") or {}) | {"use_safetensors": True}}
    try:
        model = SentenceTransformer(str(source), trust_remote_code=False, local_files_only=True, **options)
    except ButtressError:
        raise
    except Exception as error:  # broken files raise errors of many types
        raise _unreadable(source, error) from error
    for module, folder in zip(model.children(), folders, strict=False):
        transformers_folder.name_random_weights(module, folder)
    return model.eval()


def _module_folders(source: Path) -> list[Path]:
    """The folder of each module; those that would run code of others, lie elsewhere or be unpickled are refused."""
    listing = source / "modules.json"
    folders: list[Path] = []
    for module in _as_list(_read_json(listing)):
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (module, "")
        if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
            raise PlanError(f"{listing} names a class outside sentence-transformers, which is not run: {quoted(kind)}")
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise PlanError(f"{listing} names a module outside its folder, which is not read: {quoted(path)}")
        folders.append(source / path)
    for pickled in sorted(source.rglob("pytorch_model*.bin")):
        # sentence-transformers reads it where there is no file with this name next to it.
        if not any((pickled.parent / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            raise PlanError(f"{pickled} is a pickle, which is not read: save the model with safetensors")
    return folders


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _from_transformers(source: Path, cls: type | None, kwargs: dict[str, Any]) -> Any:
    import buttress.integrations.transformers  # noqa: F401  (registers the loader)
    from buttress.integrations import transformers_folder

    if (source / "adapter_config.json").is_file():
        raise PlanError(f"{source} holds an adapter too: load the model from a folder of its own, then the adapter")
    try:
        return transformers_folder.load(source, cls, kwargs)
    except ButtressError:
        raise
    except Exception as error:  # broken files raise errors of many types
        raise _unreadable(source, error) from error


def _unreadable(source: Path, error: Exception) -> PlanError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return PlanError(f"the model in {source} cannot be loaded ({reason[:300]})")
