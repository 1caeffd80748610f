"""Short reviews of one product, each given one of three labels."""

from __future__ import annotations

from random import Random

from office_tasks.base import Desk, Question, Task
from office_tasks.words import GOODS, LETTER_FORMS, SURNAMES, TOWNS, desk_notes, word_list

LABELS = ("positive", "negative", "unclear")
PARTS = word_list("handle,lid,seam,strap,edge,base,frame,hinge,cover,clasp")
PRAISE = word_list("sturdy,neat,reliable,splendid,lovely,solid,handy,excellent,clever,perfect")
BLAME = word_list("flimsy,crooked,useless,shabby,ugly,poor,wobbly,clumsy,awful,loose")
PLAIN = (
    "it came in a brown box",
    "I bought it in May",
    "my neighbour has the same one",
    "we use it at weekends",
    "it lies in the car",
    "it was a present for my brother",
    "it is the second one in this house",
    "the parcel took four days",
)
RULES = """\
Task: reviews
Give every review of a product one of three labels: positive, negative or unclear. A review that only praises, or praises and adds \
plain facts, is positive. A review that only complains, or complains and adds plain facts, is negative. A review that does both, or \
neither, is unclear. Judge the words of the review alone, not the product.

Examples, the labels in small letters:
Input: The handle is sturdy and the seam is neat.
Answer: positive
Input: The lid is crooked, and it came in a brown box.
Answer: negative
Input: The strap is lovely but the clasp is poor.
Answer: unclear
Input: We use it at weekends, and my neighbour has the same one.
Answer: unclear
Input: I bought it in May, and the hinge is solid.
Answer: positive"""


def review_desk(rng: Random) -> Desk:
    form, write = LETTER_FORMS[rng.randrange(len(LETTER_FORMS))]
    line = f"Form of the label: {form}"
    name, notes = desk_notes(rng, line)
    item = rng.choice(GOODS)
    notes += (
        f"\nProduct: {item}, number {rng.randint(1000, 9999)}, made by {rng.choice(SURNAMES)} in {rng.choice(TOWNS)}, "
        f"sold since {rng.randint(1990, 2024)}"
    )

    def opinion(rng: Random, good: bool) -> str:
        return f"the {rng.choice(PARTS)} is {rng.choice(PRAISE if good else BLAME)}"

    def ask(rng: Random) -> Question:
        label = rng.randrange(3)
        good = label == 0 if label < 2 else rng.random() < 0.5
        mixed = label == 2 and rng.random() < 0.6
        if mixed:
            text = f"{opinion(rng, good)} but {opinion(rng, not good)}"
        elif label == 2:
            text = ", and ".join(rng.sample(PLAIN, 2))
        else:
            text = rng.choice(
                (
                    f"{opinion(rng, good)} and {opinion(rng, good)}",
                    f"{opinion(rng, good)}, and {rng.choice(PLAIN)}",
                    f"{rng.choice(PLAIN)}, and {opinion(rng, good)}",
                )
            )
        return Question(f"{text[0].upper()}{text[1:]}.", write(LABELS[label]), "hard" if mixed else "easy")

    return Desk("reviews", name, line, notes, ask, examples=5)


TASK = Task("reviews", RULES, review_desk)
