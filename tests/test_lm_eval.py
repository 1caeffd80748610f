"""batchgen in lm-evaluation-harness gives the same tokens, likelihoods, texts and metrics as the harness's own model `hf`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.errors import UsageError
from support.tiny_model import CONTEXT_LENGTH, save_tiny_llama

pytest.importorskip("lm_eval")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of the harness and its libraries
]
WORDS = ("river", "stone", "lamp", "the old bridge", "a song", "winter")
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_text": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "Question"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "local_pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks over one file of 12 documents; the longest page has three contexts of the tiny model."""
    folder = tmp_path_factory.mktemp("tasks")
    with (folder / "docs.jsonl").open("w", encoding="utf-8") as file:
        for n in range(12):
            of = [WORDS[(n + k) % len(WORDS)] for k in range(4)]
            row = {
                "question": f"what comes after {of[0]} and {n}?",
                "choices": of,
                "answer": n % 4,
                "page": f"{' '.join(of)} {n}. " * (1 + 4 * n),
            }
            file.write(json.dumps(row) + "\n")
    for name, text in TASKS.items():
        few = "num_fewshot: 0\n" if name == "local_pages" else "num_fewshot: 3\nfewshot_config: {sampler: first_n}\n"
        data = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\n"
            "test_split: test\nfewshot_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{few}{text}")
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "harness", chat=True)


@pytest.fixture(scope="module")
def models(model_dir: Path) -> Iterator[tuple[Any, Any]]:
    """The harness's model and ours."""
    from lm_eval.models.huggingface import HFLM

    from batchgen.lm_eval import BatchgenLM

    ours = BatchgenLM(str(model_dir), device="cpu", dtype="float32", batch_size=1, kv_memory="16MiB")
    yield HFLM(str(model_dir), device="cpu", dtype="float32", batch_size=1), ours
    ours.llm.close()


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def evaluated(model: Any, tasks: Path, names: list[str]) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)


def test_three_tasks_give_the_same_results_as_the_hf_model(tasks, models):
    want, got = (evaluated(model, tasks, list(TASKS)) for model in models)
    assert want["results"].keys() == got["results"].keys() == TASKS.keys()
    for task in TASKS:
        assert _figures(got["results"][task]) == pytest.approx(_figures(want["results"][task]), rel=1e-5)
        for one, other in zip(want["samples"][task], got["samples"][task], strict=True):
            assert other["arguments"] == one["arguments"]
            if task == "local_text":
                assert other["resps"] == one["resps"]
                continue
            for (a,), (b,) in zip(one["resps"], other["resps"], strict=True):
                assert _likelihood(b) == pytest.approx(_likelihood(a), abs=1e-3, rel=1e-5)
                assert (b[1] == a[1]) if isinstance(a, tuple) else True


def _figures(results: dict[str, Any]) -> dict[str, float]:
    found = {name: value for name, value in results.items() if isinstance(value, int | float)}
    assert len(found) >= 2
    return found


def _likelihood(response: Any) -> float:
    return float(response[0] if isinstance(response, tuple | list) else response)


PAIRS = [
    ("a b", " c"),
    ("a b ", "c"),  # the blank moves
    ("a \n\n ", " c d"),
    ("", "abc"),
    ("", "<|begin|>abc"),
    ("   ", "abc"),
    ("<|begin|>a", " b"),
    ("<|user|>hi<|end|><|assistant|>", "yes"),
    ("ü 你好", " ß"),
    ("x" * 2 * CONTEXT_LENGTH, " end"),  # loses its beginning
    ("abc", "y" * CONTEXT_LENGTH),  # only the last token of the context is left
]


def test_likelihoods_equal_those_of_the_hf_model(models):
    theirs, ours = models
    for context, continuation in PAIRS:
        if context.strip():
            both = theirs._encode_pair(context, continuation), ours._encode_pair(context, continuation)
            assert both[0] == both[1]
    of = requests("loglikelihood", *PAIRS)
    for pair, a, b in zip(PAIRS, theirs.loglikelihood(of), ours.loglikelihood(of), strict=True):
        assert b[0] == pytest.approx(a[0], abs=1e-3, rel=1e-5), pair
        assert b[1] == a[1], pair


def test_long_texts_are_scored_as_by_the_hf_model(models):
    theirs, ours = models
    lengths = (0, 1, CONTEXT_LENGTH - 2, CONTEXT_LENGTH - 1, CONTEXT_LENGTH, 3 * CONTEXT_LENGTH + 5)
    of = requests("loglikelihood_rolling", *((("abcdefg " * 300)[:length],) for length in lengths))
    assert ours.loglikelihood_rolling(of) == pytest.approx(theirs.loglikelihood_rolling(of), rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"until": "e", "max_gen_toks": 20},
        {"until": ["\x05", "é", "ab"], "max_gen_toks": 40},
        {"until": ["<|assistant|>", "<|user|>"], "max_gen_toks": 64},
        {"until": [], "max_new_tokens": 5, "temperature": 0.0, "num_beams": 1},
        {"max_gen_toks": 300, "repetition_penalty": 1.3, "do_sample": False},
    ],
)  # fmt: skip
def test_generated_texts_end_where_those_of_the_hf_model_do(given, models):
    theirs, ours = models
    contexts = ("Once", "Once upon a time ", "<|begin|><|user|>hi<|end|><|assistant|>", "w" * 600)
    of = requests("generate_until", *((context, given) for context in contexts))
    assert ours.generate_until(of) == theirs.generate_until(of)


def test_the_requests_of_a_call_share_prefixes(models):
    _, ours = models
    shared = "one two three four five six seven eight nine ten " * 6
    before = ours.llm.stats.prefill_tokens
    ours.loglikelihood(requests("loglikelihood", *((f"{shared}{n}", f" {k}") for n in range(8) for k in "abcd")))
    own = 8 + 8  # for each document, its number and the blank before its four answers
    assert ours.llm.stats.prefill_tokens - before <= 1 + len(shared) + own


def test_the_chat_template_is_applied_as_by_the_hf_model(models):
    theirs, ours = models
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    begun = [*talk, {"role": "assistant", "content": "He"}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == theirs.apply_chat_template(
        begun, add_generation_prompt=False
    )
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name


def test_requests_that_cannot_run_raise_one_clear_error(models, model_dir):
    from batchgen.lm_eval import BatchgenLM

    _, ours = models
    with pytest.raises(UsageError, match=r"^max_gen_toks must be below max_length, which is 512, not 512$"):
        ours.generate_until(requests("generate_until", ("a", {"max_gen_toks": 512})))
    with pytest.raises(UsageError, match=r"^--gen_kwargs: unknown parameter 'best_of_all'$"):
        ours.generate_until(requests("generate_until", ("a", {"best_of_all": 2})))
    with pytest.raises(UsageError, match=r"^a continuation has 513 tokens, more than max_length, which is 512$"):
        ours.loglikelihood(requests("loglikelihood", ("a", "b" * 513)))
    with pytest.raises(UsageError, match=r"^max_length must be from 1 to the model's context of 512 tokens, not 513$"):
        BatchgenLM(str(model_dir), max_length=513, device="cpu")
    with pytest.raises(UsageError, match=r"^--model_args has the unknown option 'foo'; its options are those of LLM"):
        BatchgenLM(str(model_dir), foo=1, device="cpu")


def test_thoughts_are_removed_from_the_answer(models, monkeypatch):
    _, ours = models
    ids = ours.tok_encode("well|no| yes\n", add_special_tokens=False)
    (mark,) = ours.tok_encode("|", add_special_tokens=False)
    for end, answer in ((mark, "yes"), ("|", "yes"), (None, "well|no| yes")):
        monkeypatch.setattr(ours, "_think_end", end)
        assert ours._answer(ids, ["\n"]) == answer


def run_harness(tasks: Path, environment: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the harness's command with the model `batchgen` on the task `local_choice`."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "batchgen.lm_eval", "--model", "batchgen"),
            *("--tasks", "local_choice", "--include_path", str(tasks), *arguments),
        ],
        capture_output=True,
        text=True,
        env={**environment, "HF_DATASETS_OFFLINE": "1"},
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_only_the_harness_own_default_device_may_be_missing(model_dir):
    from batchgen.errors import ModelError
    from batchgen.lm_eval import BatchgenLM

    assert BatchgenLM(str(model_dir), device="cuda:0", kv_memory="16MiB").llm.engine.device == "cpu"
    with pytest.raises(ModelError, match=r"--device cuda:1: this machine has no CUDA device"):
        BatchgenLM(str(model_dir), device="cuda:1")


def test_the_command_runs_a_task(tasks, model_dir, tmp_path, command_environment):
    model = f"pretrained={model_dir},dtype=float32,kv_memory=16MiB"
    out = tmp_path / "out"
    done = run_harness(tasks, command_environment, "--model_args", model, "--output_path", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = out.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]["local_choice"]
    assert 0 <= results["acc,none"] <= 1
