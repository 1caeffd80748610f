"""Models that see write the text of their own `generate`, given the inputs of their family's own processor, for rows with and without images."""

from __future__ import annotations

import json
import re
import shutil
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.attention import encoder
from batchgen.config import EngineConfig, ModelConfig, PromptConfig
from batchgen.engine.engine import Engine
from batchgen.errors import RowError
from batchgen.kernels.fusion import FusedMLP, FusedPatches
from batchgen.model.image_positions import canvas_positions
from batchgen.model.loader import load_model
from batchgen.prefix import plan_requests
from batchgen.prompts import LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.prompts.images import FAMILIES as SHOWN
from batchgen.prompts.images import ImageProcessor, canvas_marks
from batchgen.records.images import ImageFile
from batchgen.records.rows import Row
from batchgen.request import IMAGE_IDS, Request, leaves_of
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams
from support.late import late
from support.models import memory_for, run
from support.params import FULL, slow_but, some_of
from support.vision import FAMILIES, ID, Reference, make, picture

# Of transformers' processor for GLM 4V.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
peft = late("peft")
Messages = list[dict[str, Any]]
TOKENS = 12 if FULL else 8
SIZES = {0: (60, 60), 1: (90, 60), 2: (60, 110), 3: (31, 75)}
"""By picture: width and height."""
MODES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "in slices": {"max_batch_tokens": 24, "batch_size": 4},
    "in slices smaller than an image": {"max_batch_tokens": 7, "batch_size": 4},
    "memory short": {"batch_size": 3, "kv_memory": "blocks"},
    "nothing shared": {"share": False},
}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(number: int) -> dict[str, Any]:
    return {"type": "image", "picture": number}


def user(*parts: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": list(parts)}]


CONVERSATIONS: list[Messages] = [
    user(text("What do you know?")),
    user(image(0), text("What is this?")),
    user(image(0), text("What is that?")),
    user(image(1), text("What is that?")),
    user(image(1), text("What is that?")),
    user(text("Look: "), image(2), text(" What is this?")),
    user(text("Look: "), image(2), image(1), text(" and "), image(0)),
    user(text("Look: "), image(2), image(3)),
    [*user(image(3), text("Well?")), {"role": "assistant", "content": "A dog."}, *user(image(0), text("And this?"))],
]


def pictures(messages: Messages) -> list[int]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["picture"] for part in parts if "picture" in part]


def with_files(messages: Messages, folder: Path) -> Messages:
    """The conversation with the paths of its pictures."""

    def changed(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [
            {"type": "image", "path": f"{folder}/{part['picture']}.png"} if "picture" in part else part
            for part in content
        ]

    return [{**message, "content": changed(message["content"])} for message in messages]


class Sees:
    """A model on disk, loaded by batchgen, and its reference."""

    def __init__(self, name: str, folder: Path, device: str = "cpu") -> None:
        self.reference: Reference = make(name, folder)
        self.folder = folder
        for number, size in SIZES.items():
            picture(number, *size).save(folder / f"{number}.png")
        self.tokenizer: LoadedTokenizer = load_tokenizer(self.config(device=device))
        self.model: Any = self.load(device=device)

    def config(self, **options: Any) -> ModelConfig:
        return ModelConfig(**{"model": str(self.folder), "device": "cpu", "dtype": "float32"} | options)

    def load(self, **options: Any) -> Any:
        return load_model(self.config(**options), self.tokenizer)

    def rows(self, conversations: list[Messages]) -> list[Row]:
        return [Row(i, {"messages": with_files(m, self.folder)}, None, "") for i, m in enumerate(conversations)]

    def build(self, conversations: list[Messages], **params: Any) -> list[Request]:
        sampling = SamplingParams(**({"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True} | params))
        built = PromptBuilder(self.tokenizer, PromptConfig(), sampling).build(self.rows(conversations))
        assert not [one for one in built if isinstance(one, Result)], built
        return built  # type: ignore[return-value]

    def engine(self, **options: Any) -> Engine:
        config = {"kv_memory": "64MiB", "debug": True} | options
        engine = Engine(self.model, self.tokenizer, EngineConfig(**(config | {"kv_memory": "64MiB"})))
        if config["kv_memory"] == "blocks":
            longest = max(engine.sizes.blocks_for(leaf) for leaf in leaves_of(self.build(CONVERSATIONS)))
            engine = Engine(
                self.model, self.tokenizer, EngineConfig(**config | {"kv_memory": memory_for(engine, longest + 1)})
            )
        return engine

    def check(self, results: list[Result]) -> None:
        assert [list(result.token_ids) for result in results] == [tokens for _, tokens in self.expected()]

    @cache  # noqa: B019 - lives as long as the test's parameter
    def expected(self) -> list[tuple[list[int], list[int]]]:
        """The prompt and the generated tokens of each conversation."""
        return [self.reference.generate(m, [picture(n, *SIZES[n]) for n in pictures(m)], TOKENS) for m in CONVERSATIONS]


@pytest.fixture(autouse=True)
def small_images_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's attention is ours however small an image is."""
    monkeypatch.setattr(encoder, "MIN_TOKENS", 1)


@pytest.fixture(scope="module")
def sees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sees:
    """A test that has other parameters beside names `scope="module"`; else pytest makes this anew for each."""
    return Sees(request.param, tmp_path_factory.mktemp("sees"))


QWEN = pytest.mark.parametrize("sees", ["qwen2_5_vl"], indirect=True)


QUICK = [("gemma3", mode) for mode in MODES if mode != "in slices"] + [
    ("llava", "in slices smaller than an image"),
    ("qwen2_5_vl", "memory short"),
]


@pytest.mark.parametrize(
    ("sees", "mode"), slow_but(QUICK, product(sorted(FAMILIES), MODES)), indirect=["sees"], scope="module"
)
def test_rows_with_images_write_what_generate_writes(sees, mode):
    expected = sees.expected()
    requests = sees.build(CONVERSATIONS)
    assert [len(request.tokens) for request in requests] == [len(prompt) for prompt, _ in expected]
    engine = sees.engine(**MODES[mode])
    sees.model.vision.encoded = 0
    results = run(engine, requests, share=MODES[mode].get("share", True))
    assert [result.error_message for result in results] == [None] * len(results)
    sees.check(results)
    if mode in ("all at once", "nothing shared"):  # each image is encoded once, and each shared token runs once
        assert sees.model.vision.encoded == len({shown.token for request in requests for shown in request.images})
        _, plan = plan_requests(requests, 16)
        assert mode == "nothing shared" or engine.stats.prefill_tokens == plan.prefill_tokens_min


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("sees", "dtype"),
    slow_but([("gemma4", "float32")], product(sorted(FAMILIES), ["float32", "bfloat16"])),
    indirect=["sees"],
    scope="module",
)
def test_log_probabilities_of_a_row_with_images_are_the_same_alone_and_in_every_job(sees, dtype):
    other = copy(sees)
    other.model = sees.load(dtype=dtype)
    some = CONVERSATIONS if FULL else CONVERSATIONS[1:3] + CONVERSATIONS[6:]
    requests = other.build(some, logprobs=3, max_tokens=TOKENS if FULL else 4)
    torch.set_num_threads(1)
    alone = [run(other.engine(debug=False), [request])[0].completions for request in requests]
    modes = some_of(("in slices smaller than an image", "memory short"), MODES)
    for threads, options in enumerate(modes.values(), 1):
        torch.set_num_threads(threads)
        results = run(other.engine(debug=False, **options), requests, share=options.get("share", True))
        assert [result.completions for result in results] == alone


@pytest.mark.parametrize(
    "sees", slow_but(["gemma4/whole"], ["gemma3", "gemma4/whole", "qwen2_5_vl", "qwen3_vl"]), indirect=True
)
def test_plain_torch_writes_the_same(sees):
    engine = Engine(
        sees.load(compile="off"), sees.tokenizer, EngineConfig(kv_memory="64MiB", debug=True, max_batch_tokens=40)
    )
    results = run(engine, sees.build(CONVERSATIONS))
    sees.check(results)


ADAPTERS: dict[str, dict[str, Any]] = {
    "text and encoder": {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    "encoder": {"target_modules": r".*vision_tower.*q_proj"},
    "text, projector whole": {"target_modules": r".*language_model.*q_proj", "modules_to_save": ["multi_modal_projector"]},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # peft warns of transformers and torch
@pytest.mark.parametrize("kind", slow_but(["text and encoder", "text, projector whole"], ADAPTERS))
@pytest.mark.parametrize("sees", ["llava"], indirect=True, scope="module")
def test_an_adapter_changes_the_encoder_too(sees, kind, tmp_path):
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(deepcopy(sees.reference.model), peft.LoraConfig(**options | ADAPTERS[kind]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path)
    other = copy(sees)
    other.model = sees.load(lora=str(tmp_path))
    other.reference = replace(sees.reference, model=adapted.merge_and_unload())
    other.check(run(other.engine(), other.build(CONVERSATIONS)))
    assert other.expected() != sees.expected()


@pytest.mark.parametrize("sees", slow_but(["qwen2_5_vl"], sorted(FAMILIES)), indirect=True)
def test_labels_and_forks_begin_after_the_same_image(sees):
    labels = ("a cat", "a dog", "no idea")
    (request,) = sees.build(CONVERSATIONS[3:4], choices=labels, ignore_eos=False)
    engine = sees.engine()
    (result,) = run(engine, [request])
    sums = []
    processor, model = sees.reference.processor, sees.reference.model
    prompt = processor.tokenizer.apply_chat_template(CONVERSATIONS[3], tokenize=False, add_generation_prompt=True)
    start = len(sees.expected()[3][0])
    for label in labels:
        more = {"suffix": label} if sees.tokenizer.hf_config.model_type == "paligemma" else {}
        shown = [prompt if more else prompt + label]
        inputs = processor(images=[picture(1, *SIZES[1])], text=shown, return_tensors="pt", **more).to(model.dtype)
        with torch.inference_mode():
            logprobs = model(**inputs).logits[0].double().log_softmax(-1)
        ids = inputs["input_ids"][0][: start + len(label)]
        sums.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))))
    weights = torch.tensor(sums, dtype=torch.float64).softmax(0).tolist()
    assert list(result.choice_probs.values()) == pytest.approx(weights, rel=1e-4)
    forks = sees.build(CONVERSATIONS[3:4], n=3)
    before = engine.stats.prefill_tokens
    (forked,) = run(engine, forks)
    assert [list(c.token_ids) for c in forked.completions] == [sees.expected()[3][1]] * 3
    # The prompt is resident; a recurrent state is kept only at the end of a node, which was the labels' own.
    assert engine.stats.prefill_tokens - before <= (len(request.tokens) if sees.model.states else 1)


GOT = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>"
    "<|im_start|>user\n<img>{{ page }}</img>\n OCR: <|im_end|><|im_start|>assistant{{ '\\n' }}"
)


@pytest.mark.parametrize("sees", slow_but([], ["got_ocr2"]), indirect=True)
def test_a_template_writes_the_prompt_that_the_processor_of_got_ocr_writes(sees):
    config = PromptConfig(template=GOT, image_column=("page",), chat=False)
    builder = PromptBuilder(sees.tokenizer, config, SamplingParams(max_tokens=1))
    (built,) = builder.build([Row(0, {"page": f"{sees.folder}/1.png"}, None, "")])
    assert isinstance(built, Request), built
    inputs = sees.reference.processor(images=[picture(1, *SIZES[1])], return_tensors="pt")
    expected = inputs["input_ids"][0].numpy()
    token = sees.tokenizer.hf_config.image_token_id
    assert np.where(built.tokens < IMAGE_IDS, built.tokens, token).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("sees", "mark"), slow_but([], [("ovis2", "<IMG_COL>"), ("minicpmv4_7", "<image>")]), indirect=["sees"]
)
def test_text_with_a_mark_of_images_fails_its_row(sees, mark):
    asked = [user(image(0), text(f"What is {mark}?")), user(image(0), text("What is this?"))]
    failed, built = PromptBuilder(sees.tokenizer, PromptConfig(), SamplingParams(max_tokens=1)).build(sees.rows(asked))
    assert isinstance(failed, Result)
    assert (failed.error_type, failed.error_message) == (
        "invalid_row",
        "the prompt's text has tokens that stand for images",
    )
    assert isinstance(built, Request)


FILE = ImageFile("0.png", b"0", *SIZES[0], "it")


def refuses(processor: ImageProcessor, why: str) -> None:
    with pytest.raises(RowError, match=why) as failed:
        processor.image(FILE, alone=True)
    assert failed.value.type == "unsupported_content"


@pytest.mark.parametrize("sees", slow_but([], ["minicpm_ocr"]), indirect=True)
def test_an_image_whose_number_of_tokens_depends_on_its_contents_fails_its_row(sees, tmp_path):
    shutil.copytree(sees.folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"small_image_upsize": "adaptive"}))
    processor = ImageProcessor(ModelConfig(model=str(tmp_path)), sees.tokenizer)
    refuses(processor, "depends on its contents")


@pytest.mark.parametrize("sees", slow_but([], ["minicpmv4_7"]), indirect=True)
def test_an_image_among_marks_that_the_configuration_does_not_name_fails_its_row(sees):
    config = deepcopy(sees.tokenizer.hf_config)
    config.newline_id = None
    processor = ImageProcessor(ModelConfig(model=str(sees.folder)), replace(sees.tokenizer, hf_config=config))
    refuses(processor, "lacks ids of the tokens around images")


LINES: list[list[list[int] | int]] = [
    [[97, 98], 0, [99, 100]],
    [0, [198, 198, 97], 1],
    [[198, 97], 1, [198], 2, 3, 1, [97, 98, 198]],
    [3, [ID["</slice>"], 198, 97], 2],
    [2],
]
"""Prompts of text (ids; 198 is a line break) and pictures (numbers): with a line break or a mark after a picture, and with pictures that touch."""


@pytest.mark.parametrize("sees", slow_but([], ["minicpmv4_7", "minicpmv4_7/4x"]), indirect=True)
def test_positions_on_a_canvas_are_those_of_the_model(sees):
    """Those of the tokens so far do not depend on what follows, and generated tokens come after the canvas."""
    config = sees.tokenizer.hf_config
    processor = ImageProcessor(ModelConfig(model=str(sees.folder)), sees.tokenizer)
    for parts in LINES:
        tokens: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, list):
                tokens += part
                continue
            file = ImageFile(f"{sees.folder}/{part}.png", bytes([part]), *SIZES[part], f"picture {part}")
            shown, layout = processor.image(file, alone=True)
            images.append(shown)
            runs = iter(layout.runs)
            ids = sees.tokenizer.hf_tokenizer.encode(layout.text, add_special_tokens=False)
            tokens += [t for i in ids for t in ([shown.id] * next(runs) if i == processor.token else [i])]
        prompt = np.array(tokens)
        seen = prompt >= IMAGE_IDS
        pictures = [picture(part, *SIZES[part]) for part in parts if isinstance(part, int)]
        positions, after = sees.reference.model.model.get_rope_index(
            torch.tensor(np.where(seen, config.image_token_id, prompt))[None],
            torch.tensor(seen.astype(int))[None],
            sees.reference.processor.image_processor(pictures, return_tensors="pt")["target_sizes"],
        )
        following = np.arange(len(prompt), len(prompt) + 3) + int(after)
        expected = np.concatenate([positions[:, 0].numpy(), np.tile(following, (3, 1))], axis=1)
        assert canvas_positions(prompt, images, canvas_marks(config), len(prompt) + 3).tolist() == expected.tolist()
        for stop in range(len(prompt)):
            found = canvas_positions(prompt[:stop], images, canvas_marks(config), stop)
            assert found.tolist() == expected[:, :stop].tolist()


@QWEN
def test_text_rows_do_not_load_the_encoder(sees):
    model = sees.load()
    engine = Engine(model, sees.tokenizer, EngineConfig(kv_memory="64MiB"))
    (result,) = run(engine, sees.build(CONVERSATIONS[:1]))
    assert list(result.token_ids) == sees.expected()[0][1]
    assert not {"_encoder", "_processor", "_threads"} & vars(model.vision).keys()
    run(engine, sees.build(CONVERSATIONS[1:2]))
    fused = {FusedMLP, FusedPatches} if model.kernels is not None else set()
    assert {FusedMLP, FusedPatches} & set(map(type, model.vision._encoder.modules())) == fused


@QWEN
@pytest.mark.parametrize("limit", slow_but(["FEATURE_SHARE"], ["FEATURE_BYTES", "FEATURE_SHARE"]))
def test_features_beyond_the_limit_are_encoded_again(sees, limit, monkeypatch):
    monkeypatch.setattr(f"batchgen.model.vision.{limit}", 0)
    requests = sees.build(CONVERSATIONS)
    prefixes = {
        tuple(r.tokens[: end + 1])
        for r in requests
        for end in np.flatnonzero(np.diff(r.tokens >= IMAGE_IDS))
        if r.tokens[end] >= IMAGE_IDS
    }
    sees.model.vision.encoded = 0
    results = run(sees.engine(), requests)
    sees.check(results)
    assert len({image.token for r in requests for image in r.images}) < sees.model.vision.encoded <= len(prefixes)


def keep_count(counts: list[int], vision: Any) -> None:
    counts.append(len(vision._features))


@QWEN
def test_features_are_dropped_when_the_last_prefix_that_needs_them_has_run(sees):
    """Of ten pictures with a question each, one at a time, the features of one are kept; of two questions that begin otherwise, those of all."""
    numbers = range(10, 20)
    for number in numbers:
        picture(number).save(sees.folder / f"{number}.png")
    asked = [user(image(n), text("What is this?")) for n in numbers]
    for more, kept in (([], 1), ([user(text("Look: "), image(n)) for n in numbers], 10)):
        engine = sees.engine(batch_size=1, max_batch_tokens=64)
        sees.model.vision.encoded = 0
        engine.add(*plan_requests(sees.build(asked + more), 16), lambda _: None)
        seen: list[int] = []
        engine.run(partial(keep_count, seen, sees.model.vision))
        assert max(seen) <= kept
        assert engine.stats.images_encoded == 10
        assert not sees.model.vision._features
        assert not sees.model.vision._waiting


@QWEN
def test_images_of_resident_nodes_are_not_prepared_again(sees, monkeypatch):
    engine = sees.engine()
    first, second, third, other = sees.build([*CONVERSATIONS[1:3], user(image(0), text("How many?")), CONVERSATIONS[3]])
    run(engine, [first, second])
    sees.model.vision.encoded = 0
    prepared = []
    pixels = ImageProcessor.pixels
    monkeypatch.setattr(
        ImageProcessor, "pixels", lambda self, shown: (prepared.append(shown.path[-5]), pixels(self, shown))[1]
    )
    run(engine, [third, other])
    assert (prepared, sees.model.vision.encoded) == (["1"], 1)


@QWEN
def test_a_limit_of_pixels_is_that_of_the_processor(sees):
    """Pictures 1 to 3 have more pixels than the limit, picture 0 has fewer."""
    limited, limit = copy(sees), 28 * 28 * 5
    limited.tokenizer = load_tokenizer(sees.config(image_max_pixels=limit))
    limited.model = limited.load(image_max_pixels=limit)
    requests = limited.build(CONVERSATIONS)
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": limit}
    expected = [
        sees.reference.generate(
            messages, [picture(n, *SIZES[n]) for n in shown], TOKENS, **({"size": size} if shown else {})
        )
        for messages, shown in ((messages, pictures(messages)) for messages in CONVERSATIONS)
    ]
    assert [len(request.tokens) for request in requests] == [len(prompt) for prompt, _ in expected]
    assert sum(len(request.tokens) for request in requests) < sum(len(prompt) for prompt, _ in sees.expected())
    assert [list(result.token_ids) for result in run(limited.engine(), requests)] == [tokens for _, tokens in expected]


@QWEN
def test_a_processor_class_that_transformers_does_not_know_is_that_of_the_type(sees, tmp_path):
    """As in `AutoProcessor`. Checkpoints that came with code of their own name it."""
    shutil.copytree(sees.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "QwenOfTheirOwn"}))
    folders = (sees.folder, tmp_path)
    expected, layout = (
        ImageProcessor(ModelConfig(model=str(f)), sees.tokenizer).image(FILE, alone=True)[1] for f in folders
    )
    assert layout == expected


@pytest.mark.parametrize("sees", ["gemma3"], indirect=True)
def test_an_image_longer_than_the_sliding_window_that_its_tokens_see_beyond_is_refused(sees, tmp_path):
    config = json.loads((sees.folder / "config.json").read_text())
    folder = shutil.copytree(sees.folder, tmp_path / "model")
    config["text_config"]["sliding_window"] = 12
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(sees.config(model=str(folder)))
    (failed,) = PromptBuilder(tokenizer, PromptConfig(), SamplingParams()).build(sees.rows(CONVERSATIONS[1:2]))
    assert isinstance(failed, Result)
    assert failed.error_type == "invalid_image"
    why = r"^the image '.*\.png' of messages\[\d\]\.content\[\d\] has 16 tokens, and the model takes at most 12, the length of its sliding window$"
    assert re.search(why, str(failed.error_message))


def test_every_family_that_is_shown_images_is_compared_with_generate():
    assert SHOWN.keys() == {name.partition("/")[0] for name in FAMILIES}


@pytest.mark.parametrize("sees", slow_but([], ["ernie4_5_vl_moe"]), indirect=True)
def test_generated_marks_of_images_go_to_the_experts_for_text(sees, tmp_path):
    mark, often = ID["<|vision_start|>"], copy(sees)
    copytree(sees.folder, tmp_path, dirs_exist_ok=True)
    head = sees.reference.model.lm_head.weight.data
    before = head[mark].clone()
    head[mark] *= 8
    sees.reference.model.save_pretrained(tmp_path)
    expected = [sees.reference.generate(m, [picture(n, *SIZES[n]) for n in pictures(m)], TOKENS) for m in CONVERSATIONS]
    head[mark] = before
    assert any(mark in tokens[:-1] for _, tokens in expected)
    often.folder = tmp_path
    often.model = often.load()
    for mode in ("all at once", "memory short"):
        results = run(often.engine(**MODES[mode]), often.build(CONVERSATIONS))
        assert [list(result.token_ids) for result in results] == [tokens for _, tokens in expected]


@pytest.mark.parametrize("sees", slow_but(["paligemma"], ["paligemma", "paligemma/2"]), indirect=True)
def test_prompts_whose_tokens_all_see_one_another_share_only_with_equal_ones(sees):
    """Their images are encoded once all the same."""
    asked = [user(image(n), text(question)) for n in (0, 1) for question in ("What is this?", "What is that?")] * 2
    requests = sees.build(asked)
    sees.model.vision.encoded = 0
    engine = sees.engine()
    results = run(engine, requests)
    assert [list(r.token_ids) for r in results[:4]] == [list(r.token_ids) for r in results[4:]]
    assert list(results[0].token_ids) == sees.expected()[1][1]
    assert engine.stats.prefill_tokens == sum(len(request.tokens) for request in requests[:4])
    assert sees.model.vision.encoded == 2
