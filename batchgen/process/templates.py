"""Renders Jinja templates in a child process, which ends when a render takes too much time or memory.

A template is a program. Neither its loops nor a long step of C code could be stopped in this process: while such a step runs, no other
thread does, and no signal is handled. Decision 0008 says more.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, Literal, NamedTuple

from batchgen.errors import BatchgenError
from batchgen.process.child_process import Process, exit_code, how_it_ended, start_module

SECONDS = 10
"""Processor time that one render may take. Up to a second more is possible."""
MEMORY = 2 << 30
"""Address space of the child process, in bytes. The process itself takes about 0.15 GiB of it."""
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 20  # what is sent at once
_POLL_SECONDS = 0.2

Form = Literal["names", "row", "chat", "shape"]
"""What is made of a template: the names that it reads, the text of a row (given its columns), the text of a conversation (given the
arguments of transformers' `render_jinja_template`), or the `TemplateShape` of such a conversation, whose contents are texts."""


class Gap(NamedTuple):
    """A gap in a shape, for a text."""

    number: int
    """Of the text."""
    stripped: bool
    """Whether it is written without the white space around it."""


Question = tuple[Gap, str, str]
"""What a template asks about a text: a method of `str` and its argument. The answer that a shape holds for is no."""


class TemplateShape(NamedTuple):
    """What a template writes around texts that it only copies (`template_shapes`)."""

    start: str
    rest: tuple[tuple[Gap, str], ...]
    """Each gap, and what is written after it."""
    asked: tuple[Question, ...]

    def filled(self, texts: Sequence[str]) -> str | None:
        """Returns what the template writes with these texts; None if the shape does not hold for them."""
        values = [(text, text.strip()) for text in texts]
        if not all(stripped for _, stripped in values):
            return None
        for (number, stripped), method, argument in self.asked:
            if getattr(values[number][stripped], method)(argument):
                return None
        parts = [self.start]
        for (number, stripped), after in self.rest:
            parts += values[number][stripped], after
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class TemplateFailure:
    """Why there is no text."""

    kind: Literal["syntax", "undefined", "null", "limit", "error"]
    message: str
    line: int = 0
    """Line of the template, if its syntax is wrong."""


class _Killed(TemplateFailure):
    """The process was killed while it rendered: by the system, which lacked memory, or by a user. No template does that."""


class TemplateCall(NamedTuple):
    """A render that is asked for."""

    form: Form
    source: str
    given: Any
    """The input; it must be possible to pickle it."""


class RenderingStopped(Exception):
    """The caller does not need the texts any more."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: Process
    connection: Connection[Any, Any]
    said: IO[bytes]
    """What it prints."""
    place: IO[bytes]
    """The child writes the place in the batch of the input that it renders, in 8 bytes."""


class TemplateProcess:
    """A child process that renders templates. It starts when it is first needed, and again after it was ended. Any thread may use it."""

    def __init__(self, seconds: int = SECONDS, memory: int = MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: _Child | None = None
        self._ready = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process, without waiting for it."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the process. The next render starts it again."""
        with self._lock:
            self._end()

    def answers(self, calls: Mapping[int, TemplateCall], is_stopped: Callable[[], bool]) -> dict[int, Any]:
        """Returns the answer to each call, which may be a `TemplateFailure`. Raises `RenderingStopped` soon after `is_stopped` is true."""
        alike: dict[tuple[Form, str], list[int]] = {}
        for key, call in calls.items():
            alike.setdefault((call.form, call.source), []).append(key)
        found: dict[int, Any] = {}
        for (form, source), keys in alike.items():
            answers = self.render(form, source, [calls[key].given for key in keys], is_stopped)
            found.update(zip(keys, answers, strict=True))
        return found

    def render(
        self, form: Form, source: str, inputs: Iterable[Any], is_stopped: Callable[[], bool] = lambda: False
    ) -> list[Any]:
        """Returns the answers to the calls of one template. A call at which the process was killed is tried twice."""
        found: list[Any] = [_packed(given) for given in inputs]
        todo = [i for i, given in enumerate(found) if isinstance(given, bytes)]
        again: int | None = None
        with self._lock:
            while todo:
                size, batch = 0, []
                for i in todo[:_BATCH_ROWS]:
                    batch.append(i)
                    size += len(found[i])
                    if size > _BATCH_BYTES:
                        break
                answers = self._ask((form, source, [found[i] for i in batch]), is_stopped)
                killed = next((place for place, answer in answers.items() if isinstance(answer, _Killed)), None)
                if killed is not None and batch[killed] != again:
                    again = batch[killed]
                    del answers[killed]
                for place, answer in answers.items():
                    found[batch[place]] = answer
                todo = [i for place, i in enumerate(batch) if place not in answers] + todo[len(batch) :]
        return found

    def _ask(self, request: tuple[Form, str, Sequence[bytes]], is_stopped: Callable[[], bool]) -> dict[int, Any]:
        """Returns the answers by place in the batch. Some are missing if the process ended at a place, which has a failure as its answer."""
        if self._child is not None and self._ready and self._child.connection.poll():
            self._end()  # it says something unasked: it was killed while it had nothing to do
        child = self._start()
        answers: list[Any] = []
        try:
            if not self._ready:
                self._ready = _receive(child, is_stopped)
            os.pwrite(child.place.fileno(), bytes(8), 0)
            child.connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            while len(answers) < len(request[2]):
                answers += _receive(child, is_stopped)
            return dict(enumerate(answers))
        except (EOFError, OSError):
            code = exit_code(child.process)
            how = how_it_ended(code, child.said)
            if not self._ready:
                raise BatchgenError(f"templates cannot be rendered, as their process does not start: {how}") from None
            place = int.from_bytes(os.pread(child.place.fileno(), 8, 0), "little")
            ended = _Killed if code == -signal.SIGKILL else TemplateFailure
            failure = ended("limit", f"the process that renders templates ended: {how}")
            if code == -signal.SIGXCPU:
                failure = TemplateFailure("limit", f"it takes more than {self._seconds} seconds of processor time")
            self._end()
            return {**dict(enumerate(answers)), place: failure}
        except BaseException:
            self._end()  # its next answer would be taken for another's
            raise

    def _start(self) -> _Child:
        if self._child is None:
            said, place = _temporary_files()
            ours, theirs = Pipe()
            limits = (str(self._seconds), str(self._memory))
            try:
                process = start_module("batchgen.process.template_renderer", theirs, said, place, arguments=limits)
            finally:
                theirs.close()
            self._child, self._ready = _Child(process, ours, said, place), False
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            exit_code(child.process)
            for file in (child.connection, child.said, child.place):
                file.close()


def _temporary_files() -> tuple[IO[bytes], IO[bytes]]:
    """Returns a file for what the child prints and one for the place, which has its room. Raises `BatchgenError` if there is none."""
    said, place = tempfile.TemporaryFile(), tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `_end`
    try:
        place.write(bytes(8))
    except OSError as e:
        said.close()
        place.close()
        raise BatchgenError(
            f"the folder for temporary files, {tempfile.gettempdir()}, cannot be written to: {e.strerror}",
            "free some space there, or set TMPDIR to another folder",
        ) from e
    return said, place


@cache
def _process_of(pid: int) -> TemplateProcess:
    process = TemplateProcess()

    def end() -> None:
        if os.getpid() == pid:  # else it belongs to the process that this one was forked from
            process._end()  # not `close`: a daemon thread may still hold the lock

    atexit.register(end)
    return process


def template_process() -> TemplateProcess:
    """Returns the process that renders all templates of this process. A fork has one of its own."""
    return _process_of(os.getpid())


def _receive(child: _Child, is_stopped: Callable[[], bool]) -> Any:
    while not child.connection.poll(_POLL_SECONDS):
        if is_stopped():
            raise RenderingStopped
    return pickle.loads(child.connection.recv_bytes())


def _packed(given: Any) -> bytes | TemplateFailure:
    try:
        return pickle.dumps(given, pickle.HIGHEST_PROTOCOL)
    except Exception as e:  # noqa: BLE001 - an object's own code may raise anything
        return TemplateFailure("error", f"a value cannot be sent to the process that renders templates: {e}")
