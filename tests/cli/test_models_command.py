"""`batchgen models` as its users see it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
Break = Callable[[Path], Any]


def breaks(change: Callable[..., Any]) -> Callable[..., Break]:
    """Makes a function of a folder and options one of the options, which returns what is to be done to the folder."""
    return lambda *given, **options: lambda folder: change(folder, *given, **options)


@breaks
def settings(folder: Path, **changes: Any) -> None:
    """Changes config.json; None removes a key."""
    value = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


@breaks
def text(folder: Path, name: str, content: str | bytes) -> None:
    """Writes a file."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@breaks
def only(folder: Path, **files: str | bytes) -> None:
    """Replaces all files by these. In their names a dot is written `__`."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in files.items():
        text(name.replace("__", "."), content)(folder)


@breaks
def without(folder: Path, name: str) -> None:
    (folder / name).unlink()


@breaks
def renamed(folder: Path, new: str) -> None:
    (folder / "model.safetensors").rename(folder / new)


@breaks
def moved(folder: Path, to: str) -> None:
    """Moves all files to a folder in the folder."""
    aside = folder.rename(folder.with_name("moved"))
    (folder / to).parent.mkdir(parents=True)
    aside.rename(folder / to)


@breaks
def cut(folder: Path, name: str, size: int) -> None:
    """Truncates a file to `size` bytes; a negative size is the number of bytes to cut off."""
    os.truncate(folder / name, size if size >= 0 else (folder / name).stat().st_size + size)


@breaks
def sharded(folder: Path, *, lose: str = "", index: bool = True, then: Break = lambda folder: None) -> None:
    """Divides the weights into two shards, and writes their index."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, tensors in halves.items():
        save_file({name: weights[name] for name in tensors}, folder / file, {"format": "pt"})
    if index:
        mapped = {name: file for file, tensors in halves.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    if lose:
        (folder / lose).unlink()
    then(folder)


@breaks
def pickled(folder: Path) -> None:
    """Leaves weights in a pickled shard alone, with its index."""
    (folder / "model.safetensors").rename(folder / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@breaks
def tensors(folder: Path, change_one: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the tensors of the weights."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change_one(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _narrow(weights: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:100].clone()


def _headless(folder: Path) -> None:
    settings(architectures=["LlamaModel"], tie_word_embeddings=False)(folder)
    tensors(lambda weights: weights.pop("lm_head.weight"))(folder)


def _dead_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")


AGAIN = "the download was not completed: download it again"
PULL = "run `git lfs pull` in the cloned folder, or download the model with `hf download`"
CAUSAL = "give a causal language model (…ForCausalLM)"
HEADLESS = (
    "the weights in 'M' have no output head (lm_head.weight): the model gives hidden states, not text; "
    f"add --embed for embeddings, or {CAUSAL}"
)
ORIGINAL = "give the original model, or one quantized in a way that docs/quantized.md lists"

PICKLED = (
    "the model 'M' has only pickled weights (pytorch_model.bin), which batchgen never opens because they can run any program; convert them "
    "on a machine where that is safe (from_pretrained and save_pretrained of transformers), or use another model or --revision"
)

BROKEN: dict[str, tuple[Break, str]] = {
    # no model
    "empty folder": (only(), "model folder 'M' is empty; give the folder that holds the model"),
    "no config": (without("config.json"), "model folder 'M' has no config.json; give the folder that holds the model"),
    "folder of checkpoints": (moved("checkpoint-1000"), "model folder 'M' has no config.json; did you mean M/checkpoint-1000?"),
    "cache entry": (moved("snapshots/0123abc"),
        "model folder 'M' is an entry of the hub's cache; give M/snapshots/0123abc, or the model's name on the hub"),
    "config is a pointer": (text("config.json", LFS),
        f"M/config.json is a Git LFS pointer, not the file itself; {PULL}"),
    "config is a web page": (text("config.json", "<!DOCTYPE html><html><body>Sign in</body></html>"),
        "M/config.json is a web page, not the file itself; download it with `hf download`"),
    "config is cut": (text("config.json", '{"model_type": "llama", "hidden_'),
        "M/config.json is not JSON: Unterminated string starting at: line 1 column 25 (char 24); copy the file from the model again"),
    "config is a list": (text("config.json", "[]"),
        "M/config.json holds no JSON object; copy the file from the model again"),
    "config without a type": (settings(model_type=None, architectures=None),
        "M/config.json does not say the model's model_type; give the folder of a transformers model"),
    # another program's
    "gguf": (only(m__Q4_K_M__gguf="GGUF"),
        "M/m.Q4_K_M.gguf is cut inside its header; the download was not completed: download it again"),
    "no gguf": (only(m__gguf="PK"), "M/m.gguf is not a GGUF file; download it again"),
    "gguf is a web page": (only(m__gguf="<html>"), "M/m.gguf is a web page, not the file itself; download it with `hf download`"),
    "several gguf": (only(a__gguf="GGUF", b__gguf="GGUF"), "model folder 'M' holds 2 GGUF files; give one of them: M/a.gguf"),
    "part of a gguf": (only(**{"m-00001-of-00002__gguf": b"GGUF" + bytes(30)}),
        "M/m-00001-of-00002.gguf is one part of a GGUF file; put the parts together with `llama-gguf-split --merge` of llama.cpp"),
    "adapter": (only(
            adapter_config__json=json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"}),
            adapter_model__safetensors=b"\x02\0\0\0\0\0\0\0{}",
        ),
        "model folder 'M' holds an adapter (LoRA) of org/base, not a model; name its base model with --model, and this folder with --lora"),
    "original format": (only(params__json="{}", consolidated__00__pth="x"),
        "model folder 'M' is in the format of the model's authors (params.json), not in that of transformers; download the version with config.json"),
    "mlx": (settings(model_type="ernie4_5_moe", quantization={"group_size": 64, "bits": 4}),
        "the model 'M' is quantized in a way that batchgen does not read: MLX, for models of type 'ernie4_5_moe'; give the original model, or one quantized in a way that docs/quantized.md lists"),
    # another task
    "classifier": (settings(architectures=["LlamaForSequenceClassification"]),
        "the model in 'M' is a classifier or reward model (LlamaForSequenceClassification), not a model that writes text; classify the rows with batchgen run --classify, or in Python with task='classify'"),
    "bert": (settings(architectures=["BertForMaskedLM"], model_type="bert"),
        f"the model in 'M' is a masked language model, which fills gaps (BertForMaskedLM), not a model that writes text; {CAUSAL}"),
    "t5": (settings(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True),
        "the model in 'M' is an encoder-decoder (t5), and batchgen runs decoder-only models; give a decoder-only model"),
    "no head": (_headless, HEADLESS),
    "head lost": (tensors(lambda w: w.pop("lm_head.weight")), HEADLESS),
    "unknown type": (settings(model_type="martian", architectures=["MartianForCausalLM"]),
        "transformers TRANSFORMERS does not know models of type 'martian'; install a newer transformers, or use another model"),
    # quantized in ways that are not read
    "aqlm": (settings(quantization_config={"quant_method": "aqlm", "bits": 4}),
        f"the model in 'M' is quantized with AQLM, which batchgen does not read; {ORIGINAL}"),
    "hqq": (settings(quantization_config={"quant_method": "hqq", "bits": 4}),
        f"the model in 'M' is quantized with HQQ, which batchgen does not read; {ORIGINAL}"),
    "quantized without a name": (settings(quantization_config={"bits": 4}),
        f"the model in 'M' is quantized with a method that its quantization_config does not name, which batchgen does not read; {ORIGINAL}"),
    "float8 without scales": (settings(dtype="float8_e4m3fn"),
        "the weights in 'M' are float8_e4m3fn without scales, which batchgen does not read; give the original model"),
    "unknown dtype": (settings(dtype="half"),
        "M/config.json gives the dtype 'half'; correct it: float32, bfloat16, float16, float64 or auto"),
    # weights
    "weights are a pointer": (text("model.safetensors", LFS),
        f"M/model.safetensors is a Git LFS pointer, not the file itself; {PULL}"),
    "weights are empty": (text("model.safetensors", ""), f"M/model.safetensors is empty; {AGAIN}"),
    "weights are cut": (cut("model.safetensors", -1000),
        f"M/model.safetensors is cut: it has BYTES of BYTES bytes; {AGAIN}"),
    "weights are cut in the header": (cut("model.safetensors", 600),
        f"M/model.safetensors is cut inside its header; {AGAIN}"),
    "weights are noise": (text("model.safetensors", bytes(range(256)) * 40),
        "M/model.safetensors is damaged, or not a safetensors file; download it again"),
    "weights are gone": (without("model.safetensors"), f"model folder 'M' has no weights (model.safetensors); {AGAIN}"),
    "weights are a dead link": (_dead_link,
        "M/model.safetensors is a link to a file that does not exist; download the model again"),
    "pickled weights": (renamed("pytorch_model.bin"), PICKLED),
    "pickled shards": (pickled(), PICKLED),
    "weights of another name": (renamed("consolidated.safetensors"),
        "model folder 'M' has consolidated.safetensors, but no model.safetensors; rename it if it holds all weights in the format of transformers, or download the version that has model.safetensors"),
    "a shard is gone": (sharded(lose="model-00002-of-00002.safetensors"),
        f"the weights in 'M' lack model-00002-of-00002.safetensors, one of 2 shards; {AGAIN}"),
    "no index": (sharded(index=False),
        f"model folder 'M' has shards (model-00001-of-00002.safetensors) but no model.safetensors.index.json; {AGAIN}"),
    "index without a map": (sharded(then=text("model.safetensors.index.json", '{"metadata": {}}')),
        "M/model.safetensors.index.json has no weight_map; copy the file from the model again"),
    "a cut shard": (sharded(then=cut("model-00001-of-00002.safetensors", -8)),
        f"M/model-00001-of-00002.safetensors is cut: it has BYTES of BYTES bytes; {AGAIN}"),
    "config of another size": (settings(hidden_size=128),
        "the weights in 'M' do not fit its config.json: lm_head.weight has shape [262, 64], and the configuration says [262, 128]; copy config.json and the weights from one model"),
    "a weight of another shape": (tensors(_narrow),
        "the weights in 'M' do not fit its config.json: model.layers.0.mlp.up_proj.weight has shape [100, 64], and the configuration says [128, 64]; copy config.json and the weights from one model"),
    "tensors are missing": (tensors(lambda w: [w.pop(f"model.layers.0.mlp.{name}_proj.weight") for name in ("up", "down")]),
        "the weights in 'M' lack 2 tensors, among them model.layers.0.mlp.down_proj.weight; copy config.json and the weights from one model"),
    # tokenizers
    "no tokenizer": (without("tokenizer.json"),
        "model folder 'M' has no tokenizer files; copy tokenizer.json and tokenizer_config.json of the model into it"),
    "tokenizer is cut": (cut("tokenizer.json", 1000),
        "M/tokenizer.json is not JSON: TAIL; copy the file from the model again"),
    "tokenizer without its parts": (text("tokenizer.json", "{}"),
        "the tokenizer of model 'M' cannot be loaded: it has no 'added_tokens'"),
    # architectures that cannot be exact
    "encoder": (settings(model_type="roberta", architectures=["RobertaForCausalLM"]),
        "models of type 'roberta' are not supported: they are encoders, in which a token also sees the tokens after it"),
    "an encoder by its settings": (settings(is_causal=False),
        "this model of type 'llama' is not supported: it is an encoder (is_causal is false), in which a token also sees the tokens after it"),
    "generation config is cut": (text("generation_config.json", "{"),
        "M/generation_config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); copy the file from the model again"),
    "generation config is a list": (text("generation_config.json", "[1]"),
        "M/generation_config.json holds no JSON object; copy the file from the model again"),
    "no length": (settings(max_position_embeddings=-1),
        "the configuration of model 'M' does not say how long its context is; add max_position_embeddings to its config.json"),
}  # fmt: skip
"""By name: the function that breaks the folder, and the message, with M for the folder."""


@pytest.mark.parametrize(
    ("files", "chat_template", "prompts"),
    [
        ("*.json *.jinja", True, "through its chat template"),
        ("config.json", None, "unknown: the folder has no tokenizer files, which a run needs"),
    ],
)
def test_a_model_that_would_run_is_told_from_its_configuration_and_what_there_is_of_its_tokenizer(
    files, chat_template, prompts, cli, tiny_chat_model_dir, tmp_path
):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (path for pattern in files.split() for path in tiny_chat_model_dir.glob(pattern)):
        shutil.copy(path, folder)
    outcome = cli("models", folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        f"model     {folder} (llama)",
        "          would run: its type is verified",
        "context   512 tokens",
        "size      1 layer, 262 tokens in the vocabulary, float32",
        f"prompts   {prompts}",
        "KV        256 B per token",
    ]
    shown = json.loads(cli("models", folder, "--json").out)
    assert (shown["verified"], shown["chat_template"]) == (True, chat_template)


@pytest.mark.parametrize(("name", "lines"), [("llava", ["images    shown to the model"]), ("llama", [])])
def test_a_model_that_is_shown_images_says_so(name, lines, cli, tmp_path):
    transformers.AutoConfig.for_model(name).save_pretrained(tmp_path)
    outcome = cli("models", tmp_path)
    assert [line for line in outcome.out.splitlines() if line.startswith("images")] == lines
    assert json.loads(cli("models", tmp_path, "--json").out)["images"] == bool(lines)


def test_a_context_that_is_shorter_than_the_configuration_says_is_explained(cli, tiny_chat_model_dir, tmp_path):
    folder = Path(shutil.copytree(tiny_chat_model_dir, tmp_path / "model"))
    indexed = {"model_type": "deepseek_v32", "index_topk": 48, "architectures": ["DeepseekV32ForCausalLM"]}
    settings(**indexed)(folder)
    outcome = cli("models", folder)
    assert (outcome.code, outcome.err) == (0, "")
    why = "the context ends at 48 tokens: beyond that the model's indexer chooses which keys a query sees"
    assert outcome.out.splitlines()[2:4] == ["context   48 tokens", f"          {why}"]
    assert json.loads(cli("models", folder, "--json").out)["context_note"] == why
    assert json.loads(cli("models", tiny_chat_model_dir, "--json").out)["context_note"] is None


def test_the_verified_and_the_refused_types_are_listed(cli):
    outcome = cli("models")
    assert (outcome.code, outcome.err) == (0, "")
    assert "qwen3" in outcome.out.replace(",", " ").split()
    assert max(map(len, outcome.out.splitlines())) <= 110
    words = outcome.out.replace(",", " ").split()
    assert ("qwen2_5_vl*" in words, "granite_speech" in words) == (True, True)
    known = json.loads(cli("models", "--json").out)
    assert set(known["images"]) < set(known["multimodal"])
    assert "llama" in known["verified"]
    assert not set(known["verified"]) & set(known["refused"])


# -- models that are refused


ONLY_LOADING_TELLS = {
    "weights are gone", "weights are a dead link", "config of another size", "a weight of another shape", "tensors are missing",
    "no head", "head lost",
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "name"),
    [("models", "classifier"), *(("run", name) for name in BROKEN), *(("plan", name) for name in BROKEN if name not in ONLY_LOADING_TELLS)],
)  # fmt: skip
def test_a_broken_model_is_refused_in_a_line_of_its_own(name, command, cli, tiny_model_dir, write_jsonl, tmp_path):
    change, message = BROKEN[name]
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    change(folder)
    job = () if command == "models" else (write_jsonl([{"prompt": "x"}]), "--no-progress", "-m")
    outcome = cli(command, *job, folder)
    assert (outcome.code, outcome.out) == (1, ""), outcome
    message = message.replace("TRANSFORMERS", transformers.__version__)
    expected = re.escape(re.sub(r"\bM\b(?=[/'])", lambda _: str(folder), message))
    expected = expected.replace("TAIL", ".*").replace("BYTES", r"[\d,]+")
    assert re.fullmatch(f"batchgen: error: {expected}\n", outcome.err), outcome.err
