"""The result of a row, and the digest that identifies its request."""

import numpy as np
import pytest

from batchgen.errors import ROW_ERROR_TYPES, RowError
from batchgen.request import Request, leaves_of, row_digest, row_key
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams
from support.requests import request as plain_request


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def request(params: SamplingParams, *texts: np.ndarray, max_tokens: int = 5) -> Request:
    return plain_request(3, [1, 2], max_tokens, params=params, key=b"k" * 16, texts=texts)


def test_a_failed_row_has_only_an_error():
    for kind in ROW_ERROR_TYPES:
        result = Result.from_error(3, RowError(kind, "why"), prompt_tokens=7)
        assert result.failed is True
        assert result == Result(
            row=3, text=None, finish_reason="error", prompt_tokens=7, error_type=kind, error_message="why"
        )
    with pytest.raises(ValueError, match="unknown row error type 'oops'"):
        RowError("oops", "why")


def test_equal_results_have_equal_hashes_and_each_request_is_its_own():
    results = [Result(row=3, text="a", finish_reason="stop", token_ids=(row,)) for row in (1, 1, 2)]
    assert len(set(results)) == 2
    assert len({request(SamplingParams()), request(SamplingParams())}) == 2


def test_the_leaves_of_a_request_are_its_completions_or_its_texts_without_their_last_token():
    several = leaves_of([request(SamplingParams(n=3))])
    assert [(leaf.choice, leaf.tokens.tolist(), leaf.scored.tolist(), leaf.max_kv_tokens) for leaf in several] == [
        (i, [1, 2], [], 6) for i in range(3)
    ]
    labels = leaves_of([request(SamplingParams(choices=("a", "b")), ids(7), ids(8, 9), max_tokens=0)])
    assert [(leaf.choice, leaf.tokens.tolist(), leaf.scored.tolist(), leaf.max_kv_tokens) for leaf in labels] == [
        (0, [1, 2], [7], 2),
        (1, [1, 2, 8], [8, 9], 3),
    ]


def test_the_digest_differs_for_other_prompts_parameters_and_texts():
    params = SamplingParams()
    digests = [
        row_digest(ids(1, 2), params),
        row_digest(ids(1, 2, 3), params),
        row_digest(ids(1, 2), SamplingParams(n=2)),
        row_digest(ids(1, 2), params, [ids(3)]),
        row_digest(ids(1, 2), params, [ids()]),
        row_digest(ids(1), params, [ids(2)]),
    ]
    assert len(set(digests)) == len(digests)
    assert row_digest(ids(1, 2), params) == digests[0]
    assert [len({row_key(digest, n) for n in range(3)}) for digest in digests] == [3] * len(digests)
    assert row_key(digests[0], 0) == digests[0]
