"""A job on a model with recurrent layers, from its folder to its rows: loaded from safetensors, resumed, and on two devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.models import build, generate
from support.tiny_model import EOS_ID, save_tiny_tokenizer

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 3.5 with a byte tokenizer."""
    path = tmp_path_factory.mktemp("models") / "qwen"
    build("qwen3_5_text", vocab_size=260, eos_token_id=EOS_ID).save_pretrained(path)
    save_tiny_tokenizer(path, chat=False)
    return path


def prompts() -> list[str]:
    root = "You are a careful assistant. Answer in one word.\n"
    groups = [f"{root}{name}: " for name in ("Sort", "Name the colour of", "Translate")]
    return [f"{group}{word}" for group in groups for word in ("sky", "grass", "sea and land", "a", "")]


@pytest.mark.slow
def test_a_job_is_resumed_and_runs_on_two_devices_with_the_rows_of_generate(
    folder: Path,
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    cli: Callable[..., Any],
    read_jsonl: Callable[[Path], Rows],
) -> None:
    source = write_jsonl([{"prompt": p} for p in prompts()])
    options = ["--model", folder, "--max-tokens", "12", "--temperature", "0", "--debug", "-q"]
    whole = tmp_path / "whole.jsonl"
    assert cli("run", source, *options, "-o", whole, "-n", "2", "--token-ids", "--kv-memory", "4MiB").code == 0
    rows = read_jsonl(whole)
    stats = json.loads((tmp_path / "whole.jsonl.job" / "stats.json").read_text())
    assert stats["prefill_tokens"] == stats["prefill_tokens_min"]
    assert stats["state_bytes_peak"] > 0
    model, tokenizer = build("qwen3_5_text", vocab_size=260, eos_token_id=EOS_ID), AutoTokenizer.from_pretrained(folder)
    for prompt, row in zip(prompts(), rows, strict=True):
        want = generate(model, tokenizer(prompt).input_ids, 12, (EOS_ID,))
        assert [c["token_ids"] for c in row["choices"]] == [want, want]
    part = tmp_path / "part.jsonl"
    small = [*options, "-o", part, "-n", "2", "--token-ids", "--batch-size", "3"]
    assert cli("run", source, *small, "--limit", "7").code == 0
    assert cli("run", source, *small, "--device", "cpu:0,1").code == 0
    assert [row["choices"] for row in read_jsonl(part)] == [row["choices"] for row in rows]
