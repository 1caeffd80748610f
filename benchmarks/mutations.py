"""Which small faults do the tests notice? `python -m benchmarks.mutations --work FOLDER` (hours for all; `--count 40` for a sample)

Copies the tree to FOLDER, and notes there which functions each test calls. Then it puts one fault at a time into a module (a comparison turned
round, a call left out, a number one larger) and runs the tests that call the function, for at most `--seconds`: first those of the module's own
folder, and unless one of them fails the others, the fastest first. Each fault is written to `--output` as a line of JSON: where it is, whether the tests
caught it, and which did (all of its folder that do, or the first of the others). A run that was interrupted goes on where it stopped. The same `--seed`
makes the same faults. `--again FILE` repeats the faults of such a file in the present tree: one that was caught by a test that is still the same stays
caught, and one whose line is no longer there is gone.
Tests run in forks of one process that has imported torch. Not as root: changed code may put its output in the place of a device (/dev/full).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "batchgen",
    "benchmarks",
    "cli",
    "docs",
    "sample_data",
    "tests",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
)
AREAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scheduler": ("batchgen/scheduling/[!b]*.py", ("tests/scheduling", "tests/engine")),
    "blocks": ("batchgen/scheduling/b*.py", ("tests/scheduling", "tests/engine")),
    "prefix": ("batchgen/prefix/*.py", ("tests/prefix",)),
    "engine": (
        "batchgen/engine/*.py",
        (
            "tests/engine",
            "tests/parity/test_long_rope.py",
            "tests/parity/test_recurrent.py",
            "tests/test_embed.py",
            "tests/test_image_rows.py",
            "tests/cli/test_result_kinds.py",
        ),
    ),
    "drafts": ("batchgen/drafting/*.py", ("tests/drafting", "tests/engine")),
    "devices": ("batchgen/devices/*.py", ("tests/devices",)),
    "model": ("batchgen/model/**/*.py", ("tests/model", "tests/parity")),
    "kernels": ("batchgen/kernels/*.py", ("tests/kernels", "tests/parity")),
    "attention": ("batchgen/attention/*.py", ("tests/attention",)),
    "state": (
        "batchgen/state/*.py",
        (
            "tests/state",
            "tests/kernels/test_recurrent.py",
            "tests/parity/test_recurrent.py",
            "tests/test_recurrent_job.py",
        ),
    ),
    "jobs": (
        "batchgen/jobs/**/*.py",
        ("tests/jobs", "tests/recording", "tests/test_job.py", "tests/test_whole.py", "tests/test_shards.py"),
    ),
    "records": ("batchgen/records/*.py", ("tests/records", "tests/test_openai_batch.py")),
    "sampling": ("batchgen/sampling/*.py", ("tests/sampling",)),
    "prompts": (
        "batchgen/prompts/*.py",
        ("tests/prompts", "tests/test_openai_endpoints.py", "tests/model/test_gguf_models.py"),
    ),
    "parsers": (
        "batchgen/parsers/*.py",
        (
            "tests/parsers",
            "tests/sampling/test_reasoning.py",
            "tests/sampling/test_tool_calls.py",
            "tests/test_tool_rows.py",
            "tests/test_reasoning_rows.py",
        ),
    ),
    "command": ("cli/batchgen_cli/*.py", ("tests/cli",)),
    "reports": ("batchgen/recording/*.py", ("tests/recording", "tests/report")),
}
"""The modules of each area, and the tests among which those that call a faulty function are looked for."""
OPPOSITE: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
ENVIRONMENT = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "HF_HUB_OFFLINE", "TRITON_INTERPRET"), "1"
)
"""What tests/conftest.py sets, for modules that are imported before it."""
FOUND = ("found", "by")
"""What a line of the output has beside the fault: the result, and the tests that failed with the digests of their code."""
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """`new` in place of `old` at `column` of a line of `file` that reads `line`, the `nth` of such lines in it."""

    area: str
    file: str
    line: str
    nth: int
    column: int
    old: str
    new: str


class _Finder(ast.NodeVisitor):
    """Collects pairs of a node and the source that replaces it. Leaves annotations, docstrings and messages of errors alone."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._starts = [0, *accumulate(map(len, self._bytes.splitlines(keepends=True)))]
        self.found: list[tuple[ast.expr | ast.stmt, str]] = []

    def text(self, node: ast.AST) -> str:
        return f"({self.segment(node)})"

    def segment(self, node: Any) -> str:
        """Returns the source of a node. `ast.get_source_segment` looks for it from the first line on, which takes minutes here."""
        start = self._starts[node.lineno - 1] + node.col_offset
        return self._bytes[start : self._starts[node.end_lineno - 1] + node.end_col_offset].decode()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *filter(None, node.kw_defaults)):
            self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.found.append((node.test, f"not {self.text(node.test)}"))
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.found.append((node.test, f"(not {self.text(node.test)})"))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            new = f"{self.text(node.left)} {OPPOSITE[type(node.ops[0])]} {self.text(node.comparators[0])}"
            self.found.append((node, f"({new})"))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(
            isinstance(n, ast.JoinedStr | ast.List) or isinstance(getattr(n, "value", 0), str) for n in ast.walk(node)
        )
        if type(node.op) in OPPOSITE and not texts:
            self.found.append((node, f"({self.text(node.left)} {OPPOSITE[type(node.op)]} {self.text(node.right)})"))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.found.append((node, f"({f' {OPPOSITE[type(node.op)]} '.join(map(self.text, node.values))})"))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.found.append((node, self.text(node.operand)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.found.append((node, str(not node.value)))
        elif isinstance(node.value, int):
            self.found.append((node, str(node.value + 1)))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.found.append((node, "..."))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not isinstance(node.value, ast.Constant):
            self.found.append((node, "return None"))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in OPPOSITE:
            target, value = ast.unparse(node.target), self.text(node.value)
            self.found.append((node, f"{target} {OPPOSITE[type(node.op)]}= {value}"))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in OTHER_NAME:
            self.found.append((node, OTHER_NAME[node.id]))


def faults_of(area: str, file: str, source: str) -> Iterator[Fault]:
    """Yields all faults that a module can be given."""
    lines = source.splitlines()
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    for node, new in finder.found:
        line = lines[node.lineno - 1]
        column = len(line.encode()[: node.col_offset].decode())
        yield Fault(area, file, line, lines[: node.lineno - 1].count(line), column, finder.segment(node), new)


def line_number(source: str, fault: Fault) -> int:
    """Returns the number of the fault's line, from 1; 0 if it is no longer there."""
    places = [i for i, line in enumerate(source.splitlines(), start=1) if line == fault.line]
    return places[fault.nth] if fault.nth < len(places) else 0


def with_fault(source: str, fault: Fault) -> str | None:
    """Returns the module with the fault, or None if its place is no longer there."""
    number = line_number(source, fault)
    if not number:
        return None
    at = sum(map(len, source.splitlines(keepends=True)[: number - 1])) + fault.column
    if not source.startswith(fault.old, at):
        return None
    return source[:at] + fault.new + source[at + len(fault.old) :]


def sample(count: int, seed: int, areas: Iterable[str] = AREAS) -> list[Fault]:
    """Returns `count` faults, as many from each area if it has them, and in an area from all of its modules."""
    chosen: list[Fault] = []
    shuffled = random.Random(seed)
    queues: list[list[Fault]] = []
    for area in areas:
        found = [
            fault
            for path in sorted(ROOT.glob(AREAS[area][0]))
            for fault in faults_of(area, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        ]
        shuffled.shuffle(found)
        queues.append(found)
    while len(chosen) < count and any(queues):
        chosen += [queue.pop() for queue in queues if queue]
    return chosen[:count]


def function_of(source: str, number: int) -> str:
    """Returns the qualified name of the function that line `number` is in; empty if it is in none."""
    names: list[tuple[int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            below = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                below = f"{prefix}{child.name}."
                if isinstance(child, ast.FunctionDef):
                    if child.body[0].lineno <= number <= (child.end_lineno or 0):
                        names.append((child.lineno, prefix + child.name))
                    below += "<locals>."
            visit(child, below)

    visit(ast.parse(source), "")
    return max(names, default=(0, ""))[1]


class CallRecorder:
    """A plugin of pytest that appends a line of JSON to `file` for each test: its name, how long it took, and the functions that it called."""

    def __init__(self, file: Path, tree: Path) -> None:
        self._file, self._tree = file, f"{tree}{os.sep}"
        self._called: set[tuple[str, str]] = set()
        self._lines: list[str] = []
        self._at = ""

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        self._called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if str(item.path) != self._at:
            self.pytest_sessionfinish()
            self._at = str(item.path)
        self._called.clear()
        start = time.monotonic()
        threading.settrace(self._note)
        sys.settrace(self._note)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        here = f"{self._tree}batchgen{os.sep}", f"{self._tree}cli{os.sep}"
        found = self._called.copy()  # threads of the test may still run
        called = sorted([f.removeprefix(self._tree), name] for f, name in found if f.startswith(here))
        seconds = round(time.monotonic() - start, 3)
        entry = {"test": item.nodeid, "digest": digest(item.path), "seconds": seconds, "called": called}
        self._lines.append(json.dumps(entry) + "\n")

    def pytest_sessionfinish(self) -> None:
        """Writes the tests of a file when all of them have run."""
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
        self._lines.clear()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


class Runner:
    """Runs tests of a copy of the tree in forks of this process."""

    def __init__(self, work: Path, seconds: float) -> None:
        self.tree = work / "tree"
        self.log = work / "log"
        self._calls = work / "calls.jsonl"
        self._limit = seconds
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in COPIED:
            there, copy = ROOT / name, self.tree / name
            if there.is_dir():
                shutil.copytree(there, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(there, copy)
        self.paths = [str(self.tree), str(self.tree / "cli"), str(self.tree / "tests")]
        self.callers: dict[tuple[str, str], list[tuple[float, str]]] = {}
        """The tests that call a function of a file, and the seconds that each takes."""
        self.seconds: dict[str, float] = {}

    def learn(self, areas: Iterable[str]) -> None:
        """Notes which functions the tests of these areas call. Test files that are as they were when this was last done do not run."""
        for folder in dict.fromkeys(folder for area in areas for folder in AREAS[area][1]):
            known = {(entry["test"].partition("::")[0], entry["digest"]) for entry in self._entries()}
            path = self.tree / folder
            files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            new = [name for f in files if ((name := f.relative_to(self.tree).as_posix()), digest(f)) not in known]
            if new and self.run(new, 1800.0, (), CallRecorder(self._calls, self.tree)) not in (0, 5):
                sys.exit(f"without any fault, tests of {folder} fail or take half an hour; see {self.log}")
        for entry in self._entries():
            test, seconds = entry["test"], entry["seconds"]
            if digest(self.tree / test.partition("::")[0]) == entry["digest"]:
                self.seconds[test] = seconds
                for file, name in entry["called"]:
                    self.callers.setdefault((file, name), []).append((seconds, test))

    def _entries(self) -> Iterator[dict[str, Any]]:
        if self._calls.exists():
            yield from map(json.loads, self._calls.read_text(encoding="utf-8").splitlines())

    def tests_of(self, fault: Fault) -> tuple[list[str], list[str]]:
        """Returns the tests that call the faulty function, as many as the limit allows: those of the module's own folder, and the others."""
        source = (self.tree / fault.file).read_text(encoding="utf-8")
        callers = self.callers.get((fault.file, function_of(source, line_number(source, fault))))
        own = AREAS[fault.area][1][0]
        if callers is None:  # it runs when the module is imported, or in another process
            callers = [(seconds, test) for test, seconds in self.seconds.items() if test.startswith(own)]
        stem = f"/test_{Path(fault.file).stem}.py::"
        chosen: tuple[list[str], list[str]] = [], []
        left = [self._limit / 2, self._limit / 2]
        for seconds, test in sorted(callers, key=lambda pair: (stem not in pair[1], pair)):
            other = not test.startswith(own)
            left[other] -= seconds
            if left[other] > 0 and len(chosen[other]) < 300:
                chosen[other].append(test)
        return chosen

    def caught(self, fault: Fault, before: Iterable[str] = ()) -> tuple[str, list[str]]:
        """Returns "caught", "missed", "hung" or "gone", and the tests that failed. Tests that caught it `before` run first."""
        module = self.tree / fault.file
        source = module.read_text(encoding="utf-8") if module.exists() else ""
        faulty = with_fault(source, fault)
        if faulty is None:
            return "gone", []
        own, others = self.tests_of(fault)
        again = [test for test in before if test in self.seconds]
        try:
            module.write_text(faulty, encoding="utf-8")
            for tests, options in ((again, ["-x"]), (own, []), (others, ["-x"])):
                if not tests:
                    continue
                code = self.run(tests, 30.0 + 5 * sum(self.seconds[test] for test in tests), options)
                if code not in (0, 5):
                    return "hung" if code is None else "caught", self.failed()
        finally:
            module.write_text(source, encoding="utf-8")
        return "missed", []

    def run(self, tests: Sequence[str], timeout: float, options: Sequence[str] = (), *plugins: object) -> int | None:
        """Returns pytest's exit code, or None if it was not done after `timeout` seconds."""
        pid = os.fork()
        if pid == 0:
            self._child([*options, *tests], plugins)
        end = time.monotonic() + timeout
        try:
            while time.monotonic() < end:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return self._code()
                time.sleep(0.05)
        except BaseException:
            os.killpg(pid, signal.SIGKILL)
            raise
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def failed(self) -> list[str]:
        """Returns the tests that failed in the last run."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = (line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
        return [line.partition(" - ")[0] for line in failed]

    def digest_of(self, test: str) -> str:
        """Returns the digest of a test's code: its file without imports and other tests."""
        file, _, name = test.partition("[")[0].partition("::")
        path = self.tree / file
        if not path.exists():
            return ""
        kept = [
            ast.dump(node)
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if not isinstance(node, ast.Import | ast.ImportFrom)
            and not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name != name)
        ]
        return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]

    def _code(self) -> int:
        try:
            return int((self.tree / "code").read_text())
        except FileNotFoundError:  # the process died
            return 70

    def _child(self, tests: Sequence[str], plugins: Sequence[object]) -> None:
        """Runs pytest and writes its exit code to a file. Does not return."""
        os.setsid()
        (self.tree / "code").unlink(missing_ok=True)
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.tree)
        sys.path[:] = self.paths + [path for path in sys.path if path not in ("", str(ROOT))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "batchgen")]:
            del sys.modules[name]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": os.pathsep.join(self.paths), "PYTHONDONTWRITEBYTECODE": "1"}
        options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-W", IMPORTED_BEFORE]
        code = 70
        try:
            code = int(pytest.main([*options, *tests], list(plugins)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            (self.tree / "code").write_text(str(code))
            os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the copy of the tree")
    parser.add_argument("--output", type=Path, help="default: faults.jsonl in --work")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="longest run of tests for a fault (default: 60)")
    parser.add_argument("--area", action="append", choices=list(AREAS), help="only these areas; may be repeated")
    parser.add_argument("--again", type=Path, help="repeat the faults of this file")
    options = parser.parse_args()
    faults = sample(options.count, options.seed, options.area or list(AREAS))
    before: dict[Fault, dict[str, Any]] = {}
    if options.again:
        entries = [json.loads(line) for line in options.again.read_text(encoding="utf-8").splitlines()]
        before = {Fault(**{k: v for k, v in entry.items() if k not in FOUND}): entry for entry in entries}
        faults = [fault for fault in before if fault.area in (options.area or AREAS)]
    options.work.mkdir(parents=True, exist_ok=True)
    output = options.output or options.work / "faults.jsonl"
    done = set(output.read_text(encoding="utf-8").splitlines()) if output.exists() else set()
    known = {json.dumps({k: v for k, v in json.loads(line).items() if k not in FOUND}) for line in done}
    os.environ |= ENVIRONMENT
    for name in ("pyarrow.parquet", "torch", "transformers"):
        importlib.import_module(name)

    signal.signal(signal.SIGTERM, _leave)
    runner = Runner(options.work, options.seconds)
    runner.learn(options.area or AREAS)
    found: Counter[tuple[str, str]] = Counter()
    for fault in faults:
        if json.dumps(asdict(fault)) in known:
            continue
        entry = before.get(fault, {})
        by: dict[str, str] = entry.get("by", {})
        same = {test: known for test, known in by.items() if test in runner.seconds and runner.digest_of(test) == known}
        if same:
            result, by = "caught", same
        else:
            result, failed = runner.caught(fault, by)
            by = {test: runner.digest_of(test) for test in failed[:12]}
        found[fault.area, result] += 1
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(fault) | {"found": result, "by": by}) + "\n")
        print(
            f"{result:7} {fault.file}: {fault.line.strip()[:90]}  {fault.old[:30]!r} -> {fault.new[:40]!r}", flush=True
        )
    for (area, result), number in sorted(found.items()):
        print(f"{area}: {result} {number}")


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(f"ended by signal {signum}")


if __name__ == "__main__":
    main()
