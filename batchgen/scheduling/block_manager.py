"""Which pages a span holds: tables opened, shared, copied on write, grown and given back. Integers only.

Storage is in whole pages, compute exact to the token. A span's block table begins with its parent's full pages, shared;
the page with the parent's last tokens is either written on by one child (a claim) or copied into each child's first own
page. Nodes that nothing descends from any more stay for the next windows, up to `IDLE_NODES` and while memory lasts, the least
recently used first to go.

A model with recurrent layers needs a state slot, besides, for each sequence that runs and each node that something still begins at: a node's
slot is read by all of its children, each of which writes its own. So a state is there exactly where the tree branches, and nothing can begin
between two nodes. Once all of a node's children have begun, its slot is only kept while no other needs it.
"""

from __future__ import annotations

from collections.abc import Container

from batchgen.prefix import resident_lengths
from batchgen.request import TokenArray
from batchgen.scheduling.batch import Copy, Load, Save
from batchgen.scheduling.block_pool import PagePool
from batchgen.scheduling.sequence import Branch, GenerationSequence, Saved, Span
from batchgen.scheduling.waiting import Window

IDLE_NODES = 1024
"""Most nodes kept for later windows, the most recently used: else a long file would fill the whole pool with them."""


class Memory:
    """The page pool, and the spans that hold its pages.

    `sliding` is the widest sliding window, where every layer has one: pages behind it are given back. `host_pages` is how many
    pages of idle nodes are kept in host memory once the pool has no room for them. `slots` (two at least) are those of recurrent states,
    None for a model without.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        sliding: int | None = None,
        host_pages: int = 0,
        slots: PagePool | None = None,
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.page_size = page_size
        self.sliding = sliding
        self.live: dict[Branch, None] = {}  # nodes that leaves descend from, complete or being computed
        self.idle: dict[Branch, None] = {}  # complete nodes without descendants, least recently used first
        self.host_pages = host_pages
        self.parked: dict[Branch, None] = {}  # idle nodes in host memory, least recently used first
        self._moves: list[Copy | Save | Load] = []
        self._promised = 0  # pages that the running sequences can still ask for

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def take_moves(self) -> tuple[Copy | Save | Load, ...]:
        """What is to be done to pages since the last call, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    # -- across windows

    def match(self, w: Window) -> None:
        """Finds what nodes of earlier windows hold of a new window's tree; its spans take it over when they are opened.

        Exact to the token, with recurrent layers to the end of such a node; what has to be run for its logits is left out.
        """
        if not w.leaves:
            return
        branches = [*self.idle, *self.parked, *(b for b in self.live if b.complete and b.window is not w)]
        prompts: list[TokenArray] = [w.leaves[0].tokens] * len(w.leaves)
        for i, leaf in enumerate(w.leaves):
            prompts[int(w.plan.order[i])] = leaf.tokens
        for match in resident_lengths(w.plan, prompts, [b.tokens(0, b.end) for b in branches]):
            branch, i, shared = branches[match.path], match.position, match.length
            n = int(w.plan.leaf_parent[i])
            leaf = w.leaves[i]
            start = w.plan.nodes[n].end if n >= 0 else 0
            found = self._offer(w, ~i, branch, min(shared, len(leaf.request.tokens) - 1), start)
            while n >= 0:
                node = w.plan.nodes[n]
                found |= self._offer(w, n, branch, min(shared, node.end, w.logits_from[n]), node.start)
                n = node.parent
            for kept in (self.idle, self.parked):
                if found and branch in kept:
                    kept[branch] = kept.pop(branch)

    def _offer(self, w: Window, item: int, branch: Branch, length: int, start: int) -> bool:
        if length <= start or branch.dropped * self.page_size > self._needed_from(length):
            return False
        if self.slots is not None and (length < branch.end or branch.state_slot < 0):
            return False
        known = w.sources.get(item)
        # Of equally good ones that which ends first: the node itself, not one below it, is what the new one replaces.
        if known is None or (known[1], -known[0].end) < (length, -branch.end):
            w.sources[item] = (branch, length)
        return True

    # -- spans come and go

    def open_branch(self, w: Window, n: int, reserve: int) -> Branch | None:
        """Node n with pages for all its tokens; None when that would not leave `reserve` pages free beside the promised."""
        node = w.plan.nodes[n]
        parent = w.branches[node.parent] if node.parent >= 0 else None
        branch = Branch(
            window=w, place=w.place(n), parent=parent, start=node.start, table=[], computed=node.start,
            claims_tail=False, path=(*parent.path, parent) if parent else (), node=node,
            prompt=w.leaves[node.first].tokens,
        )  # fmt: skip
        if not self._open(branch, reserve + self._promised // 2 if reserve else 0):
            return None
        self.live[branch] = None
        return branch

    def open_sequence(self, seq: GenerationSequence, parent: Branch | None, reserve: int | None) -> bool:
        """Gives the sequence pages for the tokens that it has. False when there are not enough.

        Unless it runs alone (None), `reserve` pages must stay free, and half of what the running sequences can still ask for:
        a sequence that is preempted is work done twice.
        """
        seq.parent = parent
        seq.path = (*parent.path, parent) if parent else ()
        seq.start = seq.computed = parent.end if parent else 0
        growth = self.pages_for(seq.most_tokens) - self.pages_for(seq.end)
        if not self._open(seq, 0 if reserve is None else max(reserve, (self._promised + growth) // 2)):
            return False
        self._promised += growth
        return True

    def grow(self, seq: GenerationSequence) -> bool:
        """Makes room for the sequence's next token. False when no page is free."""
        if seq.computed < len(seq.table) * self.page_size:
            return True
        if not self._make_room(1):
            return False
        seq.table += self.pool.allocate(1)
        self._promised -= 1
        return True

    def close(self, seq: GenerationSequence) -> None:
        """Takes a sequence's pages back."""
        self._promised -= self.pages_for(seq.most_tokens) - len(seq.table)
        self._release(seq)

    def drop_behind(self, span: Span) -> None:
        """Gives back the pages that no query from the last computed position on can see."""
        last = self._needed_from(span.computed) // self.page_size
        if last > span.dropped:
            self.pool.release(span.table[span.dropped : last])
            span.dropped = last

    def _needed_from(self, computed: int) -> int:
        """First position that queries behind `computed` ones can see, or the last of those should it be run again."""
        return 0 if self.sliding is None else max(0, computed - self.sliding)

    def retire(self, branch: Branch) -> None:
        """Nothing descends from the node any more: it stays while memory lasts."""
        if not self.has_state(branch):
            self.evict(branch)
            return
        del self.live[branch]
        branch.logits = None
        branch.scores.clear()
        branch.prompt = branch.prompt[: branch.end].copy()  # not a part of whatever it was read with
        self.idle[branch] = None
        if len(self.idle) > IDLE_NODES:
            self.evict(next(iter(self.idle)))

    def evict(self, branch: Branch) -> None:
        """Takes a node's pages back. Sequences below keep theirs."""
        self.idle.pop(branch, None)
        self.live.pop(branch, None)
        branch.evicted = True
        branch.logits = None
        self._release(branch)

    def evict_all(self, kept: Container[Branch | None] = ()) -> None:
        """Takes the pages of idle nodes back, and of all complete ones but those `kept`."""
        for branch in [*self.idle, *(b for b in self.live if b.complete and b not in kept)]:
            if branch in self.idle:
                self._park(branch)
            self.evict(branch)

    # -- states of recurrent layers

    def has_state(self, branch: Branch) -> bool:
        """Whether something can begin at the node's end: its state is there, or the model has none."""
        return self.slots is None or branch.state_slot >= 0

    def has_slots(self, count: int) -> bool:
        """Whether so many slots are free, or are so when idle nodes are given up; true for a model without states."""
        return self.slots is None or self.slots.num_free + len(self.idle) >= count

    def wrote_state(self, span: Span) -> None:
        """The span's first forward is launched: its state is in its own slot now."""
        if span.read_slot != span.state_slot:
            if span.read_slot >= 0 and self.slots is not None:
                self.slots.release([span.read_slot])
            span.read_slot = span.state_slot

    def slots_of(self, span: Span) -> list[int]:
        """The slots that the span holds."""
        return [slot for slot in dict.fromkeys((span.state_slot, span.read_slot)) if slot >= 0]

    def _make_slot(self) -> bool:
        """Whether a slot is free: idle nodes are given up for it where need be, then the state of a node that nothing begins at any more."""
        assert self.slots is not None
        while not self.slots.num_free and self.idle:
            self.evict(next(iter(self.idle)))
        if not self.slots.num_free:
            for branch in self.live:
                slot, n = branch.state_slot, branch.node.index
                if branch.complete and slot >= 0 and self.slots.is_held_once(slot) and not branch.window.begins_at(n):
                    self.slots.release([branch.state_slot])
                    branch.state_slot = branch.read_slot = -1
                    break
        return self.slots.num_free > 0

    # -- tables

    def _open(self, span: Span, reserve: int) -> bool:
        """Fills the span's table for positions [0, end), leaving `reserve` pages free, and gives it a state slot. False when
        memory is short.
        """
        kept, known = span.window.sources.get(span.item, (None, 0))
        while kept is not None and kept.evicted and kept.saved is None:  # since the window was matched
            kept = kept.successor
            known = min(known, kept.computed if kept else 0)
        gone = kept is None or (self.slots is not None and (kept.state_slot < 0 or known != kept.end))
        if kept is None or gone or known <= span.start or kept.dropped * self.page_size > self._needed_from(known):
            return self._fill(span, span.parent, span.start, None, reserve)
        # What it takes over must not be given up to make room for it.
        shelf = self.idle if kept in self.idle else self.parked if kept in self.parked else None
        if shelf is not None:
            del shelf[kept]
        filled = self._fill(span, kept, known, kept.saved, reserve)
        # Else every window would leave one more copy of a prefix that all of them have.
        replaced = filled and isinstance(span, Branch) and _covers(span, kept, known)
        # With recurrent layers no other node can take over from the middle of the new one.
        replaced = replaced and (self.slots is None or span.end == kept.end)
        if shelf is self.idle and replaced:
            assert isinstance(span, Branch)
            kept.successor = span
            self.evict(kept)
        elif shelf is not None and not replaced:
            shelf[kept] = None
        elif shelf is not None:
            kept.saved = None
        if not filled and kept.saved is not None:
            # What is loaded has pages of its own. Run again, it can write on in its parent's last one: where memory is short, that is less.
            filled = self._fill(span, span.parent, span.start, None, reserve)
        return filled

    def _fill(self, span: Span, source: Branch | None, known: int, saved: Saved | None, reserve: int) -> bool:
        """`_open`, with the KV of positions before `known` taken over from `source`, or from host memory where it was `saved`."""
        if self.slots is None:
            return self._fill_table(span, source, known, saved, reserve)
        before = source.state_slot if source is not None else -1
        if before >= 0:  # held first, so that no room is made of it
            self.slots.share([before])
        whole = isinstance(span, Branch) and known == span.end  # nothing is to be run: the state is the source's
        if (whole or self._make_slot()) and self._fill_table(span, source, known, saved, reserve):
            span.state_slot = before if whole else self.slots.allocate(1)[0]
            span.read_slot = before
            return True
        if before >= 0:
            self.slots.release([before])
        return False

    def _fill_table(self, span: Span, source: Branch | None, known: int, saved: Saved | None, reserve: int) -> bool:
        size = self.page_size
        parent = span.parent
        first = span.start // size
        full, tail = divmod(known, size)  # pages taken over whole, and tokens of the next one
        if saved is not None:
            full, tail = first, 0  # nothing can be shared or copied: it is loaded into pages of its own
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
        dropped = max(parent.dropped if parent else 0, source.dropped if source else 0)
        self.pool.share([*above, *taken][dropped:])
        fresh = self.pool.allocate_run(wanted - claims) if run else self.pool.allocate(wanted - claims)
        if claims:
            assert parent is not None
            tail_page = parent.table[full]
            self.pool.share([tail_page])
            parent.claimed = span.claims_tail = True
            fresh = [tail_page, *fresh]
        elif tail:
            assert source is not None
            self._moves.append(Copy(source.table[full], fresh[0]))
        elif saved is not None:
            self._moves.append(Load(saved, first, tuple(fresh[: self.pages_for(known) - first])))
        span.table = [*above, *taken, *fresh]
        span.dropped = dropped
        span.computed = known
        return True

    def _release(self, span: Span) -> None:
        self.pool.release(span.table[span.dropped :])
        span.table, span.dropped = [], 0
        if self.slots is not None:
            self.slots.release(self.slots_of(span))
            span.state_slot = span.read_slot = -1
        if span.claims_tail and span.parent is not None:
            span.parent.claimed = False
        span.claims_tail = False

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are free, idle nodes given up for it where need be."""
        while self.pool.num_free < pages and self.idle:
            branch = next(iter(self.idle))
            self._park(branch)
            self.evict(branch)
        return self.pool.num_free >= pages

    def _park(self, branch: Branch) -> None:
        """Has an idle node's KV moved to host memory, where there is room; the least recently used ones go for it."""
        count = len(branch.table)
        if count > self.host_pages or branch.dropped:
            return
        while self.parked and sum(self.pages_for(b.end) for b in self.parked) + count > self.host_pages:
            oldest = next(iter(self.parked))
            del self.parked[oldest]
            oldest.saved = None
        branch.saved = Saved()
        self.parked[branch] = None
        self._moves.append(Save(tuple(branch.table), branch.saved))


def _covers(branch: Branch, kept: Branch, known: int) -> bool:
    """Whether all of the `kept` node's tokens are the branch's too, which has taken over `known` of them."""
    last = kept.end - 1
    return known >= last and branch.end > last and bool(branch.prompt[last] == kept.prompt[last])
