"""`--prompt-logprobs` gives the log-probability of every token of a prompt or a scored completion. Shared tokens run once."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")

SHARED = "All of these begin with the same words, and then "
ROWS = [{"prompt": f"{SHARED}{what}", "completion": f" they are {what}"} for what in ("red", "green", "red", "blue")]
ROWS += [{"prompt": SHARED, "completion": "x"}, {"prompt": "", "completion": ""}]


def teacher(folder, text):
    """The tokens of a text and their log-probabilities from transformers. The first is None."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return ids[0].tolist(), [None, *logprobs]


def test_each_token_of_a_completion_has_its_logprob(cli, tiny_model_dir, write_jsonl, tmp_path):
    path = write_jsonl(ROWS)
    assert cli("run", path, "-m", tiny_model_dir, "--score", "--prompt-logprobs", "-q").code == 0
    for row, given in zip(json_rows(tmp_path / "prompts.out.jsonl"), ROWS, strict=True):
        ids, logprobs = teacher(tiny_model_dir, given["prompt"] + given["completion"])
        count = len(given["completion"])
        assert [t["token_id"] for t in row["prompt_logprobs"]] == ids[len(ids) - count :]
        assert [t["logprob"] for t in row["prompt_logprobs"]] == pytest.approx(logprobs[len(ids) - count :], abs=1e-4)
        assert "".join(t["token"] for t in row["prompt_logprobs"]) == given["completion"]
        assert row["score"]["logprob"] == pytest.approx(math.fsum(t["logprob"] for t in row["prompt_logprobs"]))
        assert row["score"]["tokens"] == count


@pytest.mark.parametrize("options", [(), ("--max-batch-tokens", "9"), ("--window", "2")])
def test_each_token_of_a_prompt_except_the_first_has_its_logprob(cli, tiny_model_dir, write_jsonl, tmp_path, options):
    path, stats = write_jsonl(ROWS), tmp_path / "stats.json"
    command = ["run", path, "-m", tiny_model_dir, "--prompt-logprobs", "--stats", stats, "--debug", *options]
    assert cli(*command, "-q").code == 0
    rows = json_rows(tmp_path / "prompts.out.jsonl")
    for row, given in zip(rows, ROWS, strict=True):
        ids, logprobs = teacher(tiny_model_dir, given["prompt"])
        assert [t["token_id"] for t in row["prompt_logprobs"]] == ids
        assert row["prompt_logprobs"][0]["logprob"] is None
        found = [t["logprob"] for t in row["prompt_logprobs"][1:]]
        assert found == pytest.approx(logprobs[1:], abs=1e-4)
        assert row["score"]["logprob"] == pytest.approx(math.fsum(found), abs=1e-9)
        assert row["score"]["tokens"] == len(ids) - 1
        assert row["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0}
        assert (row["text"], row["finish_reason"]) == (None, None)
    if not options:
        figures = json.loads(stats.read_text())
        texts = ["^" + row["prompt"] for row in ROWS]
        assert (
            figures["prefill_tokens"]
            == figures["prefill_tokens_min"]
            == len({t[: i + 1] for t in texts for i in range(len(t))})
        )
        write_jsonl([*ROWS, {"prompt": "One more"}])
        assert f"1 done, {len(ROWS)} kept from an earlier run" in cli(*command).err
        assert json_rows(tmp_path / "prompts.out.jsonl")[: len(ROWS)] == rows


def test_parquet_has_null_for_the_first_token(cli, tiny_model_dir, write_jsonl, tmp_path):
    path = write_jsonl(ROWS)
    command = ["run", path, "-m", tiny_model_dir, "--prompt-logprobs", "-o", tmp_path / "o.parquet"]
    assert cli(*command, "-q").code == 0
    first = pq.read_table(tmp_path / "o.parquet")["prompt_logprobs"].to_pylist()
    assert first[0][0]["logprob"] is None
    assert first[0][1]["logprob"] < 0
    write_jsonl([*ROWS, {"prompt": "One more"}])
    assert f"1 done, {len(ROWS)} kept from an earlier run" in cli(*command).err
    assert pq.read_table(tmp_path / "o.parquet")["prompt_logprobs"].to_pylist()[: len(ROWS)] == first
