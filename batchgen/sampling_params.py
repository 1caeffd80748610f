"""Sampling parameters: how a completion is sampled, or which texts are scored. Checks, merges and digests them. No torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, wraps
from typing import Any, ClassVar

from batchgen.errors import RowError, UsageError
from batchgen.options import (
    JsonText,
    Rule,
    above,
    at_least,
    between,
    file_text,
    first_problem,
    json_schema_file,
    option,
    settle,
    whole_number_or_auto,
)

_CONSTRAINTS = ("choices", "regex", "json_schema")
MAX_LOGPROBS = 1000
AUTO_MAX_TOKENS = 1024
"""The value of `max_tokens` if nobody sets it."""
AUTO_MAX_TOKENS_THINKING = 16_384
"""The same, for a model that thinks before it answers."""

_TEXTS: Rule = (lambda v: all(v), "texts that are not empty")
_NOT_EMPTY: Rule = (lambda v: v != "", "text that is not empty")


def _parse_choices(name: str, text: str) -> tuple[str, ...]:
    given = file_text(name, text[1:]).strip() if text.startswith("@") else text
    try:
        lines = text.startswith("@") and not given.startswith("[")
        choices = tuple(filter(None, map(str.strip, given.splitlines()))) if lines else choices_of(given)
    except ValueError as e:
        raise UsageError(f"--{e}") from None
    if not choices:  # the default, which means text
        raise UsageError(f"{name} {text} has no labels", "give two or more different texts")
    return choices


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a completion is sampled, or which texts are scored.

    A list may be a list, a tuple, a numpy array or a single value. A JSON schema may be a dict. Raises `TypeError` for a value of the wrong
    type and `ValueError` for a value out of range; both name the parameter.
    """

    GROUP: ClassVar = "Sampling"

    max_tokens: int = option(
        AUTO_MAX_TOKENS,
        "Maximum number of tokens in a completion. auto is 1,024, or 16,384 for a model that thinks.",
        metavar="auto|N",
        rules=[at_least(1)],
        parse=whole_number_or_auto,
        shown="auto",
    )
    """None means auto."""
    temperature: float = option(0.0, "Divides the logits. 0 is greedy decoding.", rules=[at_least(0)])
    top_p: float = option(
        1.0,
        "Sample from the most likely tokens that together have this probability. 1 is off.",
        rules=[(lambda v: 0 < v <= 1, "above 0 and at most 1")],
    )
    top_k: int = option(0, "Sample from the N most likely tokens. 0 or -1 is off.", rules=[at_least(0)])
    min_p: float = option(
        0.0,
        "Minimum probability of a token, relative to the most likely token. 0 is off.",
        rules=[between(0, 1)],
    )
    repetition_penalty: float = option(
        1.0,
        "A value above 1 makes tokens of the prompt and completion less likely. 1 is off.",
        rules=[above(0)],
    )
    """The penalty of CTRL (arXiv:1909.05858)."""
    presence_penalty: float = option(
        0.0,
        "Subtracted once from the logit of every token that is in the completion; -2 to 2.",
        rules=[between(-2, 2)],
    )
    frequency_penalty: float = option(
        0.0,
        "Subtracted from a token's logit for each time it is in the completion; -2 to 2.",
        rules=[between(-2, 2)],
    )
    stop: tuple[str, ...] | Any = option(
        (),
        "A text that ends the completion and is removed from it. Repeatable.",
        metavar="TEXT",
        rules=[_TEXTS],
    )
    stop_token_ids: tuple[int, ...] | Any = option(
        (),
        "A token id that ends the completion, in addition to the model's own. Repeatable.",
        flags=["--stop-token-id"],
        metavar="ID",
        rules=[(lambda v: all(t >= 0 for t in v), "token ids")],
    )
    ignore_eos: bool = option(False, "Ignore the model's end tokens: generate --max-tokens tokens.")
    seed: int = option(
        0,
        "Seed of the random numbers.",
        rules=[(lambda v: -(2**63) <= v < 2**63, "a 64-bit number")],
    )
    n: int = option(
        1,
        "Number of completions of each prompt, each with its own random numbers.",
        flags=["--n", "-n"],
        rules=[between(1, 1024)],
    )
    logprobs: int | None = option(
        None,
        "Add the log-probability of each sampled token and of the K most likely tokens.",
        metavar="K",
        shown="none",
        rules=[between(0, MAX_LOGPROBS)],
    )
    """As the model gives them, before penalties and temperature. 0 adds only the sampled token's."""
    max_repeats: int | None = option(
        None,
        "End a completion when it repeats a sequence of 1 to 256 tokens N times in a row (at least 32 tokens in all).",
        rules=[at_least(2)],
        shown="no limit",
    )
    """Its finish reason is then `repetition`."""
    reasoning: str = option(
        "auto",
        "auto moves the thoughts of models that mark them from the text to the field reasoning. off leaves them in the text.",
        values=["auto", "off"],
    )
    reasoning_budget: int | None = option(
        None,
        "End the thoughts after N tokens, so that the answer begins.",
        rules=[at_least(0)],
        shown="no limit",
    )
    choices: tuple[str, ...] | Any = option(
        (),
        "Labels, separated by commas, as a JSON list, or in a file (a label a line, or a JSON list). Each is scored instead of generating, and the text is the most likely one.",
        group="Constraints",
        metavar="A,B,C|@FILE",
        rules=[_TEXTS, (lambda v: len(v) != 1, "two or more different texts")],
        parse=_parse_choices,
    )
    """At a temperature above 0 the text is sampled from the labels."""
    top_choices: int | None = option(
        None,
        "Write the probabilities of the K most likely labels only, the most likely first.",
        group="Constraints",
        metavar="K",
        rules=[at_least(1)],
        shown="all",
    )
    """A label that is sampled is always among them."""
    regex: str | None = option(
        None,
        "Regular expression that the whole completion must match.",
        group="Constraints",
        metavar="TEXT",
        rules=[_NOT_EMPTY],
    )
    json_schema: JsonText | None = option(
        None,
        "File with a JSON schema that the completion must satisfy.",
        group="Constraints",
        metavar="FILE",
        rules=[_NOT_EMPTY],
        parse=json_schema_file,
    )
    """The schema as JSON text."""
    json_whitespace: bool = option(
        False,
        "Allow spaces and line ends between the tokens of JSON, not only one space after a colon or comma.",
        group="Constraints",
    )

    given: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Names of the parameters that were given a value, even the default. Others may come from the model (`completed`). Set automatically."""

    def __post_init__(self) -> None:
        settle(self)
        if self.top_k == -1:  # off, as in vLLM
            object.__setattr__(self, "top_k", 0)
        problem = first_problem(self)
        if problem is not None:
            raise ValueError(" ".join(problem))
        self._check_together()

    def _check_together(self) -> None:
        constraints = [name for name in _CONSTRAINTS if getattr(self, name)]
        if len(constraints) > 1:
            raise ValueError(f"{constraints[0]} cannot be combined with {constraints[1]}")
        if len(set(self.choices)) < len(self.choices):
            twice = next(choice for choice, times in Counter(self.choices).items() if times > 1)
            raise ValueError(f"choices must be two or more different texts, and {twice!r} is there twice")
        if self.choices and (self.n > 1 or self.logprobs is not None):
            raise ValueError(f"choices cannot be combined with {'n' if self.n > 1 else 'logprobs'}")
        if self.constrained and (self.stop or self.ignore_eos):
            # A text cut at a stop string, or one that cannot end, would not match the constraint.
            raise ValueError(f"{constraints[0]} cannot be combined with {'stop' if self.stop else 'ignore_eos'}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def constrained(self) -> bool:
        """Whether a grammar restricts the tokens that may follow."""
        return self.regex is not None or self.json_schema is not None

    @property
    def guided(self) -> bool:
        """Whether the tokens that may follow are restricted, by a grammar or by a limit of the thoughts."""
        return self.constrained or self.reasoning_budget is not None

    def completed(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns these parameters with `defaults` for those that were not given."""
        changes = {name: value for name, value in defaults.items() if name not in self.given}
        return replace(self, **changes, given=self.given) if changes else self

    def merged(self, row: Mapping[str, Any]) -> SamplingParams:
        """Returns these parameters, overridden by a row's own; a null keeps the default.

        Raises `RowError("unsupported_parameter")` for an unknown name or a value out of range.
        """
        known = {f.name for f in fields(self) if f.compare}
        changes: dict[str, Any] = {}
        for name, value in row.items():
            name = "stop_token_ids" if name == "stop_token_id" else name
            if value is not None and name not in known:
                raise RowError("unsupported_parameter", f"unknown parameter {name!r}")
            if name == "choices" and isinstance(value, list | tuple) and not value:
                raise RowError(
                    "unsupported_parameter", "choices must be two or more different texts, not an empty list"
                )
            if value is not None:
                changes[name] = value
        if not changes.keys().isdisjoint(_CONSTRAINTS):  # a row's own constraint replaces the command's
            changes = {name: None if name != "choices" else () for name in _CONSTRAINTS} | changes
        try:
            return replace(self, **changes, given=tuple(sorted({*self.given, *changes})))
        except (TypeError, ValueError) as e:
            raise RowError("unsupported_parameter", str(e)) from None

    def digest(self, max_tokens: int | None = None) -> bytes:
        """Returns a digest for the row's key: the same for equal parameters, on every machine. `max_tokens` replaces the parameter in it."""
        return _params_digest(self, self.max_tokens if max_tokens is None else max_tokens)


_plain_init = SamplingParams.__init__


@wraps(_plain_init)
def _init(self: SamplingParams, **values: Any) -> None:
    """Remembers which parameters were given."""
    if "max_tokens" in values and values["max_tokens"] is None:
        del values["max_tokens"]
    values.setdefault("given", tuple(sorted(values)))
    _plain_init(self, **values)


SamplingParams.__init__ = _init  # type: ignore[method-assign]


@lru_cache(maxsize=1024)  # most rows of a job have the same parameters
def _params_digest(params: SamplingParams, max_tokens: int) -> bytes:
    # Without parameters that have their defaults, so that a new parameter does not change the keys of rows that do not use it.
    values = {f.name: getattr(params, f.name) for f in fields(params) if f.compare} | {"max_tokens": max_tokens}
    own = {f.name: values[f.name] for f in fields(params) if f.compare and values[f.name] != f.default}
    return hashlib.blake2b(json.dumps(own, sort_keys=True).encode(), digest_size=16).digest()


def choices_of(text: str) -> tuple[str, ...]:
    """Returns the choices in a text: parts between commas without the blanks around them, or the members of a JSON list, taken literally.

    Raises `ValueError` for a list that is not JSON.
    """
    if not text.lstrip().startswith("["):
        return tuple(choice.strip() for choice in text.split(","))
    try:
        choices = tuple(json.loads(text))
    except ValueError as e:
        raise ValueError(f"choices must be separated by commas, or a JSON list: {e}") from None
    for choice in choices:
        if not isinstance(choice, str):
            raise ValueError(f"choices must be texts, and one is {json.dumps(choice)}: put it in quotes")
    return choices
