"""Configuration of the documentation site: make site."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "beside_cpu_torch")]
os.environ.setdefault("TRITON_INTERPRET", "1")

import sitecustomize  # noqa: E402, F401  (makes timm and transformers importable next to a CPU build of torch)

import buttress  # noqa: E402

project = "buttress"
author = "The buttress authors"
copyright = author
version = release = buttress.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# Markdown and notebooks. Headings get the anchors that GitHub gives them; notebooks show their stored outputs.
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # no widgets, and no script from another server

# The API, from docstrings in Google style.
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Shape", "notes_style")]
python_maximum_signature_line_length = 110
add_module_names = False
toc_object_entries_show_parents = "hide"
# Names in single backticks link to what the site documents and are plain code otherwise.
default_role = "py:obj"

# Every reference to a public name must resolve. Names of inner modules and of other libraries stay unlinked: a build
# fetches nothing.
nitpicky = True
nitpick_ignore_regex = [("py:obj", r".*"), ("py:.*", r"(?!buttress\.\w+$).*")]

html_theme = "furo"
html_title = "buttress"
html_static_path = ["_static"]
html_css_files = ["buttress.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

CODE_OR_ASTERISK = re.compile(r"(`+).*?\1|\*")


def read_as_plain_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Adapt docstrings, which are plain text with code in backticks, to reStructuredText.

    Asterisks outside of code are not emphasis. The first line of an attribute's text is not "type: description", as
    napoleon would read it.
    """
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[i] = CODE_OR_ASTERISK.sub(lambda match: match[0] if match[1] else r"\*", line)
    if what in ("attribute", "data", "property") and lines:
        lines.insert(0, "\\ ")  # which reStructuredText shows as nothing


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_as_plain_text, priority=100)  # before napoleon
