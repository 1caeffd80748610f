"""`--embed` uses the model's own pooling, and jobs store, reuse and write embeddings in every format."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import LLM, PromptConfig
from support.embedders import QUERY, save_classifier, save_embedder
from support.late import late
from support.models import load_once
from support.params import slow_but
from support.records import json_rows

peft = late("peft")
SHARED = "All of these texts begin with the same long sentence, and then they differ: "
PROMPTS = [f"{SHARED}{what} {i % 5}" for i, what in enumerate(("apples", "pears", "plums", "figs") * 3)]
PROMPTS += ["Another one", "Another one", "é…", SHARED]


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    return save_embedder(tmp_path_factory.mktemp("models") / "last")


@pytest.fixture(scope="module")
def mean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "mean"
    return save_embedder(folder, pooling={"pooling_mode": "mean"}, normalize=False, prompt_name="query")


@pytest.fixture(autouse=True)
def loaded_once(last, mean, monkeypatch):
    load_once(monkeypatch, last, mean)


def expected(folder, texts, *, mean=False, normalize=True):
    """The embeddings that transformers gives."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype="float32")
    vectors = []
    for text in texts:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].float()
        vector = hidden.mean(0) if mean else hidden[-1]
        vectors.append((torch.nn.functional.normalize(vector, dim=0) if normalize else vector).numpy())
    return np.array(vectors)


def embeddings(rows):
    return np.array([row["embedding"] for row in rows])


def test_an_embedding_is_the_normalised_hidden_state_of_the_last_token(cli, last, write_jsonl, tmp_path):
    path, stats = write_jsonl([{"prompt": p, "embedding": "mine"} for p in PROMPTS]), tmp_path / "stats.json"
    assert cli("run", path, "-m", last, "--embed", "--stats", stats, "-q").code == 0
    rows = json_rows(tmp_path / "prompts.out.jsonl")
    np.testing.assert_allclose(embeddings(rows), expected(last, PROMPTS), atol=1e-5)
    assert {(row["text"], row["finish_reason"], row["error"], row["input_embedding"]) for row in rows} == {
        (None, None, None, "mine")
    }
    assert rows[0]["usage"] == {"prompt_tokens": len(PROMPTS[0]) + 1, "completion_tokens": 0}
    figures = json.loads(stats.read_text())
    assert figures["prefill_tokens"] == figures["prefill_tokens_min"] < figures["prompt_tokens"] / 3
    assert figures["embeddings"] == figures["finish_reasons"]["embedded"] == len(PROMPTS)
    assert (figures["sampling"], figures["completion_tokens"], figures["scored_tokens"]) == ({}, 0, 0)


def test_mean_pooling_is_exact_with_shared_prefixes(cli, mean, write_jsonl, tmp_path):
    path, stats = write_jsonl([{"prompt": p} for p in PROMPTS]), tmp_path / "stats.json"
    assert cli("run", path, "-m", mean, "--embed", "--stats", stats, "-q", "--debug").code == 0
    rows = json_rows(tmp_path / "prompts.out.jsonl")
    want = expected(mean, [QUERY + p for p in PROMPTS], mean=True, normalize=False)
    np.testing.assert_allclose(embeddings(rows), want, atol=1e-5)
    figures = json.loads(stats.read_text())
    assert figures["prefill_tokens"] == figures["prefill_tokens_min"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_embeddings_in_parquet_are_lists_of_float32(cli, last, write_jsonl, tmp_path, kind):
    if kind == "jsonl":
        path = write_jsonl([{"prompt": p} for p in PROMPTS])
    else:
        path = tmp_path / "in.parquet"
        pq.write_table(pa.table({"prompt": PROMPTS}), path)
    assert cli("run", path, "-m", last, "--embed", "-o", tmp_path / "o.parquet", "-q").code == 0
    table = pq.read_table(tmp_path / "o.parquet")
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    assert "choice_probs" not in table.schema.names
    np.testing.assert_allclose(np.stack(table["embedding"].to_numpy()), expected(last, PROMPTS), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # peft warns of transformers and torch
@pytest.mark.parametrize("trained", ["CausalLM", "CausalLM with its head", ""])
def test_an_adapter_is_merged_whether_it_was_trained_with_the_language_head_or_without(
    cli, last, write_jsonl, tmp_path, trained
):
    import torch
    import transformers

    kind, _, head = trained.partition(" ")
    model = getattr(transformers, f"AutoModel{'For' * bool(kind)}{kind}").from_pretrained(last)
    config = peft.LoraConfig(
        r=4, target_modules=r"model\.layers\..*[qv]_proj" if head else "all-linear", init_lora_weights=False,
        modules_to_save=["lm_head"] if head else None, alpha_pattern={"model.layers.0.self_attn.q_proj": 64} if kind else {},
        task_type="CAUSAL_LM" if kind else "FEATURE_EXTRACTION",
    )  # fmt: skip
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = shutil.copytree(last, tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(merged)
    path = write_jsonl([{"prompt": p} for p in PROMPTS])
    assert cli("run", path, "-m", last, "--lora", tmp_path / "adapter", "--embed", "-q").code == 0
    found = embeddings(json_rows(tmp_path / "prompts.out.jsonl"))
    np.testing.assert_allclose(found, expected(merged, PROMPTS), atol=1e-5)
    assert np.abs(found - expected(last, PROMPTS)).max() > 0.01


def test_embeddings_in_csv_are_the_lists_of_json_lines(cli, last, write_jsonl, tmp_path):
    path = write_jsonl([{"prompt": p} for p in [*PROMPTS, None]])
    for out in ("o.csv", "o.jsonl"):
        assert cli("run", path, "-m", last, "--embed", "-o", tmp_path / out, "-q").code == 3
    with (tmp_path / "o.csv").open(newline="") as file:
        found = [row["embedding"] for row in csv.DictReader(file)]
    rows = json_rows(tmp_path / "o.jsonl")
    assert found == ["" if row["embedding"] is None else json.dumps(row["embedding"]) for row in rows]


def test_the_figures_are_of_the_whole_output_that_a_table_becomes_after_its_last_row(
    cli, last, write_jsonl, tmp_path, monkeypatch
):
    path, out = write_jsonl([{"prompt": p} for p in PROMPTS]), tmp_path / "o.parquet"
    rows = tmp_path / "o.parquet.job" / "spool.jsonl"  # until their table is written
    monkeypatch.setattr("batchgen.stats.memory_bytes_peak", lambda: 1 if rows.exists() else 2)
    assert cli("run", path, "-m", last, "--embed", "-o", out, "-q").code == 0
    assert json.loads((tmp_path / "o.parquet.job" / "stats.json").read_text())["memory_bytes_peak"] == 2


def test_resuming_with_other_options_of_embeddings_is_refused(cli, last, write_jsonl):
    path = write_jsonl([{"prompt": p} for p in PROMPTS[:3]])
    assert cli("run", path, "-m", last, "--embed", "-q").code == 0
    for options, said in (
        (["--pooling", "mean"], 'pooling was "last", is "mean"'),
        (["--no-normalize"], "normalize was true, is false"),
        (["--prompt-name", "query"], 'prompt_name was not set, is "query"'),
    ):
        refused = cli("run", path, "-m", last, "--embed", *options)
        assert refused.code == 2
        assert said in refused.err


def test_resuming_after_the_models_pooling_has_changed_is_refused(cli, write_jsonl, tmp_path):
    model, path = save_embedder(tmp_path / "m"), write_jsonl([{"prompt": "a"}])
    assert cli("run", path, "-m", model, "--embed", "-q").code == 0
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert cli("run", path, "-m", model, "--embed", "-q").code == 2


def test_prompt_name_selects_one_of_the_models_prompts(cli, last, mean, write_jsonl, tmp_path):
    path, out = write_jsonl([{"prompt": p} for p in PROMPTS[:3]]), tmp_path / "prompts.out.jsonl"
    assert cli("run", path, "-m", last, "--embed", "--prompt-name", "query", "-q").code == 0
    want = expected(last, [QUERY + p for p in PROMPTS[:3]])
    np.testing.assert_allclose(embeddings(json_rows(out)), want, atol=1e-5)
    assert cli("run", path, "-m", mean, "--embed", "--prefix", "", "-q", "--overwrite").code == 0
    want = expected(mean, PROMPTS[:3], mean=True, normalize=False)
    np.testing.assert_allclose(embeddings(json_rows(out)), want, atol=1e-5)
    unknown = cli("run", path, "-m", last, "--embed", "--prompt-name", "passage", "--overwrite")
    assert unknown.code == 2
    assert "--prompt-name 'passage': the model has no prompt of this name; it has document, query" in unknown.err


def test_a_model_without_pooling_files_normalises_the_last_token_by_default(tiny_model_dir, tmp_path):
    with LLM(tiny_model_dir, task="embed") as llm:
        results = llm.embed(PROMPTS)
    np.testing.assert_allclose([r.embedding for r in results], expected(tiny_model_dir, PROMPTS), atol=1e-5)
    with LLM(tiny_model_dir, task="embed", pooling="mean", normalize=False) as llm:
        results = llm.embed(PROMPTS)
        (alone,) = llm.embed(PROMPTS[0])
    want = expected(tiny_model_dir, PROMPTS, mean=True, normalize=False)
    np.testing.assert_allclose([r.embedding for r in results], want, atol=1e-5)
    np.testing.assert_allclose(alone.embedding, want[0], atol=1e-5)
    assert results[0].embedding.dtype == np.float32


@pytest.mark.parametrize(
    "options", slow_but(["", "--no-chat"], ["", "--system Brief.", "--no-chat", "--prompt-name query"])
)
def test_an_embeddings_request_and_a_row_with_the_same_text_give_the_same_embedding(
    cli, write_jsonl, tmp_path, options
):
    folder = save_embedder(tmp_path / "m", chat=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"modality_config": {"text": {}, "message": {}}}))
    request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hello"}}
    path = write_jsonl([{"prompt": "Hello"}, request])
    assert cli("run", path, "-m", folder, "--embed", "-o", tmp_path / "o.jsonl", *options.split()).code == 0
    row, batch = json_rows(tmp_path / "o.jsonl")
    assert batch["usage"] == row["usage"]
    assert batch["embedding"] == row["embedding"]


def test_conversations_go_through_the_chat_template_and_texts_do_not(tmp_path):
    folder = save_embedder(tmp_path / "m", chat=True)
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    with LLM(folder, task="embed") as llm:
        results = llm.embed(["Hello", talk])
        (asked,) = llm.embed("Hello", prompt_options=PromptConfig(chat=True))
        (query,) = llm.embed("Hello", prompt_options=PromptConfig(prompt_name="query"))
    raw = expected(folder, ["Hello", QUERY + "Hello"])
    np.testing.assert_allclose([results[0].embedding, query.embedding], raw, atol=1e-5)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(t, tokenize=False) for t in (talk, talk[:1])]
    want = expected(folder, [text.removeprefix("<|begin|>") for text in texts])
    np.testing.assert_allclose([results[1].embedding, asked.embedding], want, atol=1e-5)


def test_a_prompt_may_fill_the_context_and_a_longer_one_fails_alone(last):
    with LLM(last, task="embed") as llm:
        whole, longer = llm.embed(["x" * 511, "x" * 512])
        (cut,) = llm.embed("x" * 600, prompt_options=PromptConfig(on_long_prompt="truncate-right"))
    assert (whole.error_type, longer.error_type) == (None, "prompt_too_long")
    assert whole.prompt_tokens == 512
    assert cut.truncated
    np.testing.assert_allclose(cut.embedding, whole.embedding, atol=1e-6)


def test_a_long_text_is_cut_after_the_token_where_the_tokenizer_cuts_it(tmp_path):
    folder = save_embedder(tmp_path / "m")
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=20)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|begin|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|begin|> $A <|end|>", special_tokens=special)
    tokenizer.save_pretrained(folder)
    texts = ["€" * 40, "short", "é€" * 5]
    ids = tokenizer(texts, truncation=True)["input_ids"]
    assert [len(i) for i in ids] == [20, 7, 20]
    cut = PromptConfig(on_long_prompt="truncate-right")
    with LLM(folder, task="embed") as llm:
        results, expected = llm.embed(texts, prompt_options=cut), llm.embed(ids)
        (long,) = llm.embed("a", prompt_options=replace(cut, prompt_name="query"))
    assert [r.truncated for r in results] == [True, False, True]
    np.testing.assert_array_equal([r.embedding for r in results], [r.embedding for r in expected])
    assert long.error_type == "prompt_too_long"  # the model's own text alone is


@pytest.mark.parametrize(
    "settings",
    [
        {"max_seq_length": 20, "do_lower_case": False},
        {"max_seq_length": 40, "tokenizer_args": {"model_max_length": 20, "padding_side": "left"}},
        {"processor_kwargs": {"model_max_length": 20}, "model_kwargs": {"torch_dtype": "bfloat16"}},
    ],
)
def test_the_longest_text_is_that_of_sentence_transformers(tmp_path, settings):
    folder = save_embedder(tmp_path / "m")
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    with LLM(folder, task="embed") as llm:
        assert [r.error_type for r in llm.embed(["x" * 19, "x" * 20])] == [None, "prompt_too_long"]


def test_a_model_loaded_for_one_task_refuses_another(last, tiny_model_dir):
    with LLM(last, task="embed") as llm, pytest.raises(ValueError, match=r"loaded with task='embed'.*task='generate'"):
        llm.generate("Hello")
    with LLM(tiny_model_dir) as llm, pytest.raises(ValueError, match=r"loaded with task='generate'.*task='embed'"):
        llm.embed("Hello")
    with pytest.raises(ValueError, match="task must be generate, embed or classify, not 'rerank'"):
        LLM(last, task="rerank")


NAMES = "sentence_transformers.models."
BAD_MODULES = [{"path": "", "type": f"{NAMES}Transformer"}, {"path": "1_Pooling", "type": f"{NAMES}Pooling"}]
NORMALIZE = {"path": "2_Normalize", "type": f"{NAMES}Normalize"}


POOLING, MODULES, TRANSFORMER = "1_Pooling/config.json", "modules.json", "sentence_bert_config.json"
OTHER_METHOD = {"text": {"method": "get_text_features", "method_output_name": "pooler_output"}}


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        (POOLING, {"pooling_mode_cls_token": True}, "its pooling is cls, not the last token or the mean"),
        (POOLING, {"pooling_mode": ["mean", "max"]}, "its pooling is mean and max, not"),
        (POOLING, {"pooling_mode": "mean", "include_prompt": False}, "leaves out the tokens of the"),
        (MODULES, [*BAD_MODULES, {"path": "2_Dense", "type": f"{NAMES}Dense"}], "its modules.json has a module Dense"),
        (MODULES, [{"path": "", "type": "custom_st.Transformer"}, BAD_MODULES[1]], "has a module custom_st.Transformer"),
        (MODULES, [BAD_MODULES[0], {"path": "1_Pooling", "type": "org/m--own.Pooling"}], "has a module org/m--own.Pooling"),
        (MODULES, [BAD_MODULES[0], NORMALIZE, BAD_MODULES[1]], "the modules Transformer, Normalize, Pooling in this order"),
        (MODULES, [{**BAD_MODULES[0], "path": "0_Transformer"}, BAD_MODULES[1]], "in the folder 0_Transformer"),
        (MODULES, BAD_MODULES[:1], "its modules.json names no pooling"),
        (MODULES, {"a": 1}, "modules.json holds no list of objects"),
        (TRANSFORMER, {"do_lower_case": True}, "asks for lower-case text"),
        (TRANSFORMER, {"processing_kwargs": {"text": {"padding": True}}}, "has processing_kwargs"),
        (TRANSFORMER, {"config_args": {"num_hidden_layers": 1}}, "has config_args.num_hidden_layers"),
        (TRANSFORMER, {"processor_kwargs": {"padding_side": "left", "truncation_side": "left"}}, "has processor_kwargs.truncation_side;"),
        (TRANSFORMER, {"transformer_task": "fill-mask"}, "has transformer_task fill-mask"),
        (TRANSFORMER, {"modality_config": OTHER_METHOD}, "has a modality_config that embeds texts in another way"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "says that it is a SparseEncoder"),
    ],
)  # fmt: skip
def test_a_configuration_with_an_unsupported_setting_is_refused(cli, write_jsonl, tmp_path, file, content, why):
    folder = save_embedder(tmp_path / "m")
    (folder / file).write_text(json.dumps(content))
    refused = cli("run", write_jsonl([{"prompt": "a"}]), "-m", folder, "--embed")
    assert refused.code == 1
    assert why in refused.err
    assert refused.err.count("batchgen: error:") == 1


def test_a_prompt_of_the_model_cannot_be_put_before_token_ids(tmp_path, write_jsonl, cli):
    folder = save_embedder(tmp_path / "m", prompt_name="query")
    rows = write_jsonl([{"prompt": [5, 6, 7]}, {"prompt": "abc"}])
    refused = cli("run", rows, "-m", folder, "--embed", "--prompt-name", "query", "-o", tmp_path / "a.jsonl")
    assert refused.code == 3
    error = json_rows(tmp_path / "a.jsonl")[0]["error"]
    assert error["message"] == "column 'prompt' is a list of token ids, which cannot be combined with --prompt-name"
    said = cli("run", rows, "-m", folder, "--embed", "-o", tmp_path / "b.jsonl")
    assert said.code == 0
    assert (
        said.err.count(
            "prompts that are token ids are sent without the text that the model's files put before every prompt"
        )
        == 1
    )


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """The folder of the model org/name in the local cache, without a hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    return repo


@pytest.mark.parametrize("missing", ["modules.json", "1_Pooling/config.json"])
def test_a_cached_model_whose_pooling_was_never_fetched_is_refused_offline(missing, repo, tmp_path, write_jsonl, cli):
    folder = save_embedder(repo / "snapshots" / "abc", pooling={"pooling_mode_mean_tokens": True})
    (folder / missing).unlink()
    words = ("run", write_jsonl([{"prompt": "a"}]), "-m", "org/name", "--embed", "-o", tmp_path / "o.jsonl")
    refused = cli(*words)
    assert refused.code == 1
    assert refused.err == (
        f"batchgen: error: --embed: {missing} of the model 'org/name', which says how it pools, is not in the local cache, "
        f"and the hub cannot be reached; fetch it with `hf download org/name {missing}`, or name the pooling with --pooling\n"
    )
    assert cli(*words, "--pooling", "mean", "--overwrite").code == 0
    (repo / ".no_exist" / "abc" / missing).parent.mkdir(parents=True)
    (repo / ".no_exist" / "abc" / missing).touch()
    if missing == "modules.json":  # the hub was asked, and has none
        assert cli(*words, "--overwrite").code == 0


def test_the_hubs_answer_that_there_is_no_pooling_counts_without_a_writable_cache(
    repo, tmp_path, write_jsonl, cli, monkeypatch
):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    (save_embedder(repo / "snapshots" / "abc") / "modules.json").unlink()
    from_cache = huggingface_hub.hf_hub_download

    def answered(repo_id, filename, **options):
        if filename == "modules.json":
            raise EntryNotFoundError("404")
        return from_cache(repo_id, filename, **options)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answered)
    done = cli("run", write_jsonl([{"prompt": "a"}]), "-m", "org/name", "--embed", "-o", tmp_path / "o.jsonl")
    assert done.code == 0


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_a_plan_for_embeddings_or_classes_equals_the_run(cli, last, write_jsonl, tmp_path, task):
    model = last if task == "embed" else save_classifier(tmp_path / "classifier")
    path, stats = write_jsonl([{"prompt": p} for p in PROMPTS]), tmp_path / "stats.json"
    plan = json.loads(cli("plan", path, "-m", model, f"--{task}", "--json").out)
    assert cli("run", path, "-m", model, f"--{task}", "--stats", stats, "-q").code == 0
    figures = json.loads(stats.read_text())
    names = ("prompt_tokens", "prefill_tokens_min", "groups", "prefix_nodes")
    assert {n: plan[n] for n in names} == {n: figures[n] for n in names}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_embeddings_equal_those_of_sentence_transformers(
    tmp_path, tiny_model_dir, tiny_chat_model_dir, mode, normalize, chat
):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    base = tiny_chat_model_dir if chat else tiny_model_dir
    parts = [Transformer(str(base)), Pooling(64, pooling_mode=mode), *([Normalize()] if normalize else [])]
    model = SentenceTransformer(modules=parts, prompts={"query": QUERY, "document": ""}, device="cpu")
    model.save(str(tmp_path / "m"))
    model = SentenceTransformer(str(tmp_path / "m"), device="cpu")
    with LLM(tmp_path / "m", task="embed") as llm:
        for name in ("query", "document"):
            results = llm.embed(PROMPTS, prompt_options=PromptConfig(prompt_name=name))
            want = model.encode(PROMPTS, prompt_name=name, batch_size=3)
            np.testing.assert_allclose([r.embedding for r in results], want, atol=1e-5)
            assert results[0].prompt_tokens > len(PROMPTS[0]) + (len(QUERY) if name == "query" else 0)
