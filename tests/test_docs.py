"""The docs name only files and functions that exist, and the site shows every page."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(p.relative_to(ROOT) for p in [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"])
DECISIONS = ROOT / "docs" / "decisions"


def named_files(text: str) -> set[str]:
    """Paths in backticks that begin with a folder of the repository or of the package."""
    folders = {p.name for p in [*ROOT.iterdir(), *(ROOT / "batchgen").iterdir()] if p.is_dir()}
    found = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|cpp|sh|json|jsonl|parquet|txt))(?:::\w+)?`", text)
    return {path for path in found if path.split("/")[0] in folders}


@pytest.mark.parametrize("page", [p for p in PAGES if DECISIONS not in (ROOT / p).parents], ids=str)
def test_every_file_that_a_page_names_exists(page):
    named = named_files((ROOT / page).read_text("utf-8"))
    assert {path for path in named if not ((ROOT / path).exists() or (ROOT / "batchgen" / path).exists())} == set()


def defined_in(path: Path) -> set[str]:
    """The names that a module defines: functions, classes, and methods both as `Class.method` and as `method`."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            found.update(methods, (f"{node.name}.{method}" for method in methods))
    return found


def test_the_functions_that_the_architecture_page_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", page, re.MULTILINE)
    assert len({file for file, _ in rows}) == 16
    named = [(file, name) for file, rest in rows for name in re.findall(r"`([A-Za-z_][\w.]*)`", rest)]
    assert [(file, name) for file, name in named if name not in defined_in(ROOT / "batchgen" / file)] == []
    five = re.findall(r"\]\(batchgen/([\w/]+\.py)\)", (ROOT / "README.md").read_text("utf-8"))
    assert five == [file for file, _ in rows][:5]


def test_the_site_shows_every_page():
    shown = re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(str(p.relative_to("docs")) for p in PAGES if p.parts[0] == "docs")
