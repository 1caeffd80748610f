"""A model inside a Python program: prompts in, results out, nothing on disk."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import count, islice
from numbers import Integral
from os import PathLike
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from batchgen.config import INPUT_LIMITS, EngineConfig, ModelConfig, PromptConfig
from batchgen.devices import AnyEngine, open_engine
from batchgen.engine.results import cancelled_result
from batchgen.errors import RowError
from batchgen.jobs.files.row_keys import RowKeys
from batchgen.jobs.order.sorted_requests import bounded_windows
from batchgen.notebook import prompt_bar
from batchgen.prefix import plan_requests
from batchgen.process.collector import few_collections
from batchgen.process.signals import noted_interrupt
from batchgen.process.templates import template_process
from batchgen.prompts import LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.prompts.columns import quoted
from batchgen.prompts.images import PromptImages
from batchgen.prompts.params import translated
from batchgen.records import Row, RowForm
from batchgen.records.frames import frame_of, python_value
from batchgen.records.output import id_digest, own_id, parts_asked
from batchgen.request import Request
from batchgen.result import OnResult, OnToken, Result
from batchgen.sampling.grammars import Vocabulary
from batchgen.sampling_params import SamplingParams
from batchgen.stats import EngineStats

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
Prompt = str | Sequence[Mapping[str, Any]] | TokenIds | Mapping[str, Any]
"""A text; a list of messages (`role`, `content`); a list of token ids, used as they are; or a row as in a file, with `prompt` or `messages`."""
_NEW_IN_CHILD = "create a new LLM there, with the start method spawn of multiprocessing"
_TO_SHOW = "put images into messages, or name their columns in PromptConfig(image_column=…)"
_TEXT_ALONE = "it sees text alone, no images, sound or video"
LOOK_AHEAD = 1024
TASKS = ("generate", "embed", "classify")
Params = SamplingParams | Mapping[str, Any]
_CheckedParams = SamplingParams | list[SamplingParams] | None
"""The parameters of all prompts of a call, or those of each; None for the defaults."""


class LLM:
    """A loaded model. A prefix that several calls share runs once, as long as its blocks stay in memory.

    `model` is a folder (a string or a path) or a hub name. `dtype`, `quantize`, `weights`, `weight_memory`, `device`, `device_map`, `revision`, `lora`,
    `trust_remote_code`, `compile` and `attention` are those of `ModelConfig`. `task` is what the model is loaded for: `generate` (and `score`), `embed` or `classify`;
    `pooling` and `normalize` are those of `--embed`. `engine` says how the work is batched. Raises `BatchgenError`.
    `with LLM(...) as llm:` closes the model at the end.

    All methods take a single prompt or a list of prompts (`generate` also an iterator), and either parameters for all prompts or a list with those of each. Anything
    that is not a `Prompt` or `Params` raises `TypeError` before anything runs.

    `generate`, `score`, `embed` and `classify` run a list of prompts and return their results. `add` adds prompts to the loop, and `run` is the loop. Callbacks
    and other threads may call `add` and `cancel` at any time. One call at a time runs the model: another one raises `RuntimeError` until it has returned.

    `progress` shows a bar while a list of prompts runs; None shows it in a notebook only. Ctrl-C (or the interrupt of a notebook's kernel)
    ends the call at the next step with `KeyboardInterrupt`, and `interrupted` then has the results.

    With several devices (`device="cuda:0,1"`), each has the model in a process of its own. `on_token` is then called some hundredths of a
    second after a token was sampled.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        dtype: str = "auto",
        quantize: str = "none",
        weights: str = "auto",
        weight_memory: str | None = None,
        device: str = "auto",
        device_map: str | None = None,
        revision: str | None = None,
        lora: str | PathLike[str] | None = None,
        trust_remote_code: bool = False,
        compile: str = "auto",
        attention: str = "auto",
        task: str = "generate",
        pooling: str = "auto",
        normalize: bool | None = None,
        engine: EngineConfig | None = None,
        progress: bool | None = None,
    ) -> None:
        if task not in TASKS:
            raise ValueError(f"task must be {', '.join(TASKS[:-1])} or {TASKS[-1]}, not {task!r}")
        config = ModelConfig(
            model=model, revision=revision, lora=lora, trust_remote_code=trust_remote_code,
            dtype=dtype, quantize=quantize, weights=weights, weight_memory=weight_memory,
            device=device, device_map=device_map, compile=compile, attention=attention,
            embed=task == "embed", classify=task == "classify", pooling=pooling, normalize=normalize,
        )  # fmt: skip
        if engine is not None and not isinstance(engine, EngineConfig):
            raise TypeError(f"engine must be an EngineConfig, not {engine!r}")
        self.config = engine or EngineConfig()
        with few_collections():
            self.tokenizer: LoadedTokenizer = load_tokenizer(config)
            if getattr(self.tokenizer.hf_tokenizer, "chat_template", None) is not None:
                template_process().start()  # while the model is loaded
            self._engine: AnyEngine | None = open_engine(config, self.tokenizer, self.config)
        self._stats: EngineStats | None = None
        self._grammars = Vocabulary(self.tokenizer.hf_tokenizer, self.tokenizer.vocab_size)
        self._numbers = count()
        self._images = PromptImages(self.tokenizer)
        self._images.store.fetch_once = self._images.store.fail_once = False
        self._failed: deque[tuple[OnResult, Result]] = deque()  # of prompts that never became requests
        # Windows that the engine does not have yet: a planned label takes far more memory than a waiting prompt.
        self._waiting: deque[tuple[Iterator[list[Request]], OnResult, OnToken | None]] = deque()
        self._requests: dict[int, Request] = {}
        self._cancelled: set[Request] = set()
        self._running = threading.Lock()  # held by the one call that runs the model
        self._process, self._name, self._progress = os.getpid(), config.model, progress
        self.interrupted: list[Result] = []
        """The results of the last call that ran a list of prompts or a table, if Ctrl-C has ended it; else empty. Prompts that were not done have the
        `finish_reason` "cancelled" and their text so far; labels, scores and embeddings that were not ready have an error of type `cancelled`,
        and so have all prompts that were not done when Ctrl-C came twice within a step."""

    def __reduce__(self) -> str:
        raise TypeError(f"a model cannot be sent to another process: {_NEW_IN_CHILD}")

    def __repr__(self) -> str:
        engine = self._engine
        return f"LLM({self._name!r}, {'closed' if engine is None else f'{engine.dtype} on {engine.device}'})"

    @property
    def stats(self) -> EngineStats:
        """Figures of all calls so far. Also valid while `run` runs."""
        return self._stats or self.engine.stats

    @property
    def engine(self) -> AnyEngine:
        """The engine that runs the model. Raises `RuntimeError` after `close`."""
        if self._engine is None:
            raise RuntimeError("this model is closed: create a new LLM")
        return self._engine

    @property
    def unfinished(self) -> int:
        """Number of prompts whose results have not come. A cancelled prompt's result comes in the next call that runs the model."""
        return len(self._requests)

    @overload
    def generate(
        self,
        prompts: Iterator[Prompt],
        params: Params | None = None,
        *,
        prompt_options: PromptConfig | None = None,
        look_ahead: int = LOOK_AHEAD,
    ) -> Generator[Result, None, None]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params | None] | None = None,
        *,
        prompt_options: PromptConfig | None = None,
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        params: Params | Sequence[Params | None] | None = None,
        *,
        prompt_options: PromptConfig | None = None,
        look_ahead: int = LOOK_AHEAD,
    ) -> list[Result] | Generator[Result, None, None]:
        """Returns one result per prompt, in order; for a single prompt a list of one.

        For an iterator of prompts (a generator, a file's lines) it returns an iterator of results, in the order of the prompts. Each comes as
        soon as it and those before it are done. At most `look_ahead` prompts are taken before their results are asked for. The model runs
        while the next result is awaited; other calls may run in between. Closing the iterator cancels the prompts that were taken. An
        exception of `prompts` is raised after the results of the prompts that came before it.

        A text becomes a user message in the model's chat template, if it has one, unless `prompt_options` say otherwise. The result of a
        prompt that cannot be run is `failed`; the others are not affected. `params` are for all prompts, or a
        list with those of each (None for the defaults).
        """
        if not isinstance(prompts, Iterator):
            return self._results_of_task("generate", prompts, params, prompt_options)
        self.engine  # noqa: B018 - a closed model says so here, not with the first result
        self._check_task("generate")
        if type(look_ahead) is not int:
            raise TypeError(f"look_ahead must be a whole number, not {look_ahead!r}")
        if look_ahead < 1:
            raise ValueError(f"look_ahead must be at least 1, not {look_ahead}")
        given = None if params is None else one_params(params)
        return self._stream(prompts, given, _prompt_options(prompt_options), look_ahead)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, prompt_options: PromptConfig | None = None) -> list[Result]:
        """Embeds prompts. Returns one result per prompt, in order, with its `embedding` (a float32 array). The model needs `task="embed"`.

        A text is taken as it is, after the model's own text of `PromptConfig(prompt_name=…)` or its default; a list of messages goes through
        the chat template.
        """
        return self._results_of_task("embed", prompts, None, prompt_options)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, prompt_options: PromptConfig | None = None
    ) -> list[Result]:
        """Classifies prompts with the model's own head. Returns one result per prompt, in order. The model needs `task="classify"`.

        A result has the most likely label as its `text` and the probabilities of all in `choice_probs`, or, of a head with a single number,
        that number as its `reward`. A text is taken as it is; a list of messages goes through the chat template.
        """
        return self._results_of_task("classify", prompts, None, prompt_options)

    def generate_table(
        self,
        table: Any,
        params: Params | Sequence[Params | None] | None = None,
        *,
        prompt_options: PromptConfig | None = None,
    ) -> Any:
        """Generates for each row of a table, and returns the table with the columns of the results (`text`, `finish_reason`, `usage`…).

        With the task `embed` or `classify` it adds the columns of that task.

        `table` is an Arrow table, a DataFrame of pandas or polars, or a `datasets.Dataset`, with a column `prompt` or `messages`, or those
        that `prompt_options` name, and the returned table is of the same kind. Its own columns stay as they are; a column with
        the name of a result field gets the prefix `input_`. `sampling_params` and other special columns mean the same as in a file.

        Raises `TypeError` for anything that is not such a table, `UsageError` if no row has a prompt or a name stands for several columns.
        """
        options = _prompt_options(prompt_options)
        frame = frame_of(table)
        rows = frame.rows()
        given = _params_of(params, len(rows))
        builder = self._builder(given, options)
        builder.columns.check(rows)
        results = self._results_of(rows, given, options)
        head = self.tokenizer.head
        params = given if isinstance(given, list) else [given or SamplingParams()]
        asked = {part for one in params for part in parts_asked(options, one, head)}
        # Whether rows may have schemas is judged by the types, so that tables of one kind have the same columns.
        types = {name: of for name, of in frame.types().items() if name != "valid"}
        optional = asked.union(builder.optional_results(types))
        if "valid" in optional:
            asked.add("valid")
        form = RowForm(
            reasoning=builder.reasoning,
            tool_calls=builder.tool_calls,
            asked=tuple(sorted(asked)),
            optional=tuple(sorted(optional)),
        )
        return frame.with_results(rows, results, form)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: str | Sequence[str | TokenIds],
        *,
        prompt_options: PromptConfig | None = None,
    ) -> list[Result]:
        """Scores how likely each completion is after its prompt. Returns one result per pair, in order, with its `score`.

        A completion is a text, or a list of token ids, which follow the prompt as they are.
        """
        self._check_task("generate")
        options = replace(_prompt_options(prompt_options), score=True)
        rows = _rows_of(prompts, options)
        given = _listed("completions", "a text", completions, lambda one: isinstance(one, str))
        texts = [_checked_completion(place, one) for place, one in enumerate(given)]
        if len(texts) != len(rows):
            raise ValueError(
                f"there are {len(rows)} prompts and {len(texts)} completions; give one completion for each prompt"
            )
        for row, text in zip(rows, texts, strict=True):
            row.columns[options.completion_column] = text
        return self._results_of(rows, None, options)

    def add(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params | None] | None = None,
        *,
        prompt_options: PromptConfig | None = None,
        on_result: OnResult,
        on_token: OnToken | None = None,
    ) -> list[int]:
        """Adds prompts for `run`. Returns their numbers, which are unique.

        `run` calls `on_result(result)` for each prompt, with its number in `result.row`, and `on_token(number, completion, token)` for
        each sampled token; `completion` is the index of the completion among those of the prompt.
        """
        _check_callable("on_result", on_result)
        if on_token is not None:
            _check_callable("on_token", on_token)
        options = _prompt_options(prompt_options)
        rows = _rows_of(prompts, options)
        return self._add(rows, _params_of(params, len(rows)), options, on_result, on_token)

    def cancel(self, number: int) -> None:
        """Ends a prompt. Its result has the `finish_reason` "cancelled" and the text generated so far. Does nothing if it is done."""
        request = self._requests.get(number)
        if request is not None:
            self._cancelled.add(request)
            if number not in self._requests:  # another thread has ended it meanwhile
                self._cancelled.discard(request)
            self.engine.cancel(request)

    def run(self) -> None:
        """Runs until all added prompts are done, also those that are added meanwhile. An exception in a callback ends it and drops the rest.

        Ctrl-C cancels all prompts: their callbacks get what there is, and then `KeyboardInterrupt` is raised.
        """
        with self._only_call(), noted_interrupt() as came:
            self._run(lambda: self._cancel_all() if came() else None)
            if came():
                raise KeyboardInterrupt

    def close(self) -> None:
        """Frees the model's memory and ends the processes of several devices. Later calls raise `RuntimeError`; `stats` stays valid."""
        with self._only_call("close it when that call has returned"):
            if self._engine is not None:
                self._stats = self._engine.stats
                self._engine.close()
                self._engine = None
                gc.collect()  # an engine and the layers of its model refer to themselves

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _only_call(self, instead: str = "add prompts to it with add()") -> Iterator[None]:
        """A context in which no other call runs or closes the model. Raises `RuntimeError` if one does now, in another thread or around a callback,
        and in a process that was forked from the model's own.
        """
        self._check_process()
        if not self._running.acquire(blocking=False):
            raise RuntimeError(f"this model is running in another call: {instead}")
        try:
            with few_collections():
                yield
        finally:
            self._running.release()

    def _check_process(self) -> None:
        """Raises `RuntimeError` in a forked process, which has the model but none of the threads that compute: a call would never return."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this model belongs to process {self._process}, from which this one was forked: {_NEW_IN_CHILD}"
            )

    def _check_task(self, task: str) -> None:
        loaded = "generate" if self.tokenizer.head is None else self.tokenizer.head.task
        if loaded != task:
            raise ValueError(f"this model was loaded with task={loaded!r}: make another LLM with task={task!r}")

    def _results_of_task(self, task: str, prompts: Any, params: Any, prompt_options: Any) -> list[Result]:
        self._check_task(task)
        options = _prompt_options(prompt_options)
        rows = _rows_of(prompts, options)
        return self._results_of(rows, _params_of(params, len(rows)), options)

    def _results_of(self, rows: list[Row], params: _CheckedParams, options: PromptConfig) -> list[Result]:
        """Runs rows. Returns their results, in order."""
        with self._only_call("add prompts to it with add(), or call this when that call has returned"):
            self.interrupted = []
            results: dict[int, Result] = {}

            def take(result: Result) -> None:
                results[result.row] = result

            with closing(RowKeys()) as row_keys:
                numbers = self._add(rows, params, options, take, row_keys=row_keys)
            tokens_before = self.stats.completion_tokens
            try:
                with noted_interrupt() as came, prompt_bar(len({*numbers}), self._progress) as show:

                    def between_steps() -> None:
                        if came():  # the bar stays where it is: cancelled prompts are not done
                            self._cancel_all()
                        else:
                            show(len(results), self.stats.completion_tokens - tokens_before)

                    self._run(between_steps)
            except KeyboardInterrupt:  # Ctrl-C again, before the step ended
                lost = RowError("cancelled", "interrupted in the middle of a step")
                known = [results.get(number) or Result.from_error(0, lost) for number in numbers]
                self.interrupted = [replace(result, row=place) for place, result in enumerate(known)]
                raise
            done = [replace(results[number], row=place) for place, number in enumerate(numbers)]
            if came():
                self.interrupted = done
                whole = sum("cancelled" not in (result.reason, result.error_type) for result in done)
                raise KeyboardInterrupt(
                    f"{whole:,} of {len(done):,} prompts were done; LLM.interrupted has the results"
                )
            return done

    def _stream(
        self, prompts: Iterator[Prompt], params: _CheckedParams, options: PromptConfig, look_ahead: int
    ) -> Generator[Result, None, None]:
        """Yields the results of prompts, which are taken when half of the earlier ones have been yielded."""
        done: dict[int, Result] = {}
        pending: deque[int] = deque()
        awaited: Counter[int] = Counter()  # how often a number is pending: equal prompts have one
        taken, places, more = count(), count(), True
        fault: Exception | None = None

        def take(result: Result) -> None:
            done[result.row] = result

        with closing(RowKeys()) as row_keys:
            try:
                while more or pending:
                    if more and 2 * len(pending) <= look_ahead:
                        free = look_ahead - len(pending)
                        rows: list[Row] = []
                        try:
                            rows.extend(_row_of(next(taken), prompt, options) for prompt in islice(prompts, free))
                        except Exception as e:  # noqa: BLE001 - it is raised after the results of the prompts before it
                            fault = e
                        more = len(rows) == free
                        pending.extend(numbers := self._add(rows, params, options, take, row_keys=row_keys))
                        awaited.update(numbers)
                    self._run_until(lambda: not pending or pending[0] in done)
                    while pending and pending[0] in done:
                        number = pending.popleft()
                        result = done[number]
                        awaited[number] -= 1
                        if not awaited[number]:
                            del awaited[number], done[number]
                        yield replace(result, row=next(places))
                if fault is not None:
                    raise fault
            finally:
                if self._engine is not None:
                    for number in pending:
                        self.cancel(number)

    def _cancel_all(self) -> None:
        for number in list(self._requests):
            self.cancel(number)

    def _run_until(self, done: Callable[[], bool]) -> None:
        """Runs until `done()`, which must hold when no prompt is unfinished."""
        if done():
            return
        with self._only_call(), noted_interrupt() as came:
            self._run(lambda: "pause" if done() or came() else None)
            if came():
                raise KeyboardInterrupt
        if not done():
            raise RuntimeError("the prompts of this iterator were dropped by an exception in another call")

    def _add(
        self,
        rows: list[Row],
        params: _CheckedParams,
        options: PromptConfig,
        on_result: OnResult,
        on_token: OnToken | None = None,
        row_keys: RowKeys | None = None,
    ) -> list[int]:
        """With `row_keys`, which tell equal rows of several calls apart, only the first of prompts whose results cannot differ runs, and its number
        is returned for all of them.
        """
        self.engine  # noqa: B018 - a closed model takes no prompts
        self._check_process()
        own = params if isinstance(params, list) else None
        numbers = [next(self._numbers) for _ in rows]
        rows = [row._replace(number=number) for row, number in zip(rows, numbers, strict=True)]
        builder = self._builder(params, options)
        if media := builder.columns.media(rows):
            why = _TO_SHOW if self._images.refusal is None else _TEXT_ALONE
            warnings.warn(f"prompts have {quoted(media)}, which the model is not shown: {why}", stacklevel=4)
        checked = [self._grammars.checked(b) if isinstance(b, Request) else b for b in builder.build(rows, own)]
        asked = [(row, one) for row, one in zip(rows, checked, strict=True) if isinstance(one, Request)]
        ids = [id_digest(own_id(row, None)) for row, _ in asked]
        with nullcontext(row_keys) if row_keys is not None else closing(RowKeys()) as keys:
            requests = [request for request, _ in keys.keyed([request for _, request in asked], ids)]
        if row_keys is not None:
            first: dict[bytes, Request] = {}
            same = {r.row: first.setdefault(r.key, r).row for r in requests}
            requests, numbers = list(first.values()), [same.get(number, number) for number in numbers]
        self._requests.update((request.row, request) for request in requests)

        def done(result: Result) -> None:
            request = self._requests.pop(result.row, None)
            if request is not None:
                self._cancelled.discard(request)
            on_result(result)

        self._failed.extend((done, result) for result in checked if isinstance(result, Result))
        self._waiting.append((bounded_windows(requests, INPUT_LIMITS), done, on_token))
        return numbers

    def _builder(self, params: _CheckedParams, options: PromptConfig) -> PromptBuilder:
        return PromptBuilder(
            self.tokenizer,
            options,
            params if isinstance(params, SamplingParams) else SamplingParams(),
            images=self._images,
        )

    def _run(self, between_steps: Callable[[], str | None]) -> None:
        """Runs until all prompts are done, or `between_steps` returns "pause"."""

        def take() -> str | None:
            self._take()
            return between_steps()

        try:
            wish = take()
            while wish is None and self.engine.unfinished:
                self.engine.run(stop=take)
                wish = take()
        except BaseException:
            for dropped in (self._failed, self._waiting, self._requests, self._cancelled):
                dropped.clear()
            if self.engine.unfinished:  # the exception did not come from its run, which would have dropped them
                self.engine.run(stop=lambda: "now")
            raise

    def _take(self) -> None:
        """Gives the added prompts to the engine: those of large calls window by window, while fewer than half a window wait there."""
        while self._failed:
            done, result = self._failed.popleft()
            done(result)
        while self._waiting and 2 * self.engine.waiting < INPUT_LIMITS.window_leaves:
            windows, on_result, on_token = self._waiting[0]
            window = next(windows, None)
            if window is None:
                self._waiting.popleft()
                continue
            requests = [r for r in window if not self._is_cancelled(r, on_result)]
            if requests:
                planned = plan_requests(requests, self.config.chunk_size, share=self.config.share)
                self.engine.add(*planned, on_result, on_token)

    def _is_cancelled(self, request: Request, on_result: OnResult) -> bool:
        """Ends a request that was cancelled before the engine had it."""
        if request not in self._cancelled:
            return False
        on_result(cancelled_result(request))
        return True


def _rows_of(prompts: Any, options: PromptConfig) -> list[Row]:
    """Returns the prompts of a call as rows."""
    given = _listed("prompts", "a prompt", prompts, _is_prompt)
    return [_row_of(place, prompt, options) for place, prompt in enumerate(given)]


def _row_of(place: int, prompt: Any, options: PromptConfig) -> Row:
    return Row(place, _columns(place, prompt, options), None, f"prompt {place}")


def _listed(name: str, one: str, given: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    """Returns an argument as a list: one prompt or completion becomes a list of one. `name` and `one` are for messages."""
    if is_one(given):
        return [given]
    if hasattr(given, "columns"):  # it would give its columns, or their names
        raise TypeError(
            f"{name} must be {one} or a list of {name}, not a {type(given).__name__}: give one of its columns, or use generate_table"
        )
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be {one} or a list of {name}, not {_shortened(given)}")
    if isinstance(given, set | frozenset):
        # Its order differs between processes: nobody could tell which result is whose.
        raise TypeError(f"{name} must be in an order, and a set has none: give a list, such as sorted({name})")
    if hasattr(given, "to_pylist"):  # of Arrow, whose scalars are no texts
        return list(given.to_pylist())
    return list(given.to_list() if hasattr(given, "to_list") else given)  # polars would give lists as its own Series


def _check_callable(name: str, given: Any) -> None:
    if not callable(given):
        raise TypeError(f"{name} must be a function, not {_shortened(given)}")


def _columns(place: int, prompt: Any, options: PromptConfig) -> dict[str, Any]:
    """Returns a prompt as the columns of a row. pandas and numpy have arrays where a file has lists."""
    if isinstance(prompt, str):
        return {options.prompt_column: prompt}
    if _is_token_ids(prompt):
        return {options.prompt_column: [int(token) for token in prompt]}
    if _is_conversation(prompt):
        return {options.messages_column: python_value(list(prompt))}
    usual = options.prompt_column, options.messages_column, *options.image_column
    if isinstance(prompt, Mapping) and (options.template is not None or not prompt.keys().isdisjoint(usual)):
        return {name: _column(value) for name, value in prompt.items()}
    raise TypeError(
        f"prompts[{place}] must be text, a list of messages (objects with role and content), a list of token ids, or an object with "
        f"{options.prompt_column} or {options.messages_column}, not {_shortened(prompt)}"
    )


def _column(value: Any) -> Any:
    """Returns a value of a prompt's object as a file would have it."""
    if isinstance(value, SamplingParams):
        return {name: getattr(value, name) for name in value.given}
    if isinstance(value, np.ndarray | np.generic):
        return python_value(value)
    return value  # not looked into: many prompts may share it


def _checked_completion(place: int, given: Any) -> str | list[int]:
    if isinstance(given, str):
        return given
    if _is_token_ids(given):
        return [int(token) for token in given]
    raise TypeError(f"completions[{place}] must be text or a list of token ids, not {_shortened(given)}")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str | Mapping) or _is_token_ids(value) or _is_conversation(value)


def _is_token_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.ndim == 1 and value.size and value.dtype.kind in "iu")
    return _is_list_of(value, lambda item: isinstance(item, Integral) and not isinstance(item, bool))


def _is_conversation(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype == object:  # a list of messages that pandas has read from Parquet
        value = list(value)
    return _is_list_of(value, lambda item: isinstance(item, Mapping) and "role" in item)


def _is_list_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_one, value))


def _params_of(given: Any, prompts: int) -> _CheckedParams:
    """Returns the parameters of a call, or a list with those of each prompt."""
    if not isinstance(given, list | tuple):
        return None if given is None else one_params(given)
    if len(given) != prompts:
        raise ValueError(
            f"there are {prompts} prompts and {len(given)} params; give one for each prompt, or one for all"
        )
    return [SamplingParams() if one is None else one_params(one, f"params[{place}]") for place, one in enumerate(given)]


def one_params(given: Any, place: str = "") -> SamplingParams:
    """Returns the parameters as `SamplingParams`. `place` is their name in messages, if they are those of one prompt of several.

    Raises `TypeError` for anything but parameters, and `ValueError` for a name or a value that there is not.
    """
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        wanted = "params must be SamplingParams, a dict, or, for a list of prompts, a list of them"
        if place:
            wanted = f"{place} must be SamplingParams or a dict"
        raise TypeError(f"{wanted}, not {_shortened(given)}")
    try:
        return SamplingParams().merged(translated(given))
    except RowError as e:
        raise ValueError(f"{place}: {e.message}" if place else e.message) from None


def _prompt_options(given: Any) -> PromptConfig:
    if given is not None and not isinstance(given, PromptConfig):
        raise TypeError(f"prompt_options must be a PromptConfig, not {_shortened(given)}")
    return given or PromptConfig()


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
