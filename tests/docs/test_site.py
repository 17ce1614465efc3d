"""The site of the documents: it is built without a warning, and its reference is the code's."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import reference_pages
from holmesjax import config as configs
from launch import arguments

CHECKOUT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    subprocess.run(
        [*command, "-d", str(out / "trees"), str(CHECKOUT / "docs"), str(out / "html")],
        check=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return out / "html"


def test_the_site_has_a_page_for_every_document_and_finds_words(site):
    docs = CHECKOUT / "docs"
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.glob("**/*.md")}
    pages = {page for page in pages if not page.startswith("reference/")}
    built = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    made = {f"reference/{name}" for name in ("settings", "commands", "modules", "gallery")}
    assert pages | made <= built
    index = (site / "searchindex.js").read_text()
    assert "microbatch" in index
    settings = (site / "reference/settings.html").read_text()
    assert "settings docutils container" in settings  # cards on a narrow screen
    assert "site.css" in settings
    links = re.findall(r'href="([a-z0-9_/]+)\.html', (site / "index.html").read_text())
    assert pages - {"index"} <= set(links)  # every page stands in the menu


def test_the_settings_page_has_every_setting_with_its_default():
    page = reference_pages.settings()
    for field in dataclasses.fields(configs.Config):
        for setting in dataclasses.fields(field.type) if field.name != "topology" else ():
            assert re.search(rf"^\| `{setting.name}` \|", page, re.MULTILINE), setting.name
    train = page[page.index("## `train`") : page.index("## `model`")]
    assert "| `steps` | whole number, at least 1 |  | Optimizer steps of the whole run. |" in train
    assert "| `seed` | whole number, at least 0 | `0` |" in train
    parallel = page[page.index("## `parallel`") : page.index("## `plan`")]
    schedules = parallel.partition("`schedule` | ")[2].partition(" | `null`")[0]
    assert {"`1f1b`", "`gpipe`", "`zero_bubble`"} <= set(re.split(r"[,;] ", schedules))
    assert "| list of: whole number, at least 1; or null | `null` |" in parallel
    mixture = page[page.index("## `data.mixture`") : page.index("## `data.mixture_changes`")]
    assert "| `corpus` | text |  | As data.corpus. |" in mixture  # of the class below


def test_the_pages_in_the_checkout_are_those_of_the_code():
    for name, text in reference_pages.kept().items():
        is_same = (CHECKOUT / "docs/reference" / name).read_text() == text
        assert is_same, f"run `python -m docs.reference_pages`, and look at {name}"


def test_a_setting_without_a_sentence_is_an_error(monkeypatch):
    read, comment = Path.read_text, "  # tokens in a sequence"
    silent = lambda path, **how: read(path, **how).replace(comment, "")
    monkeypatch.setattr(Path, "read_text", silent)
    with pytest.raises(ValueError, match=r"ModelConfig\.context_length has no comment"):
        reference_pages.settings()


def test_the_page_of_commands_has_every_verb_with_its_options():
    page = reference_pages.commands()
    for name in arguments.VERBS:
        assert f"\n## `{name}`\n" in page
    assert "--launcher {local,external,ssh,slurm,kubernetes,skypilot,ray}" in page
