"""Dates as people say them, rewritten in the desk's form."""

from __future__ import annotations

from random import Random

from office_tasks.base import Desk, Question, Task
from office_tasks.words import desk_notes, word_list

MONTHS = word_list("January February March April May June July August September October November December")
WEEKDAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
DAY_WORDS = word_list(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third twenty-fourth "
    "twenty-fifth twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
DATE_FORMS = {
    "YYYY-MM-DD": "{year}-{month:02}-{day:02}",
    "DD.MM.YYYY": "{day:02}.{month:02}.{year}",
    "MM/DD/YYYY": "{month:02}/{day:02}/{year}",
    "YYYYMMDD": "{year}{month:02}{day:02}",
}
RULES = """\
Task: dates
Customers and suppliers write dates as they speak. Rewrite the date of the input in the form that the desk asks for. The day \
and the month always have two digits, the year always has four. A day may be a number or a word, and the name of the month \
may be cut short. Weekdays and words such as "on", "by" or "since" are not part of the date: leave them out.

Examples in the form YYYY-MM-DD:
Input: the 3rd of March, 1987
Answer: 1987-03-03
Input: on Tuesday, October 14, 2003
Answer: 2003-10-14
Input: since the twenty-first of June 1999
Answer: 1999-06-21
Input: 9 Feb 1964
Answer: 1964-02-09
Input: by Dec 30th, 2018
Answer: 2018-12-30
Input: Friday the eleventh of August 1950
Answer: 1950-08-11"""


def _ordinal(day: int) -> str:
    return f"{day}{'th' if 10 < day < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


def date_desk(rng: Random) -> Desk:
    form = rng.choice(list(DATE_FORMS))
    line = f"Form of the date: {form}"
    name, notes = desk_notes(rng, line)

    def ask(rng: Random) -> Question:
        month, year = rng.randrange(12), rng.randint(1930, 2029)
        day = rng.randint(1, MONTH_DAYS[month])
        full = MONTHS[month]
        month_name = full if rng.random() < 0.6 else full[:3]
        before = rng.choice(("", "", "on ", "by ", "since "))
        weekday = rng.choice(WEEKDAYS)
        hard = rng.random() < 0.4
        if hard:
            text = rng.choice((f"{before}the {{}} of {full} {year}", f"{weekday} the {{}} of {full} {year}"))
            text = text.format(DAY_WORDS[day - 1])
        else:
            text = before + rng.choice(
                (
                    f"the {_ordinal(day)} of {full}, {year}",
                    f"{day} {month_name} {year}",
                    f"{month_name} {_ordinal(day)}, {year}",
                    f"{weekday}, {full} {day}, {year}",
                )
            )
        answer = DATE_FORMS[form].format(year=year, month=month + 1, day=day)
        return Question(text, answer, "hard" if hard else "easy")

    return Desk("dates", name, line, notes, ask, examples=4)


TASK = Task("dates", RULES, date_desk)
