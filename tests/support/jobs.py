"""Jobs without a model, for tests of the job's folder, inputs and outputs."""

import hashlib
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.errors import RowError
from batchgen.jobs.base import JobSpec
from batchgen.jobs.files.results import decode
from batchgen.jobs.job_folder import open_job
from batchgen.jobs.reuse_output import results_of_output
from batchgen.records import RowForm, open_input
from batchgen.result import Result

SETTINGS = {"model": "tiny", "temperature": 0.0, "max_tokens": 256, "stop": []}


FINISHED_FILES = ["claims", "keys", "known.sqlite", "manifest.json", "report.json", "stats.json"]
"""What the folder of a finished job holds."""


def crash(patch, owner, method, at, *, after):
    """Makes call `at` (from 1) of a method die, before or `after` it has done its work."""
    real = getattr(owner, method)
    calls = []

    def crashing(*args):
        calls.append(1)
        now = len(calls) == at
        if now and not after:
            raise KeyboardInterrupt
        done = real(*args)
        if now:
            raise KeyboardInterrupt
        return done

    patch.setattr(owner, method, crashing)


def reused_results(output, keys):
    """Yields the keys and results that a job takes from a finished output, lines that it takes as they are decoded."""
    for key, found in results_of_output(str(output), keys):
        result = found if isinstance(found, Result) else decode(key, found, zlib.crc32(key + found))
        if result is not None:
            yield key, result


def write_input_rows(prompts, name="in.jsonl"):
    Path(name).write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


def job_open(output="o.jsonl", inputs=("in.jsonl",), settings=SETTINGS, mentions=None, **options):
    source = open_input(list(inputs), format=None, output=output)
    form = RowForm(
        **{name: options.pop(name) for name in ("keep", "id_column", "token_ids", "optional") if name in options}
    )
    spec = JobSpec(output=output, settings=settings, mentions=mentions or {}, input=source, form=form, **options)
    return open_job(spec), source


def key_of(row) -> bytes:
    return hashlib.blake2b(json.dumps(row.columns, default=str).encode(), digest_size=16).digest()


def answer(row) -> Result:
    """A fake answer to a row. The prompt `fail` fails."""
    prompt = row.columns["prompt"]
    if prompt == "fail":
        return Result.from_error(row.number, RowError("does_not_fit", "too big"), prompt_tokens=7)
    return Result(
        row=row.number, text=prompt.upper(), finish_reason="stop", prompt_tokens=len(prompt), completion_tokens=2,
        token_ids=(1, 2), truncated=prompt == "cut",
    )  # fmt: skip


def job_run(output="o.jsonl", *, stop_after=None, stats=None, answer=answer, **options):
    """Runs a job like `job.py`. Returns the job and the generated prompts. Stops without finishing after `stop_after` prompts."""
    job, source = job_open(output, **options)
    generated = []
    with job:
        if job.finished is not None:
            return job, generated
        rows = list(source.rows(options.get("limit")))
        keys = {r.number: key_of(r) for r in rows if r.error is None}
        stored = job.stored(list(keys.values()))
        job.add_rows(
            [r.number for r in rows], keys, {r.number: Result.from_error(r.number, r.error) for r in rows if r.error}
        )
        job.check_dropped(prune=options.get("prune", False))
        results = {n: replace(stored[k], row=n) for n, k in keys.items() if k in stored}
        results |= {r.number: Result.from_error(r.number, r.error) for r in rows if r.error is not None}
        for row in reversed(rows):  # like an engine, in another order
            if row.number not in results:
                if len(generated) == stop_after:
                    return job, generated
                generated.append(row.columns["prompt"])
                results[row.number] = answer(row)
                job.append(keys[row.number], results[row.number])
        job.write(rows, results, keys)
        job.finish(stats or {"rows": len(rows)})
    return job, generated


def job_texts(output="o.jsonl"):
    return [json.loads(line)["text"] for line in Path(output).read_text().splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return job_run


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return job_texts


@pytest.fixture
def write_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_input_rows
