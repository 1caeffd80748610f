"""Which small faults do the tests notice? `python -m benchmarks.mutations --work FOLDER` (hours for all; `--count 40` for a sample)

Copies the tree to FOLDER, puts one fault at a time into a module (a comparison turned round, a call left out, a number one larger) and runs
the tests of that module alone. Each fault is written to `--output` as a line of JSON: where it is, whether the tests caught it, and by which.
The same `--seed` makes the same faults. `--again FILE` repeats the faults of such a file in the present tree; those whose line is no longer there are
counted as gone. Tests run in forks of one process that has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

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
    "attention plan": ("batchgen/attention/plan.py", ("tests/attention/test_plan.py", "tests/attention")),
    "jobs": (
        "batchgen/jobs/**/*.py",
        ("tests/jobs", "tests/test_job.py", "tests/test_whole.py", "tests/test_shards.py"),
    ),
    "records": ("batchgen/records/*.py", ("tests/records", "tests/test_openai_batch.py")),
    "sampling": ("batchgen/sampling/*.py", ("tests/sampling",)),
    "prompts": ("batchgen/prompts/*.py", ("tests/prompts", "tests/test_openai_endpoints.py")),
    "parsers": ("batchgen/parsers/*.py", ("tests/parsers", "tests/test_tool_rows.py", "tests/test_reasoning_rows.py")),
    "command": ("cli/batchgen_cli/*.py", ("tests/cli",)),
    "reports": ("batchgen/recording/*.py", ("tests/recording", "tests/report")),
}
"""The modules of each area, and the tests that are run for a fault in one of them."""
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
"""What a line of the output has beside the fault."""
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


def with_fault(source: str, fault: Fault) -> str | None:
    """Returns the module with the fault, or None if its place is no longer there."""
    lines = source.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.rstrip("\n") == fault.line]
    if fault.nth >= len(places):
        return None
    at = sum(map(len, lines[: places[fault.nth]])) + fault.column
    if not source.startswith(fault.old, at):
        return None
    return source[:at] + fault.new + source[at + len(fault.old) :]


def sample(count: int, seed: int) -> list[Fault]:
    """Returns `count` faults, as many from each area if it has them, and in an area from all of its modules."""
    chosen: list[Fault] = []
    shuffled = random.Random(seed)
    queues: list[list[Fault]] = []
    for area, (modules, _) in AREAS.items():
        found = [
            fault
            for path in sorted(ROOT.glob(modules))
            for fault in faults_of(area, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        ]
        shuffled.shuffle(found)
        queues.append(found)
    while len(chosen) < count and any(queues):
        chosen += [queue.pop() for queue in queues if queue]
    return chosen[:count]


class Runner:
    """Runs tests of a copy of the tree in forks of this process."""

    def __init__(self, work: Path) -> None:
        self.tree = work / "tree"
        self.log = work / "log"
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in COPIED:
            there, copy = ROOT / name, self.tree / name
            if there.is_dir():
                shutil.copytree(there, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(there, copy)
        self.paths = [str(self.tree), str(self.tree / "cli"), str(self.tree / "tests")]
        self.seconds: dict[str, float] = {}
        """How long the tests of an area take."""

    def tests_of(self, fault: Fault) -> tuple[str, ...]:
        """Returns the tests of the fault's area, those that are named after its module first."""
        tests = AREAS[fault.area][1]
        nearest = sorted((self.tree / tests[0]).glob(f"test_{Path(fault.file).stem}.py"))
        return (*(p.relative_to(self.tree).as_posix() for p in nearest), *tests)

    def caught(self, fault: Fault) -> str:
        """Returns "caught", "missed", "hung" or "gone"."""
        if fault.area not in self.seconds:
            tests, start = AREAS[fault.area][1], time.monotonic()
            if self.run(tests, 3600.0) != 0:
                sys.exit(f"without any fault, these tests fail: {' '.join(tests)}; see {self.log}")
            self.seconds[fault.area] = time.monotonic() - start
        module = self.tree / fault.file
        source = module.read_text(encoding="utf-8") if module.exists() else ""
        faulty = with_fault(source, fault)
        if faulty is None:
            return "gone"
        try:
            module.write_text(faulty, encoding="utf-8")
            code = self.run(self.tests_of(fault), 120.0 + 5 * self.seconds[fault.area])
        finally:
            module.write_text(source, encoding="utf-8")
        return {None: "hung", 0: "missed"}.get(code, "caught")

    def run(self, tests: Sequence[str], timeout: float) -> int | None:
        """Returns pytest's exit code, or None if it was not done after `timeout` seconds."""
        pid = os.fork()
        if pid == 0:
            self._child(tests)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return self._code()
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def by(self) -> str:
        """Returns the test that failed first in the last run; empty if none did."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = (line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
        return next(failed, "")

    def _code(self) -> int:
        try:
            return int((self.tree / "code").read_text())
        except FileNotFoundError:  # the process died
            return 70

    def _child(self, tests: Sequence[str]) -> None:
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
        import pytest

        code = 70
        try:
            code = int(pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", IMPORTED_BEFORE, *tests]))
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
    parser.add_argument("--area", action="append", choices=list(AREAS), help="only these areas; may be repeated")
    parser.add_argument("--again", type=Path, help="repeat the faults of this file")
    options = parser.parse_args()
    faults = sample(options.count, options.seed)
    if options.again:
        entries = [json.loads(line) for line in options.again.read_text(encoding="utf-8").splitlines()]
        faults = [Fault(**{k: v for k, v in entry.items() if k not in FOUND}) for entry in entries]
    faults = [fault for fault in faults if not options.area or fault.area in options.area]
    options.work.mkdir(parents=True, exist_ok=True)
    output = options.output or options.work / "faults.jsonl"
    done = set(output.read_text(encoding="utf-8").splitlines()) if output.exists() else set()
    known = {json.dumps({k: v for k, v in json.loads(line).items() if k not in FOUND}) for line in done}
    os.environ |= ENVIRONMENT
    for name in ("pyarrow.parquet", "torch", "transformers"):
        importlib.import_module(name)

    signal.signal(signal.SIGTERM, _leave)
    runner = Runner(options.work)
    found: Counter[tuple[str, str]] = Counter()
    for fault in faults:
        if json.dumps(asdict(fault)) in known:
            continue
        result = runner.caught(fault)
        found[fault.area, result] += 1
        with output.open("a", encoding="utf-8") as file:
            by = runner.by() if result == "caught" else ""
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
