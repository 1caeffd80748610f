"""Which device runs which rows: pieces of whole groups, balanced, and taken over by devices that have none left."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.devices.partition import DECODE_COST, PIECES, Piece, WaitingPieces, consecutive_pieces, cut, deal
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.fakes import grouped
from support.params import examples
from support.requests import planned, request


def rows(pieces: list[Piece]) -> list[int]:
    return [r.row for piece in pieces for r in piece.requests]


def pieces_of(requests: list[Request], devices: int, *, share: bool = True) -> list[Piece]:
    return cut(*planned(requests, share=share), devices)


@st.composite
def some_requests(draw: st.DrawFn) -> list[Request]:
    """Prompts of few tokens, so that much is shared, at all depths; some with several leaves."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=40))
    found = []
    for row, tokens in enumerate(prompts):
        params = SamplingParams(n=draw(st.integers(1, 3)))
        texts = draw(st.sampled_from([(), ([1],), ([1, 2], [0])]))
        more: dict[str, Any] = {"texts": tuple(request(0, t).tokens for t in texts)} if texts else {"params": params}
        found.append(request(row, tokens, draw(st.sampled_from([1, 5, 100])), **more))
    return found


@settings(max_examples=examples(10, 50))
@given(some_requests(), st.integers(1, 5), st.booleans())
def test_every_request_is_in_one_piece_and_every_piece_in_one_share(requests, devices, share):
    pieces = pieces_of(requests, devices, share=share)
    assert Counter(rows(pieces)) == Counter(range(len(requests)))
    assert [p.leaves for p in pieces] == [sum(r.leaves for r in p.requests) for p in pieces]
    shares = deal(pieces, devices)
    assert len(shares) == devices
    assert [p for dealt in shares for p in dealt] == pieces


@settings(max_examples=examples(10, 50))
@given(some_requests(), st.integers(1, 5))
def test_costs_add_up_to_the_tokens_of_the_tree_and_those_to_generate(requests, devices):
    leaves, plan = planned(requests)
    drawn = sum(DECODE_COST * r.max_tokens * r.params.n for r in requests if not r.texts)
    assert sum(p.cost for p in cut(leaves, plan, devices)) <= plan.prefill_tokens_min + drawn
    if not any(r.texts for r in requests):  # otherwise a piece without a request of its own is left out
        assert sum(p.cost for p in cut(leaves, plan, devices)) == plan.prefill_tokens_min + drawn


@settings(max_examples=examples(10, 50))
@given(some_requests(), st.integers(2, 5))
def test_no_share_is_further_from_the_mean_than_a_piece_and_a_prefix(requests, devices):
    pieces = pieces_of(requests, devices)
    mean = sum(p.cost for p in pieces) / devices
    slack = max(p.cost for p in pieces) + 2 * max(p.shared for p in pieces)
    assert max(sum(p.cost for p in share) for share in deal(pieces, devices)) <= mean + slack


@settings(max_examples=examples(10, 50))
@given(some_requests(), st.integers(1, 5))
def test_a_group_is_cut_only_where_it_costs_more_than_a_piece_may(requests, devices):
    leaves, plan = planned(requests)
    pieces = cut(leaves, plan, devices)
    piece_of = {r.row: i for i, p in enumerate(pieces) for r in p.requests}
    most = sum(p.cost for p in pieces) / (devices * PIECES)
    for node in plan.nodes:
        below = [leaves[i].request for i in plan.order[node.first : node.last].tolist()]
        if any(r.texts or r.params.n > 1 for r in below):
            continue  # whose leaves may be in several nodes
        inner = [n for n in plan.nodes if node.first <= n.first and n.last <= node.last and n.end >= node.end]
        cost = sum(n.end - n.start for n in inner) + sum(
            len(leaves[int(plan.order[i])].tokens) - plan.nodes[plan.leaf_parent[i]].end
            for i in range(node.first, node.last)
        )
        cost += sum(DECODE_COST * r.max_tokens for r in below)
        if cost <= most:
            assert len({piece_of[r.row] for r in below}) == 1


def test_a_group_a_little_larger_than_its_share_stays_whole():
    requests = [*grouped(1, 22), *(request(100 + i, [7] * 50 + [1000 + i]) for i in range(18))]
    first, second = deal(pieces_of(requests, 2), 2)
    assert [len(rows(first)), len(rows(second))] == [22, 18]


def test_pieces_in_an_order_of_their_own_are_equal_in_cost():
    pieces = consecutive_pieces([request(i, [1] * 8, 3) for i in (5, 3, 8, 1, 2, 0, 7, 4)], 4)
    assert [[r.row for r in p.requests] for p in pieces] == [[5, 3], [8, 1], [2, 0], [7, 4]]
    assert {p.cost for p in pieces} == {2 * (8 + 3 * DECODE_COST)}
    assert consecutive_pieces([], 4) == []


# -- taking


def waiting_for(devices: int) -> WaitingPieces:
    shares = WaitingPieces()
    for device in range(devices):
        shares.join(device)
    return shares


def shares_of(requests: list[Request]) -> WaitingPieces:
    shares = waiting_for(2)
    shares.add(*planned(requests))
    return shares


def taken_by(shares: WaitingPieces, device: int, leaves: int) -> list[int]:
    return rows(shares.take(device, leaves))


def test_a_device_takes_its_share_from_the_front_as_much_as_it_asks_for():
    shares = shares_of([request(i, [i], 1) for i in range(40)])
    assert shares.waiting == 40
    assert taken_by(shares, 0, 3) == [0, 1, 2, 3]  # whole pieces
    assert taken_by(shares, 1, 1) == [20, 21]
    assert shares.waiting == 34
    assert taken_by(shares, 0, 100) == list(range(4, 20))


def test_one_that_has_none_left_takes_over_from_the_back_at_most_half():
    shares = shares_of([request(i, [i], 1) for i in range(40)])
    assert taken_by(shares, 0, 100) == list(range(20))
    assert taken_by(shares, 0, 4) == [36, 37, 38, 39]
    assert taken_by(shares, 0, 100) == list(range(28, 36))
    assert taken_by(shares, 0, 100) == [24, 25, 26, 27]
    assert taken_by(shares, 1, 100) == [20, 21, 22, 23]
    assert taken_by(shares, 0, 1) == taken_by(shares, 1, 1) == []
    assert shares.waiting == 0


def test_rows_whose_prefix_costs_more_than_their_wait_are_not_taken_over():
    shares = shares_of(grouped(2, 40, prefix=400))
    assert len(taken_by(shares, 0, 100)) == 40
    assert len(taken_by(shares, 1, 30)) >= 30
    assert taken_by(shares, 0, 1) == []
    assert len(taken_by(shares, 1, 100)) <= 10


def test_the_next_window_begins_where_the_last_one_ended():
    shares = shares_of([request(i, [i], 1) for i in range(40)])
    shares.add(*planned([request(40 + i, [40 + i], 1) for i in range(40)]))
    assert taken_by(shares, 1, 100) == list(range(20, 60))
    assert taken_by(shares, 0, 100) == [*range(20), *range(60, 80)]


def test_priorities_come_before_the_prefix_order():
    requests = [request(i, [i % 2] * 9 + [i], 1, priority=float(-i // 8)) for i in range(32)]
    shares = shares_of(requests)
    taken = [taken_by(shares, i % 2, 1) for i in range(32)]
    assert max(map(len, taken)) == 32 // (2 * PIECES)  # there is work for each of the devices
    order = [row for rows in taken for row in rows]
    assert sorted(order) == list(range(32))
    assert [requests[row].priority for row in order] == sorted(r.priority for r in requests)


def test_what_a_lost_device_had_comes_after_the_shares_of_the_others():
    requests = [request(i, [i], 1) for i in range(40)]
    shares = shares_of(requests)
    begun = taken_by(shares, 0, 4)
    shares.lost(0, [requests[row] for row in begun])
    assert shares.waiting == 40
    assert taken_by(shares, 1, 20) == list(range(20, 40))
    assert taken_by(shares, 1, 100) == [*range(4, 20), 0, 1, 2, 3]
    assert shares.waiting == 0


def test_a_lost_device_gets_nothing_of_the_next_window():
    shares = waiting_for(3)
    shares.lost(1, [])
    shares.add(*planned([request(i, [i], 1) for i in range(40)]))
    assert taken_by(shares, 0, 100) + taken_by(shares, 2, 100) == list(range(40))


@settings(max_examples=examples(10, 50))
@given(some_requests(), st.integers(1, 4), st.data())
def test_whatever_is_asked_all_is_handed_out_once(requests, devices, data):
    shares = waiting_for(devices)
    half = len(requests) // 2
    for window in (requests[:half], requests[half:]):
        if window:
            shares.add(*planned(window))
    alive, found, idle = list(range(devices)), [], 0
    while shares.waiting:
        device = data.draw(st.sampled_from(alive))
        pieces = shares.take(device, data.draw(st.integers(1, 9)))
        if pieces and len(alive) > 1 and data.draw(st.integers(0, 9)) == 0:
            alive.remove(device)
            shares.lost(device, [r for p in pieces for r in p.requests])
            continue
        found += rows(pieces)
        idle = 0 if pieces else idle + 1
        if idle > 20:  # one device runs the rest faster
            found += [row for other in alive for row in rows(shares.take(other, 1))]
    assert Counter(found) == Counter(range(len(requests)))
