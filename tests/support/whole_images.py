"""A prompt with three images whose tokens, or all of its tokens, see one another."""

import numpy as np

from batchgen.request import IMAGE_IDS, Image, Leaf
from batchgen.scheduling.sequence import GenerationSequence
from support.requests import request
from support.simulation import Length

A, B = IMAGE_IDS + 5, IMAGE_IDS + 9
TOKENS = np.array([1, 2, A, A, A, B, B, 3, A, A, A], dtype=np.int64)


def sequence(whole: bool = True, prompt: int = 0) -> GenerationSequence:
    """A sequence [1, 2, A, A, A, B, B, 3, A, A, A] that has not begun."""
    images = tuple(Image(token, count, "x", whole=whole, prompt=prompt) for token, count in ((A, 3), (B, 2), (A, 3)))
    leaf = Leaf(request(0, TOKENS, 9, images=images), 0, TOKENS)
    return GenerationSequence(
        window=0, index=0, place=(0, 1), parent=None, start=0, table=[0], computed=0, leaf=leaf, stops=Length(9)
    )
