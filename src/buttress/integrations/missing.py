"""Why an optional library cannot be imported, and what to install."""

from __future__ import annotations

from importlib import metadata

from buttress.errors import MissingExtraError

FAILURES = (ImportError, RuntimeError, OSError, AttributeError)
"""What importing a broken installation raises: compiled extensions that do not fit each other raise RuntimeError."""
_REQUIREMENTS = {"transformers": "transformers>=5.6", "timm": "timm>=1.0.26", "safetensors": "safetensors>=0.4.5"}


def import_failure(module: str, library: str, error: BaseException) -> MissingExtraError:
    """The error that names the package at fault.

    Args:
        module: Our module that was imported, such as "buttress.hf".
        library: The library that it integrates.
        error: What the import raised.

    Returns:
        An error that says what to install.

    Example:
        >>> str(import_failure("buttress.hf", "transformers", ModuleNotFoundError(name="transformers")))
        "buttress.hf needs transformers: pip install 'transformers>=5.6'"
    """
    cause = _root(error)
    package = (getattr(cause, "name", None) or "").partition(".")[0]
    if isinstance(cause, ModuleNotFoundError) and package and _version(package) is None:
        return MissingExtraError(f"{module} needs {package}: pip install '{_REQUIREMENTS.get(package, package)}'")
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return MissingExtraError(
        f"{module} cannot use {library} {_version(library) or '(unknown version)'} as it is installed ({reason}): "
        f"install versions that fit each other, such as pip install '{_REQUIREMENTS.get(library, library)}'"
    )


def _root(error: BaseException) -> BaseException:
    """The first error of a chain."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
