"""Every input besides the prompt is either used or reported as unused."""

import pytest

from batchgen.errors import UsageError
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.tokenizers_by_hand import CHATML, USER

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = "{# answers may have <tool_call> #}{% if tools %}[{{ tools|length }}:{{ tools[0].function.name }}]{% endif %}"
DOCUMENTS = "{% for d in documents %}<{{ d.title }}={{ d.text }}>{% endfor %}"
IN_PARTS = "{% for m in messages %}{% if m.content is not string %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
ALTERNATE = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no such role') }}{% endif %}{{ m.content }}{% endfor %}"
TEMPLATE = TOOLS + "{% if documents %}" + DOCUMENTS + "{% endif %}{{ messages[-1].content }}"


def one(tools, columns, **options):
    b = tools.builder(**{"chat_template": TEMPLATE, "bos": False} | options)
    (out,) = b.build(tools.rows(columns))
    return out, b.notes


def test_variables_that_the_chat_template_does_not_use_are_noted(tools):
    template = "{{ messages[0].content }}{% if enable_thinking %}!{% endif %}"
    b = tools.builder(chat_template=template, chat_template_kwargs={"enable_thinking": True, "thinking_budget": 3})
    assert b.notes == [
        "--chat-template-kwargs sets 'thinking_budget', which the chat template does not use: it has no effect"
    ]
    b = tools.builder(chat_template=template)
    body = {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}
    for _ in range(2):
        b.build(tools.rows({"url": "/v1/chat/completions", "body": body}))
    assert b.notes == ["rows set 'reasoning_effort', which the chat template does not use: it has no effect"]


UNSEEN = [
    ({"prompt": "a", "tools": [TOOL]}, {"chat_template": "{{ messages[-1].content }}"}, "rows have tools, which the chat template does not use: the model does not see them"),
    ({"prompt": "a", "tools": [TOOL]}, {"chat_template": None}, "column 'tools' is only copied to the output, not sent to the model: prompts are raw"),
    ({"prompt": "a", "tools": "hammer, saw"}, {}, "column 'tools' is only copied to the output, not sent to the model: it is not a list of objects"),
    ({"prompt": "a", "documents": [5]}, {}, "column 'documents' is only copied to the output, not sent to the model: it is not a list of objects"),
]  # fmt: skip
BOTH = {"prompt": "p", "messages": [USER]}
IMAGES = [{"prompt": "a", "images": ["x.png"], "audio": None}, {"prompt": "b", "image": b"png", "video": ""}]
SAME = "the 3 completions of a prompt are identical at temperature 0; use --temperature above 0"
NOTES = [
    *(([columns], options, [note]) for columns, options, note in UNSEEN),
    ([BOTH, BOTH], {}, ["rows have both 'messages' and 'prompt': 'messages' is the prompt, 'prompt' is only copied to the output"]),
    ([BOTH], {"chat": False}, ["rows have both 'prompt' and 'messages': 'prompt' is the prompt, 'messages' is only copied to the output"]),
    ([{"prompt": "p", "messages": None}], {}, []),
    ([{"prompt": "a"}], {"system": "S"}, ["--system has no effect: the chat template does not write system messages"]),
    ([{"prompt": "a"}], {"system": "S", "chat_template": IN_PARTS}, []),
    ([{"url": "/v1/completions", "body": {"prompt": "a"}}], {"system": "S", "chat_template": CHATML}, ["--system is not used for rows of /v1/completions, whose prompts are raw"]),
    (IMAGES, {}, ["columns 'image', 'images' are only copied to the output: the model sees text alone, no images, sound or video"]),
    ([{"image": "a cat"}], {"template": "{{ image }}"}, []),
    ([{"prompt": "a", "top_p": 0.5, "seed": 1}, {"prompt": "a", "temperature": 1.0, "n": 3}], {"row_params": ("seed",)},
     ["columns 'n', 'temperature', 'top_p' are not used as sampling parameters; name them in --row-params to use them"]),
    ([{"stop": "a", "seed": 1}], {"prompt_column": "stop"}, ["column 'seed' is not used as sampling parameter; name it in --row-params to use it"]),
    ([{"prompt": "a"}, {"prompt": "b"}], {"sampling": SamplingParams(n=3)}, [SAME]),
    ([{"prompt": "a"}], {"sampling": SamplingParams(n=3, temperature=0.5)}, []),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "notes"), NOTES)
def test_what_a_row_has_besides_its_prompt_is_used_or_noted_once(tools, columns, options, notes):
    b = tools.builder(**{"chat_template": TEMPLATE, "bos": False} | options)
    for out in b.build(tools.rows(*columns)) + b.build(tools.rows(*columns)):
        assert isinstance(out, Request)
    assert b.notes == notes


def test_a_system_message_that_the_chat_template_refuses_is_said_before_any_row_fails(tools):
    with pytest.raises(
        UsageError, match=r"^--system: the chat template refuses system messages \(no such role\); put the text before"
    ):
        tools.builder(chat_template=ALTERNATE, system="S")
    assert tools.text_of(one(tools, {"prompt": "a"}, chat_template=ALTERNATE)[0]) == "a"
    refuses_all = ALTERNATE.replace("'system'", "m.role")  # rows may still tell why, and --system is not at fault
    assert tools.error_of(one(tools, {"prompt": "a"}, chat_template=refuses_all, system="S")[0]) == (
        "template_error",
        "chat template: no such role",
    )


def test_documents_of_a_row_are_shortened_like_messages(tools):
    columns = {"messages": [USER], "documents": [{"title": "T", "text": "abcdefgh"}]}
    options = {"context": 12, "on_long_prompt": "truncate-left", "sampling": SamplingParams(max_tokens=2)}
    draft, _ = one(tools, columns, **options)
    assert (tools.text_of(draft), draft.truncated) == ("<T=defgh>a", True)


def test_stop_token_ids_beyond_the_vocabulary_are_refused(tools):
    with pytest.raises(
        UsageError, match=r"^--stop-token-id 260 is beyond the model's 260 tokens; give ids of the model's"
    ):
        tools.builder(sampling=SamplingParams(stop_token_ids=[5, 260]))
    result, _ = one(tools, {"prompt": "a", "sampling_params": {"stop_token_ids": [999]}})
    assert tools.error_of(result) == ("unsupported_parameter", "stop_token_ids: 999 is beyond the model's 260 tokens")


IDLE = "{} no effect with {}, which generates nothing"
LABELS = {"choices": ("a", "b"), "temperature": 1.0}
IN_A_SHELL = r"--stop has a backslash and a letter, as in \n, which is no line break; $'\n' is one in a shell"
UNKNOWN_MARKS = "--reasoning-budget has no effect: batchgen does not know how this model marks thoughts"


@pytest.mark.parametrize(
    ("sampling", "options", "note"),
    [
        ({"max_tokens": 3}, {"score": True}, IDLE.format("--max-tokens has", "--score")),
        (
            {"top_p": 0.5, "stop": "x", "temperature": 1.0, "seed": 3}, {"prompt_logprobs": True},
            IDLE.format("--temperature, --top-p and --stop have", "--prompt-logprobs"),
        ),
        (LABELS | {"ignore_eos": True, "max_tokens": 3}, {}, IDLE.format("--max-tokens and --ignore-eos have", "--choices")),
        (LABELS, {}, None),
        ({"max_tokens": 3, "top_p": 0.5}, {}, None),
        ({"stop": "\n"}, {}, None),
        ({"stop": ("a", r"\n\n")}, {}, IN_A_SHELL),
        ({"seed": 3}, {"score": True}, None),
        ({"reasoning_budget": 5}, {}, UNKNOWN_MARKS),
    ],
)  # fmt: skip
def test_sampling_options_without_an_effect_are_named(tools, sampling, options, note):
    b = tools.builder(sampling=SamplingParams(**sampling), bos=False, **options)
    assert b.notes == ([] if note is None else [note])


def test_the_model_may_be_named_after_its_folder(tools, tmp_path):
    from batchgen.config import ModelConfig, PromptConfig
    from batchgen.prompts import PromptBuilder, load_tokenizer

    def asks(model):
        return {"url": "/v1/completions", "body": {"model": model, "prompt": "a"}}

    folder = tools.save_model(tmp_path / "tiny")
    b = PromptBuilder(load_tokenizer(ModelConfig(model=folder)), PromptConfig(), SamplingParams())
    b.build(tools.rows(asks("tiny"), asks(folder)))
    assert b.notes == []
    b.build(tools.rows(asks("big")))
    assert b.notes == [f"rows ask for model 'big'; all rows are run on {folder!r}"]
