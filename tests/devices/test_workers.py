"""Several processes as one engine: which rows each gets, what comes back, and what happens to the rows of one that ends."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.transport import Gone, Processes
from batchgen.devices.worker import serve
from batchgen.devices.workers import Workers
from batchgen.errors import DevicesLost, ModelError, OutOfMemory
from batchgen.request import Request
from batchgen.result import Result
from support.fakes import FakeEngine, Fleet, grouped
from support.requests import planned, request


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    for process in fleet.processes:
        process.kill()
        process.wait(60)


def run(workers: Workers, requests: list[Request], stop: Callable[[], str | None] | None = None) -> dict[int, Result]:
    results: dict[int, Result] = {}
    workers.add(*planned(requests), lambda r: results.__setitem__(r.row, r))
    workers.run(stop)
    return results


def when(done: Callable[[], bool], action: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function to pass as `stop`: it runs the action once, as soon as `done`."""
    left = [action]

    def stop() -> None:
        if left and done():
            left.pop()()

    return stop


def test_every_row_is_done_once_and_all_devices_do_some(fleet):
    workers = fleet.workers("cpu:0,1,2")
    counts: Counter[int] = Counter()
    texts: Counter[Any] = Counter()
    requests = grouped(12, 5)

    def on_result(result: Result) -> None:
        counts[result.row] += 1
        texts[result.text] += 1

    workers.add(*planned(requests), on_result)
    assert (workers.unfinished, workers.waiting) == (60, 60)
    workers.run()
    assert counts == Counter(range(60))
    assert texts.keys() == {"cpu:0", "cpu:1", "cpu:2"}
    assert (workers.unfinished, workers.waiting, workers.device) == (0, 0, "cpu:0,1,2")
    assert (workers.dtype, workers.attention) == ("float32", "fake")
    assert sorted(workers.notes) == ["all say this", *(f"cpu:{i} says this" for i in range(3))]
    assert workers.stats.completion_tokens == 180
    assert workers.stats.steps == sum(e.stats.steps for e in fleet.engines.values())
    assert workers.stats.process_bytes_peak > 3 << 20
    assert not any(e.watched for e in fleet.engines.values())  # no process sends tokens that nobody asks for


def test_no_process_is_given_more_than_two_batches_at_a_time(fleet):
    fleet.make = lambda name: FakeEngine(name, batch_size=4)
    workers = fleet.workers()
    run(workers, [request(i, [i]) for i in range(200)])
    pieces = 200 // 16 + 1
    assert all(4 <= e.max_unfinished <= 8 + pieces for e in fleet.engines.values())


def test_a_window_may_be_added_while_another_runs(fleet):
    workers = fleet.workers()
    results: dict[int, Result] = {}
    more = iter([[request(100 + i, [i]) for i in range(30)], [request(200 + i, [i]) for i in range(30)]])

    def stop() -> None:
        if not workers.waiting and (window := next(more, None)):
            workers.add(*planned(window), lambda r: results.__setitem__(r.row, r))

    results |= run(workers, [request(i, [i]) for i in range(30)], stop)
    assert sorted(results) == [*range(30), *range(100, 130), *range(200, 230)]


def test_what_is_under_way_on_all_devices_is_told_while_it_runs(fleet):
    workers = fleet.workers(under_way_seconds=(0.0, 0.0))  # with every report
    seen: dict[int, int] = {}

    def stop() -> None:
        for row, begun in workers.under_way().items():
            assert set(begun) == {0}
            assert set(begun[0].token_ids) <= {row}
            seen[row] = max(seen.get(row, 0), len(begun[0].token_ids))

    results = run(workers, [request(i, [i], max_tokens=400) for i in range(4)], stop)
    assert sorted(results) == [0, 1, 2, 3]
    assert any(0 < count < 400 for count in seen.values())
    assert workers.under_way() == {}


def test_how_far_each_worker_is_can_be_seen_while_they_run(fleet):
    workers = fleet.workers()
    assert [w["device"] for w in workers.progress()] == ["cpu:0", "cpu:1"]
    seen: set[str] = set()

    def stop() -> None:
        if workers.stats.completion_tokens > 20:
            seen.update(w["state"] for silent_after in (30.0, -1.0) for w in workers.progress(silent_after))

    run(workers, [request(i, [i], max_tokens=40) for i in range(8)], stop)
    assert {"running", "silent"} <= seen
    done = workers.progress()
    assert [(w["state"], w["seconds_silent"]) for w in done] == [("idle", None), ("idle", None)]
    assert (sum(w["rows_done"] for w in done), sum(w["completion_tokens"] for w in done)) == (8, 320)
    assert all(w["rows_per_s"] > 0 and w["completion_tokens_per_s"] > 0 for w in done)


def test_tokens_are_told_in_order_and_before_the_result(fleet):
    workers = fleet.workers()
    told: dict[int, list[Any]] = {}
    requests = grouped(3, 4)
    workers.add(
        *planned(requests),
        lambda result: told[result.row].append("result"),
        lambda row, completion, token: told.setdefault(row, []).append((completion, token)),
    )
    workers.run()
    assert told == {row: [(0, row)] * 3 + ["result"] for row in range(12)}


def test_a_row_can_be_cancelled_wherever_it_is(fleet):
    workers = fleet.workers()
    requests = [request(i, [i], 10_000 if i in (0, 39) else 2) for i in range(40)]
    results: dict[int, Result] = {}
    workers.add(*planned(requests), lambda r: results.__setitem__(r.row, r))
    workers.cancel(requests[39])  # waits here
    threading.Timer(0.1, workers.cancel, [requests[0]]).start()
    workers.run()
    assert len(results) == 40
    assert {r.row for r in results.values() if r.finish_reason == "cancelled"} == {0, 39}
    workers.cancel(requests[5])  # done: nothing happens
    assert len(run(workers, [request(5, [5])])) == 1


# -- stopping


def test_now_drops_the_rest_and_the_next_run_is_whole(fleet):
    workers = fleet.workers()
    requests = [request(i, [i], 50) for i in range(100)]
    results = run(workers, requests, lambda: "now" if workers.stats.completion_tokens else None)
    assert len(results) < 100
    assert (workers.unfinished, workers.waiting) == (0, 0)
    assert sorted(run(workers, [request(i, [i]) for i in range(20)])) == list(range(20))


def test_drain_lets_what_runs_finish_and_starts_nothing(fleet):
    workers = fleet.workers()
    results = run(
        workers,
        [request(i, [i], 400) for i in range(100)],
        lambda: "drain" if workers.stats.completion_tokens else None,
    )
    assert 2 <= len(results) <= 4
    assert {r.finish_reason for r in results.values()} == {"length"}
    assert workers.unfinished == 0


def test_a_run_that_stops_does_not_wait_for_ever_for_a_process_that_hangs(fleet):
    stuck = threading.Event()

    class Stuck(FakeEngine):
        def step(self, admit: bool) -> None:
            super().step(admit)
            if self.name == "cpu:1":
                stuck.wait(60)

    fleet.make = Stuck
    workers = fleet.workers(silent_after=0.3)
    results: list[Result] = []
    workers.add(*planned([request(i, [i], 2) for i in range(30)]), results.append)
    workers.run(lambda: "now" if len(results) > 5 else None)
    assert not stuck.is_set()
    assert 5 < len(results) < 30
    assert any(note.startswith("cpu:1 has sent nothing for ") for note in workers.notes)
    stuck.set()


def test_a_callback_that_fails_drops_the_rest_and_the_devices_can_be_used_again(fleet):
    workers = fleet.workers()

    def broken(result: Result) -> None:
        raise OSError("disk full")

    workers.add(*planned([request(i, [i], 1 if i == 0 else 3000) for i in range(9)]), broken)
    with pytest.raises(OSError, match="disk full"):
        workers.run()
    assert workers.unfinished == 0
    assert sorted(run(workers, grouped(3, 10))) == list(range(30))
    assert workers.stats.completion_tokens < 3000  # none of the other rows went on


# -- processes that end


def test_the_rows_of_a_process_that_was_killed_go_to_the_others(fleet):
    fleet.make = lambda name: FakeEngine(name, batch_size=4, step_seconds=0.002)
    workers = fleet.workers("cpu:0,1,2")
    requests = [request(i, [i], 50) for i in range(24)]
    kill = when(lambda: workers.stats.completion_tokens > 30, fleet.processes[1].kill)
    results = run(workers, requests, kill)
    assert sorted(results) == list(range(24))
    (note,) = [note for note in workers.notes if "ended" in note]
    assert note.startswith("the process of cpu:1 ended (SIGKILL); its ")
    assert note.endswith(" unfinished rows go to cpu:0, cpu:2")
    assert sorted(run(workers, requests)) == list(range(24))  # the others go on


@pytest.mark.parametrize("watched", [False, True])
def test_rows_of_a_lost_process_continue_where_it_was_unless_their_tokens_are_watched(watched, fleet):
    fleet.make = lambda name: FakeEngine(name, step_seconds=0.002)
    workers = fleet.workers(under_way_seconds=(0.0, 0.0))  # with every report
    results: list[Result] = []
    told: Counter[int] = Counter()
    on_token = (lambda row, completion, token: told.update([row])) if watched else None
    workers.add(*planned([request(i, [i], max_tokens=200) for i in range(4)]), results.append, on_token)
    workers.run(when(lambda: len(workers.under_way()) == 4, fleet.processes[1].kill))
    assert {result.row: result.completion_tokens for result in results} == dict.fromkeys(range(4), 200)
    assert (workers.stats.completion_tokens > 4 * 200) == watched
    assert sum(told.values()) == (workers.stats.completion_tokens if watched else 0)


def test_when_the_last_one_ends_the_run_ends_with_its_error(fleet):
    workers = fleet.workers()
    results: list[Result] = []

    def kill() -> None:
        for process in fleet.processes:
            process.kill()

    workers.add(*planned([request(i, [i], 20) for i in range(60)]), results.append)
    with pytest.raises(DevicesLost) as e:
        workers.run(when(lambda: len(results) > 4, kill))
    assert str(e.value) in (
        f"the process of cpu:{i} ended (SIGKILL); run the same command again to continue" for i in (0, 1)
    )
    assert e.value.exit_code == 1
    assert 4 < len(results) < 60
    with pytest.raises(DevicesLost, match=r"^the processes of cpu:0,1 have ended; run"):
        run(workers, [request(0, [0])])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("CUDA error: an illegal memory access\nmore"), "cpu:0: RuntimeError: CUDA error: an illegal memory access"),
        (OutOfMemory("not one row fits", "lower it"), "not one row fits"),
        (MemoryError(), "out of memory: no memory left"),
    ],
)  # fmt: skip
def test_an_error_on_one_device_leaves_its_rows_to_the_others(fleet, error, message):
    workers = fleet.workers()
    fleet.engines["cpu:0"].failing = error
    assert len(run(workers, grouped(4, 4))) == 16
    (note,) = [note for note in workers.notes if "unfinished rows" in note]
    assert note.startswith(f"{message}; its ")
    assert note.endswith(" unfinished rows go to cpu:1")
    fleet.engines["cpu:1"].failing = OutOfMemory("nor here", "lower it")
    with pytest.raises(OutOfMemory, match=r"^nor here; lower it$"):
        run(workers, grouped(4, 4))


def test_a_model_that_cannot_be_loaded_is_told_as_on_one_device(fleet):
    def make(name: str) -> Any:
        if name == "cuda:9":
            raise ModelError("--device cuda:9: this machine has 1 CUDA device", "use --device auto or cpu")
        return FakeEngine(name)

    fleet.make = make
    with pytest.raises(ModelError) as e:
        fleet.workers("cuda:0,9")
    assert str(e.value) == "--device cuda:9: this machine has 1 CUDA device; use --device auto or cpu"
    for process in fleet.processes:
        process.wait(60)  # none is left


def ending_while_loading(fleet: Fleet, *places: int) -> None:
    def make(name: str) -> Any:
        place = int(name.removeprefix("cpu:"))
        if place in places:
            fleet.processes[place].said.write(b"something\nSegmentation fault\n\n")
            fleet.processes[place].kill()
        return FakeEngine(name)

    fleet.make = make


def test_the_others_do_the_work_of_a_process_that_ends_while_its_model_loads(fleet):
    ending_while_loading(fleet, 1)
    workers = fleet.workers()
    results = run(workers, grouped(4, 4))
    assert {result.text for result in results.values()} == {"cpu:0"}
    assert "the process of cpu:1 ended (SIGKILL: Segmentation fault); the others do its work" in workers.notes
    assert [line["lost"] for line in workers.by_worker] == [False, True]


def test_processes_end_with_what_they_serve(fleet):
    workers = fleet.workers()
    run(workers, grouped(2, 2))
    del workers
    gc.collect()
    for process in fleet.processes:
        assert process.wait(60) == -9


def test_an_interrupt_while_models_are_loaded_ends_the_processes(fleet):
    def start(*args: Any) -> Any:
        if fleet.processes:
            raise KeyboardInterrupt
        return fleet.start(*args)

    with pytest.raises(KeyboardInterrupt):
        Workers(
            ModelConfig(model="m", device="cpu:0,1"), EngineConfig(), Processes(("cpu:0", "cpu:1"), "cpu:0,1", start)
        )
    assert fleet.processes[0].wait(60) == -9


class Replacing(Processes):
    """Processes that can be started again, as actors can."""

    replaces = True


def replacing(fleet: Fleet, count: int = 2) -> Workers:
    names = tuple(f"cpu:{i}" for i in range(count))
    return Workers(ModelConfig(model="m", device="cpu"), EngineConfig(), Replacing(names, "some", fleet.start))


def test_a_worker_that_is_lost_is_started_again_and_all_rows_are_done_once(fleet):
    fleet.make = lambda name: FakeEngine(name, step_seconds=0.002)
    workers = replacing(fleet)
    results: Counter[int] = Counter()
    workers.add(*planned(grouped(20, 6)), lambda r: results.update([r.row]))
    workers.run(when(lambda: len(results) > 10, lambda: fleet.processes[0].kill()))
    assert results == Counter(range(120))
    assert len(fleet.processes) == 3
    assert [worker["lost"] for worker in workers.by_worker].count(True) == 1
    lost = [worker for worker in workers.progress() if worker["state"] == "lost"]
    assert [(worker["rows_per_s"], worker["completion_tokens_per_s"]) for worker in lost] == [(0.0, 0.0)]
    assert sum(worker["rows"] for worker in workers.by_worker) == 120
    assert any("it is started again, and its" in note for note in workers.notes)


def test_a_worker_that_is_lost_again_and_again_without_a_row_is_given_up(fleet):
    def make(name: str) -> FakeEngine:
        engine = FakeEngine(name)
        engine.failing = DevicesLost("no more")
        return engine

    fleet.make = make
    workers = replacing(fleet, count=1)
    with pytest.raises(DevicesLost, match="no more"):
        run(workers, [request(0, [1])])
    assert len(fleet.processes) == 3


def test_work_begins_before_all_are_ready_and_those_that_come_late_take_over(fleet):
    late = threading.Event()

    def make(name: str) -> FakeEngine:
        if name == "cpu:1":
            late.wait(60)
        return FakeEngine(name, step_seconds=0.02 if name == "cpu:0" else 0.001, batch_size=2)

    fleet.make = make
    workers = replacing(fleet)
    results: list[Result] = []
    workers.add(*planned(grouped(30, 4)), results.append)
    workers.run(when(lambda: len(results) > 5, late.set))
    assert {result.text for result in results[:5]} == {"cpu:0"}
    assert Counter(result.text for result in results)["cpu:1"] > 10


def test_a_worker_ends_its_process_when_the_other_end_has_gone():
    def connect(on_message):
        on_message(Gone())

    ended = []
    serve(connect, load=pytest.fail, gone=lambda: ended.append("process"))
    assert ended == ["process"]
