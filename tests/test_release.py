"""What a release states about itself: versions, addresses, the description on a package index, the workflow."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import buttress

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")
SUPPORTED = ["3.11", "3.12", "3.13"]

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def description() -> str:
    """README.md as a package index shows it."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text(encoding="utf-8") for fragment in hook["fragments"])
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == buttress.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors", "type", "references"} <= set(citation)


def test_the_changelog_starts_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == buttress.__version__


def test_the_description_on_an_index_has_no_relative_links() -> None:
    targets = LINK.findall(description())
    assert [target for target in targets if not target.startswith("https://")] == []
    relative = [target for target in LINK.findall((ROOT / "README.md").read_text()) if "://" not in target]
    assert len(targets) >= len(relative) > 0
    for target in relative:
        assert (ROOT / target.partition("#")[0]).exists(), target


def test_addresses_of_the_project_are_stated_in_one_file() -> None:
    addresses = PROJECT["project"]["urls"]
    home = addresses["Repository"]
    assert all(address.startswith(home) for address in addresses.values())
    assert home in description()
    own = {"CITATION.cff", "README.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert [name for name in sorted(own) if home in (ROOT / name).read_text(encoding="utf-8")] == []


def test_the_workflow_tests_every_supported_python_and_builds_the_site() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == SUPPORTED
    assert workflow["permissions"] == {"contents": "read"}
    assert {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step} == {
        "make test",
        "make site",
        "make dist",
    }
    assert all(job["timeout-minutes"] <= 90 for job in jobs.values())


def test_classifiers_name_every_supported_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    classifiers = PROJECT["project"]["classifiers"]
    assert [c.removeprefix(prefix) for c in classifiers if c.startswith(prefix)] == [v[2:] for v in SUPPORTED]
    assert PROJECT["project"]["requires-python"] == f">={SUPPORTED[0]}"
