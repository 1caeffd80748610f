"""Short messages of customers, each sent on to the department that it is for."""

from __future__ import annotations

from random import Random

from office_tasks.base import Desk, Question, Task
from office_tasks.words import FIRST_NAMES, GOODS, LETTER_FORMS, SURNAMES, TOWNS, desk_notes

MATTERS = {
    "delivery": (
        "the parcel with the {item} has not come",
        "when will the {item} be here",
        "please send the {item} to my new address",
        "the parcel went to the wrong house",
        "can the {item} come a week later",
    ),
    "repairs": (
        "the {item} does not work any more",
        "a part of the {item} is broken",
        "can you mend the {item}",
        "the {item} fell and has a crack",
        "the {item} makes a strange noise",
    ),
    "refunds": (
        "I want my money back for the {item}",
        "I sent the {item} back and wait for the money",
        "please pay back the price of the {item}",
        "I return the {item}, please refund it",
        "the money for the {item} has not come back",
    ),
    "invoices": (
        "I need a new invoice for the {item}",
        "the name on the invoice is wrong",
        "please send the invoice once more",
        "the invoice names the {item} twice",
        "the tax on the invoice is missing",
    ),
}
RULES = """\
Task: routing
Send every message of a customer to one of four departments. Delivery is for parcels on their way, late or astray, and for new \
addresses. Repairs is for things that are broken or do not work. Refunds is for money that is to be paid back. Invoices is for \
invoices that are wrong or missing. Names, towns and order numbers change nothing. What the customer says was settled before \
does not count.

Examples, the departments in small letters:
Input: Hugo Castro, Ghent, order 55120: when will the camp stove be here?
Answer: delivery
Input: The oil lamp does not work any more. Alma Brandt, Oslo
Answer: repairs
Input: I want my money back for the wool blanket. Order 71335, Leo Winter
Answer: refunds
Input: My delivery was fine, but the name on the invoice is wrong. Rosa Haas, Lyon
Answer: invoices"""


def routing_desk(rng: Random) -> Desk:
    form, write = LETTER_FORMS[rng.randrange(len(LETTER_FORMS))]
    line = f"Form of the department: {form}"
    name, notes = desk_notes(rng, line)

    def ask(rng: Random) -> Question:
        department = rng.choice(list(MATTERS))
        matter = rng.choice(MATTERS[department]).format(item=rng.choice(GOODS))
        sender = f"{rng.choice(FIRST_NAMES)} {rng.choice(SURNAMES)}"
        place = rng.choice(TOWNS)
        order = f"order {rng.randrange(10_000, 100_000)}"
        hard = rng.random() < 0.25
        if hard:
            settled = rng.choice([d for d in MATTERS if d != department])
            text = f"my {settled} matter is settled, but {matter}. {sender}, {place}"
        elif rng.random() < 0.5:
            text = f"{sender}, {place}, {order}: {matter}"
        else:
            text = f"{matter}. {order}, {sender}"
        return Question(f"{text[0].upper()}{text[1:]}", write(department), "hard" if hard else "easy")

    return Desk("routing", name, line, notes, ask, examples=5)


TASK = Task("routing", RULES, routing_desk)
