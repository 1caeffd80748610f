"""Ray Data on this machine reads a folder of Parquet files and writes it with completions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import LLM, SamplingParams

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings about processes and sockets
]
ONE = SamplingParams(max_tokens=1)
FILES, ROWS = 4, 500
TOPICS = ("ships and harbours", "trains and stations", "parks and gardens", "bridges over rivers", "old town halls")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Short rows whose topics alternate, so that neighbours share nothing."""
    (tmp_path / "in").mkdir()
    for file in range(FILES):
        numbers = range(file * ROWS, (file + 1) * ROWS)
        prompts = [f"A note about {TOPICS[n % len(TOPICS)]}, number {n * 7919 % 1000}" for n in numbers]
        pq.write_table(pa.table({"n": list(numbers), "prompt": prompts}), tmp_path / "in" / f"{file}.parquet")
    return tmp_path


def test_each_row_has_the_same_completion_as_alone(local_ray, folder, tiny_model_dir):
    from batchgen.ray_data import Generate, in_prefix_order

    rows = in_prefix_order(ray.data.read_parquet(str(folder / "in")), tiny_model_dir, blocks=4)
    done = rows.map_batches(
        Generate,
        fn_constructor_kwargs={"model": str(tiny_model_dir), "sampling": ONE, "device": "cpu"},
        batch_format="pyarrow",
        batch_size=500,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    done.write_parquet(str(folder / "out"))
    table = pa.concat_tables([pq.read_table(path) for path in sorted((folder / "out").glob("*.parquet"))])
    assert sorted(table["n"].to_pylist()) == list(range(FILES * ROWS))
    assert set(table["finish_reason"].to_pylist()) <= {"length", "stop"}
    prompts = dict(zip(table["n"].to_pylist(), table["prompt"].to_pylist(), strict=True))
    texts = dict(zip(table["n"].to_pylist(), table["text"].to_pylist(), strict=True))
    chosen = list(range(0, FILES * ROWS, 97))
    alone = LLM(tiny_model_dir, device="cpu").generate([prompts[n] for n in chosen], ONE)
    assert [result.text for result in alone] == [texts[n] for n in chosen]


def test_rows_of_a_topic_are_together_in_prefix_order(local_ray, folder, tiny_model_dir):
    from batchgen.ray_data import KEY, in_prefix_order

    rows = in_prefix_order(ray.data.read_parquet(str(folder / "in")), tiny_model_dir, blocks=3)
    topics: list[str] = []
    for row in rows.iter_rows():
        assert KEY not in row
        topic: Any = row["prompt"].split(",")[0]
        if not topics or topics[-1] != topic:
            topics.append(topic)
    assert len(topics) == len(TOPICS), "a topic's rows are not together"
