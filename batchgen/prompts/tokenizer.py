"""Loads a model's tokenizer and configuration, never its weights. Knows nothing of rows and prompts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from threading import Lock
from typing import Any

from batchgen.config import ModelConfig
from batchgen.errors import ModelError, RowError
from batchgen.model_files import check_model_files, find_file, gguf_file, mlx_settings, read_json
from batchgen.parsers.heads import OutputHead
from batchgen.parsers.thinking import ThinkingFormat, thinking_format
from batchgen.parsers.tool_calls import ToolFormat, tool_format
from batchgen.prompts.gguf import load_gguf
from batchgen.prompts.heads import max_prompt_tokens, read_head
from batchgen.prompts.hub import load_failure, prefer_cache_if_unreachable
from batchgen.request import IMAGE_IDS
from batchgen.sampling_params import SamplingParams

# Where configurations say how many positions a model has, the usual name first.
_CONTEXT_NAMES = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_length", "max_seq_len", "seq_length", "n_ctx",
)  # fmt: skip
OTHER_PARTS = ("vision_config", "audio_config")
"""Names under which configurations describe parts other than the language model."""
_GENERATION = "generation_config.json"
_PROCESSOR_TEMPLATES = ("processor_config.json", "chat_template.json")
"""The files in which older multimodal checkpoints (LLaVA) may have their chat template. transformers reads them with the processor alone, in this order."""
# A tokenizer without a limit has a number such as 10**30.
_SANE_CONTEXT = 100_000_000


@dataclass(frozen=True, slots=True, eq=False)
class LoadedTokenizer:
    """A model's tokenizer and configuration, without its weights."""

    hf_tokenizer: Any
    """The transformers tokenizer."""
    hf_config: Any
    """The transformers configuration of the whole model (a nested one has `text_config`)."""
    context_length: int
    """Maximum number of tokens of prompt and completion together."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion. May be empty."""
    vocab_size: int
    """Number of token ids that the model knows: 0 to `vocab_size - 1`."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The sampling parameters of the model's `generation_file`; empty if that does not ask for sampling."""
    unused: tuple[str, ...] = ()
    """What that file asks for beside them, and batchgen does not do."""
    generation_file: str = _GENERATION
    """The file with the model's settings for generation."""
    thinking: ThinkingFormat | None = None
    """How the model marks its thoughts; None if it does not."""
    tool_format: ToolFormat | None = None
    """How the model writes tool calls; None if that is not known."""
    source: ModelConfig | None = None
    """Where it was loaded from; None for one that a program has put together."""
    head: OutputHead | None = None
    """How the model embeds or classifies prompts; None for a model that writes text."""

    @property
    def short_context(self) -> int:
        """Number of tokens up to which LongRoPE uses its short factors, if the context is longer; 0 for other models."""
        length = max(longrope_length(text_config(self.hf_config)), longrope_length(self.hf_config))
        return length if length < self.context_length else 0

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of a prompt's tokens, with `[image]` for each run of image tokens."""
        runs = groupby(tokens, lambda token: token >= IMAGE_IDS)
        return "".join("[image]" if image else str(self.hf_tokenizer.decode(list(run))) for image, run in runs)


def load_tokenizer(config: ModelConfig) -> LoadedTokenizer:
    """Loads the tokenizer and configuration of a folder or a hub model.

    Raises `ModelError`, in one line, if there is none or it cannot be read. transformers imports torch if it is installed; this module
    does not.
    """
    check_model_files(config)
    hf_config, tokenizer = _load_gguf(config) or (load_config(config), None)
    if tokenizer is None:
        tokenizer = _load_hf_tokenizer(config, hf_config)
        if tokenizer.chat_template is None:
            found = (_small_file(config, name).get("chat_template") for name in _PROCESSOR_TEMPLATES)
            tokenizer.chat_template = next((each for each in found if isinstance(each, str | dict)), None)
    # If files are missing, some classes make an empty tokenizer, or one with special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise load_failure(config, "tokenizer", ValueError("its vocabulary is empty"))
    with _loading(config, "configuration"):
        head, longest = read_head(config, hf_config), max_prompt_tokens(config, tokenizer)
    context_length = context_length_of(config, hf_config, tokenizer.model_max_length)
    vocab_size = _positive(getattr(text_config(hf_config), "vocab_size", None)) or len(tokenizer)
    generation_file, generation = ("", {}) if gguf_file(config) is not None else _generation_settings(config)
    return LoadedTokenizer(
        hf_tokenizer=tokenizer,
        hf_config=hf_config,
        context_length=context_length if longest is None else min(context_length, longest),
        eos_token_ids=_eos_token_ids(generation, hf_config, tokenizer, vocab_size),
        sampling=_generation_sampling(generation),
        unused=_unused_settings(generation),
        generation_file=generation_file,
        thinking=thinking_format(tokenizer),
        tool_format=tool_format(tokenizer),
        head=head,
        source=config,
        vocab_size=vocab_size,
    )


def load_config(config: ModelConfig) -> Any:
    """Loads the transformers configuration of a folder or a hub model. Raises `ModelError`, in one line, if it cannot be read."""
    # Imported here because transformers takes seconds to import. Before quiet(), because its import sets its log level.
    from transformers import AutoConfig

    with _loading(config, "configuration"):
        prefer_cache_if_unreachable(config)
        found = AutoConfig.from_pretrained(config.model, **_hub_options(config))
    if (file := getattr(found, "transformers_weights", None)) is not None:
        raise ModelError(
            f"config.json of model {config.model!r} says that the weights are in {file} (transformers_weights), which batchgen does not read",
            "name that file model.safetensors, and remove the setting",
        )
    settings = {} if hasattr(found, "quantization_config") else _small_file(config, "hf_quant_config.json")
    if "quantization" in settings:  # ModelOpt's older checkpoints describe themselves there
        found.quantization_config = {"quant_method": "modelopt", **settings["quantization"]}
    if getattr(found, "vision_config", None) == {}:  # mlx-vlm writes one for models of text, too
        del found.vision_config
    if (mlx := mlx_settings(found.to_dict())) is not None:
        stored = _small_file(config, "model.safetensors.index.json").get("weight_map") or {}
        lacks_encoder = bool(stored) and not any("vision" in name for name in stored)  # mlx-lm leaves it out
        if found.model_type == "gemma3n" and lacks_encoder:  # without embeddings of images, which the whole model has
            found.text_config.dtype = found.dtype
            found, mlx["is_multimodal"] = found.text_config, False
        found.quantization_config = mlx | {"lacks_encoder": lacks_encoder}
        if found.model_type == "falcon_h1":
            _take_out_multipliers(found)
    return found


def _take_out_multipliers(config: Any) -> None:
    """Leaves to a configuration of Falcon H1 the multipliers that are not in the weights that mlx-lm stores: that of keys, and that of values, which
    is applied to the output of attention instead."""
    of_head = config.lm_head_multiplier / config.embedding_multiplier if config.tie_word_embeddings else 1.0
    config.embedding_multiplier, config.lm_head_multiplier = 1.0, of_head
    config.attention_in_multiplier, config.attention_out_multiplier = 1.0, config.attention_in_multiplier
    config.mlp_multipliers, config.ssm_multipliers = [1.0] * 2, [1.0] * 5
    config.ssm_in_multiplier = config.ssm_out_multiplier = 1.0


def _load_hf_tokenizer(config: ModelConfig, hf_config: Any) -> Any:
    from transformers import AutoTokenizer

    with _loading(config, "tokenizer"):
        if (own := _load_tekken(config)) is not None:
            return own
        # Never mistral-common, which transformers prefers if it is installed: tokens must not depend on that.
        return AutoTokenizer.from_pretrained(
            config.model, config=hf_config, mistral_format=False, **_hub_options(config)
        )


def _load_tekken(config: ModelConfig) -> Any | None:
    """Returns the tokenizer of a checkpoint that has only Mistral's own file; None for others. transformers would leave out its special tokens and chat template.

    Raises `ModelError` if the checkpoint has no chat template, and the package that knows it is not installed.
    """
    file = find_file(config, "tekken.json")
    if file is None or find_file(config, "tokenizer.json") is not None:
        return None
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    written = find_file(config, "chat_template.jinja")
    if written is None and find_spec("mistral_common") is None:
        raise ModelError(
            f"model {config.model!r} has no tokenizer.json, and the chat template for its tekken.json comes with the package mistral-common",
            "pip install mistral-common",
        )
    template = None if written is None else written.read_text(encoding="utf-8")
    tokenizer = convert_tekken_tokenizer(str(file), template)
    tokenizer.add_bos_token = True
    return tokenizer


def _load_gguf(config: ModelConfig) -> tuple[Any, Any] | None:
    """Returns the configuration and the tokenizer of a GGUF file; None for another model."""
    file = gguf_file(config)
    if file is None:
        return None
    import transformers  # noqa: F401 - before quiet(), as above

    with _loading(config, "configuration"):
        hf_config, tokenizer = load_gguf(file)
    tokenizer.name_or_path = config.model
    return hf_config, tokenizer


def _hub_options(config: ModelConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


# transformers imports torchao if it is installed, which logs about its own build.
TALKATIVE = ("transformers", "huggingface_hub", "torchao", "bitsandbytes", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the warnings and loading bars of transformers and the retries of the hub off standard error. Errors are still raised and logged.

    May be nested, also by several threads. When the last one leaves, the settings from before the first one are restored.
    """
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _loading(config: ModelConfig, what: str) -> Iterator[None]:
    """Makes a `ModelError` of what libraries raise while they load a part of the model, and keeps them quiet."""
    with quiet():
        try:
            yield
        except ModelError:
            raise
        except Exception as e:
            raise load_failure(config, what, e) from e


class _Quiet:
    """Counts the users of `quiet`. The first one silences the libraries, the last one restores them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._silenced = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._silence()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._silenced.close()

    def _silence(self) -> None:
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
        from transformers.utils import logging as library

        for logger in map(logging.getLogger, TALKATIVE):
            if logger.isEnabledFor(logging.WARNING):
                self._silenced.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)
        if library.is_progress_bar_enabled():
            downloads = not are_progress_bars_disabled()
            self._silenced.callback(library.enable_progress_bar)
            library.disable_progress_bar()
            if downloads:  # whose bars are turned off with transformers' own
                enable_progress_bars()


_QUIET = _Quiet()


def language_config(hf_config: Any) -> Any:
    """Returns the configuration of the part that writes text if the model also speaks, else the configuration itself."""
    thinker = getattr(hf_config, "thinker_config", None)
    return hf_config if thinker is None else thinker


def text_config(hf_config: Any) -> Any:
    """Returns the configuration of the language model inside a multimodal one, else the configuration itself."""
    writer = language_config(hf_config)
    nested = getattr(writer, "text_config", None)
    return writer if nested is None else nested


def checkpoint_dtype(hf_config: Any) -> str:
    """Returns the type of a checkpoint's weights, such as `bfloat16`; float32 if its configuration does not say."""
    own = getattr(hf_config, "dtype", None) or getattr(text_config(hf_config), "dtype", None)
    return "float32" if own is None else str(own).removeprefix("torch.")


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def context_length_of(config: ModelConfig, hf_config: Any, tokenizer_length: int | None) -> int:
    """Returns the maximum number of tokens of prompt and completion. The tokenizer's length is used if the configuration has none. Raises `ModelError`."""
    for part in (text_config(hf_config), hf_config):
        for name in _CONTEXT_NAMES:
            length = _positive(getattr(part, name, None))
            if length is not None:
                longest = max(length, _yarn_length(part))
                ends = (capped_longrope(part), _chunk(part), indexed_length(part))
                return min([longest, *filter(None, ends)])
    length = _positive(tokenizer_length)
    if length is not None and length <= _SANE_CONTEXT:
        return length
    raise ModelError(
        f"the configuration of model {config.model!r} does not say how long its context is",
        "add max_position_embeddings to its config.json",
    )


def capped_longrope(part: Any) -> int:
    """Returns the length at which the context ends because the frequencies of LongRoPE cannot be chosen here; 0 if they can, and without it."""
    own = getattr(part, "model_type", None) != "phimoe" and type(part).__module__.startswith("transformers.")
    return 0 if own else longrope_length(part)


def _chunk(part: Any) -> int:
    """Returns the length of the chunks to which some layers limit their attention (Llama 4); 0 if there are none."""
    chunked = "chunked_attention" in (getattr(part, "layer_types", None) or ())
    return (_positive(getattr(part, "attention_chunk_size", None)) or 0) if chunked else 0


def indexed_length(part: Any) -> int:
    """Returns the length up to which an indexer (of DeepSeek V3.2 and others) or a dynamic mask (Doge) chooses every key; 0 without one."""
    if "minimax_m3_sparse" in (getattr(part, "layer_types", None) or ()):  # it chooses blocks of keys
        return int(part.index_block_size * part.index_topk_blocks)
    names = ("index_topk", "indexer_budget", "keep_window_size")
    return next(filter(None, (_positive(getattr(part, name, None)) for name in names)), 0)


def _yarn_length(part: Any) -> int:
    """Returns the context length that YaRN gives; 0 without YaRN. Models such as Qwen2.5 do not change max_position_embeddings for it."""
    rope = getattr(part, "rope_parameters", None) or getattr(part, "rope_scaling", None)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    factor, original = rope.get("factor"), _positive(rope.get("original_max_position_embeddings"))
    return int(original * factor) if original and isinstance(factor, int | float) else 0


def longrope_length(part: Any) -> int:
    """Returns the length up to which LongRoPE uses its short factors; 0 without LongRoPE. (Dynamic NTK changes only beyond max_position_embeddings.)"""
    rope = getattr(part, "rope_parameters", None) or getattr(part, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return 0
    ropes = [r for r in (rope, *rope.values()) if isinstance(r, Mapping)]
    long = [r for r in ropes if r.get("rope_type", r.get("type")) == "longrope"]
    lengths = [_positive(r.get("original_max_position_embeddings")) for r in long]
    return min(filter(None, lengths), default=0)


def _eos_token_ids(generation: Mapping[str, Any], hf_config: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Returns the end tokens of the generation configuration, else of the configuration, else of that of its language model, whose class may have a
    default, else of the tokenizer. Those that the model does not know are left out."""
    for value in (
        generation.get("eos_token_id"),
        getattr(hf_config, "eos_token_id", None),
        getattr(text_config(hf_config), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids = value if isinstance(value, list | tuple) else [value]
        known = (i for i in ids if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size)
        if found := tuple(dict.fromkeys(known)):
            return found
    return ()


def _generation_settings(config: ModelConfig) -> tuple[str, Mapping[str, Any]]:
    """Returns the name and the content of the file with the model's settings for generation: config.json if there is no other, as in transformers."""
    for name in (_GENERATION, "config.json"):
        if found := _small_file(config, name):
            return name, found
    return _GENERATION, {}


_UNUSED_SETTINGS = {
    "num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1,
    "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {}, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0, "stop_strings": [], "exponential_decay_length_penalty": None,
    "guidance_scale": 1, "penalty_alpha": 0, "typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0, "token_healing": False,
    "watermarking_config": None,
}  # fmt: skip
"""Settings of a generation configuration that batchgen does not use, and their values without effect."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _generation_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """Returns the sampling parameters of a generation configuration if it asks for sampling. Invalid values are left out."""
    if generation.get("do_sample") is not True:
        return {}
    return {"temperature": 1.0} | {n: generation[n] for n in _SAMPLING if _is_valid(n, generation.get(n))}


def _is_valid(name: str, value: Any) -> bool:
    """Whether a parameter may have this value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        SamplingParams().merged({name: value})
    except RowError:
        return False
    return True


def _unused_settings(generation: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of settings of a generation configuration that change what `generate` writes, and that batchgen does not use."""
    sampled = generation.get("do_sample") is True
    neutral = _UNUSED_SETTINGS if sampled else _UNUSED_SETTINGS | {"repetition_penalty": 1}
    unused = [name for name, value in neutral.items() if generation.get(name) not in (None, value)]
    given = (name for name in _SAMPLING if sampled and generation.get(name) is not None)
    return (*unused, *(name for name in given if not _is_valid(name, generation[name])))


def _small_file(config: ModelConfig, name: str) -> Mapping[str, Any]:
    """Returns the content of a JSON file of the model; {} if there is none. Raises `ModelError`."""
    with _loading(config, name):
        path = find_file(config, name)
    return {} if path is None else read_json(path)
