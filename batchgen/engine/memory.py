"""Which pages a span holds: tables opened, shared, copied on write, grown and given back. Integers only.

Storage is in whole pages, compute exact to the token. A span's block table begins with its parent's full pages, shared;
the page with the parent's last tokens is either written on by one child (a claim) or copied into each child's first own
page. Nodes that nothing descends from any more stay for the next windows, up to `IDLE_NODES` and while memory lasts, the least
recently used first to go.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchgen.engine.pages import PagePool
from batchgen.engine.spans import Branch, Place, Sequence, Span
from batchgen.prefix import PrefixNode, PrefixPlan, resident_lengths
from batchgen.request import Request, TokenArray

IDLE_NODES = 1024
"""Most nodes kept for later windows, the most recently used: else a long file would fill the whole pool with them."""


class Memory:
    """The page pool, and the spans that hold its pages."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.idle: dict[Branch, None] = {}  # complete nodes without descendants, least recently used first
        self._copies: list[tuple[int, int]] = []
        self._promised = 0  # pages that the running sequences can still ask for
        self._sources: dict[int, tuple[Branch, int]] = {}

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The page copies (from, to) asked for since the last call, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    # -- across windows

    def match(self, requests: list[Request], plan: PrefixPlan, ends_at: list[bool]) -> None:
        """Finds what idle nodes hold of a new window's tree; its spans adopt it when they are opened.

        `requests` in depth-first order. Exact to the token; where a prompt ends, its last token is left to be run
        again, for its logits.
        """
        self._sources.clear()
        if not requests:
            return
        branches = list(self.idle)
        prompts: list[TokenArray] = [requests[0].tokens] * len(requests)
        for i, request in enumerate(requests):
            prompts[int(plan.order[i])] = request.tokens
        for match in resident_lengths(plan, prompts, [b.tokens(0, b.end) for b in branches]):
            branch, i, shared = branches[match.path], match.position, match.length
            parent = int(plan.leaf_parent[i])
            start = plan.nodes[parent].end if parent >= 0 else 0
            found = self._offer(~i, branch, min(shared, len(requests[i].tokens) - 1), start)
            while parent >= 0:
                node = plan.nodes[parent]
                found |= self._offer(parent, branch, min(shared, node.end - ends_at[parent]), node.start)
                parent = node.parent
            if found:
                self.idle[branch] = self.idle.pop(branch)

    def _offer(self, item: int, branch: Branch, length: int, start: int) -> bool:
        if length <= start:
            return False
        known = self._sources.get(item)
        # Of equally good ones that which ends first: the node itself, not one below it, is what the new one replaces.
        if known is None or (known[1], -known[0].end) < (length, -branch.end):
            self._sources[item] = (branch, length)
        return True

    # -- spans come and go

    def open_branch(
        self, node: PrefixNode, prompt: TokenArray, parent: Branch | None, place: Place, reserve: int
    ) -> Branch | None:
        """A node with pages for all its tokens; None when that would not leave `reserve` pages free beside the promised."""
        branch = Branch(
            place=place, parent=parent, start=node.start, table=[], computed=node.start, claims_tail=False,
            path=(*parent.path, parent) if parent else (), node=node, prompt=prompt,
        )  # fmt: skip
        return branch if self._open(branch, node.index, reserve + self._promised // 2 if reserve else 0) else None

    def open_sequence(self, seq: Sequence, parent: Branch | None, alone: bool) -> bool:
        """Gives the sequence pages for the tokens that it has. False when there are not enough.

        Unless it runs alone, half of what the running sequences can still ask for must stay free: a sequence that is
        preempted is work done twice.
        """
        seq.parent = parent
        seq.path = (*parent.path, parent) if parent else ()
        seq.start = seq.computed = parent.end if parent else 0
        growth = self.pages_for(seq.most_tokens) - self.pages_for(seq.end)
        if not self._open(seq, ~seq.place[0], reserve=0 if alone else (self._promised + growth) // 2):
            return False
        self._promised += growth
        return True

    def grow(self, seq: Sequence) -> bool:
        """Makes room for the sequence's next token. False when no page is free."""
        if seq.computed < len(seq.table) * self.page_size:
            return True
        if not self._make_room(1):
            return False
        seq.table += self.pool.allocate(1)
        self._promised -= 1
        return True

    def close(self, seq: Sequence) -> None:
        """Takes a sequence's pages back."""
        self._promised -= self.pages_for(seq.most_tokens) - len(seq.table)
        self._release(seq)

    def retire(self, branch: Branch) -> None:
        """Nothing descends from the node any more: it stays while memory lasts."""
        branch.logits = None
        self.idle[branch] = None
        if len(self.idle) > IDLE_NODES:
            self.evict(next(iter(self.idle)))

    def evict(self, branch: Branch) -> None:
        """Takes a node's pages back. Sequences below keep theirs."""
        self.idle.pop(branch, None)
        branch.evicted = True
        branch.logits = None
        self._release(branch)

    def evict_all(self, branches: Iterable[Branch]) -> None:
        """Takes the pages of idle nodes and of these back."""
        for branch in [*self.idle, *branches]:
            if not branch.evicted:
                self.evict(branch)

    # -- tables

    def _open(self, span: Span, item: int, reserve: int) -> bool:
        """Fills the span's table for positions [0, end), leaving `reserve` pages free. False when memory is short."""
        kept, known = self._sources.get(item, (None, 0))
        if kept is None or kept.evicted:
            return self._fill(span, span.parent, span.start, reserve)
        self.idle.pop(kept, None)  # what it takes over must not be given up to make room for it
        filled = self._fill(span, kept, known, reserve)
        if filled and isinstance(span, Branch) and _covers(span, kept, known):
            self.evict(kept)  # else every window would leave one more copy of a prefix that all of them have
        else:
            self.idle[kept] = None
        return filled

    def _fill(self, span: Span, source: Branch | None, known: int, reserve: int) -> bool:
        """`_open`, with the KV of positions before `known` taken over from `source`."""
        size = self.page_size
        parent = span.parent
        first = span.start // size
        full, tail = divmod(known, size)  # pages taken over whole, and tokens of the next one
        wanted = self.pages_for(span.end) - full
        # A node of its own pages is better in one run, so it copies its parent's tail; others write on in that page.
        may_claim = tail > 0 and source is parent and parent is not None and not parent.claimed
        run = isinstance(span, Branch) and span.end // size > first
        claims = may_claim and not run
        if not self._make_room(wanted - claims + reserve):
            if not may_claim or claims or not self._make_room(wanted - 1 + reserve):
                return False
            claims = True
        above = parent.table[:first] if parent else []
        taken = source.table[first:full] if source else []
        self.pool.share(above)
        self.pool.share(taken)
        fresh = self.pool.allocate_run(wanted - claims) if run else self.pool.allocate(wanted - claims)
        if claims:
            assert parent is not None
            tail_page = parent.table[full]
            self.pool.share([tail_page])
            parent.claimed = span.claims_tail = True
            fresh = [tail_page, *fresh]
        elif tail:
            assert source is not None
            self._copies.append((source.table[full], fresh[0]))
        span.table = [*above, *taken, *fresh]
        span.computed = known
        return True

    def _release(self, span: Span) -> None:
        self.pool.release(span.table)
        span.table = []
        if span.claims_tail and span.parent is not None:
            span.parent.claimed = False
        span.claims_tail = False

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are free, idle nodes given up for it where need be."""
        while self.pool.num_free < pages and self.idle:
            self.evict(next(iter(self.idle)))
        return self.pool.num_free >= pages


def _covers(branch: Branch, kept: Branch, known: int) -> bool:
    """Whether all of the `kept` node's tokens are the branch's too, which has taken over `known` of them."""
    last = kept.end - 1
    return known >= last and branch.end > last and bool(branch.prompt[last] == kept.prompt[last])
