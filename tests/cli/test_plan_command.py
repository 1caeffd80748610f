"""`batchgen plan` as its users see it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchgen.scheduling.duration import Estimate
from batchgen_cli.plan import time_lines
from batchgen_cli.stderr import for_encoding

pytestmark = pytest.mark.usefixtures("loaded_once")

ROOT = "All rows begin with this text, which is more than a chunk. "
GROUPS = ["The first group goes on like this. ", "The second one has other words here. "]
TIME_UNKNOWN = (
    "time               not known: no steps of this model on this machine were measured yet (--measure does that)"
)


@pytest.fixture
def source(write_jsonl: Callable[..., Path]) -> Path:
    return write_jsonl({"prompt": f"{ROOT}{GROUPS[i % 2]}{i}"} for i in range(8))


def test_the_plan_is_told_in_lines(cli, source, tiny_model_dir, monkeypatch):
    monkeypatch.setattr("batchgen.model.weights.weight_size.free_host_memory", lambda: 8 << 20)
    outcome = cli("plan", source, "-m", tiny_model_dir, "--max-tokens", "10")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "rows               8, as raw text",
        "prompt tokens      776",
        "to be prefilled    136 (82.5% of the prompt tokens are shared and run once)",
        "groups             2 with 8 rows",
        "prefix nodes       3",
        "weights            on a CPU         in memory, with KV    of 8.0 MiB that are free",
        "                   as they are      275.8 KiB, 395.8 KiB  fits; --weights auto takes this",
        "                   --quantize int8  171.8 KiB, 291.8 KiB  fits",
        "                   streamed         275.8 KiB, 395.8 KiB  fits",
        "KV per token       256 B",
        "KV for a batch     120.0 KiB; a run holds a batch of rows",
        "KV for all rows    120.0 KiB (unshared: 256.0 KiB) if all ran at once, each to its full length",
        "KV for longest row 32.0 KiB; with less KV memory that row fails, or is cut with --max-tokens auto",
        TIME_UNKNOWN,
        "",
        "the prefixes that save the most (tokens × rows):",
        '  64 × 8  "<|begin|>All rows begin with this text, which i…"',
        '    31 × 4  "first group goes on like this. "',
        '    33 × 4  "second one has other words here. "',
    ]


def test_prefixes_of_few_tokens_that_save_next_to_nothing_are_not_listed(cli, write_jsonl, tiny_model_dir):
    """Rows that begin with numbers share a digit."""
    rows = [{"prompt": f"{i:02} {'the text of the row ' * 6}"} for i in range(60)]
    outcome = cli("plan", write_jsonl(rows), "-m", tiny_model_dir)
    assert "prefix nodes       7\n" in outcome.out
    assert "the prefixes that save the most" not in outcome.out


@pytest.mark.parametrize(("low", "at_least"), [(0.04, ""), (0.06, " (at least 0.1 s)")])
def test_a_shortest_time_of_nothing_is_left_out(low, at_least):
    estimate = Estimate(seconds=90.0, low=low, high=100.0, rows=3, lengths="max_tokens")
    report = SimpleNamespace(figures={"measured": None, "lengths": None}, estimate=estimate)
    text = f"at most about 90 s to generate 3 rows{at_least}: how long completions get is not known (--measure runs a few rows)"
    assert time_lines(report) == [("time", text)]


def test_the_plan_is_one_json_object(cli, source, tiny_model_dir):
    outcome = cli("plan", source, "-m", tiny_model_dir, "--json", "--max-tokens", "10")
    assert (outcome.code, outcome.err) == (0, "")
    plan = json.loads(outcome.out)
    assert list(plan) == [
        "schema", "rows", "rows_failed", "rows_equal", "windows", "prompt_tokens", "prefill_tokens_min", "prefix_nodes", "groups", "grouped_rows",
        "kv_bytes_unshared", "kv_bytes_shared", "kv_bytes_batch", "kv_bytes_least", "prefill_tokens", "shared_fraction", "weight_bytes", "memory",
        "kv_bytes_per_token", "state_bytes_per_sequence", "state_bytes_peak", "tree", "largest_groups",
        "lengths", "failures", "shards", "measured", "advice", "estimate",
    ]  # fmt: skip
    assert (plan["schema"], plan["prefill_tokens_min"], plan["groups"]) == ("batchgen.plan/1", 136, 2)
    assert plan["tree"][1] == {
        "level": 1, "tokens": 31, "rows": 4, "saved_tokens": 93, "text": "first group goes on like this. ",
    }  # fmt: skip
    assert [(group["prefix_tokens"], group["rows"]) for group in plan["largest_groups"]] == [(96, 4), (80, 4)]


@pytest.mark.parametrize(("options", "tokens"), [((), 776), (("-n", "2", "--temperature", "1"), 2 * 776)])
def test_without_sharing_all_prompts_are_to_be_run(options, tokens, cli, source, tiny_model_dir, tmp_path):
    told = cli("plan", source, "-m", tiny_model_dir, "--no-share", *options).out
    assert f"to be prefilled    {tokens:,} (nothing is shared; with sharing it would be 136)" in told
    plan = json.loads(cli("plan", source, "-m", tiny_model_dir, "--no-share", *options, "--json").out)
    assert (plan["prefill_tokens"], plan["prefill_tokens_min"], plan["shared_fraction"]) == (tokens, 136, 0.0)
    ran = cli(
        "run", source, "-m", tiny_model_dir, "--no-share", *options, "--max-tokens", "2", "-o", tmp_path / "o.jsonl"
    )
    assert f"776, of which {tokens:,} were run (minimum: 136): 0.0% shared" in ran.err


def test_results_of_other_settings_tell_nothing_and_the_refusal_is_told(cli, source, tiny_model_dir):
    asked = (source, "-m", tiny_model_dir, "--ignore-eos")
    assert cli("plan", *asked, "--max-tokens", "9", "--measure", "3").code == 0
    for limit, more, lengths in (("9", (), 3), ("8", (), None), ("10", (), None), ("10", ("--retry", "length"), 3)):
        plan = cli("plan", *asked, "--max-tokens", limit, *more, "--json")
        found = json.loads(plan.out)["lengths"]
        assert (found and found["completions"]) == lengths
        said = f"prompts.out.jsonl was made with other settings, so a run will be refused: max_tokens was 9, is {limit}"
        assert (said in plan.err) == (lengths is None)
    assert cli("run", *asked, "--max-tokens", "8").code == 2


def test_an_ellipsis_is_three_dots_where_the_encoding_lacks_it():
    assert [for_encoding("a…", name) for name in ("utf-8", "cp1252", "latin-1", "ascii")] == [
        "a…",
        "a…",
        "a...",
        "a...",
    ]


def test_rows_that_cannot_be_run_and_windows_are_told(cli, write_jsonl, tiny_chat_model_dir):
    source = write_jsonl([{"prompt": "a"}, "junk", {"prompt": "b"}])
    out = cli("plan", source, "-m", tiny_chat_model_dir, "--window", "2", "-q").out.splitlines()
    assert out[0] == "rows               3 (1 would fail), through the chat template"
    assert out[-5:] == [
        "windows            2; memory is that of the largest one, and the tree is that of the first one",
        TIME_UNKNOWN,
        "",
        "the first rows that would fail:",
        f"  {source}:2: invalid_row: not JSON: Expecting value at column 1",
    ]


def test_the_plan_says_what_cuts_cost(cli, source, tiny_model_dir):
    outcome = cli("plan", source, "-m", tiny_model_dir, "--json", "--max-tokens", "10", "--shards", "2")
    plan = json.loads(outcome.out)
    assert len(plan["shards"]["rows"]) == len(plan["shards"]["cost"]) == 2
    assert sum(plan["shards"]["rows"]) == plan["rows"] - plan["rows_failed"]
    assert abs(sum(plan["shards"]["cost"]) - 1) < 1e-5
    assert 0 <= plan["shards"]["prefill_tokens_again"] < plan["prefill_tokens_min"]
    again = plan["shards"]["prefill_tokens_again"]
    shown = cli("plan", source, "-m", tiny_model_dir, "--max-tokens", "10", "--shards", "2").out
    assert f"in 2 shards        {again:,} prompt tokens are run again (" in shown
