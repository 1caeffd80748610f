"""The text of the sample: four small office tasks; every prompt built from nested prefixes, every answer known.

A prompt is ROOT, then a task's text, then the notes of one desk (a `Desk`), then one question. Nothing here knows of tokens
or models; randomness comes only from the `random.Random` that is passed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

ROOT = """\
You answer the small paperwork of Pine & Harbour, a shop that sells lamps, kettles, tents and other things for the outdoors \
by post. Every request has the same four parts, in this order: these general rules, the rules of one task with examples, \
the notes of the desk that asks, and one input. Read all of it before you answer.

General rules
1. Give the bare answer on one line. No greeting, no explanation, no quotation marks.
2. The notes of the desk decide the form of the answer. Where they differ from the examples of the task, follow the notes.
3. Take every fact from the request itself. If two facts seem to fit, the one that the input asks about counts.
4. Copy names, codes and numbers exactly as they are written, letter by letter and digit by digit.
5. Do not put a full stop after the answer.
6. Each input stands alone. Nothing carries over from one input to the next."""


@dataclass(frozen=True)
class Question:
    """One input and its right answer."""

    text: str
    answer: str
    difficulty: str
    """`easy` or `hard`: hard ones have words in place of digits, distractors or mixed feelings."""


@dataclass(frozen=True)
class Desk:
    """The third level of a prompt: who asks, and in what form."""

    task: str
    name: str
    form: str
    """The line of the notes that fixes the form of the answers."""
    notes: str
    """Without the desk's examples: `desk_text` adds them."""
    ask: Callable[[Random], Question]
    examples: int


@dataclass(frozen=True)
class Task:
    """The second level of a prompt."""

    name: str
    rules: str
    desk: Callable[[Random], Desk]
    """Draws a desk with a form and a wording of its own."""


def is_held_out(question: Question) -> bool:
    """Whether a question is kept from training: a fifth of all, told by a digest of its answer and text."""
    return hashlib.blake2b(f"{question.answer}\n{question.text}".encode(), digest_size=1).digest()[0] < 51


def draw_questions(rng: Random, desk: Desk, count: int, *, held_out: bool) -> list[Question]:
    """Questions of the desk, all of the held-out part or none of it."""
    questions: list[Question] = []
    while len(questions) < count:
        question = desk.ask(rng)
        if is_held_out(question) == held_out:
            questions.append(question)
    return questions


def input_text(question: Question) -> str:
    """The last level of a prompt, from the line break after the prefix on."""
    return f"Input: {question.text}\nAnswer:"


def desk_text(rng: Random, desk: Desk) -> str:
    """The notes of a desk with its own examples, which are never held-out questions."""
    return "\n".join([desk.notes, "", "Examples of this desk:", *example_lines(rng, desk, desk.examples)])


def example_lines(rng: Random, desk: Desk, count: int) -> list[str]:
    """Inputs of the desk with their answers."""
    return [f"{input_text(q)} {q.answer}" for q in draw_questions(rng, desk, count, held_out=False)]


def prefix_text(*levels: str) -> str:
    """What all prompts of one desk begin with."""
    return "".join(f"{level}\n\n" for level in levels)
