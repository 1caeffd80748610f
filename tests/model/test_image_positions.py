"""Positions with axes, by hand. tests/parity/test_images.py compares them with those of the models."""

import numpy as np
import pytest

from batchgen.model.image_positions import canvas_positions, column_row_number, time_row_column
from batchgen.request import IMAGE_IDS, Image, Leaf
from batchgen.scheduling.batch import ScheduledSpan
from batchgen.scheduling.sequence import GenerationSequence
from support.requests import request
from support.simulation import Length

A, B = IMAGE_IDS + 5, IMAGE_IDS + 9
START, END, SLICE, SLICE_END, LINE = MARKS = (51, 52, 53, 54, 55)


@pytest.mark.parametrize(
    ("axes", "tokens", "grids", "expected"),
    [
        pytest.param(
            time_row_column, [1, A, A, A, A, 2, B, B, B, 2], [(2, 2), (1, 3)],
            [
                [0, 1, 1, 1, 1, 3, 4, 4, 4, 7],
                [0, 1, 1, 2, 2, 3, 4, 4, 4, 7],
                [0, 1, 2, 1, 2, 3, 4, 5, 6, 7],
            ],
            id="text goes on behind the larger side",
        ),
        pytest.param(
            column_row_number, [1, *[A] * 8, 2], [(2, 2)],
            [
                [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
                [0, 1, 0, 1, 2, 0, 1, 2, 8, 9],
                [0, 1, 0, 0, 0, 1, 1, 1, 8, 9],
                [0, 1, 0, 0, 0, 0, 0, 0, 8, 9],
            ],
            id="rows that have a token at their end, between one that begins the image and one that ends it",
        ),
        pytest.param(
            column_row_number, [1, A, A, B, B, B, 2], [(1, 1), (1, 2)],
            [
                [0, 1, 2, 3, 4, 5, 6],
                [0, 0, 1, 0, 1, 2, 6],
                [0, 0, 0, 0, 0, 0, 6],
                [0, 0, 0, 1, 1, 1, 6],
            ],
            id="two images",
        ),
    ],
)  # fmt: skip
def test_the_tokens_of_an_image_lie_in_a_grid_however_its_prompt_is_cut(axes, tokens, grids, expected):
    images = tuple(Image(token, tokens.count(token), "x", grid) for token, grid in zip((A, B), grids, strict=False))
    end, prompt = len(tokens), np.array(tokens)
    leaf = Leaf(request(0, prompt, 9, images=images), 0, prompt)
    span = GenerationSequence(
        window=0, index=0, place=(0, 1), parent=None, start=0, table=[0], computed=0, leaf=leaf, stops=Length(9)
    )
    for start in range(end):
        for stop in range(start + 1, end + 1):
            found = np.tile(np.arange(start, stop), (len(expected), 1))
            axes(ScheduledSpan(span, start, stop, stop), found)
            assert found.tolist() == [row[start:stop] for row in expected], (start, stop)
    generated, last = np.tile([end, end + 1], (len(expected), 1)), expected[0][-1]
    axes(ScheduledSpan(span, end, end + 2, end + 2), generated)
    assert generated.tolist() == [[last + 1, last + 2]] * len(expected)


@pytest.mark.parametrize(
    ("grid", "tokens", "rows", "columns", "after"),
    [
        ((0, 0, 0, 0, 2, 2), [START, A, A, A, A, END], [-1, 0, 0, 1, 1, 2], [-1, 0, 1, 0, 1, 2], 3),
        ((0, 0, 0, 0, 1, 1), [START, A, END, LINE], [-1, 0, 1, 0], [-1, 0, 1, 0], 2),
        (
            (1, 2, 2, 2, 1, 1),
            [START, A, END, SLICE, A, A, A, A, SLICE_END, SLICE, A, A, A, A, SLICE_END],
            [-1, 0, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1],
            [-1, 0, 4, 0, 0, 1, 0, 1, 1, 2, 2, 3, 2, 3, 3],
            5,
        ),
        (
            (2, 1, 2, 1, 2, 1),
            [START, A, A, END, SLICE, A, A, SLICE_END, LINE, SLICE, A, A, SLICE_END],
            [-1, 0, 3, 4, 0, 0, 1, 1, 1, 2, 2, 3, 3],
            [-1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0],
            5,
        ),
    ],
)
def test_an_image_and_its_slices_lie_over_one_another_on_a_canvas(grid, tokens, rows, columns, after):
    """`rows` and `columns` are relative to the canvas, which begins at position 2; text goes on `after` positions behind its beginning."""
    prompt, count = np.array([1, 2, *tokens, 3]), tokens.count(A)
    text = [0, 1], [2 + after, 3 + after, 4 + after]
    expected = [text[0] + [2 + at for at in axis] + text[1] for axis in ([0] * len(rows), rows, columns)]
    image = Image(A, count, "x", grid)
    assert canvas_positions(prompt, [image], MARKS, len(prompt) + 2).tolist() == expected
    for stop in range(1, len(prompt)):
        found = canvas_positions(prompt[:stop], [image], MARKS, stop)
        assert found.tolist() == [axis[:stop] for axis in expected], stop


@pytest.mark.parametrize(
    ("between", "places", "begins"),
    [
        ([7], [0, 0, 1, 2, 3, 3, 4, 5, 6], [0, 1, 1, 1, 3, 4, 4, 4, 6]),
        ([], [0, 0, 1, 2, 2, 3, 4, 5], [0, 1, 1, 1, 3, 3, 3, 5]),
    ],
)
def test_a_canvas_begins_behind_the_one_before_it(between, places, begins):
    one = [START, A, END]
    tokens, image = np.array([7, *one, *between, *one, 7]), Image(A, 1, "x", (0, 0, 0, 0, 1, 1))
    assert canvas_positions(tokens, [image, image], MARKS, len(tokens)).tolist() == [begins, places, places]
