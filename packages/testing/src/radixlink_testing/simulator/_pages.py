"""Pages of the device: what their bytes must be, whose they are, and who reads them now.

The bytes of a page, a window's page or a state are a function of its sequence up to its end, its
namespace, the pool, the rank and the layer range. None of it is a hash of the code under test, so
that a wrong key, a window at another place or a state of another boundary shows as wrong bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import PoolName
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from radixlink_contracts import OperationId, RadixKey
    from radixlink_testing.simulator._rules import Referee

#: What is in a slot that nobody has written: no page has such bytes.
POISON: Final = b"poison"
_MARK_BYTES: Final = 8
_marks: Final[dict[tuple[bytes, bytes], bytes]] = {}
_NUMBERS: Final = {PoolName.KV: 0, PoolName.SWA: 1, PoolName.MAMBA: 2}


def marks_of(key: RadixKey, page_size: int) -> list[bytes]:
    """What tells each whole page of a sequence from all others."""
    namespace = key.namespace
    mark = repr((namespace.extra_key, namespace.cache_salt)).encode()
    tokens = key.token_ids.tobytes()
    width = page_size * 8
    marks: list[bytes] = []
    for start in range(0, len(tokens) - width + 1, width):
        link = (mark, tokens[start : start + width])
        known = _marks.get(link)
        if known is None:
            seed = len(mark).to_bytes(1, "little") + mark + link[1]
            known = _marks[link] = blake2b(seed, digest_size=_MARK_BYTES).digest()
        marks.append(known)
        mark = known
    return marks


class Holder(enum.IntEnum):
    """Who has a page of the device."""

    FREE = enum.auto()
    #: Allocated by the code under test, which has not said for what.
    ALLOCATED = enum.auto()
    ENGINE = enum.auto()
    LOAD = enum.auto()
    TREE = enum.auto()
    #: Was in a load or a request when the tree took another's in its place.
    UNADOPTED = enum.auto()
    #: The tree gave it up.
    EVICTED = enum.auto()


@attrs.frozen
class Hold:
    """Who has a page, and for what.

    Attributes:
        holder: Who.
        operation: The load that it is for, or was.
        mark: What is, or will be, in it.
    """

    holder: Holder
    operation: OperationId | None = None
    mark: bytes = b""


_FREE: Final = Hold(Holder.FREE)
_ALLOCATED: Final = Hold(Holder.ALLOCATED)
_ENGINE: Final = Hold(Holder.ENGINE)
_EVICTED: Final = Hold(Holder.EVICTED)


class DevicePages:
    """The pages of one pool on one rank, or its states.

    Thread: any; one at a time.
    """

    def __init__(
        self,
        rank: int,
        pool: PoolName,
        num_pages: int,
        num_layers: int,
        referee: Referee,
        *,
        bytes_of: int,
    ) -> None:
        """Start with every page free.

        Args:
            rank: Whose.
            pool: Which.
            num_pages: Pages, or states.
            num_layers: Layer ranges of a page.
            referee: Hears what is wrong.
            bytes_of: The rank that has the same bytes, or this one.
        """
        self.rank = rank
        self.pool = pool
        self.num_layers = num_layers
        self._referee = referee
        number = _NUMBERS[pool]
        self._heads = [bytes((number, bytes_of, layer)) for layer in range(num_layers)]
        self._whole: dict[bytes, tuple[bytes, ...]] = {}
        self._empty = (POISON,) * num_layers
        self._layers = [self._empty] * num_pages
        self.holds = [_FREE] * num_pages
        #: How many pages each holder has.
        self.count = Counter({Holder.FREE: num_pages})
        #: Of each page, how many batches that run read or write it.
        self._busy = [0] * num_pages

    def bytes_of(self, mark: bytes) -> tuple[bytes, ...]:
        """What the layer ranges of a page have on this rank."""
        whole = self._whole.get(mark)
        if whole is None:
            whole = self._whole[mark] = tuple([head + mark for head in self._heads])
        return whole

    # -- who has what ------------------------------------------------------------------------------

    def _give(self, page: int, hold: Hold) -> None:
        """A page is somebody's from now on."""
        holds, count = self.holds, self.count
        count[holds[page].holder] -= 1
        count[hold.holder] += 1
        holds[page] = hold

    def of(self, *holders: Holder) -> set[int]:
        """The pages that these have."""
        return {page for page, hold in enumerate(self.holds) if hold.holder in holders}

    def staged_by(self) -> Counter[OperationId]:
        """How many pages each load has."""
        return Counter(
            hold.operation
            for hold in self.holds
            if hold.holder is Holder.LOAD and hold.operation is not None
        )

    def allocated(self, pages: Iterable[int]) -> None:
        """The allocator dealt these out."""
        for page in pages:
            if self.holds[page] is not _FREE:
                self._breach(Rule.LANDED, page, "is dealt out, and")
            self._give(page, _ALLOCATED)

    def taken(self, pages: Iterable[int]) -> None:
        """The engine has them for a request."""
        for page in pages:
            if self.holds[page] is not _ALLOCATED:
                self._breach(Rule.LANDED, page, "is a request's to write to, and")
            self._give(page, _ENGINE)

    def staged(self, operation: OperationId, pages: Sequence[int], marks: Sequence[bytes]) -> None:
        """A load has them."""
        for page, mark in zip(pages, marks, strict=True):
            if self.holds[page] is not _ALLOCATED:
                self._breach(Rule.LANDED, page, f"is a target of load {operation}, and")
            self._give(page, Hold(Holder.LOAD, operation, mark))

    def put_beside(self, page: int, mark: bytes) -> None:
        """A window's page is beside a full page that has, or will have, this mark; empty: unknown."""
        own = self.holds[page].mark
        if own and mark and own != mark:
            self._breach(Rule.PAGES, page, "is put beside a full page of another place, and")

    def adopted(self, page: int, mark: bytes) -> None:
        """The tree took it: from now on everybody may read it."""
        hold = self.holds[page]
        if hold.holder not in {Holder.ENGINE, Holder.LOAD}:
            self._breach(Rule.LANDED, page, "is taken into the tree, and")
        elif hold.mark and hold.mark != mark:
            self._breach(Rule.PAGES, page, "is taken into the tree at another place, and")
        self._give(page, Hold(Holder.TREE, hold.operation, mark))
        self.look(page, mark, "is published")

    def unadopted(self, page: int) -> None:
        """The tree has another in its place."""
        hold = self.holds[page]
        if hold.holder is not Holder.TREE:
            self._give(page, Hold(Holder.UNADOPTED, hold.operation))

    def left_over(self, operation: OperationId) -> None:
        """What a load still has when it is published, the tree has of others, for the load to free."""
        for page, hold in enumerate(self.holds):
            if hold.holder is Holder.LOAD and hold.operation == operation:
                self._give(page, Hold(Holder.UNADOPTED, operation))

    def left_tree(self, page: int, operation: OperationId | None = None) -> None:
        """The tree gave it up, to a load that has to free it where there was one."""
        if self.holds[page].holder is not Holder.TREE:
            self._breach(Rule.RECEIPTS, page, "is evicted, and")
        self._give(page, _EVICTED if operation is None else Hold(Holder.EVICTED, operation))

    def forget_restored(self, marks: Collection[bytes] | None = None) -> None:
        """These pages of the tree may be offered to the store, whoever brought them; None: all."""
        for page, hold in enumerate(self.holds):
            known = hold.holder is Holder.TREE and hold.operation is not None
            if known and (marks is None or hold.mark in marks):
                self._give(page, Hold(Holder.TREE, None, hold.mark))

    def freed(self, pages: Iterable[int]) -> None:
        """They went back to the allocator."""
        for page in pages:
            holder = self.holds[page].holder
            if holder is Holder.FREE or holder is Holder.TREE:
                self._breach(Rule.LANDED, page, "is freed, and")
            if self._busy[page]:
                self._breach(Rule.LANDED, page, "is freed while a batch that runs reads it, and")
            self._give(page, _FREE)
            self._layers[page] = self._empty

    # -- what is in them ---------------------------------------------------------------------------

    def launched(self, pages: Iterable[int]) -> None:
        """A batch that reads or writes these runs."""
        for page in pages:
            self._busy[page] += 1

    def retired(self, pages: Iterable[int]) -> None:
        """It has ended."""
        for page in pages:
            self._busy[page] -= 1

    def compute(self, page: int, mark: bytes) -> None:
        """A forward wrote its own page."""
        if self.holds[page].holder is not Holder.ENGINE:
            self._breach(Rule.LANDED, page, "is written by a forward, and")
        self._layers[page] = self.bytes_of(mark)

    def copied(self, source: int, target: int) -> None:
        """A state was copied."""
        if self.holds[source].holder is not Holder.TREE:
            self._breach(Rule.RECEIPTS, source, "is forked, and")
        self._layers[target] = self._layers[source]

    def write(self, operation: OperationId, page: int, layer: int, data: bytes) -> None:
        """A load wrote one layer range of one of its pages."""
        hold = self.holds[page]
        if hold.operation != operation or hold.holder not in {Holder.LOAD, Holder.UNADOPTED}:
            self._breach(Rule.FRAMES, page, f"is written late by load {operation}, and")
        elif hold.mark and data != self.bytes_of(hold.mark)[layer]:
            self._breach(Rule.PAGES, page, f"gets another page's bytes by load {operation}, and")
        layers = self._layers[page]
        self._layers[page] = (*layers[:layer], data, *layers[layer + 1 :])

    def gather(self, page: int, layer: int, operation: OperationId) -> bytes:
        """An offload read one layer range of a page of the tree."""
        hold = self.holds[page]
        data = self._layers[page][layer]
        if hold.holder is not Holder.TREE:
            self._breach(Rule.RECEIPTS, page, f"is read by offload {operation}, and")
        elif data != self.bytes_of(hold.mark)[layer]:
            self._breach(
                Rule.LANDED, page, f"goes to the store with wrong bytes ({operation}), and"
            )
        return data

    def right(self, page: int, layer: int, mark: bytes) -> bool:
        """True where one layer range of a page is what it should be."""
        return self._layers[page][layer] == self.bytes_of(mark)[layer]

    def look(self, page: int, mark: bytes, why: str) -> None:
        """Compare a page with what it should be.

        What nobody wrote, or another owner has by now, should not have been read; what is somebody
        else's in its owner's place is no page of its key.
        """
        layers, whole = self._layers[page], self.bytes_of(mark)
        if layers is whole or layers == whole:
            return
        wrong = next(layer for layer, data in enumerate(layers) if data != whole[layer])
        own = self.holds[page].mark == mark and layers[wrong] is not POISON
        rule = Rule.PAGES if own else Rule.LANDED
        self._breach(rule, page, f"{why} with wrong bytes in layer {wrong}, and")

    def _breach(self, rule: Rule, page: int, what: str) -> None:
        hold = self.holds[page]
        operation = "" if hold.operation is None else f" of operation {hold.operation}"
        self._referee.breach(
            rule,
            f"rank {self.rank}: {self.pool} page {page} {what} it is {hold.holder.name}{operation}",
        )
