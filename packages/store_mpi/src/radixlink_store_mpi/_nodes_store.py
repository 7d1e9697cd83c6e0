"""`NodesPageStore`: the pages of this node's segment, and those of other nodes by way of it.

Theory of operation. Whatever a call asks for is looked for in the local segment first; only what
misses there is asked of the other nodes, all keys of a call in one message a node. A page of another
node is never read in place: it is put into the local segment, and from then on it is a local page
with a slot, a generation and checksums of its own, which later calls find without asking anybody.

Whom it asks: all other nodes, in one round. There is no directory of who has what, so none to keep
right or to lose: a lookup of n keys costs 32 * n bytes to each of the other nodes, and one round trip
whatever their number. A page is then fetched from one node that has it, the first after this one in a
ring, so that not all fetch from the same. Where there is but one other node it is asked for the pages
at once. A home node for each page (by hash) would save the other nodes a request each, but either
pages would have to be put on their home, at the speed of the network instead of memory, or every put
would have to leave word there; and a home that is gone would hide pages that are still held.

`put` asks as well: the first writer wins among all nodes, and what another node has is not stored
twice. A node that does not answer is as one that has nothing: the page is written here then, and two
nodes that write a page at once both keep theirs. That is the contract's "first writer wins" but for
such a race; a page's bytes are the same whoever writes it, and a handle is one node's slot.

No lock of the segment is held while other nodes are waited for.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from radixlink_contracts import PageBits
from radixlink_store_mpi._pages import assign, keys_of, rows_of, spread, without
from radixlink_store_mpi._wire import Question

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageKeys, PoolLayout
    from radixlink_store.counters import StoreCounters
    from radixlink_store.segments import SegmentPageStore
    from radixlink_store_mpi._asking import Asking
    from radixlink_store_mpi._wire import Answer
    from radixlink_store_mpi.counters import NodeCounters, NodeTally


class NodesPageStore:
    """Pages of this node and of others. Also `Touchable`.

    Thread: any, several at once.
    Cost: of a page that is there, the segment's; of one that is not, a round trip to other nodes.
    """

    def __init__(self, local: SegmentPageStore, asking: Asking, tally: NodeTally) -> None:
        """Serve what is in the segment and what others have.

        Args:
            local: The segment of this node; closed with this store.
            asking: Asks the other nodes.
            tally: Counts what was fetched, for all stores of a factory.
        """
        self._local: Final = local
        self._asking: Final = asking
        self._tally: Final = tally

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._local.layout

    @property
    def num_slots(self) -> int:
        """Pages that fit on this node.

        Raises:
            StaleHandleError: The store was closed.
        """
        return self._local.num_slots

    @property
    def counters(self) -> StoreCounters:
        """What this opener did so far in the local segment; also after `close`."""
        return self._local.counters

    @property
    def node_counters(self) -> NodeCounters:
        """What its factory asked of other nodes so far, and answered them; also after `close`."""
        return self._tally.counters

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there, here or on a node that answers. Changes no recency."""
        return self._also_elsewhere(Question.CONTAINS, keys, self._local.contains(keys))

    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency where the pages are; say which are there."""
        return self._also_elsewhere(Question.TOUCH, keys, self._local.touch(keys))

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load; those of other nodes become local.

        A page that finds no room here is a miss.

        Raises:
            ContractError: `ttl_s` is not a number of at least 0.
        """
        handles = self._local.open(keys, ttl_s)
        missing = without(keys, handles.found)
        if missing.mask and self._fetch(keys_of(keys, missing)):
            # Handles are of the slots that pages are in now.
            return self._local.open(keys, ttl_s)
        return handles

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found; asks nobody.

        Raises: as the segment's store says.
        """
        return self._local.read(handles, layer_range, out)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages here, but for those that another node has.

        Raises: as the segment's store says.
        """
        views = [memoryview(part) for part in parts]
        row_bytes = self.layout.range_bytes
        fits = len(views) == len(row_bytes) and all(
            view.c_contiguous and view.nbytes == len(keys) * size
            for view, size in zip(views, row_bytes, strict=True)
        )
        missing = without(keys, self._local.contains(keys))
        if not fits or not missing.mask:
            # The segment's store says what does not fit.
            return self._local.put(keys, parts)
        lacking = keys_of(keys, missing)
        elsewhere = spread(missing, self._union(Question.TOUCH, lacking))
        if not elsewhere.mask:
            return self._local.put(keys, parts)
        here = without(keys, elsewhere)
        rows = [
            rows_of(view.cast("B"), size, here) for view, size in zip(views, row_bytes, strict=True)
        ]
        stored = spread(here, self._local.put(keys_of(keys, here), rows))
        return PageBits(stored.mask | elsewhere.mask, len(keys))

    def close(self) -> None:
        """Let go of the segment; the pages stay, and this node goes on serving them. Idempotent."""
        self._local.close()

    def _also_elsewhere(self, question: Question, keys: PageKeys, here: PageBits) -> PageBits:
        """Which pages are here or elsewhere, asking only for those that are not here."""
        missing = without(keys, here)
        if not missing.mask:
            return here
        elsewhere = spread(missing, self._union(question, keys_of(keys, missing)))
        return PageBits(here.mask | elsewhere.mask, len(keys))

    def _union(self, question: Question, keys: PageKeys) -> PageBits:
        """Which pages any other node has."""
        found = self._asking.holders(question, keys).values()
        return PageBits(reduce(or_, (bits.mask for bits in found), 0), len(keys))

    def _fetch(self, keys: PageKeys) -> int:
        """Make pages of other nodes local.

        Returns:
            How many became local.

        Cost: one round for each answer's worth of pages, and one more for pages that were there and
            could not be sent.
        """
        count = len(keys)
        everything = PageBits.all(count).mask
        nodes = self._asking.nodes
        if len(nodes) == 1:
            holders = dict.fromkeys(nodes, everything)
        else:
            bits = self._asking.holders(Question.CONTAINS, keys)
            holders = {node: found.mask for node, found in bits.items()}
        wanted, fetched = everything, 0
        while asked := assign(wanted, holders, self._asking.rank):
            pages_of = {node: PageBits(mask, count) for node, mask in asked.items()}
            answers = self._asking.fetch(
                {node: keys_of(keys, pages) for node, pages in pages_of.items()}
            )
            for node, pages in pages_of.items():
                if node not in answers:
                    del holders[node]
                    continue
                answer = answers[node]
                left = _left(answer)
                holders[node] &= ~pages.mask | spread(pages, left).mask
                came = spread(pages, spread(_sent(answer), answer.right))
                wanted &= ~came.mask
                fetched += self._keep(keys_of(keys, came), answer)
        return fetched

    def _keep(self, keys: PageKeys, answer: Answer) -> int:
        """Put the right rows of an answer into the segment.

        Returns:
            How many found room.
        """
        if not len(keys):
            return 0
        parts = [
            rows_of(column, size, answer.right)
            for column, size in zip(answer.columns, self.layout.range_bytes, strict=True)
        ]
        stored = self._local.put(keys, parts).total
        self._tally.add(fetched=stored, no_room=len(keys) - stored)
        return stored


def _sent(answer: Answer) -> PageBits:
    """Which of the pages asked for the rows of an answer are."""
    rows = answer.right.count
    pages = list(answer.found)[:rows]
    return PageBits(sum(1 << page for page in pages), answer.found.count)


def _left(answer: Answer) -> PageBits:
    """Which of the pages asked for are there, and can be asked for again."""
    return PageBits(answer.found.mask & ~_sent(answer).mask, answer.found.count)
