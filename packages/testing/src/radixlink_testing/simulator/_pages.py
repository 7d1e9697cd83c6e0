"""Pages: what their bytes must be, the store that keeps them, and who has which on the device.

A page's bytes are a function of its sequence up to its end, its namespace, the rank and the layer
range. None of it is a hash of the code under test, so that a wrong key shows as wrong bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from zlib import crc32

import attrs

from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from radixlink_contracts import OperationId, RadixKey
    from radixlink_testing.simulator._rules import Referee

#: What is in a slot that nobody has written: no page has such bytes.
POISON: Final = b"poison"
_MARK_BYTES: Final = 8
_marks: Final[dict[tuple[bytes, bytes], bytes]] = {}


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


def page_bytes(mark: bytes, rank: int, layer: int) -> bytes:
    """What one layer range of a page has on a rank."""
    return bytes((rank, layer)) + mark


@attrs.define(kw_only=True, eq=False)
class _Stored:
    """A page in the store.

    Attributes:
        layers: Its bytes, by layer range.
        sums: Their checksums, as they were written.
    """

    layers: list[bytes]
    sums: tuple[int, ...]


class Shelf:
    """One rank's shard of the store: what a page store does, and what may befall it.

    Thread: any; one at a time.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._pages: dict[bytes, _Stored] = {}
        #: Puts that find no room.
        self.full = 0

    def __contains__(self, key: bytes) -> bool:
        """True while a page is here."""
        return key in self._pages

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of the pages, from the first, are here."""
        count = 0
        for key in keys:
            if key not in self._pages:
                break
            count += 1
        return count

    def read(self, key: bytes, layer: int, *, verify: bool = True) -> bytes | None:
        """One layer range of a page; None where it is gone, or is not what was written."""
        stored = self._pages.get(key)
        if stored is None:
            return None
        data = stored.layers[layer]
        return None if verify and crc32(data) != stored.sums[layer] else data

    def put(self, key: bytes, layers: Sequence[bytes]) -> bool:
        """Store a page; False where there is no room."""
        if self.full:
            self.full -= 1
            return False
        self._pages[key] = _Stored(layers=list(layers), sums=tuple(map(crc32, layers)))
        return True

    def lose(self, which: int) -> bool:
        """Some page is gone. False where there is none."""
        if not self._pages:
            return False
        del self._pages[self._pick(which)]
        return True

    def flip(self, which: int) -> bool:
        """A bit of some page has changed. False where there is none."""
        if not self._pages:
            return False
        layers = self._pages[self._pick(which)].layers
        layer = which % len(layers)
        layers[layer] = bytes((layers[layer][0] ^ 0x80,)) + layers[layer][1:]
        return True

    def _pick(self, which: int) -> bytes:
        return list(self._pages)[which % len(self._pages)]


class Holder(enum.Enum):
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
_EVICTED: Final = Hold(Holder.EVICTED)


class DevicePages:
    """The pages of one pool on one rank: what is in them, whose they are, and who reads them now.

    Thread: any; one at a time.
    """

    def __init__(self, rank: int, num_pages: int, num_layers: int, referee: Referee) -> None:
        """Start with every page free."""
        self.rank = rank
        self.num_layers = num_layers
        self._referee = referee
        self._empty = (POISON,) * num_layers
        self._layers = [list(self._empty) for _ in range(num_pages)]
        self.holds = [_FREE] * num_pages
        #: Pages that batches which run read or write, and how many of them.
        self._busy: Counter[int] = Counter()

    # -- who has what ------------------------------------------------------------------------------

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
            self.holds[page] = _ALLOCATED

    def taken(self, pages: Iterable[int]) -> None:
        """The engine has them for a request."""
        hold = Hold(Holder.ENGINE)
        for page in pages:
            self.holds[page] = hold

    def staged(self, operation: OperationId, pages: Sequence[int], marks: Sequence[bytes]) -> None:
        """A load has them."""
        for page, mark in zip(pages, marks, strict=True):
            if self.holds[page] is not _ALLOCATED:
                self._breach(Rule.LANDED, page, f"is a target of load {operation}, and")
            self.holds[page] = Hold(Holder.LOAD, operation, mark)

    def adopted(self, pages: Sequence[int], marks: Sequence[bytes]) -> None:
        """The tree took them: from now on everybody may read them."""
        for page, mark in zip(pages, marks, strict=True):
            hold = self.holds[page]
            if hold.holder not in {Holder.ENGINE, Holder.LOAD}:
                self._breach(Rule.LANDED, page, "is taken into the tree, and")
            self.holds[page] = Hold(Holder.TREE, hold.operation, mark)
            self.look(page, mark, Rule.LANDED, "is published")

    def unadopted(self, pages: Iterable[int]) -> None:
        """The tree has others in their place."""
        for page in pages:
            hold = self.holds[page]
            if hold.holder is not Holder.TREE:
                self.holds[page] = Hold(Holder.UNADOPTED, hold.operation)

    def left_tree(self, pages: Iterable[int]) -> None:
        """The tree gave them up."""
        for page in pages:
            if self.holds[page].holder is not Holder.TREE:
                self._breach(Rule.RECEIPTS, page, "is evicted, and")
            self.holds[page] = _EVICTED

    def forget_restored(self, marks: set[bytes] | None) -> None:
        """These pages of the tree may be offered to the store, whoever brought them; None: all."""
        for page, hold in enumerate(self.holds):
            known = hold.holder is Holder.TREE and hold.operation is not None
            if known and (marks is None or hold.mark in marks):
                self.holds[page] = Hold(Holder.TREE, None, hold.mark)

    def freed(self, pages: Iterable[int]) -> None:
        """They went back to the allocator."""
        for page in pages:
            hold = self.holds[page]
            if hold.holder in {Holder.FREE, Holder.TREE}:
                self._breach(Rule.LANDED, page, "is freed, and")
            if self._busy[page]:
                self._breach(Rule.LANDED, page, "is freed while a batch that runs reads it, and")
            self.holds[page] = _FREE
            self._layers[page][:] = self._empty

    # -- what is in them ---------------------------------------------------------------------------

    def launched(self, pages: Iterable[int]) -> None:
        """A batch that reads or writes these runs."""
        self._busy.update(pages)

    def retired(self, pages: Iterable[int]) -> None:
        """It has ended."""
        self._busy.subtract(pages)

    def compute(self, page: int, mark: bytes) -> None:
        """A forward wrote its own page."""
        if self.holds[page].holder is not Holder.ENGINE:
            self._breach(Rule.LANDED, page, "is written by a forward, and")
        for layer in range(self.num_layers):
            self._layers[page][layer] = page_bytes(mark, self.rank, layer)

    def write(self, operation: OperationId, page: int, layer: int, data: bytes) -> None:
        """A load wrote one layer range of one of its pages."""
        hold = self.holds[page]
        if hold.operation != operation or hold.holder not in {Holder.LOAD, Holder.UNADOPTED}:
            self._breach(Rule.FRAMES, page, f"is written late by load {operation}, and")
        elif hold.mark and data != page_bytes(hold.mark, self.rank, layer):
            self._breach(Rule.PAGES, page, f"gets another page's bytes by load {operation}, and")
        self._layers[page][layer] = data

    def gather(self, page: int, layer: int, operation: OperationId) -> bytes:
        """An offload read one layer range of a page of the tree."""
        hold = self.holds[page]
        if hold.holder is not Holder.TREE:
            self._breach(Rule.RECEIPTS, page, f"is read by offload {operation}, and")
        elif self._layers[page][layer] != page_bytes(hold.mark, self.rank, layer):
            self._breach(
                Rule.LANDED, page, f"goes to the store with wrong bytes ({operation}), and"
            )
        return self._layers[page][layer]

    def look(self, page: int, mark: bytes, rule: Rule, why: str) -> None:
        """Compare a page with what it should be."""
        for layer, data in enumerate(self._layers[page]):
            if data != page_bytes(mark, self.rank, layer):
                self._breach(rule, page, f"{why} with wrong bytes in layer {layer}, and")

    def _breach(self, rule: Rule, page: int, what: str) -> None:
        hold = self.holds[page]
        operation = "" if hold.operation is None else f" of operation {hold.operation}"
        self._referee.breach(
            rule, f"rank {self.rank}: page {page} {what} it is {hold.holder.name}{operation}"
        )
