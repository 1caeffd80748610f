"""Words that several tasks use, and the notes of a desk."""

from __future__ import annotations

from collections.abc import Callable
from random import Random


def word_list(text: str) -> list[str]:
    """The words of a text, or what stands between its commas."""
    return text.split("," if "," in text else None)


TOWNS = word_list(
    "Hamburg Lisbon Porto Bergen Turku Riga Ghent Lyon Graz Krakow Galway Leeds Aarhus Malmo Utrecht Zurich Bilbao Trieste "
    "Rostock Bremen Dover Cork Oslo Vienna Prague Geneva Basel Nantes Genoa Split Tartu Vilnius Gdansk Kiel Bruges Namur"
)
FIRST_NAMES = word_list(
    "Clara Anton Maria Jonas Ingrid Pavel Nora Henrik Lucia Oscar Elena Tomas Greta Felix Irene Marco Alma Viktor Rosa Emil "
    "Judith Karl Paula Simon Vera Hugo Selma Bruno Edith Leo Marta Arne"
)
SURNAMES = word_list(
    "Weiss Almeida Larsen Novak Keller Moreau Silva Berg Rossi Nyman Fischer Dubois Horvat Lindgren Costa Marek Jansen "
    "Olsen Ferrari Vogel Laine Castro Brandt Nowak Peeters Sorensen Haas Ricci Kovac Winter Sommer Falk"
)
GOODS = word_list(
    "storm lantern,camp kettle,rain jacket,wool blanket,folding chair,gas stove,pocket knife,tin cup,rope ladder,hand torch,"
    "field compass,dry bag,trail map,sleeping mat,fire steel,fish pan,water filter,head lamp,travel hammock,iron peg,"
    "canvas tent,leather strap,glass flask,bread box,oak table,snow shovel,beach towel,bicycle pump,tool roll,ice axe"
)
PURPOSES = (
    "The list goes to the printers every Friday",
    "The answers are typed into a ledger by hand",
    "A machine reads the answers, so the form matters",
    "The answers are pasted into a long table",
    "The figures go to the auditors in spring",
    "The cards are filed by a student in the evening",
)
REMARKS = (
    "Somebody reads every tenth answer twice",
    "The desk sends its inputs in bundles, in no order",
    "Please do not tidy up the inputs; they are kept as they came",
    "Older cards used other forms, which are no longer taken",
    "The form below holds for all inputs of the bundle",
    "Questions about the form go to the head of the desk",
)
DESKS = word_list(
    "archive,front office,night desk,post room,ledger desk,returns desk,counting room,travel desk,order desk"
)


def desk_notes(rng: Random, form: str) -> tuple[str, str]:
    """A desk's name, and its notes around the line that fixes the form."""
    name = f"{rng.choice(DESKS)} in {rng.choice(TOWNS)}"
    head = f"{rng.choice(FIRST_NAMES)} {rng.choice(SURNAMES)}"
    first, second = rng.choice(PURPOSES), rng.choice(REMARKS)
    return name, f"Desk: {name}, head {head}\n{first}. {second}.\n{form}"


LETTER_FORMS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("small letters", str.lower),
    ("capitals", str.upper),
    ("a capital first", str.capitalize),
    ("its first three letters, small", lambda word: word[:3]),
)
"""How a desk writes a label, and what makes it so."""
