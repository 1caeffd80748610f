"""The house rules that a program can check: short functions, unique names, small folders."""

import ast
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

from support.models import engine_for, kernels, make_requests, packed_model
from support.requests import planned

ROOT = Path(__file__).parent.parent
FUNCTION_LINES = 60
FOLDER_FILES = 20
ONE_KERNEL = {"attend_kernel"}
"""A kernel for a GPU is compiled as one function."""
ENTRY_POINTS = {"main"}
"""Where a process starts: the command, a worker, the check of a device."""
Modules = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def modules() -> Modules:
    """The sources, parsed. They are half a million objects, which no other test has to keep."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text("utf-8"))
        for package in ("batchgen", "cli/batchgen_cli")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def names_in(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_benchmarks_import_only_names_that_exist(modules):
    known = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): tree for path, tree in modules.items()}
    names_of = cache(lambda module: names_in(known[module]) if module in known else set())
    wrong = set()
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "batchgen":
                wrong |= {
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in names_of(node.module) and f"{node.module}.{alias.name}" not in known
                }
    assert wrong == set()


def test_functions_fit_on_a_screen(modules):
    long = {
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES
        and node.name not in ONE_KERNEL
    }
    assert long == set()


def test_classes_and_public_functions_have_unique_names(modules):
    """A private class does not share the name of another class either."""
    homes = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) or (
                isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in ENTRY_POINTS
            ):
                homes[node.name.lstrip("_")].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_private_name_means_one_thing_in_its_package(modules):
    homes = defaultdict(list)
    for path, tree in modules.items():
        for name in private_names(tree):
            homes[path.parent, name].append(path.name)
    assert {where: files for where, files in homes.items() if len(files) > 1} == {}


def private_names(tree: ast.Module) -> set[str]:
    """The private functions, classes and constants of a module."""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_no_folder_has_too_many_files(modules):
    files = Counter(path.parent for path in modules if not path.stem.startswith("__"))
    assert {str(folder): count for folder, count in files.items() if count > FOLDER_FILES} == {}


def test_every_module_has_a_docstring(modules):
    assert [str(path) for path, tree in modules.items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("compiled", [False, True], ids=["plain torch", "with kernels"])
def test_a_decode_step_passes_at_most_sixteen_files(compiled):
    """A newcomer who follows a step reads these files."""
    if compiled and kernels() is None:
        pytest.skip("the kernels cannot be compiled here")
    engine = engine_for(packed_model("llama", compiled=compiled), debug=False)
    requests = make_requests([[*range(40), i] for i in range(8)], [8] * 8)
    engine.add(*planned(requests), lambda result: None)
    for _ in range(4):
        engine.step()
    passed = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            passed.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    files = sorted(path for path in passed if path.startswith(str(ROOT / "batchgen")))
    assert str(ROOT / "batchgen" / "sampling" / "sampler.py") in files
    assert (str(ROOT / "batchgen" / "kernels" / "dense_layer.py") in files) == compiled
    assert len(files) <= 16, files
