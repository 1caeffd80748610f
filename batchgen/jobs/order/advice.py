"""What would save the most prompt tokens: the template in another order, or text in another place. Measured on a sample of the job's own rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from batchgen.config import JobConfig
from batchgen.prefix import plan_prefixes
from batchgen.prefix.order import neighbour_lengths
from batchgen.process.templates import TemplateFailure, template_process
from batchgen.prompts import LoadedTokenizer, PromptBuilder
from batchgen.records import Row
from batchgen.request import Request, TokenArray

SAMPLE_ROWS = 256
MIN_SAVING = 0.1
"""Smallest share of the prompt tokens that is worth a line."""
_MAX_PIECES = 6
_CUE_CHARACTERS = 80
_GRAM = 16
"""Tokens in a row that must be equal to count as text that stands in another prompt."""
_EXCERPT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that would save prompt tokens. The counts are those of the sample."""

    kind: str
    """`template` or `placement`."""
    text: str
    """One sentence for the user."""
    rows: int
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens that run now."""
    prefill_tokens_after: int
    """Prompt tokens that would run after the change."""
    template: str | None = None
    """The template in its best order."""


def advice_for(config: JobConfig, tokenizer: LoadedTokenizer, own: PromptBuilder, rows: Sequence[Row]) -> Advice | None:
    """Returns what would save the most prompt tokens of a job, by these rows of its input; None if nothing saves enough. `own` is the job's builder."""
    good = [row for row in rows if row.error is None]

    def tokens_of(template: str | None) -> list[TokenArray]:
        # The job's builder does not build any more once the job has read its input.
        prompts = config.prompts if template is None else replace(config.prompts, template=template)
        builder = PromptBuilder(tokenizer, prompts, config.sampling, now=own.date, images=own.images)
        return [built.tokens for built in builder.build(good) if isinstance(built, Request)]

    return advise(config.prompts.template, [row.columns for row in good], tokens_of, tokenizer.decode)


def advise(
    template: str | None,
    columns: Sequence[dict[str, Any]],
    tokens_of: Callable[[str | None], list[TokenArray]],
    decode: Callable[[list[int]], str],
) -> Advice | None:
    """Returns what would save the most; None if nothing saves enough.

    `columns` are those of the sample's rows, and `tokens_of` returns their prompts with another template (None: as they are).
    """
    prompts = tokens_of(None)
    if len(prompts) < 2:
        return None
    now, total = _prefill(prompts), sum(map(len, prompts))
    best = None if template is None else best_order(template, columns)
    if best is not None:
        after = _prefill(tokens_of(best))
        if now - after >= MIN_SAVING * total:
            text = (
                f"with the template's parts in another order, {len(prompts):,} sampled rows would run {after:,} instead of {now:,} prompt tokens "
                "(batchgen plan --write-template FILE writes it; another order is another prompt and may change answers)"
            )
            return Advice("template", text, len(prompts), total, now, after, best)
    repeated = _repeated(prompts)
    if repeated - (total - now) < MIN_SAVING * total:
        return None
    start, differs = _first_difference(prompts)
    text = (
        f"{repeated / total:.0%} of the prompt tokens of {len(prompts):,} sampled rows stand in an earlier row too, but only "
        f"{(total - now) / total:.0%} at its beginning, where they run once. Prompts differ from token {start:,} on "
        f"({_excerpt(decode(differs))}): put what rows have in common before what differs"
    )
    return Advice("placement", text, len(prompts), total, now, total - repeated)


def best_order(template: str, columns: Sequence[dict[str, Any]]) -> str | None:
    """Returns the template with its paragraphs (or lines, if it has only one paragraph) in the order that shares most characters.

    All orders of up to six parts are tried; with more, parts with fewer different texts come first. A short last line without fields, such as
    "Answer:", stays last. None if the template has Jinja statements, or only one part.
    """
    if "{%" in template or "{#" in template:
        return None
    body, cue = _without_cue(template.strip("\n"))
    separator = "\n\n" if "\n\n" in body else "\n"
    parts = re.split(r"\n(?:[ \t]*\n)+", body) if separator == "\n\n" else body.split("\n")
    if len(parts) < 2:
        return None
    rendered = [template_process().render("row", part, columns) for part in parts]
    if any(isinstance(text, TemplateFailure) for texts in rendered for text in texts):
        return None
    different = [sorted(set(texts)) for texts in rendered]
    ranks = [{text: rank for rank, text in enumerate(texts)} for texts in different]
    ids = np.array([[rank[text] for text in texts] for rank, texts in zip(ranks, rendered, strict=True)])
    common = [_common(texts) for texts in different]
    order = max(_orders(list(map(len, different))), key=lambda order: _shared(ids, common, order))
    return separator.join(parts[i] for i in order) + cue


def _without_cue(template: str) -> tuple[str, str]:
    """Returns the template without the short last line that says what to write, and that line with the line breaks before it."""
    body, breaks, last = re.fullmatch(r"(.*?)(\n+|)([^\n]*)", template, re.DOTALL).groups()  # type: ignore[union-attr]
    return (body, breaks + last) if breaks and "{{" not in last and len(last) <= _CUE_CHARACTERS else (template, "")


def _orders(different: Sequence[int]) -> Sequence[tuple[int, ...]]:
    """Returns the orders to try, the present one first. `different`: the number of different texts of each part."""
    present = tuple(range(len(different)))
    if len(different) <= _MAX_PIECES:
        return list(permutations(present))
    return [present, tuple(sorted(present, key=lambda i: different[i]))]


def _common(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    """Returns how many characters any two of these different, sorted texts have in common at their start, [U, U]; only of a text and later ones."""
    characters = [np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.int32) for text in texts]
    neighbours = neighbour_lengths(characters, np.arange(len(texts)))
    table = np.diag([len(text) for text in texts])
    for i in range(len(texts) - 1):
        table[i, i + 1 :] = np.minimum.accumulate(neighbours[i + 1 : -1])
    return table


def _shared(ids: np.ndarray[Any, Any], common: Sequence[np.ndarray[Any, Any]], order: Sequence[int]) -> int:
    """Returns the characters that need not run if parts come in this order. `ids`: the number of each row's text among the part's sorted texts, [parts, rows]."""
    rows = np.lexsort(ids[list(reversed(order))])
    before, after = ids[:, rows[:-1]], ids[:, rows[1:]]
    total, equal = 0, np.ones(len(rows) - 1, dtype=np.bool_)
    for part in order:
        total += int(common[part][before[part], after[part]][equal].sum())
        equal &= before[part] == after[part]
    return total


def _prefill(prompts: Sequence[TokenArray]) -> int:
    return plan_prefixes(prompts, 1).prefill_tokens_min


def _repeated(prompts: Sequence[TokenArray]) -> int:
    """Returns the number of tokens that stand in an earlier prompt too, anywhere, in runs of at least `_GRAM`."""
    weights = np.uint64(0x9E3779B97F4A7C15) ** np.arange(_GRAM, dtype=np.uint64)  # a polynomial modulo 2^64
    seen: set[int] = set()
    total = 0
    for tokens in prompts:
        if len(tokens) < _GRAM:
            continue
        grams = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), _GRAM) @ weights
        edges = np.zeros(len(tokens) + 1, dtype=np.int64)
        known = np.array([gram in seen for gram in grams.tolist()])
        edges[: len(grams)] += known
        edges[_GRAM : _GRAM + len(grams)] -= known
        total += int((edges.cumsum() > 0).sum())
        seen.update(grams.tolist())
    return total


def _first_difference(prompts: Sequence[TokenArray]) -> tuple[int, list[int]]:
    """Returns the median position from which a prompt shares nothing with its neighbours in prefix order, and the tokens of one prompt from there."""
    plan = plan_prefixes(prompts, 1)
    ends = [plan.nodes[parent].end if parent >= 0 else 0 for parent in plan.leaf_parent.tolist()]
    end, prompt = sorted(zip(ends, plan.order.tolist(), strict=True))[len(ends) // 2]
    return end, prompts[prompt][end : end + _EXCERPT_TOKENS].tolist()


def _excerpt(text: str) -> str:
    return "“" + " ".join(text.split()) + "…”"
