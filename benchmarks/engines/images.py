"""Rows with images in vLLM or OpenVINO GenAI, with prefix caching; greedy, past the end token. `benchmarks/images.py` starts it.

Images are decoded by Pillow. vLLM runs without torch.compile, as for text (`vllm.py`). OpenVINO's KV cache has its default precision. It is
given the rows of an image one after the other, so that it finds the image's prefix in its cache; rows that it schedules together do not share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.common import threads
from benchmarks.engines.openvino_cpu import KV_GIB, PRECISION, SEQUENCES, STEP_TOKENS, WEIGHTS, touch_memory
from benchmarks.engines.vllm import CONTEXT, cores

Rows = list[tuple[str, str]]
"""The image's file and the prompt, with the model's own placeholder."""


def vllm(model: str, dtype: str, rows: Rows, tokens: int) -> dict[str, Any]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": cores(), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, enable_prefix_caching=True, enforce_eager=True, max_model_len=CONTEXT, max_num_seqs=SEQUENCES,
        limit_mm_per_prompt={"image": 1, "video": 0}, disable_log_stats=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = now()
    prompts = [{"prompt": text, "multi_modal_data": {"image": Image.open(path).convert("RGB")}} for path, text in rows]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return since(started) | {"texts": [output.outputs[0].text for output in outputs]}


def openvino(model: str, dtype: str, rows: Rows, tokens: int) -> dict[str, Any]:
    import numpy as np
    import openvino_genai as ov
    from openvino import Tensor
    from PIL import Image

    exported = Path(f"{model}.openvino")
    if not exported.exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "-m", model]
        command += ["--task", "image-text-to-text", "--weight-format", WEIGHTS[dtype], f"{exported}.unfinished"]
        subprocess.run(command, check=True, capture_output=True)
        Path(f"{exported}.unfinished").rename(exported)
    scheduler = ov.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = KV_GIB, SEQUENCES, STEP_TOKENS
    scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_PRECISION_HINT": PRECISION[dtype], "INFERENCE_NUM_THREADS": threads()}
    pipe = ov.ContinuousBatchingPipeline(str(exported), scheduler_config=scheduler, device="CPU", properties=properties)
    config = ov.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    touch_memory()
    started = now()
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    texts = [""] * len(rows)
    for group in batches(order, rows):
        images = [[Tensor(np.asarray(Image.open(rows[i][0]).convert("RGB"))[None])] for i in group]
        results = pipe.generate([rows[i][1] for i in group], images=images, generation_config=[config] * len(group))
        for i, result in zip(group, results, strict=True):
            texts[i] = result.texts[0]
    return since(started) | {"texts": texts}


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> dict[str, float]:
    """Returns the seconds by the clock and of processors since `now()`, in this process."""
    seconds, processor_seconds = (end - start for end, start in zip(now(), started, strict=True))
    return {"seconds": seconds, "processor_seconds": processor_seconds}


def batches(order: list[int], rows: Rows, size: int = 32) -> list[list[int]]:
    """Returns `order` in batches of at most `size` rows. The first row of each image is in a batch before the others."""
    first = {rows[i][0]: i for i in reversed(order)}
    found: list[list[int]] = []
    for start in range(0, len(order), size):
        part = order[start : start + size]
        begin = [i for i in part if first[rows[i][0]] == i]
        found += [group for group in (begin, [i for i in part if i not in begin]) if group]
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("engine", choices=("vllm", "openvino"))
    p.add_argument("--model", required=True)
    p.add_argument("--dtype", required=True)
    p.add_argument("--input", type=Path, required=True, help="JSON of {rows: [[file, prompt], …], tokens}")
    a = p.parse_args()
    work: dict[str, Any] = json.loads(a.input.read_text(encoding="utf-8"))
    run = {"vllm": vllm, "openvino": openvino}[a.engine]
    print(json.dumps(run(a.model, a.dtype, work["rows"], work["tokens"])), flush=True)


if __name__ == "__main__":
    main()
