"""The documentation is true: its Python runs, its links lead somewhere, its examples in docstrings hold."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import flash_ext

ROOT = Path(__file__).parent.parent
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "bench/*.md", "tests/*.md", "csrc/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]
if not PAGES:
    pytest.skip("no documentation beside the tests", allow_module_level=True)


def skip_without_transformers(text):
    if "transformers import" in text:
        pytest.importorskip("transformers")


def blocks():
    for page in PAGES:
        for i, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        ):
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{i}")


@pytest.mark.parametrize("block", list(blocks()))
def test_python_blocks_run(block):
    skip_without_transformers(block)
    exec(compile(block, "<documentation>", "exec"), {"__name__": "__documentation__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page):
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_named_paths_exist():
    """Folders and files of the repository that a page names in backticks exist."""
    for page in PAGES:
        for name in re.findall(
            r"`((?:csrc|flash_ext|bench|examples|docs|tools|tests)/[\w./-]+)`", page.read_text()
        ):
            is_built = name.startswith(("flash_ext/lib/", "bench/results"))
            is_future = name.startswith(("csrc/fa1", "csrc/fa2", "csrc/fa3", "csrc/faN"))
            assert is_built or is_future or (ROOT / name).exists(), f"{page.name} names {name}"


MODULES = [name for _, name, _ in pkgutil.walk_packages(flash_ext.__path__, "flash_ext.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("__main__", "._C"))])
def test_docstring_examples(name):
    if "integrations." in name:
        pytest.importorskip(name.rpartition(".")[2])
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
