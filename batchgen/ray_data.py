"""Ray Data: tables in, the same tables with completions out, on a cluster, without a row passing through the driver. Needs the extra `ray`.

import ray
from batchgen import SamplingParams
from batchgen.ray_data import Generate, in_prefix_order

rows = in_prefix_order(ray.data.read_parquet("s3://bucket/prompts/"), model="org/name")
done = rows.map_batches(
    Generate,
    fn_constructor_kwargs={"model": "org/name", "sampling": SamplingParams(max_tokens=1)},
    batch_format="pyarrow", batch_size=4096, concurrency=8, num_gpus=1,
)
done.write_parquet("s3://bucket/answers/")
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import pyarrow as pa

from batchgen.config import EngineConfig, ModelConfig, PromptConfig
from batchgen.llm import LLM
from batchgen.prefix.order import token_key
from batchgen.prompts import PromptBuilder, load_tokenizer
from batchgen.records.frames import frame_of
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams

KEY = "batchgen_prefix_key"
"""The column that `in_prefix_order` adds, sorts by and removes."""


class Generate:
    """For `ray.data.Dataset.map_batches`: takes a batch as an Arrow table, returns it with the columns of the results.

    Each actor loads the model once. `sampling` is for all rows; `prompts`, `engine` and `options` (`device`, `dtype`, `quantize`…) are those
    of `LLM`. Prefixes are shared inside of a batch, and from one batch to the next as long as their KV stays in memory.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        prompts: PromptConfig | None = None,
        engine: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """Loads the model. Raises `BatchgenError`."""
        self._llm = LLM(model, engine=engine, **options)
        self._sampling, self._prompts = sampling, prompts

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with `text`, `finish_reason`, `usage`, `error`… of each row (`LLM.generate_table`)."""
        return self._llm.generate_table(batch, self._sampling, prompt_options=self._prompts)


def in_prefix_order(
    dataset: Any,
    model: str | PathLike[str],
    *,
    prompts: PromptConfig | None = None,
    blocks: int | None = None,
    tokenizers: int = 1,
) -> Any:
    """A `ray.data.Dataset` with the same rows in the order of their prompts' tokens, by Ray's own sort.

    So each block is a contiguous piece of the prefix tree, and a prefix is run more than once only where a block ends. `prompts` says how
    a row becomes a prompt; `blocks` is the number of blocks to sort into, by default the dataset's own; `tokenizers` the number of actors
    that tokenize, one CPU each. Rows without a prompt come first.
    """
    import ray.data

    if blocks is not None:
        dataset = dataset.repartition(blocks)  # before tokenizing: a table read as one block would keep one actor busy
    keyed = dataset.map_batches(
        _Keys,
        fn_constructor_kwargs={"model": str(model), "prompts": prompts},
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=tokenizers),
        num_cpus=1,
    )
    return keyed.sort(KEY).drop_columns([KEY])


class _Keys:
    """Adds the column `KEY`: the tokens of each row's prompt, in bytes that compare as the tokens do."""

    def __init__(self, model: str, prompts: PromptConfig | None) -> None:
        tokenizer = load_tokenizer(ModelConfig(model=model))
        self._builder = PromptBuilder(tokenizer, prompts or PromptConfig(), SamplingParams())

    def __call__(self, batch: pa.Table) -> pa.Table:
        built = self._builder.build(frame_of(batch).rows())
        keys = [token_key(one.tokens) if isinstance(one, Request) else b"" for one in built]
        return batch.append_column(KEY, pa.array(keys, pa.binary()))
