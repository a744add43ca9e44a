"""Loading models from GGUF files: the header is checked first, and quantized weights are dequantized to float32."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from buttress.compression.transformers_loading import check_parameters, quiet
from buttress.errors import ButtressError, MissingExtraError, PlanError, first_line
from buttress.integrations.gguf_headers import GgufHeader

SUFFIX = ".gguf"


def gguf_file_of(source: Path) -> Path | None:
    """The GGUF file that a model is loaded from.

    Args:
        source: A GGUF file, or a model's folder.

    Returns:
        The file; None for a folder with safetensors files, or without a GGUF file.

    Raises:
        PlanError: If a folder holds several of them.
    """
    if source.is_file():
        return source
    files = sorted(p for p in source.glob(f"*{SUFFIX}") if p.is_file())
    if not files or any(source.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:4]) + (", ..." if len(files) > 4 else "")
        raise PlanError(f"{source} holds {len(files)} GGUF files: give one of them instead of the folder ({names})")
    return files[0]


def gguf_config(path: Path) -> tuple[Any, Any]:
    """The model class and the configuration that the metadata of a GGUF file describe.

    Args:
        path: The file, whose header has been checked.

    Returns:
        The class, of a language model where transformers has one of this architecture, and its configuration.

    Raises:
        ButtressError: If transformers does not know the architecture, or the metadata are incomplete.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    config = _from_file(transformers.AutoConfig, path, "configuration")
    for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)], config
    raise PlanError(f"transformers has no model class for {path}, a {type(config).__name__}")


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file.

    Args:
        path: The file, whose header has been checked.

    Returns:
        The tokenizer.

    Raises:
        ButtressError: If the file has none that transformers can read.
    """
    import transformers

    return _from_file(transformers.AutoTokenizer, path, "tokenizer")


def load_gguf(
    path: Path, header: GgufHeader, cls: Any, config: Any, device: torch.device | str
) -> tuple[Any, tuple[str, ...]]:
    """Load and dequantize a model, in eval mode and in float32.

    Args:
        path: The file.
        header: Its header.
        cls: The model's class.
        config: Its configuration.
        device: Device of the model.

    Returns:
        The model, as if it had been loaded from safetensors, and the names of its tensors that the file does not hold.

    Raises:
        ButtressError: If the tensors do not fit the configuration, or cannot be dequantized.
    """
    check_parameters(path, cls, config, header.shapes)
    try:
        with quiet(), redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off otherwise
            loaded, info = from_gguf(
                cls, path, config=config, dtype=torch.float32, output_loading_info=True, **_dequantizing()
            )
            if info["mismatched_keys"]:
                raise ValueError(f"{next(iter(info['mismatched_keys']))} has another shape in the file")
            # A model of its own, so that nothing in it or its configuration says that it is quantized.
            model = cls.from_pretrained(None, config=config, state_dict=loaded.state_dict(), dtype=torch.float32)
        return model.to(device).eval(), tuple(sorted(info["missing_keys"]))
    except Exception as error:  # damaged files raise errors of many types
        raise _failure(path, "model", error) from error


def _dequantizing() -> dict[str, Any]:
    """Keywords for weights that are dequantized as they are loaded: packed ones may ask a hub for kernels."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # earlier versions always dequantize
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _from_file(auto: Any, path: Path, what: str) -> Any:
    try:
        with quiet():
            return from_gguf(auto, path)
    except Exception as error:  # missing and damaged metadata raise errors of many types
        raise _failure(path, what, error) from error


def from_gguf(cls: Any, path: Path, **options: Any) -> Any:
    """`cls.from_pretrained` of a GGUF file alone.

    The folder is an empty one, because files beside the GGUF file would take precedence. The path is the whole one,
    because transformers prefers a file of the same name in the working directory.
    """
    with tempfile.TemporaryDirectory() as empty:
        return cls.from_pretrained(
            empty, gguf_file=str(path.resolve()), trust_remote_code=False, local_files_only=True, **options
        )


def _failure(path: Path, what: str, error: Exception) -> ButtressError:
    if "accelerate" in str(error) and "required" in str(error):
        return MissingExtraError("transformers needs accelerate to load GGUF files: pip install accelerate")
    return ButtressError(f"the {what} in {path} cannot be loaded: {type(error).__name__}: {first_line(error)}")
