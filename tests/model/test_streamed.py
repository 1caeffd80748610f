"""Streamed weights: layers are read again in every step, and give the bits of weights that stay in memory."""

import errno
import json
import os
import resource
import shutil
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels import isa
from batchgen.kernels.memory import FilePieces, Pages, in_huge_pages, mapped_files, pieces_in
from batchgen.kernels.ops import PackedLinear
from batchgen.model.weights.streamed import decoder_layers, streamed_weights, tensors_in
from batchgen.model.weights.weight_size import (
    StoredTensor,
    WeightSizes,
    adapter_bytes,
    are_streamed,
    sizes_of,
    weight_sizes,
)
from batchgen.process.machine import free_host_memory, memory_bytes
from support.models import build, engine_for, kernels, load_folder, make_requests, run
from support.params import slow_but
from support.python_process import run_python
from support.quantized import make

pytestmark = [
    pytest.mark.skipif(not mapped_files(), reason="streamed weights need Linux"),
    pytest.mark.filterwarnings("ignore"),  # libraries warn of each other
]
PROMPTS = [list(range(3, 60)), [*range(3, 50), 7, 8, 9], [11, 12], list(range(70, 120))]
LENGTHS = [6, 3, 8, 4]
PLAIN = {"llama": 5, "qwen3_moe": 4, "qwen3_5_text": 4, "gpt2": 4, "longcat_flash": 2, "llama4_text": 4, "jetmoe": 2}
"""Plain models, with their numbers of layers."""


def saved(name: str, folder: Path) -> Path:
    if name in PLAIN:
        count = {"n_layer": PLAIN[name]} if name == "gpt2" else {"num_hidden_layers": PLAIN[name]}
        build(name, **(count if name in ("llama", "gpt2") else {})).save_pretrained(folder)
    else:
        make(name, folder)
    return folder


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    model.module.register_forward_hook(lambda _, args, out: found.append(out.logits[0].clone()))
    run(engine_for(model), make_requests(PROMPTS, LENGTHS))
    return torch.cat(found)


KINDS = (*PLAIN, "awq", "gptq", "mxfp4", "fp8 experts")
QUICK = zip(KINDS, cycle(("float32", "bfloat16")), cycle(("auto", "auto", "off", "off")), strict=False)


@pytest.mark.parametrize(
    ("name", "dtype", "compile"), slow_but(QUICK, product(KINDS, ("float32", "bfloat16"), ("auto", "off")))
)
def test_every_logit_is_that_of_weights_in_memory_to_the_last_bit(name, dtype, compile, tmp_path):
    folder = saved(name, tmp_path)
    model = load_folder(folder, weights="streamed", dtype=dtype, compile=compile)
    layers = decoder_layers(model.module)
    if compile == "auto" and kernels() is not None and name in ("llama", "awq"):
        assert any(isinstance(part, PackedLinear) for part in layers[0].modules())
    mapped = mapped_files()
    for layer in layers:
        large = [x for x in tensors_in(layer) if x.nbytes >= 4096]
        assert all(any(m.start <= x.data_ptr() < m.end for m in mapped) for x in large)
    assert torch.equal(
        logits_of(model), logits_of(load_folder(folder, weights="resident", dtype=dtype, compile=compile))
    )
    per_step = sum(Pages(tensors_in(layer), mapped).nbytes for layer in layers)
    assert model.streamed.bytes_read >= per_step > 0


@pytest.mark.parametrize(("dtype", "own"), [("bfloat16", True), ("float32", False)])
def test_weights_that_need_no_other_form_stay_in_the_models_files(dtype, own, tmp_path, monkeypatch):
    build("llama").bfloat16().save_pretrained(tmp_path)
    model = load_folder(tmp_path, weights="streamed", dtype=dtype, compile="off")
    assert model.notes[0].endswith("from the model's own files") == own


def test_layers_for_which_there_is_room_stay_in_memory(tmp_path):
    folder = saved("llama", tmp_path)
    whole = sum(p.nbytes for p in load_folder(folder, compile="off").module.parameters())
    for size, streamed in ((whole - 1, 4), (whole, 0)):  # of five layers, three are in memory at once
        model = load_folder(folder, compile="off", weights="streamed", weight_memory=f"{size}B")
        assert sum(bool(layer._forward_hooks) for layer in decoder_layers(model.module)) == streamed
    assert model.notes == ("all weights stay in memory: there is room for them",)


def test_a_small_step_reads_only_the_experts_that_it_needs(tmp_path):
    if kernels() is None:
        pytest.skip("without kernels all experts are read")
    build("qwen3_moe", num_experts=16, num_local_experts=16, moe_intermediate_size=64).bfloat16().save_pretrained(
        tmp_path
    )
    requests = make_requests(PROMPTS[:1], [3])  # a step of a prompt, and two of one token, which needs two experts
    expected = run(engine_for(load_folder(tmp_path, weights="resident")), requests)
    model = load_folder(tmp_path, weights="streamed")
    steps: list[int] = []
    model.module.register_forward_hook(lambda *_: steps.append(model.streamed.bytes_read))
    assert run(engine_for(model, speculate="off"), requests)[0].completions == expected[0].completions
    layers = model.streamed._ahead._pages
    experts = [experts for pages in layers for experts in pages.experts]
    assert {len(each.pages) for each in experts} == {16}
    assert steps[0] >= sum(pages.nbytes for pages in layers)
    one = max(pages.nbytes for each in experts for pages in each.pages)
    rest = sum(pages.rest.nbytes for pages in layers)
    assert rest < steps[2] - steps[1] <= rest + len(experts) * 2 * one


def test_weights_in_files_are_not_the_memory_of_the_process_and_leave_no_file(tmp_path):
    x = torch.ones(8 << 20)
    before = memory_bytes()
    with pieces_in(FilePieces(tmp_path)):
        y = in_huge_pages(x)
    assert torch.equal(x, y)
    assert memory_bytes() - before < 8 << 20
    assert list(tmp_path.iterdir()) == []
    pages = Pages([y], mapped_files())
    assert y.nbytes <= pages.nbytes <= y.nbytes + 8192
    pages.drop()
    pages.read()
    assert torch.equal(x, y)
    assert Pages([x], mapped_files()).nbytes == 0


def test_a_full_disk_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = saved("llama", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelError, match=r"no room for them in .*/weights \(No space left on device\)"):
        load_folder(folder, weights="streamed")


@pytest.mark.parametrize("lora", [None, "an adapter"])
def test_a_disk_without_room_for_the_files_is_told_before_they_are_made(lora, tmp_path, monkeypatch):
    folder = saved("llama", tmp_path)
    config, settings = ModelConfig(model=str(folder), weights="streamed", lora=lora), AutoConfig.from_pretrained(folder)
    sizes = sizes_of(config, settings, 4)
    assert sizes is not None
    needed = int(1.2 * sizes.kept) + adapter_bytes(config, sizes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert streamed_weights(config, settings, torch.device("cpu"), 4) is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(ModelError, match="the files take up to"):
        streamed_weights(config, settings, torch.device("cpu"), 4)


SIZES = WeightSizes(
    kept=100 << 20, int8=120 << 20, int8_load=400 << 20, streamed=30 << 20, plain=400 << 20, stored=100 << 20, largest=0
)


@pytest.mark.parametrize(
    ("options", "free", "expected"),
    [
        ({}, 120, False),
        ({}, 109, True),  # no room for the KV
        ({}, 29, "100.0 MiB, and 29.0 MiB of memory are free; with --weights streamed, .* still take 30.0 MiB"),
        ({"weights": "streamed"}, 1000, True),
        ({"weight_memory": "100MiB"}, 1000, False),
        ({"weight_memory": "99MiB"}, 1000, True),
        ({"weight_memory": "29MiB"}, 1000, "--weight-memory 29MiB is too little: .* 3 layers take 30.0 MiB"),
        ({"weights": "resident"}, 100, False),
        ({"weights": "resident"}, 99, "the weights take 100.0 MiB, and 99.0 MiB of memory are free"),
        ({"quantize": "int8"}, 400, False),
        ({"quantize": "int8"}, 399, "--quantize int8 needs all weights in memory: the weights take 400.0 MiB"),
        ({"lora": "adapter"}, 123, False),
        ({"lora": "adapter"}, 122, True),  # no room for the adapter
    ],
)
def test_weights_are_streamed_when_they_do_not_fit(options, free, expected):
    config = ModelConfig(model="m", **options)  # type: ignore[arg-type]
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            are_streamed(config, SIZES, 10 << 20, free << 20)
    else:
        assert are_streamed(config, SIZES, 10 << 20, free << 20) == expected


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_an_adapter_that_can_only_be_merged_is_counted_with_plain_weights(settings, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert adapter_bytes(ModelConfig(model="m", lora=str(tmp_path)), SIZES) == SIZES.plain


def test_weights_are_not_streamed_over_several_devices(tiny_model_dir):
    with pytest.raises(ModelError, match="only on a CPU so far"):
        load_folder(tiny_model_dir, weights="streamed", device_map="auto", device="auto")


_W4A16: dict[str, Any] = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("instructions", "settings", "tensor", "stays"),
    [
        ("avx2", {"quant_method": "gptq", "bits": 4}, ("qweight", "I32", [8, 640]), True),
        ("avx2", {"quant_method": "gptq", "bits": 4, "desc_act": True}, ("qweight", "I32", [8, 640]), False),
        ("avx2", {"quant_method": "gptq", "bits": 8}, ("qweight", "I32", [16, 640]), False),
        ("amx", {"quant_method": "gptq", "bits": 4}, ("qweight", "I32", [8, 640]), False),
        ("none", {"quant_method": "gptq", "bits": 4}, ("qweight", "I32", [8, 640]), False),
        ("avx2", {"quant_method": "bitsandbytes"}, ("weight", "U8", [640, 32]), False),
        ("avx512_vnni", {"quant_method": "modelopt"}, ("weight", "U8", [640, 32]), True),
        ("avx512_vnni", {"quant_method": "compressed-tensors"}, ("weight_packed", "I32", [640, 8]), True),
        ("avx512_vnni", {"quant_method": "gguf"}, ("weight", "Q4_0", [640, 64]), True),
        ("avx512_vnni", {"quant_method": "gguf"}, ("weight", "Q4_K", [640, 64]), False),
        ("avx2", {"quant_method": "gptq", "bits": 4, "group_size": 64}, ("qweight", "I32", [8, 640]), False),
        ("avx2", {"quant_method": "modelopt"}, ("weight", "U8", [640, 32]), False),
        (
            "avx2",
            _W4A16 | {"config_groups": {"0": {"weights": {"group_size": 32}}}},
            ("weight_packed", "I32", [640, 8]),
            False,
        ),
        (
            "avx2",
            _W4A16 | {"config_groups": {"0": {"weights": {"group_size": 128}}}},
            ("weight_packed", "I32", [640, 8]),
            True,
        ),
        ("avx2", {"quant_method": "mxfp4"}, ("up_blocks", "U8", [640, 32]), False),
        ("avx2", {"quant_method": "gguf"}, ("weight", "Q4_0", [640, 64]), False),
    ],
)
def test_int8_counts_codes_of_4_bits_that_it_multiplies_as_they_are(instructions, settings, tensor, stays, monkeypatch):
    monkeypatch.setattr(isa, "instruction_set", lambda: instructions)
    name, dtype, shape = tensor
    table = StoredTensor("embed.weight", "BF16", [100, 64], 12800)
    found = weight_sizes([table, StoredTensor(f"layers.0.up.{name}", dtype, shape, 20480)], settings, 2)
    kept, plain = 12800 + (23680 if dtype == "Q4_K" else 20480), 12800 + 2 * 64 * 640
    assert (found.kept, found.plain) == (kept, plain)
    in_8_bits = 12800 + 64 * 640 + 8 * 640
    packed_first = instructions in ("avx2", "avx512_vnni") and settings.get("bits") != 8
    in_between = kept + in_8_bits if packed_first else plain
    assert (found.int8, found.int8_load) == ((kept, kept) if stays else (in_8_bits, in_between))


@pytest.mark.parametrize("name", ["llama", "awq", "gptq", "mxfp4", "fp8 experts", "bitsandbytes int8"])
@pytest.mark.usefixtures("compiled")
def test_sizes_are_those_of_the_loaded_model(name, tmp_path):
    folder = saved(name, tmp_path)
    model = load_folder(folder, dtype="float32" if name == "llama" else "bfloat16", weights="resident")
    itemsize = 4 if name == "llama" else 2
    sizes = sizes_of(ModelConfig(model=str(folder)), AutoConfig.from_pretrained(folder), itemsize)
    tables = sum(part.table.nbytes for part in model.module.modules() if "table" in part.__dict__)  # of cos and sin
    assert 0.75 < sizes.kept / (model.weight_bytes - tables) < 1.1  # tiny panels are filled up


def test_a_limit_of_the_cgroup_is_a_limit_of_the_free_memory(tmp_path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert free_host_memory(tmp_path) == 800 * 1024
    write("proc/self/cgroup", "0::/job\n")
    group = "sys/fs/cgroup/job/"
    for name, text in (("max", "max\n"), ("current", "100000\n"), ("stat", "anon 50\ninactive_file 50000\nactive_file 9000\nfile_mapped 4000\n")):  # fmt: skip
        write(f"{group}memory.{name}", text)
    assert free_host_memory(tmp_path) == 800 * 1024
    write(f"{group}memory.max", "300000\n")
    assert free_host_memory(tmp_path) == 255000
    write("proc/self/cgroup", "4:memory:/docker/1\n0::/\n")  # as in a container, where the group is the first one
    group = "sys/fs/cgroup/memory/"
    for name, text in (("limit_in_bytes", "90000"), ("usage_in_bytes", "60000"), ("stat", "total_inactive_file 600\ntotal_active_file 400\n")):  # fmt: skip
        write(f"{group}memory.{name}", text)
    assert free_host_memory(tmp_path) == 31000


def test_a_limit_of_the_address_space_is_a_limit_of_the_free_memory(tmp_path, monkeypatch):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 800000 kB\n")
    (tmp_path / "proc/self/statm").write_text("1000 500 200 1 0 300 0\n")  # in pages
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert free_host_memory(tmp_path) == 800_000 * 1024
    for limit, free in ((200_000_000, 200_000_000 - 1000 * resource.getpagesize()), (1000, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=limit: (soft, resource.RLIM_INFINITY))
        assert free_host_memory(tmp_path) == free


PEAK = """
import time
from batchgen.process.machine import memory_bytes, memory_bytes_peak, watch_memory
watch_memory()
block = b"x" * (256 << 20)
most = memory_bytes()
while memory_bytes_peak.__globals__["_most_bytes"] < most:
    time.sleep(0.01)
del block
assert memory_bytes() < most - (200 << 20)
assert memory_bytes_peak() >= most
"""


def test_the_peak_of_the_memory_is_known_after_it():
    run_python(PEAK, check=True)
