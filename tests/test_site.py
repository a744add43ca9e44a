"""The site: every link leads somewhere, every public name is documented, every page is reachable."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import buttress as bt
from pages import DOCS, ROOT, TUTORIALS, anchors, cells, name, pages, without_code

LINK = re.compile(r"\]\(([^()\s]*)\)")


def text_of(path: Path) -> str:
    if path.suffix == ".ipynb":
        return "\n".join("".join(c["source"]) for c in cells(path) if c["cell_type"] == "markdown")
    return path.read_text()


@pytest.mark.parametrize("path", [*pages(), *TUTORIALS], ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(without_code(text_of(path))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_public_name_is_documented() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference/api").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:class|function|exception|decorator):: (\w+)$", text, re.MULTILINE)
    assert set(bt.__all__) <= set(listed)
    assert all(listed.count(public) == 1 for public in bt.__all__)


@pytest.mark.parametrize("module", ["hf", "vision"])
def test_every_name_of_an_integration_is_documented(module: str) -> None:
    pytest.importorskip({"hf": "transformers", "vision": "timm"}[module])
    names = __import__(f"buttress.{module}", fromlist=["__all__"]).__all__
    text = (DOCS / f"reference/api/{module}.md").read_text()
    assert set(names) <= set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))


def test_every_page_is_in_the_navigation() -> None:
    listed = set()
    for index in DOCS.rglob("index.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(), re.DOTALL | re.MULTILINE):
            entries = re.findall(r"^(?:[^:\n]+ <)?([\w/-]+)>?$", tree, re.MULTILINE)
            listed |= {(index.parent / entry).relative_to(DOCS) for entry in entries}
    sources = [p for p in pages() if DOCS in p.parents] + TUTORIALS
    assert listed == {p.relative_to(DOCS).with_suffix("") for p in sources} - {Path("index")} | {Path("self")}


class Assets(HTMLParser):
    """What a browser loads to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.addresses.append(values.get("href") or "")


def test_site_builds_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "docs", str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "html").rglob("*.html"))
    assert len(built) > 40
    for page in built:
        assets = Assets()
        assets.feed(page.read_text())
        assert not [a for a in assets.addresses if re.match(r"(https?:)?//", a)], page.name
    index = (tmp_path / "html/searchindex.js").read_text()
    assert "coordinate_check" in index
