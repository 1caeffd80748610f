"""A multimodal checkpoint writes the text of the wrapper's own `generate`, with the same logits, and only its language model is loaded."""

import pytest
import torch
from transformers import AutoConfig

from batchgen.model.architectures import INNER, REFUSED, VERIFIED, WRAPPERS, context_note, is_verified, refusal
from batchgen.model.multimodal import Absent
from support.models import (
    check_equal_to_generate,
    engine_for,
    expect,
    generate_all,
    load_folder,
    tokens_of,
)
from support.params import slow_but
from support.shapes import SHAPES, prompts_and_lengths
from support.wrappers import TEXTS, config_of, text_model, whole_model, with_text_config

# Warnings of transformers 5.17. The first is about parts of the reference that text never reaches: they are on the meta device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning"),
    pytest.mark.filterwarnings("ignore:`acoustic_tokenizer_chunk_size` is deprecated:FutureWarning"),
]

PROMPTS, LENGTHS = prompts_and_lengths()
CORE = {"qwen2_5_vl"}
"""The other wrappers are slow tests."""


@pytest.mark.parametrize("name", slow_but(CORE, sorted(TEXTS)))
def test_text_equals_that_of_the_wrappers_own_generate(name, tmp_path):
    written = text_model(name)
    whole = whole_model(written)
    expected = [expect(whole, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    written.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert is_verified(config)
    model = load_folder(tmp_path, dtype="float32")
    assert model.notes == tuple(filter(None, [context_note(config)]))
    check_equal_to_generate(model, PROMPTS, LENGTHS, expected)


@pytest.mark.parametrize("name", slow_but(CORE, sorted(TEXTS)))
def test_parts_that_text_does_not_need_are_left_out(name):
    model = text_model(name)
    left_out = [part.name for part in model.modules() if isinstance(part, Absent)]
    assert left_out or name == "mistral4"
    whole = whole_model(model)
    needed = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in whole.parameters()) >= (2 * needed if name not in SMALL else needed)


SMALL = {"fast_vlm", "mistral4", "perception_lm"}
"""These have nothing but a language model, or their vision part needs timm, which tests do without."""


def test_at_least_sixty_wrappers_are_verified_and_all_are_tested():
    assert set(TEXTS) == WRAPPERS
    assert len(WRAPPERS & with_text_config()) >= 60
    assert with_text_config() <= WRAPPERS | set(REFUSED)
    assert not (WRAPPERS | INNER) & (set(REFUSED) | VERIFIED)
    assert {inner for inner, _ in TEXTS.values() if inner} - {shape.split("/")[0] for shape in SHAPES} == INNER


def test_the_language_model_inside_decides_whether_a_wrapper_is_verified():
    plain = config_of("llava")
    assert is_verified(plain)
    plain.text_config = AutoConfig.for_model("xlstm")
    assert not is_verified(plain)
    assert refusal(plain) == REFUSED["xlstm"]
    alone = config_of("qwen3_vl").text_config
    assert not is_verified(alone)


def test_only_the_text_part_of_a_checkpoint_that_speaks_is_loaded(tmp_path):
    written = text_model("qwen2_5_omni_thinker")
    config = AutoConfig.for_model("qwen2_5_omni", thinker_config=written.config.to_dict())
    assert is_verified(config)
    expected = generate_all(written, PROMPTS[:3], LENGTHS[:3])
    state = {f"thinker.{name}": tensor.contiguous() for name, tensor in written.state_dict().items()}
    state["talker.codec_head.weight"] = torch.zeros(4, 4)
    from safetensors.torch import save_file

    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    assert tokens_of(engine_for(load_folder(tmp_path, dtype="float32")), PROMPTS[:3], LENGTHS[:3]) == expected
