"""The site of the documents: `make docs` writes it to the folder `site`."""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

project = "HolmesJAX"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

html_theme = "furo"
html_title = "HolmesJAX"
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
default_role = "code"  # docstrings have single backticks
autodoc_member_order = "bysource"
autoclass_content = "both"  # the arguments of a class are described in its __init__
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False


def _write_reference(app: Sphinx) -> None:
    from docs import reference_pages

    reference_pages.write(Path(app.srcdir) / "reference")


def _link_to_files(app: Sphinx, page: str, content: list[str]) -> None:
    """Makes files outside of docs/ downloads, and folders plain names."""
    docs = Path(app.srcdir).resolve()
    folder = (docs / page).parent

    def changed(link: re.Match[str]) -> str:
        text, target = link[1], link[2].partition("#")[0]
        file = (folder / target).resolve()
        if file.is_relative_to(docs):
            return link[0]
        return text if file.is_dir() else f"[{text}](path:{target})"

    content[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)", changed, content[0])


def _show_indented_lines_as_they_are(*arguments: Any) -> None:
    """Makes an indented block of a docstring a literal one, as Markdown has it."""
    lines = arguments[-1]
    for i in range(len(lines) - 1, 1, -1):
        is_block = lines[i].startswith("    ") and not lines[i - 1].strip()
        if is_block and lines[i - 2].strip() and not lines[i - 2].startswith(" "):
            lines[i - 1 : i] = ["", "::", ""]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_to_files)
    app.connect("builder-inited", _write_reference)
    app.connect("autodoc-process-docstring", _show_indented_lines_as_they_are)
