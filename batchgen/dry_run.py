"""`batchgen plan`: what a job would share and cost, without loading the weights."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.attention.kv_size import kv_numbers
from batchgen.config import JobConfig, ModelConfig, check_config, parse_memory
from batchgen.devices.opening import costs_file, num_threads
from batchgen.errors import OutputError, UsageError, memory_errors
from batchgen.jobs.files.disk import check_file, write_whole
from batchgen.jobs.files.manifest import as_stored, load_manifest
from batchgen.jobs.files.results import read_keyed_results
from batchgen.jobs.files.row_keys import RowKeys
from batchgen.jobs.identity import date_of_job, dtype_name, job_settings, local_identity
from batchgen.jobs.opening import continued_settings
from batchgen.jobs.order.advice import SAMPLE_ROWS, Advice, advice_for
from batchgen.jobs.order.shares import PrefixCosts, Share
from batchgen.jobs.order.sorted_requests import SortedRequests, bounded_windows, evenly, in_window_order
from batchgen.jobs.order.windows import Planned, Planner
from batchgen.jobs.outcomes import FAILURES_KEPT, failure_line
from batchgen.jobs.reuse_output import read_keys
from batchgen.kernels import isa
from batchgen.model.architectures import RECURRENT, check_architecture, context_note
from batchgen.model.weights.variants import check_quantization
from batchgen.model.weights.weight_size import itemsize, memory_table, streaming_room
from batchgen.prefix import (
    GroupSurvey,
    PrefixOutline,
    merge_figures,
    plan_figures,
    plan_prefixes,
)
from batchgen.preflight import check_job
from batchgen.process.collector import few_collections
from batchgen.process.machine import free_host_memory
from batchgen.process.signals import Signals
from batchgen.progress import Progress, Silent, Tracker
from batchgen.prompts import LoadedTokenizer, PromptBuilder, load_tokenizer
from batchgen.prompts.tokenizer import quiet, text_config
from batchgen.recording import tree_record
from batchgen.records import Input, Row, RowStream, open_input, output_of, window_rows
from batchgen.records.output import id_digest, job_path, own_id
from batchgen.report import ReportPage, check_report_file, report_plan
from batchgen.request import Request, leaves_of
from batchgen.result import Result
from batchgen.scheduling.duration import Duration, Estimate, Lengths
from batchgen.scheduling.pool_size import (
    AUTO_SHARE,
    BATCH_SIZE,
    MemoryShare,
    limits_for,
    memory_option,
    sufficient_memory,
)
from batchgen.scheduling.rehearsal import Rehearsal
from batchgen.scheduling.step_costs import StepCosts
from batchgen.scheduling.waiting import POLICIES
from batchgen.state.state_size import attention_layers, state_bytes

if TYPE_CHECKING:
    from batchgen.model.memory_budget import Sizes

SCHEMA = "batchgen.plan/1"
TREE_NODES = 20
FEW_TOKENS = 16
"""A node of fewer tokens is listed only if it saves a hundredth of the prompt tokens."""
GROUPS = 10
EXCERPT_TOKENS = 64
_BEGINS_AGAIN = "the same command begins the plan again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan of a job: what it shares and costs, the top of the prefix tree, and the largest groups.

    If windows follow the order of the input or of priorities, tree and groups are those of the first window.
    """

    figures: dict[str, Any]
    """What `as_dict` returns, but for advice and estimate."""
    advice: Advice | None = None
    """What would save the most prompt tokens."""
    estimate: Estimate | None = None
    """How long the rows without a result will take; None if nothing is known of this model's steps on this machine."""
    chat: bool
    whole: bool
    """Whether the windows cover the whole input in prefix order."""
    sufficient_memory: str
    """A `--kv-memory` that holds the longest row: its KV and, if the model has recurrent layers, its states."""
    title: str
    """The inputs, as they were named."""
    prefix_tree: Mapping[str, Any] | None
    """The prefix tree in outline (`recording.tree_record`); None without sharing."""

    def page(self) -> ReportPage:
        """Returns the plan as a page for a browser."""
        return report_plan(self.title, self.as_dict(), self.prefix_tree)

    def _repr_html_(self) -> str:
        """What a notebook displays: the page."""
        return self.page()._repr_html_()

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan for `--json` (schema `batchgen.plan/1`)."""
        more = {"advice": self.advice, "estimate": self.estimate}
        return self.figures | {name: None if found is None else asdict(found) for name, found in more.items()}


def plan_job(
    config: JobConfig,
    progress: Progress | None = None,
    *,
    shards: int | None = None,
    write_template: str | None = None,
    measured: Mapping[str, Any] | None = None,
) -> PlanReport:
    """Returns what a job would share and cost, and with `shards` also what it would cost to run it in so many shards.
    `measured`: what rows that were run for this plan took (`job.measure_job`).

    Loads the tokenizer but not the weights. Writes nothing but the report, if the configuration names one, and the file `write_template`: the
    template in its best order, if another order saves enough. Raises `BatchgenError`.
    """
    _check(config, write_template)
    if shards is not None:
        config = replace(config, shard=f"1/{shards}")
    tracker = Tracker(progress or Silent())
    with Signals(0, _BEGINS_AGAIN) as signals, memory_errors(), few_collections(), signals.interruptible():
        source = open_input(config, None)
        _check_with_input(config, source, write_template)
        tracker.phase("loading tokenizer")
        tokenizer = _tokenizer(config.model)
        prompts = PromptBuilder(tokenizer, config.prompts, config.sampling, now=_date_of_prompts(config))
        size = window_rows(config, source)
        whole = size is None and config.prompts.priority_column is None
        sample: list[Row] = []
        with tempfile.TemporaryDirectory(prefix="batchgen-") as folder, closing(RowKeys()) as row_keys:
            with quiet():  # torch is imported
                known = _earlier_rows(config, tokenizer, prompts, tracker)
                plan = _PlanBuilder(config, tokenizer, *known, row_keys, whole=whole)
            tracker.phase("planning")
            waiting, costs = SortedRequests(Path(folder), config.limits), PrefixCosts(Path(folder))
            stream = RowStream(source.rows())
            while rows := stream.take(size or config.limits.read_rows, config.limit):
                if plan.rows == 0:
                    prompts.columns.check(source.rows_to_check(rows, config.limit), config.named_columns)
                    sample = evenly(rows, SAMPLE_ROWS)
                requests = plan.requests(rows, prompts.build(rows))
                rows.clear()  # freed before the next ones are read
                tracker.passed(plan.rows)
                if size is not None:
                    for window in bounded_windows(requests, config.limits):
                        plan.add_window(window)
                else:
                    for request in requests:
                        waiting.add(request)
            if stream.broken is not None:
                raise stream.broken
            waiting.close()
            for requests in waiting.windows():
                plan.add_window(requests)
                if shards is not None:
                    costs.add(in_window_order(requests))
            cuts = None if shards is None else _cuts(costs.shares(shards, config.engine.chunk_size))
        advice = advice_for(config, tokenizer, prompts, sample)
        tracker.show_notes([*source.notes, *prompts.notes, *filter(None, [context_note(tokenizer.hf_config)])])
        report = plan.report({"shards": cuts, "measured": measured}, advice, chat=prompts.chat)
        _write_files(report, config.report, write_template, tracker)
        return report


def _check(config: JobConfig, write_template: str | None) -> None:
    check_config(config)
    if write_template is not None and config.prompts.template is None:
        raise UsageError("--write-template is for a job with a template", "name one with --template")
    if config.report is not None:
        check_report_file(config.report, "--report")


def _check_with_input(config: JobConfig, source: Input, write_template: str | None) -> None:
    check_job(config, source, None)
    check_file("--write-template", write_template, [file.name for file in source.files])
    if write_template is not None and Path(write_template).is_file():
        with suppress(OSError, UnicodeDecodeError):
            if Path(write_template).read_text(encoding="utf-8-sig") == config.prompts.template:
                raise UsageError(
                    f"--write-template {write_template} holds the job's template already", "name another file"
                )


def _write_files(report: PlanReport, page: str | None, template: str | None, tracker: Tracker) -> None:
    """Writes the report to the file `page`, and the template in its best order to `template` if there is a better order."""
    if page is not None:
        report.page().save(page)
        tracker.note(f"the report is in {page}")
    best = None if report.advice is None else report.advice.template
    if template is not None and best is not None:
        try:
            write_whole(template, best)
        except OSError as e:
            raise OutputError(f"--write-template {template} cannot be written: {e.strerror}") from e
        tracker.note(f"the template in its best order is in {template}")
    elif template is not None:
        tracker.note("no other order of the template saves enough: no template was written")


def _date_of_prompts(config: JobConfig) -> datetime | None:
    """Returns the time that the job writes into its prompts if it has begun (`date_of_job`), else None."""
    if config.overwrite:
        return None
    with suppress(UsageError):  # no output is named, or its folder is damaged: the run will say so
        return date_of_job(output_of(config), config.work_dir)
    return None


def _cuts(shares: Sequence[Share]) -> dict[str, Any]:
    """Returns the cost of running the job in shards: the requests of each, its part of the cost, and what runs again although the shard before it runs it."""
    total = sum(share.cost for share in shares)
    return {
        "rows": [share.last - share.first for share in shares],
        "cost": [round(share.cost / total, 6) if total else 0.0 for share in shares],
        "prefill_tokens_again": sum(share.again for share in shares),
    }


def _length_figures(lengths: Lengths) -> dict[str, Any] | None:
    """Returns the distribution of the lengths of completions, in tokens: half have at most `half`, nine in ten at most `most`. None if there are none."""
    tokens = lengths.tokens
    count = len(tokens)
    if not count:
        return None
    half, most, longest = (int(tokens[-(-count * part // 10) - 1]) for part in (5, 9, 10))
    mean = round(float(tokens.mean()), 3)
    return {"completions": count, "mean": mean, "half": half, "most": most, "max": longest, "cut": lengths.cut}


def _tokenizer(config: ModelConfig) -> LoadedTokenizer:
    """Loads the tokenizer of a model. Raises `ModelError` for a model that would not run."""
    tokenizer = load_tokenizer(config)
    check_quantization(config.model, tokenizer.hf_config)
    check_architecture(tokenizer.hf_config)
    return tokenizer


def _earlier_rows(
    config: JobConfig, tokenizer: LoadedTokenizer, prompts: PromptBuilder, tracker: Tracker
) -> tuple[set[bytes], Lengths]:
    """Returns the keys of the rows that the job has finished, and the lengths of their completions; none of a job with other settings, which a run will refuse to continue."""
    keys, ends = set[bytes](), list[tuple[int, bool]]()
    if config.overwrite:
        return keys, Lengths()
    with suppress(UsageError, OSError):  # no output is named, or it has no folder
        output = output_of(config)
        folder = job_path(output, config.work_dir)
        for key, result in read_keyed_results(folder):
            keys.add(key)
            completions = [(len(c.token_ids), c.finish_reason) for c in result.completions]
            completions = completions or [(result.completion_tokens, result.finish_reason or "")]
            ends += [(tokens, reason == "length") for tokens, reason in completions if tokens]
        with suppress(FileNotFoundError):  # the job is not finished
            keys.update(read_keys(folder / "keys"))
        if keys and (said := _other_settings(folder, config, tokenizer, prompts)):
            tracker.note(f"{output} was made with other settings, so a run will be refused: {said}")
            return set(), Lengths()
    return keys, Lengths(ends)


def _other_settings(folder: Path, config: JobConfig, tokenizer: LoadedTokenizer, prompts: PromptBuilder) -> str:
    """Returns how the settings of a job differ from those of this command; empty if they do not, or if that is not known without the hub."""
    manifest, model = load_manifest(folder / "manifest.json"), local_identity(config.model)
    if manifest is None or model is None:
        return ""
    new = as_stored(job_settings(config, tokenizer, prompts, model))
    return continued_settings(manifest.settings, new, config.retried)[2]


class _PlanBuilder:
    """Plans a job window by window and adds up the figures."""

    def __init__(
        self,
        config: JobConfig,
        tokenizer: LoadedTokenizer,
        finished: set[bytes],
        lengths: Lengths,
        row_keys: RowKeys,
        *,
        whole: bool,
    ) -> None:
        """`finished`: keys of rows that have a result; `lengths`: those of their completions. `whole`: windows follow each other in depth-first order."""
        self.config, self.tokenizer = config, tokenizer
        dtype = computed_dtype(config.model, tokenizer.hf_config)
        self._itemsize = itemsize(dtype)
        self.block_size = config.engine.block_size
        self.bytes_per_token = kv_bytes_per_token(tokenizer.hf_config, dtype)
        self._prompts_of_leaves = 0
        """Prompt tokens of all completions, labels and scored texts, each counted with its prompt."""
        self.bytes_per_state = state_bytes_per_sequence(tokenizer.hf_config, dtype)
        self.memory = memory_table(config.model, tokenizer.hf_config, dtype)
        self.weight_bytes = 0
        if self.memory is not None:
            self.weight_bytes = self.memory.int8 if config.model.quantize == "int8" else self.memory.kept
        self.rows = self.failed = self.windows = self.equal = self._equal_tokens = 0
        self._row_keys = row_keys
        self.failures: list[str] = []
        self.figures = merge_figures([])
        self._whole = whole
        engine = config.engine
        kind = config.model.devices[0].partition(":")[0]
        self._batch_size = engine.batch_size or BATCH_SIZE.get(kind, BATCH_SIZE["cpu"])  # "auto" would need torch
        self._planner = Planner(engine.chunk_size, share=engine.share, consecutive=whole, under_way={})
        self._survey = GroupSurvey(engine.chunk_size, GROUPS)
        costs = self._costs()
        self._chosen_memory = isinstance(parse_memory(engine.kv_memory), int)
        """Whether the KV memory of a run is known, and so which rows do not fit it."""
        self._sizes = self._sized() if self.bytes_per_state or self._chosen_memory or costs is not None else None
        self._rehearsal = self._rehearse() if self.bytes_per_state else None
        self._finished, self._lengths = finished, lengths
        timed = self._rehearse() if costs is not None else None
        self._duration = None
        if timed is not None and costs is not None:
            self._duration = Duration(costs, timed, lengths, len(config.model.devices))

    def _costs(self) -> StepCosts | None:
        """Returns what the steps of this model cost on this machine; None if nothing is known of it."""
        model, engine = self.config.model, self.config.engine
        if model.ray is not None:
            return None
        threads = num_threads(engine, processes=len(model.devices))
        costs = StepCosts(costs_file(model, self.tokenizer.hf_config, engine, threads))
        return costs if costs.known else None

    def _rehearse(self) -> Rehearsal | None:
        """Returns the job's scheduler; None where the memory holds no two states."""
        sizes = self._sizes
        if sizes is None:
            return None
        policy = POLICIES[self.config.engine.policy]
        return Rehearsal(sizes.limits, sizes.block_size, sizes.num_blocks, sizes.num_state_slots, policy)

    def _sized(self) -> Sizes | None:
        """Returns the sizes of `memory_budget.size_engine`; None where the memory holds no two states. Raises `UsageError` for a size that does not."""
        from batchgen.model.loader import pick_device  # with torch
        from batchgen.model.memory_budget import limits_within, sizes_within

        engine = self.config.engine
        device = pick_device(self.config.model.devices[0]).type
        streamed, held = self._weights_in_memory(device)
        limits = limits_for(engine, device, self.tokenizer.vocab_size, streamed=streamed)
        wish = parse_memory(engine.kv_memory)
        room: int | None = wish if isinstance(wish, int) else None
        if room is None and device in AUTO_SHARE:
            free = max(0, free_host_memory() - held) // engine.processes
            if wish is None:
                hf_config, vocab_size = self.tokenizer.hf_config, self.tokenizer.vocab_size
                limits = limits_within(limits, free, hf_config, vocab_size, self._itemsize)
            room = int(free * (wish or AUTO_SHARE[device]))
        shares = []
        if room is not None:  # on CUDA, the engine measures what is free
            shares = [MemoryShare(room, self.block_size * self.bytes_per_token, self.bytes_per_state)]
        try:
            return sizes_within(
                engine, limits, shares, self.bytes_per_token, self.bytes_per_state, self.tokenizer.context_length
            )
        except UsageError:
            if self._chosen_memory:
                raise
            return None

    def _weights_in_memory(self, device: str) -> tuple[bool, int]:
        """Returns whether a run streams the weights, and how many of their bytes it holds in memory."""
        model, table = self.config.model, self.memory
        chosen = model.weights if model.weights != "auto" or table is None or model.quantize != "none" else table.auto
        if chosen != "streamed" or device != "cpu":
            return False, self.weight_bytes
        return True, 0 if table is None else max(table.streamed, streaming_room(model, table.free))

    def requests(self, rows: Sequence[Row], built: Sequence[Request | Result]) -> list[Request]:
        """Counts rows that were built, and returns the requests to run: only the first of equal ones whose results cannot differ."""
        self.rows += len(built)
        built = [self._checked(r) if isinstance(r, Request) else r for r in built]
        for row, result in zip(rows, built, strict=True):
            if isinstance(result, Result) and result.failed:
                self.failed += 1
                if len(self.failures) < FAILURES_KEPT:
                    self.failures.append(failure_line(result, row.source))
        requests = [(row, one) for row, one in zip(rows, built, strict=True) if isinstance(one, Request)]
        openai = self.config.output_format == "openai"
        ids = [id_digest(own_id(row, self.config.id_column, openai=openai)) for row, _ in requests]
        keyed = self._row_keys.keyed([request for _, request in requests], ids)
        equal = [request for request, is_equal in keyed if is_equal]
        self.equal += len(equal)
        self._equal_tokens += sum(len(request.tokens) for request in equal)
        return [request for request, is_equal in keyed if not is_equal]

    def _checked(self, request: Request) -> Request | Result:
        """Returns the request, or the result of one that would not fit the KV memory."""
        sizes = self._sizes
        if sizes is None or not self._chosen_memory:
            return request
        fitted = sizes.fitted(request)
        longest = max(map(len, fitted.texts), default=fitted.max_tokens)
        if len(fitted.tokens) + longest <= sizes.num_blocks * sizes.block_size:
            return request
        unfit = [leaf for leaf in leaves_of([fitted]) if sizes.blocks_for(leaf) > sizes.num_blocks]
        return Result.from_error(request.row, sizes.does_not_fit(unfit[-1]), len(request.tokens)) if unfit else request

    def add_window(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        self.windows += 1
        planned = self._planner.plan(requests)
        leaves, engine = planned.leaves, self.config.engine
        window = plan_figures(
            planned.row_plan,
            planned.plan,
            [len(leaf.tokens) + (0 if leaf.request.texts else leaf.request.max_tokens) for leaf in leaves],
            block_size=self.block_size,
            bytes_per_token=self.bytes_per_token,
            batch_size=self._batch_size,
            prefill_tokens_min=planned.prefill_tokens_min,
        )
        self.figures = merge_figures([self.figures, window])
        self._prompts_of_leaves += sum(len(leaf.request.tokens) for leaf in leaves)
        if self._rehearsal is not None:
            self._rehearsal.find_peak(leaves, planned.plan)
        if self._duration is not None:
            self._add_time(self._duration, planned)
        if (self._whole or self.windows == 1) and engine.share:
            for i in planned.row_plan.order.tolist():
                self._survey.add(requests[i].tokens, long=requests[i].long)

    def _add_time(self, duration: Duration, planned: Planned) -> None:
        """Adds the time of the requests that have no result yet."""
        leaves, plan, sizes = planned.leaves, planned.plan, self._sizes
        assert sizes is not None, "the rehearsal has its sizes"
        fitted = {leaf.request: sizes.fitted(leaf.request) for leaf in leaves}
        lacking = [
            leaf if (request := fitted[leaf.request]) is leaf.request else replace(leaf, request=request)
            for leaf in leaves
            if leaf.request.key not in self._finished
        ]
        if len(lacking) < len(leaves):
            engine = self.config.engine
            plan = plan_prefixes([leaf.tokens for leaf in lacking], engine.chunk_size, share=engine.share)
        if lacking:
            duration.add(lacking, plan)

    def report(self, more: Mapping[str, Any], advice: Advice | None, *, chat: bool) -> PlanReport:
        """Returns the plan of all windows. `more`: further figures."""
        survey, found, tree = self._survey, dict(self.figures), self._planner.tree
        groups = survey.end()
        if self._whole:  # a node or group that lies in two windows was counted twice
            nodes = 0 if tree is None else tree.node_count
            found |= {"prefix_nodes": nodes, "groups": survey.groups, "grouped_rows": survey.grouped}
        found["prompt_tokens"] += self._equal_tokens
        prompt_tokens = found["prompt_tokens"]
        prefill_tokens = found["prefill_tokens_min"] if self.config.engine.share else self._prompts_of_leaves
        memory = sufficient_memory(found["kv_bytes_least"], self.bytes_per_state, self._batch_size)
        figures = {
            "schema": SCHEMA,
            "rows": self.rows,
            "rows_failed": self.failed,
            "rows_equal": self.equal,  # no figure but `prompt_tokens` counts them
            "windows": self.windows,
            **found,
            "prefill_tokens": prefill_tokens,  # those that will run; without sharing the prompts of all completions
            "shared_fraction": round(max(0.0, 1 - prefill_tokens / prompt_tokens), 6) if prompt_tokens else 0.0,
            "weight_bytes": self.weight_bytes,  # as a run holds them; 0 if that is not known
            # What the weights would take in each way, and what fits this machine.
            "memory": None if self.memory is None else asdict(self.memory),
            "kv_bytes_per_token": self.bytes_per_token,  # 0 if the model's configuration does not say
            "state_bytes_per_sequence": self.bytes_per_state,  # 0 without recurrent layers
            # On one device, with completions of full length.
            "state_bytes_peak": self._rehearsal.peak_state_slots * self.bytes_per_state if self._rehearsal else 0,
            "tree": [] if tree is None else list(self._lines(tree)),
            "largest_groups": [asdict(line) for line in groups],
            "lengths": _length_figures(self._lengths),
            "failures": self.failures,
            **more,
        }
        return PlanReport(
            figures=figures,
            advice=advice,
            estimate=None if self._duration is None else self._duration.estimate(),
            chat=chat,
            whole=self._whole,
            sufficient_memory=memory_option(memory),
            title=", ".join(Path(name).name for name in self.config.inputs),
            prefix_tree=None if tree is None else tree_record(tree, self.tokenizer.decode),
        )

    def _lines(self, tree: PrefixOutline) -> Iterator[dict[str, Any]]:
        """Yields the nodes that save the most, in depth-first order, as lines of an indented tree with the start of each node's own text."""
        levels = {-1: -1}
        found = [
            i
            for i, (_, node, _) in enumerate(tree.nodes)
            if node.tokens >= FEW_TOKENS or 100 * node.saved_tokens >= tree.prompt_tokens
        ]
        for i in sorted(heapq.nlargest(TREE_NODES, found, key=lambda i: tree.nodes[i].interval.saved_tokens)):
            above, node, text_tokens = tree.nodes[i]
            while above not in levels:
                above = tree.nodes[above].parent
            levels[i] = levels[above] + 1
            text = self.tokenizer.decode(text_tokens[:EXCERPT_TOKENS].tolist())
            counts = {"tokens": node.tokens, "rows": node.rows, "saved_tokens": node.saved_tokens}
            yield {"level": levels[i], **counts, "text": text}


def computed_dtype(config: ModelConfig, hf_config: Any) -> str:
    """Returns the dtype that a run computes in: on a CPU it may be float32 for a 16-bit checkpoint (`model.loader.cpu_dtype`)."""
    own = dtype_name(config, hf_config)
    fast = {"bfloat16": isa.has_bfloat16, "float16": isa.has_float16}.get(own)
    if config.dtype != "auto" or config.device_map is not None or fast is None or fast():
        return own
    with quiet():
        from batchgen.model.loader import cpu_dtype, pick_device  # with torch, which only these processors need here

    if pick_device(config.device).type != "cpu":
        return own
    return str(cpu_dtype(config, hf_config)).removeprefix("torch.")


def kv_bytes_per_token(hf_config: Any, dtype: str) -> int:
    """Returns the KV of one token in all layers, from the model's configuration alone; 0 if it does not say."""
    own = text_config(hf_config)
    layers = attention_layers(own) if getattr(own, "model_type", None) in RECURRENT else None
    return kv_numbers(own, layers) * itemsize(dtype)


def state_bytes_per_sequence(hf_config: Any, dtype: str) -> int:
    """Returns the state of one sequence in all recurrent layers, from the model's configuration alone; 0 for a model without such layers."""
    own = text_config(hf_config)
    return state_bytes(own, itemsize(dtype)) if getattr(own, "model_type", None) in RECURRENT else 0
