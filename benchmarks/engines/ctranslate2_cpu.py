"""CTranslate2's `generate_batch` with the common beginning of all rows as `static_prompt`; rows sorted by length, greedy, past the end token.

It computes in float32 whatever the dtype of the weights, because the release for CPUs has no bfloat16.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.engines.common import (
    check_and_write_ids,
    model_dtype,
    parser,
    read_work,
    report,
    shared_prefix,
    threads,
)


def main() -> None:
    p = parser((__doc__ or "").splitlines()[0], converts=True)
    p.add_argument("--batch", type=int, default=64)
    a = p.parse_args()
    import ctranslate2

    if a.convert:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(a.model).convert(str(a.converted), quantization=model_dtype(a.model), force=True)
        return
    from tokenizers import Tokenizer

    work = read_work(a.input)
    start = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(Path(a.model) / "tokenizer.json"))
    generator = ctranslate2.Generator(str(a.converted), intra_threads=threads())
    load = time.perf_counter() - start
    start = time.perf_counter()
    prompts = [encoding.tokens for encoding in tokenizer.encode_batch(work.prompts)]
    shared = shared_prefix(prompts)
    static = prompts[0][:shared] or None
    order = sorted(range(len(prompts)), key=lambda row: (work.max_tokens[row], len(prompts[row])))
    done: dict[int, list[int]] = {}
    for at in range(0, len(order), a.batch):
        batch = order[at : at + a.batch]
        longest = max(work.max_tokens[row] for row in batch)
        results = generator.generate_batch(
            [prompts[row][shared:] for row in batch],
            static_prompt=static,
            cache_static_prompt=True,
            max_length=longest,
            min_length=longest,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
        )
        for row, result in zip(batch, results, strict=True):
            done[row] = result.sequences_ids[0][: work.max_tokens[row]]
    wall = time.perf_counter() - start
    check_and_write_ids(a.ids_out, [done[row] for row in range(len(prompts))], work)
    report(
        "ctranslate2",
        wall_s=wall,
        load_s=load,
        completion_tokens=work.completion_tokens,
        rows=len(prompts),
        packages=("ctranslate2", "tokenizers"),
        batch=a.batch,
        compute_type=generator.compute_type,
    )


if __name__ == "__main__":
    main()
