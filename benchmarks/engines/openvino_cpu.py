"""OpenVINO GenAI's continuous batching with prefix caching; greedy, past the end token.

Prompts that are scheduled together do not share. So one row runs first, within the measured time, and the others find its prefix in the cache.
The KV cache has its default precision.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engines.common import check_and_write_ids, model_dtype, parser, read_work, report, threads

PRECISION = {"float32": "f32", "bfloat16": "bf16"}
"""The type in which it computes. Without products of bfloat16 in the processor it computes in float32."""
WEIGHTS = {"float32": "fp32", "bfloat16": "fp16"}
KV_GIB = 6
SEQUENCES = 256
STEP_TOKENS = 2048
TOUCHED = 1 << 32
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""


def convert(model: str, to: Path, weights: str) -> None:
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "-m", model]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def touch_memory() -> None:
    """Makes the system provide memory before the clock starts, as for the pools of other engines: OpenVINO's pool grows from this heap while it runs."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    memory = libc.malloc(TOUCHED)
    ctypes.memset(memory, 1, TOUCHED)
    libc.free(memory)


def main() -> None:
    p = parser((__doc__ or "").splitlines()[0], converts=True)
    a = p.parse_args()
    if a.convert:
        shutil.rmtree(a.converted, ignore_errors=True)
        convert(a.model, a.converted, "int8" if a.int8 else WEIGHTS[model_dtype(a.model)])
        return
    import openvino_genai as ov
    from openvino import Core

    def wanted(number: int) -> ov.GenerationConfig:
        config = ov.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = number
        config.ignore_eos, config.do_sample = True, False
        return config

    work = read_work(a.input)
    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = KV_GIB
    scheduler.max_num_seqs = SEQUENCES
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    precision = PRECISION[model_dtype(a.model)]
    if precision.upper() not in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        precision = "f32"
    start = time.perf_counter()
    pipe = ov.ContinuousBatchingPipeline(
        str(a.converted),
        scheduler_config=scheduler,
        device="CPU",
        properties={"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads()},
    )
    load = time.perf_counter() - start
    touch_memory()
    configs = [wanted(number) for number in work.max_tokens]
    start = time.perf_counter()
    tokenizer = pipe.get_tokenizer()
    ids = [tokenizer.encode(prompt).input_ids for prompt in work.prompts]
    pipe.generate(ids[:1], [wanted(1)])
    results = pipe.generate(ids, configs)
    wall = time.perf_counter() - start
    check_and_write_ids(a.ids_out, [result.m_generation_ids[0] for result in results], work)
    report(
        "openvino",
        wall_s=wall,
        load_s=load,
        completion_tokens=work.completion_tokens,
        rows=len(results),
        packages=("openvino-genai", "openvino"),
        precision=f"int8 weights, {precision}" if a.int8 else precision,
    )


if __name__ == "__main__":
    main()
