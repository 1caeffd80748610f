"""Which blocks each span holds: tables are opened, shared, copied on write, grown and released. Integers only.

Storage is in whole blocks; what is computed is exact to the token. A span's block table begins with its parent's full blocks, which
are shared. The block with the parent's last tokens is either written on by one child or copied into the first own block of each other
child. While a node has children, its last tokens are always read from a child's block, so the node has no block for them alone.

So the blocks in use are at most those that the running sequences and the childless nodes would have alone, without sharing. The scheduler
keeps these to the batch size in number. Nodes that no leaf needs any more stay for later windows, at most `max_cached_nodes` of them,
while no more blocks are in use than sequences have ever needed without sharing. The least recently used one is evicted first.

A model with recurrent layers also needs a state slot for each running sequence and for each node that something still begins at. A
node's slot is read by all of its children, and each child writes its own. So states exist exactly where the tree branches, and nothing
can begin between two nodes. Once all children of a node have begun, its slot is only kept while no other span needs it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from batchgen.prefix import resident_lengths
from batchgen.request import Image, TokenArray, image_ends
from batchgen.scheduling.block_pool import BlockPool
from batchgen.scheduling.sequence import GenerationSequence, PrefixNodeSpan, Span
from batchgen.scheduling.waiting import Window


class BlockManager:
    """The block pool and the spans that hold its blocks.

    `sliding_window` is the widest sliding window in tokens if every layer has one; blocks behind it are released. `state_slots`
    (at least two) are the slots of recurrent states; None for a model without recurrent layers. `sums` says that the outputs of a prefix are summed (pooling by the mean):
    what follows a prefix then begins at the end of a node, as with recurrent layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        sliding_window: int | None = None,
        state_slots: BlockPool | None = None,
        *,
        sums: bool = False,
    ) -> None:
        self.pool = pool
        self.state_slots = state_slots
        self._sums = sums
        self._whole_nodes = sums or state_slots is not None
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.max_cached_nodes = 1024
        """Nodes that are kept for later windows: a long file would otherwise fill the whole pool with them."""
        self.windows: dict[int, Window] = {}  # by number: those that are not done
        self.live: dict[PrefixNodeSpan, None] = {}  # nodes that leaves need, complete or being computed
        self.cached: dict[PrefixNodeSpan, None] = {}  # complete nodes that no leaf needs, least recently used first
        self._sources: dict[int, dict[int, tuple[PrefixNodeSpan, int]]] = {}
        """By window and item: a node of an earlier window, and the number of positions whose KV can be taken over from it."""
        self._freed_nodes: list[PrefixNodeSpan] = []
        self._copies: list[tuple[int, int]] = []
        self._reserved_blocks = 0  # blocks that the running sequences may still need
        self.childless: set[PrefixNodeSpan] = set()
        """Nodes that leaves need and that have no children now. Each stands for a sequence that begins under it later. If a window does not
        run in depth-first order, only those of its nodes that have never had children."""
        self.unshared_blocks = self.peak_unshared_blocks = 0
        """Blocks that the running sequences and the childless nodes would hold without sharing."""

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Returns the copies of blocks (from, to) that were decided on since the last call, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_freed_nodes(self) -> tuple[PrefixNodeSpan, ...]:
        """Returns the nodes that were freed since the last call: no prompt samples from them any more."""
        nodes = tuple(self._freed_nodes)
        self._freed_nodes.clear()
        return nodes

    # -- across windows

    def add_window(self, w: Window) -> None:
        """Registers a window, and finds the KV of its tree that nodes of earlier windows hold. Its spans take it over when they are opened.

        The match is exact to the token, or with recurrent layers and sums to the end of such a node. Tokens that must run for their logits
        are left out.
        """
        self.windows[w.number] = w
        self._sources[w.number] = {}
        if not w.leaves:
            return
        node_spans = [*self.cached, *(b for b in self.live if b.complete)]
        prompts: list[TokenArray] = [w.leaves[0].tokens] * len(w.leaves)
        for i, leaf in enumerate(w.leaves):
            prompts[int(w.plan.order[i])] = leaf.tokens
        for match in resident_lengths(w.plan, prompts, [b.tokens(0, b.end) for b in node_spans]):
            node_span, i, shared = node_spans[match.path], match.position, match.length
            n = int(w.plan.leaf_parent[i])
            leaf = w.leaves[i]
            start = w.plan.nodes[n].end if n >= 0 else 0
            found = self._offer(w, ~i, node_span, min(shared, leaf.request.scored_from), start)
            while n >= 0:
                node = w.plan.nodes[n]
                found |= self._offer(w, n, node_span, min(shared, node.end, w.wanted[n].start), node.start)
                n = node.parent
            if found and node_span in self.cached:
                self.cached[node_span] = self.cached.pop(node_span)

    def _offer(self, w: Window, item: int, node_span: PrefixNodeSpan, length: int, start: int) -> bool:
        if length <= start or node_span.dropped * self.block_size > self._needed_from(length):
            return False
        if self._whole_nodes and (length < node_span.end or not self.has_state(node_span)):
            return False
        known = self._sources[w.number].get(item)
        # Of equally good nodes the one that ends first is chosen: the new node replaces that one, not a node below it.
        if known is None or (known[1], -known[0].end) < (length, -node_span.end):
            self._sources[w.number][item] = (node_span, length)
        return True

    def images_to_run(self, w: Window) -> Iterator[tuple[Image, tuple[int, ...]]]:
        """Yields the images that the window's leaves need, each with the span (`Span.key`) in whose own tokens it ends, and where; not those that
        nodes of earlier windows hold."""
        sources = self._sources[w.number]
        for i, leaf in enumerate(w.leaves):
            if w.has_ended(i) or not leaf.request.images:
                continue
            path, n = [], int(w.plan.leaf_parent[i])
            while n >= 0:
                path.append(w.plan.nodes[n])
                n = path[-1].parent
            items = [~i, *(node.index for node in path)]
            resident = max((sources[item][1] for item in items if item in sources), default=0)
            for image, end in zip(leaf.request.images, image_ends(leaf.request.images, leaf.tokens), strict=True):
                if end > resident:
                    item = next((node.index for node in path if node.start < end <= node.end), ~i)
                    yield image, (w.number, item, end)

    def remove_window(self, w: Window) -> None:
        """Forgets a window that is done. Its nodes may stay for later ones."""
        self.windows.pop(w.number, None)
        self._sources.pop(w.number, None)

    # -- spans come and go

    def open_node(self, w: Window, n: int, reserve: int) -> PrefixNodeSpan | None:
        """Returns node n with blocks for all its tokens, or None if too few blocks are free.

        With `reserve`, that many blocks must stay free, and half of those that the running sequences may still need.
        """
        node = w.plan.nodes[n]
        parent, leaf = w.node_span(node.parent), w.leaves[node.first]
        node_span = PrefixNodeSpan(
            window=w.number, place=w.place(n), parent=parent, start=node.start, table=[], computed=node.start,
            path=(*parent.path, parent) if parent else (), node=node, wanted=w.wanted[n], prompt=leaf.tokens,
            images=leaf.request.images,
        )  # fmt: skip
        if not self._open(node_span, reserve + self._reserved_blocks // 2 if reserve else 0):
            return None
        self.live[node_span] = None
        self.childless.add(node_span)
        return node_span

    def _not_childless(self, node_span: PrefixNodeSpan) -> None:
        """Notes that the node has children, or that no leaf needs it any more."""
        if node_span in self.childless:
            self.childless.remove(node_span)
            self.unshared_blocks -= _held(node_span)

    def attach(self, seq: GenerationSequence, parent: PrefixNodeSpan | None) -> None:
        """Puts the sequence after its parent node; None for the root."""
        seq.parent = parent
        seq.path = (*parent.path, parent) if parent else ()
        seq.start = seq.computed = parent.end if parent else 0

    def open_sequence(self, seq: GenerationSequence, parent: PrefixNodeSpan | None, reserve: int | None) -> bool:
        """Allocates blocks for the tokens that the sequence has. Returns False if too few are free.

        `reserve` is None if the sequence runs alone. Otherwise `reserve` blocks must stay free, or half of those that the running
        sequences may still need if that is more: a preempted sequence is work done twice.
        """
        self.attach(seq, parent)
        growth = self.blocks_for(seq.max_kv_tokens) - self.blocks_for(seq.end)
        if not self._open(seq, 0 if reserve is None else max(reserve, (self._reserved_blocks + growth) // 2)):
            return False
        self._reserved_blocks += growth
        return True

    def note_unshared(self, scored: Sequence[GenerationSequence]) -> None:
        """Notes the blocks that would be in use without sharing. `scored` are texts that nodes have scored, and that would run too."""
        blocks = self.unshared_blocks + sum(self.blocks_for(seq.end) for seq in scored)
        self.peak_unshared_blocks = max(self.peak_unshared_blocks, blocks)

    def grow(self, seq: GenerationSequence, position: int | None = None) -> bool:
        """Makes room for the token at `position`, by default the sequence's next one. Returns False if no block is free."""
        if (seq.computed if position is None else position) < len(seq.table) * self.block_size:
            return True
        if not self._make_room(1, 0, self.unshared_blocks + 1):
            return False
        seq.table += self.pool.allocate(1)
        self._reserved_blocks -= 1
        self.unshared_blocks += 1
        return True

    def room_for_drafts(self, seq: GenerationSequence, count: int, reserve: int) -> int:
        """Makes room for up to `count` tokens behind the sequence's newest one, from blocks that nothing holds. `reserve` blocks stay free.
        With recurrent layers the sequence gets a second state slot, until `end_verification`.

        Returns the number of tokens that there is room for. The sequence keeps the blocks: what follows its newest token is written there.
        """
        if self.state_slots is not None and not self.state_slots.num_free:
            return 0
        for _ in range(self.blocks_for(seq.end + count) - len(seq.table)):
            held = self.pool.num_used + 1 > max(self.unshared_blocks + 1, self.peak_unshared_blocks)
            if self.pool.num_free <= reserve or held or not self.grow(seq, len(seq.table) * self.block_size):
                break
        count = min(count, len(seq.table) * self.block_size - seq.end)
        if count > 0 and self.state_slots is not None:
            seq.draft_state_slot = self.state_slots.allocate(1)[0]
        return count

    def end_verification(self, seq: GenerationSequence, computed: int | None) -> None:
        """Frees one of the two state slots of a sequence that had drafts: the old one if all drafts were right and `computed` tokens are computed,
        else (None) the new one, and the sequence goes on where it was before.
        """
        assert self.state_slots is not None
        if computed is not None:
            if seq.read_state_slot == seq.state_slot:
                seq.read_state_slot = seq.draft_state_slot
            seq.state_slot, seq.draft_state_slot = seq.draft_state_slot, seq.state_slot
            self.advance(seq, computed)
        self.state_slots.release([seq.draft_state_slot])
        seq.draft_state_slot = -1

    def close(self, seq: GenerationSequence) -> None:
        """Releases a sequence's blocks."""
        self._reserved_blocks -= self.blocks_for(seq.max_kv_tokens) - len(seq.table)
        self.unshared_blocks -= _held(seq)
        self._release(seq)

    def drop_behind(self, span: Span) -> None:
        """Releases the blocks that no query from the last computed position on can see."""
        last = self._needed_from(span.computed) // self.block_size
        if last > span.dropped:
            self.pool.release(span.table[span.dropped : last])
            if isinstance(span, GenerationSequence) or span in self.childless:
                self.unshared_blocks -= last - span.dropped
            span.dropped = last

    def _needed_from(self, computed: int) -> int:
        """First position that a query at position `computed - 1` or later can see."""
        return 0 if self.sliding_window is None else max(0, computed - self.sliding_window)

    def retire(self, node_span: PrefixNodeSpan) -> None:
        """Keeps a node that no leaf needs any more for later windows, while memory lasts."""
        if not self.has_state(node_span):
            self.evict(node_span)
            return
        del self.live[node_span]
        self._not_childless(node_span)
        self._leave_parent(node_span)
        self._freed_nodes.append(node_span)
        node_span.scores.clear()
        node_span.prompt = node_span.prompt[: node_span.end].copy()  # not a view of a larger array
        self.cached[node_span] = None
        if len(self.cached) > self.max_cached_nodes:
            self.evict(next(iter(self.cached)))

    def evict(self, node_span: PrefixNodeSpan) -> None:
        """Releases a node's blocks. Sequences below keep their references to them."""
        self.cached.pop(node_span, None)
        self.live.pop(node_span, None)
        self._not_childless(node_span)
        node_span.evicted = True
        self._freed_nodes.append(node_span)
        self._release(node_span)

    def evict_all(self, kept: Container[PrefixNodeSpan | None] = ()) -> None:
        """Evicts all cached nodes, and of the complete nodes that leaves still need all but those in `kept`."""
        for node_span in [*self.cached, *(b for b in self.live if b.complete and b not in kept)]:
            self.evict(node_span)

    def discard(self) -> None:
        """Forgets the KV of all idle nodes: it cannot be trusted."""
        for node_span in list(self.cached):
            self.evict(node_span)
        self._copies.clear()

    # -- states of recurrent layers

    def has_state(self, node_span: PrefixNodeSpan) -> bool:
        """Whether something can begin at the node's end: the node has its state, or the model has no recurrent layers."""
        return self.state_slots is None or node_span.state_slot >= 0

    def has_state_slots(self, count: int) -> bool:
        """Whether `count` state slots are free, or would be if cached nodes were evicted. True for a model without recurrent layers."""
        return self.state_slots is None or self.state_slots.num_free + len(self.cached) >= count

    def advance(self, span: Span, computed: int) -> None:
        """Notes that a forward is launched which computes the span's positions before `computed`. From now on the span's state is in its own slot."""
        span.computed = computed
        if span.read_state_slot != span.state_slot:
            if span.read_state_slot >= 0 and self.state_slots is not None:
                self.state_slots.release([span.read_state_slot])
            span.read_state_slot = span.state_slot

    def state_slots_of(self, span: Span) -> list[int]:
        """The state slots that the span holds."""
        state_slots = dict.fromkeys((span.state_slot, span.read_state_slot, span.draft_state_slot))
        return [state_slot for state_slot in state_slots if state_slot >= 0]

    def _make_state_slot(self) -> bool:
        """Makes a state slot free. Returns False if that is impossible.

        Evicts cached nodes if need be, then releases the state of a node that nothing begins at any more.
        """
        assert self.state_slots is not None
        while not self.state_slots.num_free and self.cached:
            self.evict(next(iter(self.cached)))
        if not self.state_slots.num_free:
            for node_span in self.live:
                state_slot = node_span.state_slot
                own = node_span.complete and state_slot >= 0 and self.state_slots.num_references(state_slot) == 1
                if own and not self.windows[node_span.window].begins_at(node_span.node.index):
                    self.state_slots.release([state_slot])
                    node_span.state_slot = node_span.read_state_slot = -1
                    break
        return self.state_slots.num_free > 0

    # -- tables

    def _open(self, span: Span, reserve: int) -> bool:
        """Fills the span's table for positions [0, end) so that `reserve` blocks stay free, and gives it a state slot. Returns False
        if memory is short.
        """
        kept, known = self._sources.get(span.window, {}).get(span.item, (None, 0))
        while kept is not None and kept.evicted:  # evicted since the window was added
            kept = kept.successor
            known = min(known, kept.computed if kept else 0)
        gone = kept is None or (self._whole_nodes and (not self.has_state(kept) or known != kept.end))
        if kept is None or gone or known <= span.start or kept.dropped * self.block_size > self._needed_from(known):
            return self._fill(span, span.parent, span.start, reserve)
        # The node to take over must not be evicted to make room.
        if idle := kept in self.cached:
            del self.cached[kept]
        filled = self._fill(span, kept, known, reserve)
        # Otherwise every window would leave one more copy of a prefix that all windows have.
        replaced = filled and isinstance(span, PrefixNodeSpan) and _covers(span, kept, known)
        # With recurrent layers or sums no other node can take over from the middle of the new one.
        replaced = replaced and (not self._whole_nodes or span.end == kept.end)
        if idle and replaced:
            assert isinstance(span, PrefixNodeSpan)
            kept.successor = span
            self.evict(kept)
        elif idle:
            self.cached[kept] = None
            self._make_room(0, 0, self.unshared_blocks)  # it was not there when the others were evicted
        return filled

    def _fill(self, span: Span, source: PrefixNodeSpan | None, known: int, reserve: int) -> bool:
        """Does what `_open` does. Takes the KV of positions before `known` from `source`."""
        if self.state_slots is None:
            return self._fill_table(span, source, known, reserve)
        before = source.state_slot if source is not None else -1
        if before >= 0:  # held first, so that it is not released to make room
            self.state_slots.share([before])
        whole = isinstance(span, PrefixNodeSpan) and known == span.end  # nothing has to run: the state is the source's
        if (whole or self._make_state_slot()) and self._fill_table(span, source, known, reserve):
            span.state_slot = before if whole else self.state_slots.allocate(1)[0]
            span.read_state_slot = before
            return True
        if before >= 0:
            self.state_slots.release([before])
        return False

    def _fill_table(self, span: Span, source: PrefixNodeSpan | None, known: int, reserve: int) -> bool:
        size = self.block_size
        parent = span.parent
        first = span.start // size
        full, tail = divmod(known, size)  # blocks taken over whole, and tokens of the next one
        wanted = self.blocks_for(span.end) - full
        unshared = self.unshared_blocks + self.blocks_for(span.end) - (_held(parent) if parent in self.childless else 0)

        def claimed() -> list[PrefixNodeSpan]:
            # The span may have the parent's last block if no other child has it.
            if not tail or parent is None or source is not parent:
                return []
            holders = self._tail_holders(parent)
            return [] if self.has_tail_writer(parent, holders) else holders

        holders, cached = claimed(), -1
        while len(self.cached) != cached:
            cached = len(self.cached)
            has_room = self._make_room(wanted - bool(holders), reserve, unshared)
            if len(self.cached) < cached:
                # Evictions may have freed the parent's last block, so that one block less is needed.
                holders = claimed()
        if not has_room:
            return False
        above = parent.table[:first] if parent else []
        taken = source.table[first:full] if source else []
        dropped = max(parent.dropped if parent else 0, source.dropped if source else 0)
        self.pool.share([*above, *taken][dropped:])
        tail_block = source.table[full] if source and tail else -1
        if isinstance(span, PrefixNodeSpan) and span.end // size > first:
            # A node with full blocks of its own should have them in one run. What holds the parent's last block gets the copy instead.
            self.pool.release([tail_block] * len(holders))
            fresh = self.pool.allocate_run(wanted)
            if holders:
                self._put_tail(holders, fresh[0])
        elif holders:
            self.pool.share([tail_block])
            fresh = [tail_block, *self.pool.allocate(wanted - 1)]
        else:
            fresh = self.pool.allocate(wanted)
        if tail and fresh[0] != tail_block:
            self._copies.append((tail_block, fresh[0]))
        span.table = [*above, *taken, *fresh]
        span.dropped = dropped
        span.computed = known
        span.source = source if self._sums else None
        if parent is not None:
            self._not_childless(parent)
            parent.children[span] = None
            if source is not parent:  # else a child has the parent's last block
                self._share_tail(parent)
        self.unshared_blocks += _held(span)
        return True

    def has_tail_writer(self, node_span: PrefixNodeSpan, holders: list[PrefixNodeSpan] | None = None) -> bool:
        """Whether the block with the node's last tokens also holds tokens of a span below the node. `holders`: its `_tail_holders`, if known."""
        holders = self._tail_holders(node_span) if holders is None else holders
        index = node_span.end // self.block_size
        return bool(holders) and self.pool.num_references(node_span.table[index]) > len(holders)

    def _tail_holders(self, node_span: PrefixNodeSpan) -> list[PrefixNodeSpan]:
        """The node and those above it that hold the block with its last tokens. None if that block is full or was released."""
        index, tail = divmod(node_span.end, self.block_size)
        if not tail or not node_span.dropped <= index < len(node_span.table):
            return []
        block = node_span.table[index]
        holders = [node_span]
        for span in reversed(node_span.path):
            if span.end <= index * self.block_size:
                break  # it ends in an earlier block, and so do the nodes above it
            if span.dropped <= index < len(span.table) and span.table[index] == block:
                holders.append(span)
        return holders

    def _put_tail(self, holders: list[PrefixNodeSpan], block: int) -> None:
        """Puts another block, which holds the same tokens, into the tables in place of the `holders`' last one. They do not hold that one any more."""
        self.pool.share([block] * len(holders))
        for node_span in holders:
            node_span.table[-1] = block

    def _share_tail(self, node_span: PrefixNodeSpan) -> None:
        """Frees a node's last block if no child has it and a child has a copy of its tokens, which the node can use as well."""
        holders, index = self._tail_holders(node_span), node_span.end // self.block_size
        if not holders or self.has_tail_writer(node_span, holders):
            return
        for child in node_span.children:
            if child.dropped <= index:
                self.pool.release([node_span.table[index]] * len(holders))
                self._put_tail(holders, child.table[index])
                return

    def _leave_parent(self, span: Span) -> None:
        """Notes that the span is not a child that runs any more."""
        parent = span.parent
        if parent is not None and span in parent.children:
            del parent.children[span]
            if not parent.children and parent in self.live and self.windows[parent.window].depth_first:
                self.childless.add(parent)
                self.unshared_blocks += _held(parent)

    def _release(self, span: Span) -> None:
        self.pool.release(span.table[span.dropped :])
        span.table, span.dropped = [], 0
        self._leave_parent(span)
        if span.parent is not None:
            self._share_tail(span.parent)
        if self.state_slots is not None:
            self.state_slots.release(self.state_slots_of(span))
            span.state_slot = span.read_state_slot = span.draft_state_slot = -1

    def _make_room(self, blocks: int, reserve: int, unshared: int) -> bool:
        """Evicts cached nodes until `blocks` and `reserve` are free, and until the blocks in use will not be more than have ever been
        needed without sharing, where `unshared` are needed now. Returns False if too few blocks are free then."""
        limit = max(unshared, self.peak_unshared_blocks)
        while self.cached and (self.pool.num_free < blocks + reserve or self.pool.num_used + blocks > limit):
            self.evict(next(iter(self.cached)))
        return self.pool.num_free >= blocks + reserve


def _held(span: Span) -> int:
    """Number of blocks that the span would hold without sharing."""
    return len(span.table) - span.dropped


def _covers(node_span: PrefixNodeSpan, kept: PrefixNodeSpan, known: int) -> bool:
    """Whether `node_span` has all tokens of `kept`, from which it has taken over `known`."""
    last = kept.end - 1
    return known >= last and node_span.end > last and bool(node_span.prompt[last] == kept.prompt[last])
