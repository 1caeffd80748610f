"""`--device` with several devices as users run it: real processes, from the command to the output."""

import json

import pytest


@pytest.mark.slow
def test_rows_go_out_by_one_pipe_whatever_the_processes_say(cli, tiny_model_dir, write_jsonl, tmp_path):
    source = write_jsonl({"prompt": f"Rows with a beginning that is the same, and then number {i}"} for i in range(24))
    stats = tmp_path / "stats.json"
    options = ("-m", tiny_model_dir, "-o", "-", "--max-tokens", "5", "--stats", stats)
    one = cli("run", source, *options)
    two = cli("run", source, *options, "--device", "cpu:0,1", "--no-progress", "-q")
    assert (two.code, two.err) == (0, "")
    assert two.rows == one.rows
    figures = json.loads(stats.read_text())
    assert (figures["rows_ok"], figures["device"]) == (24, "cpu:0,1")
