"""Loading a model's tokenizer and configuration: where each value comes from, and what errors say."""

import json
import os
import re
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from transformers import CONFIG_MAPPING

from batchgen.config import JobConfig, ModelConfig
from batchgen.dry_run import plan_job
from batchgen.errors import ModelError
from batchgen.model.architectures import context_note
from batchgen.model_files import has_chat_template
from batchgen.prompts import load_tokenizer
from batchgen.prompts.encoding import Encoder
from batchgen.prompts.hub import load_failure
from batchgen.prompts.tokenizer import load_config
from support.hub import cache_model, fake_hub
from support.progress import Recorder, logged
from support.python_process import run_python


def load(folder, **options):
    return load_tokenizer(ModelConfig(model=str(folder), **options))


def failure(model, **options):
    with pytest.raises(ModelError) as e:
        load(model, **options)
    assert e.value.exit_code == 1
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    ("files", "name", "value"),
    [
        # The end tokens come from the generation config, then from the configuration, then from the tokenizer.
        ({"generation": {"eos_token_id": [2, 3, 2]}}, "eos_token_ids", (2, 3)),
        ({"generation": {"eos_token_id": 3}, "config": {"eos_token_id": [1, 2]}}, "eos_token_ids", (3,)),
        ({"generation": {"temperature": 0.9, "max_length": 5}, "config": {"eos_token_id": [1, 2]}}, "eos_token_ids", (1, 2)),
        ({"generation": {"eos_token_id": None}}, "eos_token_ids", (1,)),
        ({"generation": {"eos_token_id": 0}}, "eos_token_ids", (0,)),
        ({"config": {"eos_token_id": 3}}, "eos_token_ids", (3,)),
        ({"config": {"eos_token_id": None}}, "eos_token_ids", (1,)),
        # Those of the whole model come before those of its language model, whose class may have a default.
        ({"generation": {"top_k": 9}, "config": {"model_type": "llava", "eos_token_id": [2, 3], "text_config": {"model_type": "llama"}}}, "eos_token_ids", (2, 3)),
        ({"generation": {"eos_token_id": [99999, 3]}}, "eos_token_ids", (3,)),  # the model does not know the first
        ({"generation": {"eos_token_id": 99999}, "config": {"eos_token_id": 2}}, "eos_token_ids", (2,)),
        # The length of the context and the size of the vocabulary come from the configuration, or from the one inside it.
        ({"config": {"max_position_embeddings": 77}}, "context_length", 77),
        ({"config": {"model_type": "gpt2", "n_positions": 33}}, "context_length", 33),
        ({"config": {"model_type": "mpt", "max_seq_len": 99}}, "context_length", 99),
        ({"config": {"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 55}}}, "context_length", 55),
        ({"config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}}}, "context_length", 256),
        ({"config": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}}, "context_length", 128),
        ({"config": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}}, "context_length", 64),
        ({"config": {"vocab_size": 320}}, "vocab_size", 320),
        ({"config": {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 300}}}, "vocab_size", 300),
    ],
)  # fmt: skip
def test_what_is_known_of_a_model_comes_from_its_files(tools, tmp_path, files, name, value):
    assert getattr(load(tools.save_model(tmp_path, **files)), name) == value


def test_a_model_whose_configuration_names_another_file_of_weights_is_refused(tools, tmp_path):
    """transformers reads that file, even if there is a model.safetensors."""
    message = failure(tools.save_model(tmp_path, config={"transformers_weights": "own.safetensors"}))
    assert (
        "says that the weights are in own.safetensors (transformers_weights), which batchgen does not read" in message
    )


def test_the_context_length_comes_from_the_tokenizer_if_the_configuration_has_none(tools, tmp_path):
    tokenizer = tools.byte_tokenizer(model_max_length=20)
    assert load(tools.save_model(tmp_path / "a", tokenizer=tokenizer)).context_length == 64
    assert (
        load(tools.save_model(tmp_path / "b", tokenizer=tokenizer, config={"model_type": "bloom"})).context_length == 20
    )


def test_a_hub_that_cannot_be_reached_is_an_error_that_tells_how_to_work_offline(monkeypatch, tmp_path):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    assert failure("nobody/nothing") == (
        "model 'nobody/nothing' is neither a folder here nor in the local cache, and the hub cannot be reached; "
        "check the connection and HF_HUB_OFFLINE, or use a local folder with config.json and the tokenizer's files"
    )
    assert failure("nobody/nothing", revision="v9").startswith("model 'nobody/nothing' at revision 'v9' is neither")


def test_a_package_that_the_tokenizer_files_need_is_named(monkeypatch, tmp_path):
    import transformers

    def failing(*args, **kwargs):
        raise ValueError("Couldn't instantiate the backend tokenizer from one of: \n(1) a serialization file")

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_text("x")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", failing)
    assert failure(tmp_path) == (
        f"model {str(tmp_path)!r} has no tokenizer.json, and no other tokenizer files that can be read here; "
        "add tokenizer.json, or install the package that its files are for (sentencepiece or tiktoken)"
    )


LOCAL = "use a local folder with config.json and the tokenizer's files"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("m.gguf", {"revision": "main"}, "--revision 'main' names a revision on the hub, and 'm.gguf' is a local file; leave --revision out"),
        ("what is this?", {}, f"model 'what is this?' is neither a folder nor a hub name; {LOCAL}, or a hub name such as org/model"),
    ],
)  # fmt: skip
def test_what_is_neither_a_folder_nor_a_hub_name_is_refused(tmp_path, monkeypatch, model, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_text("GGUF")
    assert failure(model, **options) == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", f"model 'org/m' is neither a folder here nor a model on the hub; check the name (a private model needs `hf auth login`), or {LOCAL}"),
        ("RevisionNotFoundError", "model 'org/m' has no revision 'v9' on the hub; give a branch, a tag or a commit of it, or leave --revision out"),
        ("GatedRepoError", f"model 'org/m' is gated, and you have no access to it; ask for access on its page and log in with `hf auth login`, or {LOCAL}"),
    ],
)  # fmt: skip
def test_the_hubs_answer_is_told_in_one_line(monkeypatch, error, message):
    import transformers
    from huggingface_hub import errors

    def refused(*args, **options):
        answer = SimpleNamespace(status_code=404, headers={}, request=None)
        raise OSError("a page of advice\nin lines") from getattr(errors, error)("no", response=answer)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refused)
    assert failure("org/m", revision="v9") == message


@pytest.mark.slow
def test_advice_from_libraries_does_not_reach_standard_error(tools, tmp_path):
    """Covers a Llama folder with a tokenizer of another class, and a prompt longer than the tokenizer's own limit."""
    folder = tools.save_model(tmp_path, tokenizer=tools.byte_tokenizer(model_max_length=2))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizer"}))
    code = (
        "import sys; from batchgen.config import *; from batchgen.sampling_params import SamplingParams\n"
        "from batchgen.prompts import *; from batchgen.records.rows import Row\n"
        f"tokenizer = load_tokenizer(ModelConfig(model={folder!r}))\n"
        "out = PromptBuilder(tokenizer, PromptConfig(), SamplingParams()).build([Row(0, {'prompt': 'abcdef'}, None, '')])\n"
        "import transformers.utils.logging as l; print(len(out[0].tokens), l.get_verbosity())"
    )
    done = run_python(code, check=True)
    assert (done.stdout, done.stderr) == ("7 30\n", "")


def test_a_split_pattern_that_transformers_knows_to_be_wrong_is_reported(tools, tmp_path):
    """transformers marks only large Mistral vocabularies saved by old versions; the test sets the mark itself."""
    from batchgen.config import PromptConfig
    from batchgen.prompts import PromptBuilder
    from batchgen.sampling_params import SamplingParams

    tokenizer = load(tools.save_model(tmp_path))
    assert PromptBuilder(tokenizer, PromptConfig(), SamplingParams()).notes == []
    tokenizer.hf_tokenizer.fix_mistral_regex = False
    assert PromptBuilder(tokenizer, PromptConfig(), SamplingParams()).notes == [
        f"the tokenizer of {str(tmp_path)!r} splits text by a pattern known to be wrong; "
        'to fix it, put "fix_mistral_regex": true into its tokenizer_config.json'
    ]


# -- the length of the context


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
PHIMOE = PHI3 | {"model_type": "phimoe", "num_key_value_heads": 2, "num_local_experts": 2, "intermediate_size": 32}
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.5}
QSA = {"indexer_n_heads": 1, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_compress_ratio": 4}
BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "index_block_size": 16}
LONG = {"max_position_embeddings": 512}
MOVES = "beyond that LongRoPE changes the positions of all rows that run together"
CHOOSES = "beyond that the model's indexer chooses which keys a query sees"
CHUNKS = "beyond that some layers see only a chunk of the text"


@pytest.mark.parametrize(
    ("config", "length", "why"),
    [
        (PHIMOE | {"rope_parameters": LONGROPE | MSCALES | {"original_max_position_embeddings": 48}} | LONG, 48, MOVES),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, 64, None),
        ({"model_type": "llama4_text", "attention_chunk_size": 40} | LONG, 40, CHUNKS),
        ({"model_type": "deepseek_v32", "index_topk": 96} | LONG, 96, CHOOSES),
        ({"model_type": "minimax_m3_vl_text", "index_topk_blocks": 6} | BLOCKS | LONG, 96, CHOOSES),
        ({"model_type": "qwen4_exp_text", "indexer_budget": 96, "head_dim": 64} | QSA | LONG, 96, CHOOSES),
    ],
)
def test_the_context_ends_where_a_model_begins_to_treat_rows_otherwise(tools, tmp_path, config, length, why):
    """Positions would depend on the batch, or a query would no longer see all keys."""
    if config.get("model_type", "llama") not in CONFIG_MAPPING:
        pytest.skip("the installed transformers does not have it")
    tokenizer = load(tools.save_model(tmp_path, config=config))
    assert tokenizer.context_length == length
    note = why and f"the context ends at {length} tokens: {why}"
    assert context_note(tokenizer.hf_config) == note


def test_the_user_is_told_why_the_context_ends(tools, tmp_path):
    model = tools.save_model(tmp_path, config={"model_type": "llama4_text", "attention_chunk_size": 40} | LONG)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a" * 50}))
    told = Recorder()
    assert plan_job(JobConfig(inputs=tmp_path / "rows.jsonl", model=model), told).figures["rows_failed"] == 1
    assert f"the context ends at 40 tokens: {CHUNKS}" in told.notes


@pytest.mark.parametrize(
    ("config", "short"),
    [
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 48}}, 48),
        (PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 40}, 40),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}}, 0),
        ({}, 0),
    ],
)
def test_long_rope_has_the_models_whole_context(tools, tmp_path, config, short):
    tokenizer = load(tools.save_model(tmp_path, config={"max_position_embeddings": 64} | config))
    assert (tokenizer.context_length, tokenizer.short_context) == (64, short)
    assert context_note(tokenizer.hf_config) is None


@pytest.mark.parametrize(("own", "expected"), [(None, "processor"), ("tokenizer", "tokenizer")])
@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_chat_template_in_the_processors_own_file_is_used_if_the_tokenizer_has_none(
    tools, tmp_path, file, own, expected
):
    folder = tools.save_model(tmp_path, tokenizer=tools.byte_tokenizer(chat_template=own))
    assert has_chat_template(ModelConfig(model=str(folder))) is (own is not None)
    (tmp_path / file).write_text('{"chat_template": "processor"}')
    assert load(folder).hf_tokenizer.chat_template == expected
    assert has_chat_template(ModelConfig(model=str(folder)))


def test_a_package_that_transformers_lacks_is_named():
    missing = ImportError(
        "\nAutoImageProcessor requires the Torchvision library but it was not found in your environment. Check"
    )
    assert str(load_failure(ModelConfig(model="m"), "image processor", missing)) == (
        "the image processor of model 'm' needs the package torchvision; pip install torchvision"
    )


def test_a_checkpoint_with_mistrals_own_file_alone_has_its_special_tokens_and_chat_template(tools, tmp_path):
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tekken = {
        "config": {"pattern": ".", "num_vocab_tokens": 256, "default_vocab_size": 261, "default_num_special_tokens": 5, "version": "v7"},
        "vocab": [{"rank": i, "token_bytes": b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)],
        "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(special)],
    }  # fmt: skip
    folder = Path(tools.save_model(tmp_path / "m", config={"model_type": "mistral"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tekken.json").write_text(json.dumps(tekken))
    if find_spec("mistral_common") is None:
        assert failure(folder) == (
            f"model {str(folder)!r} has no tokenizer.json, and the chat template for its tekken.json comes with the package mistral-common; pip install mistral-common"
        )
    (folder / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    tokenizer = load(folder).hf_tokenizer
    texts = ["a", "<s>a", "[INST]a"]
    assert [a.tolist() for a in Encoder(tokenizer).encode(texts, special=True)] == [[1, 102], [1, 102], [1, 3, 102]]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<s>[INST]a[/INST]"
    assert tokenizer.decode([1, 3, 102, 4], skip_special_tokens=True) == "a"


@pytest.fixture
def cached(tmp_path, tiny_model_dir, monkeypatch):
    """The model org/name in the hub's cache, without offline mode."""
    cache_model(monkeypatch, tmp_path / "hub", tiny_model_dir, offline=False)
    return constants


@pytest.mark.parametrize("weights", [True, False])
def test_a_cached_model_is_loaded_offline_if_the_hub_gives_no_answer(cached, monkeypatch, tmp_path, weights):
    """Otherwise each file that it lacks would be asked for again and again, for minutes. A plan needs no weights."""
    monkeypatch.setattr(cached, "ENDPOINT", "http://127.0.0.1:9")
    if not weights:
        for file in (tmp_path / "hub").rglob("*.safetensors"):
            file.unlink()
    with logged("batchgen", "WARNING") as messages:
        assert load_config(ModelConfig(model="org/name")).model_type == "llama"
    (message,) = messages
    assert re.fullmatch(
        r"the hub cannot be reached \(.*\): the files of org/name are those of the local cache", message
    )
    assert (cached.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (True, "1")


def test_an_answer_of_the_hub_turns_no_offline_mode_on(cached, monkeypatch):
    with fake_hub(monkeypatch), logged("batchgen", "WARNING") as messages, pytest.raises(ModelError):
        load_config(ModelConfig(model="org/name"))
    assert (messages, cached.HF_HUB_OFFLINE) == ([], False)
