"""Sampling defaults: the model's own settings or greedy decoding, and the number of tokens."""

from dataclasses import replace

import pytest

from batchgen.config import ModelConfig, PromptConfig
from batchgen.parsers.thinking import FORMATS
from batchgen.prompts import PromptBuilder, load_tokenizer
from batchgen.sampling_params import SamplingParams

QWEN = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 1,
}  # fmt: skip
ASKED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def builder(tools, tmp_path, generation, sampling=None, **options):
    tokenizer = load_tokenizer(ModelConfig(model=tools.save_model(tmp_path / "m", generation=generation)))
    return PromptBuilder(tokenizer, PromptConfig(**options), sampling or SamplingParams())


def params(tools, b, *columns):
    return [request.params for request in b.build(tools.rows(*({"prompt": "a"} | c for c in columns)))]


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        (None, {}),
        ({"temperature": 0.6}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_p": "high", "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True, "top_p": 7.0}, {"temperature": 1.0}),
    ],
)
def test_a_model_that_does_not_ask_for_sampling_is_greedy(tools, tmp_path, generation, found):
    tokenizer = load_tokenizer(ModelConfig(model=tools.save_model(tmp_path / "m", generation=generation)))
    assert tokenizer.sampling == found


@pytest.mark.parametrize(
    ("generation", "unused"),
    [
        ({"repetition_penalty": 1.1, "suppress_tokens": [3], "num_beams": 1}, "suppress_tokens, repetition_penalty"),
        ({"do_sample": True, "temperature": 1.0, "repetition_penalty": 1.1, "typical_p": 1.0, "num_beams": 4}, "num_beams"),
        (
            {"min_new_tokens": 5, "stop_strings": ["a"], "encoder_no_repeat_ngram_size": 2, "num_return_sequences": 2},
            "num_return_sequences, encoder_no_repeat_ngram_size, min_new_tokens, stop_strings",
        ),
        ({"top_h": 0.4, "token_healing": True, "watermarking_config": {"bias": 2.5}}, "top_h, token_healing, watermarking_config"),
        ({"do_sample": True, "temperature": -1.0, "top_p": 0.0, "min_p": None, "top_k": 5}, "temperature, top_p"),
    ],
)  # fmt: skip
def test_settings_of_the_model_that_batchgen_does_not_use_are_named(tools, tmp_path, generation, unused):
    assert builder(tools, tmp_path, generation).notes[-1] == f"not used of the model's generation_config.json: {unused}"


def test_a_model_without_a_generation_config_has_its_settings_in_its_configuration(tools, tmp_path):
    settings = {"do_sample": True, "temperature": 0.3, "top_k": 7, "suppress_tokens": [5]}
    folder = tools.save_model(tmp_path / "m", config=settings)
    b = PromptBuilder(load_tokenizer(ModelConfig(model=folder)), PromptConfig(), SamplingParams())
    assert b.sampling == SamplingParams(temperature=0.3, top_k=7)
    assert b.notes == [
        "sampling uses the model's config.json: temperature 0.3, top_k 7 (--sampling-defaults greedy ignores it)",
        "not used of the model's config.json: suppress_tokens",
    ]


def test_the_greedy_option_ignores_the_models_sampling(tools, tmp_path):
    b = builder(tools, tmp_path, QWEN, sampling_defaults="greedy")
    assert (params(tools, b, {}), b.notes) == ([SamplingParams()], [])


def test_options_and_a_rows_own_parameters_win_over_the_model(tools, tmp_path):
    b = builder(tools, tmp_path, QWEN, SamplingParams(temperature=0.0, seed=3))
    rest = {name: value for name, value in ASKED.items() if name != "temperature"}
    assert params(tools, b, {}, {"sampling_params": {"top_p": 1, "temperature": None}}) == [
        SamplingParams(seed=3, **rest),
        SamplingParams(seed=3, **rest | {"top_p": 1.0}),
    ]
    each = b.build(tools.rows({"prompt": "a"}), [SamplingParams(top_k=0)])
    assert each[0].params == SamplingParams(**ASKED | {"top_k": 0})


def test_the_models_sampling_does_not_affect_labels_and_scores(tools, tmp_path):
    b = builder(tools, tmp_path, QWEN, SamplingParams(choices=("a", "b")))
    assert (params(tools, b, {}), b.notes) == ([SamplingParams(choices=("a", "b"))], [])
    b = builder(tools, tmp_path, QWEN)
    assert params(tools, b, {"sampling_params": {"choices": ["a", "b"]}}) == [SamplingParams(choices=("a", "b"))]
    b = builder(tools, tmp_path, QWEN, score=True)
    assert params(tools, b, {"completion": "c"}) == [SamplingParams()]


def test_a_thinking_model_gets_more_tokens_but_no_more_than_fit(tools):
    plain = tools.loaded(tools.byte_tokenizer(), context=100_000)
    thinking = replace(plain, thinking=FORMATS[1])
    for tokenizer, auto in ((plain, 1024), (thinking, 16_384)):
        b = PromptBuilder(tokenizer, PromptConfig(), SamplingParams())
        automatic, own = b.build(tools.rows({"prompt": "a"}, {"prompt": "a", "sampling_params": {"max_tokens": 5}}))
        assert (automatic.max_tokens, own.max_tokens) == (auto, 5)
    small = PromptBuilder(replace(thinking, context_length=100), PromptConfig(), SamplingParams())
    (request,) = small.build(tools.rows({"prompt": "a"}))
    assert len(request.tokens) + request.max_tokens == 100


OF_QWEN = {"temperature": (0.6, "model"), "top_k": (20, "model"), "repetition_penalty": (1.05, "model")}


@pytest.mark.parametrize(
    ("generation", "sampling", "options", "figures"),
    [
        (
            QWEN, {"top_p": 1.0, "seed": 7}, {},
            OF_QWEN | {"top_p": (1.0, "option"), "max_tokens": (1024, "auto"), "seed": (7, "option")},
        ),
        ({}, {"max_tokens": 5}, {}, {"temperature": (0.0, "default"), "max_tokens": (5, "option")}),
        (QWEN, {"choices": ("a", "b")}, {}, {}),
        (QWEN, {}, {"score": True}, {}),
    ],
)  # fmt: skip
def test_the_figures_name_the_sampling_values_and_their_sources(
    tools, tmp_path, generation, sampling, options, figures
):
    found = builder(tools, tmp_path, generation, SamplingParams(**sampling), **options).sampling_from
    assert found == {name: {"value": value, "from": source} for name, (value, source) in figures.items()}
