"""Reads what `--embed` and `--classify` need to know of a model: its sentence-transformers configuration, or its labels.

The files are those that sentence-transformers writes: modules.json, the configuration of the pooling module, sentence_bert_config.json and
config_sentence_transformers.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model_files import CLASSIFIER, CLASSIFY_HINT, find_file, read_json, read_json_list
from batchgen.parsers.heads import OutputHead

MODULES = "modules.json"
_TRANSFORMER = "sentence_bert_config.json"
_MODEL = "config_sentence_transformers.json"
_PACKAGE = "sentence_transformers."
"""The names of sentence-transformers' own modules begin with this. Others run code of the model, which may do anything."""
_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
"""How `modality_config` calls the model for hidden states."""
_NO_EFFECT = frozenset({
    "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "padding_side", "torch_dtype", "trust_remote_code", "use_cache",
    "use_fast",
})  # fmt: skip
"""What the arguments below may hold: it changes no embedding, or only its rounding."""
_TOKENIZER = ("processor_kwargs", "tokenizer_args")
_ARGUMENTS = dict.fromkeys(("config_kwargs", "config_args", "model_kwargs", "model_args"), _NO_EFFECT) | dict.fromkeys(
    _TOKENIZER, _NO_EFFECT | {"model_max_length"}
)
"""Arguments with which sentence-transformers loads the model and its tokenizer, and what of them is read here. The names in `_args` are older ones."""
_POOLINGS = {"lasttoken": "last", "mean": "mean"}
_SWITCH = "pooling_mode_"
"""Older files have a switch for each pooling, which begins with this."""


def read_head(config: ModelConfig, hf_config: Any) -> OutputHead | None:
    """Returns how the model embeds or classifies prompts; None without `--embed` and `--classify`. Raises `ModelError`."""
    if config.classify:
        return _classification(config, hf_config)
    if config.embed:
        return _embedding(config)
    name = str((getattr(hf_config, "architectures", None) or [""])[0])
    if name.endswith(CLASSIFIER):
        raise ModelError(
            f"the model {config.model!r} is a classifier or reward model ({name}), not a model that writes text",
            CLASSIFY_HINT,
        )
    return None


def max_prompt_tokens(config: ModelConfig, tokenizer: Any) -> int | None:
    """Returns the length to which sentence-transformers cuts texts for the model; None if it does not, or without `--embed`."""
    if not config.embed or find_file(config, MODULES) is None:
        return None
    transformer = _json_object(config, _TRANSFORMER)
    length = _tokenizer_length(transformer) or transformer.get("max_seq_length") or tokenizer.model_max_length
    return length if isinstance(length, int) and length > 0 else None


def _embedding(config: ModelConfig) -> OutputHead:
    pooling, normalize = "last", True
    file = find_file(config, MODULES)
    if file is None:
        _check_absent(config, MODULES)
    own = [] if file is None else read_json_list(file)
    if own:
        pooling, normalize = _pooling_of(config, own), any(_class_name(module) == "Normalize" for module in own)
    transformer, model = _json_object(config, _TRANSFORMER), _json_object(config, _MODEL)
    _check_settings(config, transformer, model)
    prompts = model.get("prompts")
    found = {k: v for k, v in prompts.items() if isinstance(v, str)} if isinstance(prompts, Mapping) else {}
    name = model.get("default_prompt_name")
    return OutputHead(
        task="embed",
        pooling=pooling if config.pooling == "auto" else config.pooling,
        normalize=normalize if config.normalize is None else config.normalize,
        prompts=found,
        prompt_name=name if name in found else None,
        # Since version 6, sentence-transformers writes this for models with a chat template.
        chat="message" in (transformer.get("modality_config") or ()),
    )


def _check_settings(config: ModelConfig, transformer: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raises `ModelError` for settings that change embeddings and that batchgen does not read."""
    if transformer.get("do_lower_case") is True:
        raise _unsupported(config, f"its {_TRANSFORMER} asks for lower-case text")
    unread = ["processing_kwargs"] if transformer.get("processing_kwargs") else []
    for name, read in _ARGUMENTS.items():
        unread += [f"{name}.{key}" for key in transformer.get(name) or () if key not in read]
    if unread:
        raise _unsupported(config, f"its {_TRANSFORMER} has {', '.join(unread)}")
    task = transformer.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise _unsupported(config, f"its {_TRANSFORMER} has transformer_task {task}")
    calls = transformer.get("modality_config") or {}
    call = calls.get("message") or calls.get("text") or {}
    if call and any(call.get(key) != value for key, value in _FORWARD.items()):
        raise _unsupported(config, f"its {_TRANSFORMER} has a modality_config that embeds texts in another way")
    kind = model.get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":
        raise _unsupported(config, f"its {_MODEL} says that it is a {kind}")


def _tokenizer_length(transformer: Mapping[str, Any]) -> Any:
    """Returns the length that the settings of the tokenizer have, which is used before any other; None without one."""
    settings = (transformer.get(name) or {} for name in _TOKENIZER)
    return next((found["model_max_length"] for found in settings if "model_max_length" in found), None)


def _pooling_of(config: ModelConfig, modules: Sequence[Mapping[str, Any]]) -> str:
    """Returns the pooling that modules.json names. Raises `ModelError` for one that batchgen does not have, and for other modules."""
    kinds = [_class_name(module) for module in modules]
    other = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
    if other is not None:
        raise _unsupported(config, f"its modules.json has a module {other}")
    place = next(
        (str(m.get("path") or "") for m, kind in zip(modules, kinds, strict=True) if kind == "Transformer"), ""
    )
    if place:
        raise _unsupported(config, f"its modules.json has the language model in the folder {place}, not beside it")
    if "Pooling" not in kinds:
        raise _unsupported(config, "its modules.json names no pooling")
    if kinds[:2] != ["Transformer", "Pooling"] or {*kinds[2:]} - {"Normalize"}:
        raise _unsupported(config, f"its modules.json has the modules {', '.join(kinds)} in this order")
    pooling = modules[1]
    place = f"{pooling.get('path')}/config.json"
    settings = _json_object(config, place)
    if not settings:
        _check_absent(config, place)
    on = [key.removeprefix(_SWITCH) for key, value in settings.items() if key.startswith(_SWITCH) and value is True]
    modes = settings.get("pooling_mode") or [mode.removesuffix("_tokens").removesuffix("_token") for mode in on]
    modes = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
    if config.pooling != "auto":
        return config.pooling
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise _unsupported(config, f"its pooling is {' and '.join(map(str, modes))}, not the last token or the mean")
    if modes[0] == "mean" and settings.get("include_prompt") is False:
        raise _unsupported(config, "its pooling leaves out the tokens of the prompt")
    return _POOLINGS[modes[0]]


def _check_absent(config: ModelConfig, name: str) -> None:
    """Raises `ModelError` if the hub may have a file that says how the model pools, and the file is neither in the cache nor can be fetched."""
    if config.pooling != "auto" or Path(config.model).expanduser().exists():
        return
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if try_to_load_from_cache(config.model, name, revision=config.revision) is _CACHED_NO_EXIST:
        return
    try:  # a cache that cannot be written to does not remember that the hub has no such file
        hf_hub_download(config.model, name, revision=config.revision)
    except LocalEntryNotFoundError as e:
        raise ModelError(
            f"--embed: {name} of the model {config.model!r}, which says how it pools, is not in the local cache, and the hub cannot be reached",
            f"fetch it with `hf download {config.model} {name}`, or name the pooling with --pooling",
        ) from e
    except EntryNotFoundError:
        return


def _class_name(module: Mapping[str, Any]) -> str:
    """The name of a module's class: `Pooling` of sentence-transformers, or the whole name of another package's."""
    name = str(module.get("type", ""))
    return name.rpartition(".")[2] if name.startswith(_PACKAGE) else name


def _unsupported(config: ModelConfig, why: str) -> ModelError:
    return ModelError(
        f"--embed does not run the model {config.model!r} as sentence-transformers does: {why}",
        "use sentence-transformers for it, or another model",
    )


def _classification(config: ModelConfig, hf_config: Any) -> OutputHead:
    names = getattr(hf_config, "architectures", None) or ["without a name"]
    if not str(names[0]).endswith(CLASSIFIER):
        raise ModelError(
            f"--classify: the model {config.model!r} has no classification head (its architecture is {names[0]})",
            "give a …ForSequenceClassification model; --choices labels prompts with a model that writes text",
        )
    labels = tuple(str(name) for _, name in sorted(hf_config.id2label.items()))
    if len(set(labels)) < len(labels):
        raise ModelError(
            f"--classify: two labels of the model {config.model!r} have the same name",
            "correct id2label in its config.json",
        )
    problem = getattr(hf_config, "problem_type", None)
    if problem == "regression" and len(labels) > 1:
        raise ModelError(
            f"--classify: the head of the model {config.model!r} gives {len(labels)} numbers that are not probabilities "
            "(problem_type regression)",
            "give a classifier, or a reward model with one number",
        )
    return OutputHead(
        task="classify",
        labels=labels,
        independent=problem == "multi_label_classification",
        pad_token_id=getattr(hf_config.get_text_config(), "pad_token_id", None),
    )


def _json_object(config: ModelConfig, name: str) -> Mapping[str, Any]:
    """Returns the object in a file of the model; {} if there is none."""
    path = find_file(config, name)
    return {} if path is None else read_json(path)
