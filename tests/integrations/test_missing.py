"""What is said if a library cannot be imported: the package at fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

import buttress as bt
from buttress.integrations.missing import import_failure


def chained(cause: BaseException) -> ImportError:
    try:
        try:
            raise cause
        except type(cause) as first:
            raise ImportError("could not import module 'LlamaModel'") from first
    except ImportError as error:
        return error


def test_a_missing_package_is_named() -> None:
    error = import_failure("buttress.hf", "transformers", ModuleNotFoundError(name="transformers_of_nobody.models"))
    assert isinstance(error, bt.MissingExtraError)
    assert str(error) == "buttress.hf needs transformers_of_nobody: pip install 'transformers_of_nobody'"


def test_the_root_of_a_broken_installation_is_named() -> None:
    cause = RuntimeError("operator torchvision::nms does not exist")
    text = str(import_failure("buttress.hf", "transformers", chained(cause)))
    assert "operator torchvision::nms does not exist" in text
    assert "transformers" in text
    assert "buttress[" not in text


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from importlib import metadata
real = metadata.version
def version(name):
    if name in sys.argv[1:]:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
import buttress as bt
for module in ("hf", "vision"):
    try:
        __import__(f"buttress.{module}")
    except bt.MissingExtraError as error:
        print(error)
"""


def test_modules_say_what_to_install() -> None:
    command = [sys.executable, "-c", BLOCKED, "transformers", "timm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "buttress.hf needs transformers: pip install 'transformers>=5.6'",
        "buttress.vision needs timm: pip install 'timm>=1.0.26'",
    ], done.stderr


@pytest.mark.parametrize("name", ["safetensors"])
def test_a_package_below_the_library_is_named(name: str) -> None:
    text = str(import_failure("buttress.vision", "timm", chained(ModuleNotFoundError(name=f"{name}_gone"))))
    assert f"needs {name}_gone" in text
