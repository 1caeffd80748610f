"""Positions with several axes of the tokens of prompts with images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.request import IMAGE_IDS, Image, TokenArray
from batchgen.scheduling.batch import ScheduledSpan
from batchgen.scheduling.sequence import GenerationSequence


def time_row_column(scheduled: ScheduledSpan, positions: NDArray[np.int64]) -> None:
    """Sets the positions [3, tokens] of a span's part, which are those of text: an image's tokens lie in a grid, and what follows begins after its
    larger side."""
    span, start, stop = scheduled.span, scheduled.start, scheduled.stop
    if isinstance(span, GenerationSequence) and start >= span.prompt_end:
        positions += sum(max(image.grid) - image.count for image in span.images)
        return
    shift = 0  # position minus place of a token of text
    for image, at in _begun(scheduled):
        end = at + image.count
        if end > start:
            tokens = np.arange(max(at, start) - at, min(end, stop) - at)
            row, column = np.divmod(tokens, image.grid[1])
            positions[:, at + tokens - start] = at + shift + np.stack([np.zeros_like(row), row, column])
        shift += max(image.grid) - image.count
        text = np.arange(max(end, start), stop)
        positions[:, text - start] = text + shift


def column_row_number(scheduled: ScheduledSpan, positions: NDArray[np.int64]) -> None:
    """Sets the positions [4, tokens] of a span's part, which are those of text: an image's tokens have a column and a row, with one token more at its
    end, and the number of the image. A begin and an end token around the grid, where there are such, stay as text."""
    span, start, stop = scheduled.span, scheduled.start, scheduled.stop
    if isinstance(span, GenerationSequence) and start >= span.prompt_end:
        return
    for number, (image, at) in enumerate(_begun(scheduled)):
        rows, columns = image.grid
        inside = rows * (columns + 1)
        at += (image.count - inside) // 2
        tokens = np.arange(max(at, start) - at, min(at + inside, stop) - at)
        row, column = np.divmod(tokens, columns + 1)
        positions[1:, at + tokens - start] = np.stack([column, row, np.full_like(row, number)])


def _begun(scheduled: ScheduledSpan) -> Iterator[tuple[Image, int]]:
    """Yields the images that begin before the end of a span's part, and where they begin."""
    span, first = scheduled.span, 0
    places = np.flatnonzero(span.tokens(0, scheduled.stop) >= IMAGE_IDS) if span.images else ()
    for image in span.images:
        if first >= len(places):
            return
        yield image, int(places[first])
        first += image.count


def canvas_positions(tokens: TokenArray, images: Sequence[Image], marks: Sequence[int], stop: int) -> NDArray[np.int64]:
    """Returns the positions [3, stop] of a prompt that begins with these tokens, and of the text after them.

    An image and its slices lie over one another on a canvas, and the marks around them on its corners. What follows begins beyond the canvas.
    `marks`: the ids of `CANVAS_MARKS`.
    """
    found = np.empty((3, stop), dtype=np.int64)
    done = position = 0  # where the text after the last image begins, and its position
    begins = np.flatnonzero(tokens == marks[0]).tolist() if images else []
    for image, begin in zip(images, begins, strict=False):
        origin = position + max(0, begin - done)
        found[:, done:begin] = np.arange(position, origin)
        table = _canvas(image)[:, : len(tokens) - begin]
        done = begin + table.shape[1]
        while done < len(tokens) and tokens[done] in marks:
            done += 1
        found[:, begin:done] = origin
        found[:, begin : begin + table.shape[1]] += table
        rows, columns = _canvas_size(image)
        position = origin + max(rows, columns) + 1
    found[:, done:] = np.arange(position, position + stop - done)
    return np.maximum(found, 0)


def _canvas_size(image: Image) -> tuple[int, int]:
    """Returns the rows and columns of an image's canvas: of its slices, or of the image itself if it has none."""
    rows, columns, slice_rows, slice_columns, own_rows, own_columns = image.grid
    return (rows * slice_rows, columns * slice_columns) if rows else (own_rows, own_columns)


def _canvas(image: Image) -> NDArray[np.int64]:
    """Returns the positions [3, tokens] of an image and of its marks, from the mark before it to the one after its last slice, relative to the canvas.

    The image is stretched over the canvas. The mark before it lies just outside, those around a slice on its first and last token (MiniCPM-V 4.7).
    """
    rows, columns, slice_rows, slice_columns, own_rows, own_columns = image.grid
    height, width = _canvas_size(image)
    own = _lattice(_stretched(own_rows, height), _stretched(own_columns, width))
    parts = [_point(-1, -1), own, _point(height, width)]
    for row in range(rows):
        for column in range(columns):
            top, left = row * slice_rows, column * slice_columns
            bottom, right = top + slice_rows, left + slice_columns
            lattice = _lattice(np.arange(top, bottom), np.arange(left, right))
            parts += [_point(top, left), lattice, _point(bottom - 1, right - 1)]
        if row < rows - 1:  # a line break
            parts.append(_point((row + 1) * slice_rows - 1, width))
    places = np.concatenate(parts, axis=1)
    return np.concatenate([np.zeros_like(places[:1]), places])


def _point(row: int, column: int) -> NDArray[np.int64]:
    return np.array([[row], [column]], dtype=np.int64)


def _lattice(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns all pairs [2, rows x columns], row after row."""
    return np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, -1)


def _stretched(count: int, size: int) -> NDArray[np.int64]:
    """Returns `count` places that are spread over `size`, rounded as transformers rounds them."""
    return torch.linspace(0, size - 1, count).round().long().numpy()
