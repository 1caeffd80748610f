"""Every example of the README and of docs/ runs and prints what the page says.

The examples of a page run in order, in one folder that contains the repository's `sample_data` and small files with the names that the examples
use. The sample model replaces every other model. Numbers with a fraction may differ, because they come from another machine.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "reference" / "commands.md"]
    if re.search(r"^```(python|console)?( |$)", page.read_text("utf-8"), re.MULTILINE)
]
OTHER_MODELS = re.compile(r"Qwen/Qwen3-0\.6B|\./model\b|(?<=--model )MODEL\b|/models/m\b")
NOT_RUN = re.compile(
    r"s3://|hf://|--push|/my-dataset|/data/|INPUT\.\.\.|^batchgen (status|merge)|--shard|--ray|cuda|-VL-|--model \.\.\."
)
"""Commands that need a store, the Hub, a running job, other machines or a model that sees."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    fence = re.compile(r"^```([a-z]*) *(?:title=\"([^\"]*)\")?[^\n`]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for found in fence.finditer(page.read_text("utf-8")):
        yield Block(found[1], found[2] or "", found[3])


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that the page says it prints."""
    if block.language == "console":
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:[^\n]*\\\n)*[^\n]*", part)
            yield command[0], part[command.end() :].splitlines()[1:]
    elif block.language in ("", "bash", "sh"):
        for line in block.text.splitlines():
            if re.match(r"batchgen |cat \S+ \| batchgen ", line):
                yield line, []


def pattern(line: str) -> str:
    """A regular expression for a line that the page shows."""
    escaped = re.sub(r"(\\ )?…(\\ )?", ".*", re.escape(line))
    escaped = re.sub(r"\\?-?\d+\\\.\d+(e\\-\d+)?", lambda _: r"-?[0-9.]+(e-?[0-9]+)?", escaped)
    return re.sub(r"\d+(\\ completion\\ tokens/s)", r"[0-9]+\1", escaped)


def check(command: str, said: list[str], done: "subprocess.CompletedProcess[str]") -> None:
    failing = any(line.startswith("batchgen: error") for line in said)
    assert (done.returncode != 0) == failing, f"{command}\n{done.stdout}{done.stderr}"
    printed = [" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines()]
    wanted = [" ".join(line.split()) for line in said if line.strip(" …")]
    if re.match(r"batchgen run", command):  # the lines of a summary that are the same on every machine
        wanted = [line for line in wanted if re.match(r"rows |batchgen: error", line)]
    if re.fullmatch(pattern(" ".join(wanted)), " ".join(printed)):  # the page may break a long line
        return
    for line in wanted:
        assert any(re.fullmatch(pattern(line), p) for p in printed), f"{command}\n{line}\nis not in\n{printed}"


@pytest.fixture
def workplace(tmp_path: Path, command_environment: dict[str, str]) -> dict[str, str]:
    """Makes the files that the examples name. Returns an environment in which `batchgen` and `python` are found."""
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    lines = (ROOT / "sample_data" / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
    for name in ("prompts.jsonl", "rows.jsonl"):
        (tmp_path / name).write_text("".join(lines[:6]))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    request = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    (tmp_path / "bin").mkdir()
    for name, arguments in (("batchgen", "-m batchgen_cli"), ("python", "")):
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        shim.chmod(0o755)
    return command_environment | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_runs_and_prints_what_the_page_says(page, workplace, tmp_path):
    python, sampled = "", False
    for block in blocks(page):
        code = python + block.text if block.language == "python" else block.text
        if "answers.jsonl" in code and re.search(r"batchgen run|run_job\(", code):
            shutil.rmtree(tmp_path / "answers.jsonl.job", ignore_errors=True)  # each example's own output
            (tmp_path / "answers.jsonl").unlink(missing_ok=True)
        if block.language == "jinja" and block.title:
            (tmp_path / block.title).write_text(block.text)
        if block.language == "python":
            if "s3://" in block.text:
                continue
            python += block.text + "\n"
            if block.title:
                (tmp_path / block.title).write_text(block.text)
                continue
            done = subprocess.run(
                [sys.executable, "-c", python], env=workplace, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{page.name}: {block.text}\n{done.stderr[-2000:]}"
            continue
        for command, said in commands(block):
            if NOT_RUN.search(command):
                continue
            text = OTHER_MODELS.sub("sample_data/model", command)
            done = subprocess.run(
                ["bash", "-c", text],
                env=workplace,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            if re.match(r"batchgen run", command):
                sampled = "--temperature" in command
            check(command, [] if sampled else said, done)  # sampled text may differ between processors
