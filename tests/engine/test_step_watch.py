"""A step that does not return from the device is reported, once, while it still runs."""

import logging
import os
import threading
from types import SimpleNamespace

import torch

from batchgen.engine.executor import StepExecutor
from batchgen.engine.step_watch import StepWatch
from support.fake_device import FakeAttention, use_fake_device
from support.tiny import build, engine_of, requests_of, run

MESSAGE = (
    "cuda:0: a step has not returned for {} minutes; a kernel may hang. Ctrl-C cannot end it: use kill -9 {}, then run the same command "
    "again, which continues the job (--attention torch runs it without batchgen's kernels)"
)


def test_a_call_is_reported_once_and_only_after_its_limit(caplog):
    watch = StepWatch("cuda:0", seconds=600, every=3600)
    watch.look(10_000.0)  # between two calls
    watch.since = 1000.0
    watch.look(1600.0)
    assert caplog.messages == []
    watch.look(1600.1)
    watch.look(1700.0)
    assert caplog.messages == [MESSAGE.format(10, os.getpid())]


def test_the_watch_ends_with_its_engine():
    thread = StepWatch("cuda:0", every=3600).thread  # nothing refers to the watch
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_that_hangs_is_reported_while_it_hangs_and_the_job_goes_on_when_it_returns(monkeypatch, caplog):
    reported = threading.Event()

    class Hears(logging.Handler):
        def emit(self, record):
            reported.set()

    class Hanging(FakeAttention):
        def __call__(self, *arguments):
            if len(self.sizes) == 3:
                assert reported.wait(60), "nobody said that the step hangs"
            return super().__call__(*arguments)

    model = build()
    requests = requests_of([[5, 6, row] for row in range(4)], [6] * 4)
    want = run(engine_of(model), requests)
    use_fake_device(monkeypatch, attention=Hanging)
    engine = engine_of(model)
    engine.executor.watch = StepWatch("cuda:0", seconds=0, every=0.001)
    logger = logging.getLogger("batchgen")
    handler = Hears()
    logger.addHandler(handler)
    try:
        assert run(engine, requests) == want
    finally:
        logger.removeHandler(handler)
    assert caplog.messages == [MESSAGE.format(0, os.getpid())]
    assert engine.executor.watch.since is None


def test_steps_on_a_gpu_are_watched_and_those_on_a_cpu_are_not():
    def watch_on(device):
        runner = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))
        return StepExecutor(runner, None, None).watch

    assert isinstance(watch_on("cuda:0"), StepWatch)
    assert watch_on("cpu") is None
