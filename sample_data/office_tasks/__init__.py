"""The text of the sample: four small office tasks; every prompt is built from nested prefixes, every answer is known."""

from office_tasks import amounts, dates, reviews, routing
from office_tasks.base import (
    ROOT,
    Desk,
    Question,
    Task,
    desk_text,
    draw_questions,
    example_lines,
    input_text,
    prefix_text,
)

TASKS = (dates.TASK, amounts.TASK, reviews.TASK, routing.TASK)

__all__ = [
    "ROOT",
    "TASKS",
    "Desk",
    "Question",
    "Task",
    "desk_text",
    "draw_questions",
    "example_lines",
    "input_text",
    "prefix_text",
]
