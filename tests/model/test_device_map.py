"""Models spread over devices. The second device is `meta`, which computes shapes but no numbers."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen import LLM, SamplingParams
from batchgen.attention.base import LayerOptions
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import StepAttention
from batchgen.config import EngineConfig, ModelConfig
from batchgen.errors import ModelError
from batchgen.model import loader
from batchgen.model.adapter import prepare
from batchgen.model.loader import check_device_map, load_model
from batchgen.prompts import load_tokenizer

CPU, META = torch.device("cpu"), torch.device("meta")
PROMPTS = ["the same beginning of every text, and then " + end for end in ("a", "another", "a third one", "")] + [
    "else"
]


@pytest.fixture
def module(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture
def completions(tiny_model_dir, monkeypatch):
    """A function that returns what a loaded model generates."""

    def generate(model):
        monkeypatch.setattr(loader, "load_model", lambda *_: model)
        llm = LLM(str(tiny_model_dir), engine=EngineConfig(kv_memory="16MiB", debug=True))
        return [r.token_ids for r in llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))]

    return generate


def test_a_device_map_without_accelerate_names_the_extra(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    config = ModelConfig(model=str(tiny_model_dir), device_map="auto")
    with pytest.raises(ModelError) as e:
        load_model(config, load_tokenizer(config))
    assert str(e.value) == "--device-map needs the package accelerate; pip install 'batchgen-llm[device-map]'"


def test_hooks_that_move_tensors_between_layers_do_not_change_the_output(module, tiny_model_dir, completions):
    accelerate = pytest.importorskip("accelerate")
    want = completions(prepare(AutoModelForCausalLM.from_pretrained(tiny_model_dir)))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(module, places, force_hooks=True)
    assert hasattr(module.model.layers[1], "_hf_hook")
    assert completions(prepare(module)) == want


def test_the_kv_of_a_layer_is_on_its_device(module):
    hooks = pytest.importorskip("accelerate.hooks")
    for part in (module.model.layers[1], module.model.norm, module.lm_head):
        hooks.add_hook_to_module(part, hooks.AlignDevicesHook("meta", place_submodules=True))
    model = prepare(module)
    assert model.layers == {0: LayerShape(2, 16, 16, CPU), 1: LayerShape(2, 16, 16, META)}
    assert model.device == CPU
    assert model.spread


def test_the_plan_of_a_step_is_on_the_device_of_each_layer(tiny_model_dir, completions, monkeypatch):
    """Every step of a real run also runs attention of two more layers, one of them on another device."""
    seen = []

    class Both(StepAttention):
        def __init__(self, plan, cache):
            super().__init__(plan, cache)
            layers = {0: LayerShape(2, 16, 16), 1: LayerShape(2, 16, 16, META)}
            spread = KVCache(layers, cache.num_blocks, cache.block_size, torch.float32)
            both = StepAttention(plan, spread)
            for layer, on in ((0, CPU), (1, META)):
                q, kv = torch.ones(4, plan.num_tokens, 16, device=on), torch.ones(2, plan.num_tokens, 16, device=on)
                out = both(layer, q, kv, kv, LayerOptions(0.5, 5))
                assert (out.shape, out.device) == ((plan.num_tokens, 4, 16), on)
            seen.append((bool(plan.shared), bool(plan.causal)))

    monkeypatch.setattr("batchgen.model.runner.plan_attention", partial(plan_attention, shared_reads=1))
    monkeypatch.setattr("batchgen.model.runner.StepAttention", Both)
    completions(prepare(AutoModelForCausalLM.from_pretrained(tiny_model_dir)))
    assert [any(kinds) for kinds in zip(*seen, strict=True)] == [True, True]


@pytest.mark.parametrize("away", ["cpu", "disk", CPU])
def test_a_map_that_offloads_parts_is_refused(away):
    with pytest.raises(ModelError) as e:
        check_device_map({"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": away, "lm_head": away})
    assert str(e.value) == (
        "--device-map auto: the devices have no room for 2 of 4 parts of the model, first model.layers.1; "
        "use more devices, a smaller --dtype or a quantized checkpoint"
    )


@pytest.mark.gpu
def test_a_model_on_two_devices_gives_the_output_of_one(module, tiny_model_dir, completions):
    accelerate = pytest.importorskip("accelerate")
    want = completions(prepare(AutoModelForCausalLM.from_pretrained(tiny_model_dir)))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.1": 0, "model.norm": 0, "lm_head": 0}
    accelerate.dispatch_model(module, places, main_device="cpu")  # parts on the CPU also run there
    model = prepare(module)
    assert [shape.device.type for shape in model.layers.values()] == ["cpu", "cuda"]
    assert completions(model) == want
