"""Amounts of money in words, turned into figures in the desk's form."""

from __future__ import annotations

from random import Random

from office_tasks.base import Desk, Question, Task
from office_tasks.words import desk_notes, word_list

ONES = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen"
)
TENS = word_list("twenty thirty forty fifty sixty seventy eighty ninety")
CURRENCIES = {
    "euros": ("EUR", "cents"),
    "dollars": ("USD", "cents"),
    "pounds": ("GBP", "pence"),
    "francs": ("CHF", "centimes"),
    "kroner": ("NOK", "ore"),
}
AMOUNT_FORMS = {
    "code first, point before the cents": "{code} {whole}.{cents:02}",
    "code last, comma before the cents": "{whole},{cents:02} {code}",
    "code last, point before the cents": "{whole}.{cents:02} {code}",
    "number alone, point before the cents": "{whole}.{cents:02}",
}
RULES = """\
Task: amounts
Telephone orders are written down in words. Turn the amount of money of the input into figures, in the form that the desk asks \
for. There are always two digits after the point or the comma, also when no cents are named. Thousands have no mark. Write the \
currency as its code of three letters: EUR for euros, USD for dollars, GBP for pounds, CHF for francs, NOK for kroner. Words \
such as "about" or "exactly" change nothing.

Examples in the form with the code first and a point before the cents:
Input: two hundred and forty-one euros and five cents
Answer: EUR 241.05
Input: exactly nineteen pounds
Answer: GBP 19.00
Input: one thousand and sixty dollars and twelve cents
Answer: USD 1060.12
Input: about seventy-three francs
Answer: CHF 73.00
Input: three thousand nine hundred and eight kroner and ninety ore
Answer: NOK 3908.90"""


def _in_words(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (f" and {_in_words(number % 100)}" if number % 100 else "")
    rest = number % 1000
    link = "" if rest == 0 else " " if rest >= 100 else " and "
    return f"{ONES[number // 1000]} thousand{link}{_in_words(rest) if rest else ''}"


def amount_desk(rng: Random) -> Desk:
    form = rng.choice(list(AMOUNT_FORMS))
    line = f"Form of the amount: {form}"
    name, notes = desk_notes(rng, line)

    def ask(rng: Random) -> Question:
        whole = rng.randint(2, rng.choice((99, 999, 9999)))
        cents = rng.choice((0, rng.randint(2, 99)))
        currency = rng.choice(list(CURRENCIES))
        code, small = CURRENCIES[currency]
        text = rng.choice(("", "", "about ", "exactly ")) + f"{_in_words(whole)} {currency}"
        text += f" and {_in_words(cents)} {small}" if cents else ""
        answer = AMOUNT_FORMS[form].format(code=code, whole=whole, cents=cents)
        return Question(text, answer, "hard" if whole > 999 else "easy")

    return Desk("amounts", name, line, notes, ask, examples=4)


TASK = Task("amounts", RULES, amount_desk)
