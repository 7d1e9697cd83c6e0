"""A Hypothesis machine that drives a page store against a dict of what was written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, cast

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_testing._places import SUITE_LAYOUT, put_pages, read_page_range
from radixlink_testing.pages import page_key, page_keys, range_bytes

if TYPE_CHECKING:
    from radixlink_contracts import PageHandles, PageKeys, PageStore, Touchable
    from radixlink_testing._places import StorePlace

_NUM_PAGES: Final = 10
_ALL: Final = page_keys(range(_NUM_PAGES))
_PAGE: Final = st.integers(0, _NUM_PAGES - 1)
_PAGES: Final = st.lists(_PAGE, min_size=1, max_size=6)
"""With duplicates, sometimes."""
_OPENERS: Final = st.integers(0, 1)
_RANGES: Final = st.integers(0, len(SUITE_LAYOUT.range_bytes) - 1)
_FLOOD: Final = 72


@attrs.frozen(kw_only=True, eq=False)
class _Opened:
    """Handles, and which write of each page they must be of.

    Attributes:
        opener: Who opened them.
        pages: Their numbers.
        handles: What the store gave.
        writes: The write of each page at that time; 0 for one that was not there.
    """

    opener: int
    pages: list[int]
    handles: PageHandles
    writes: tuple[int, ...]


class PageStoreMachine(RuleBasedStateMachine):
    """Subclass it, give `make_place`, and run its `TestCase`, whose `settings` are yours to set.

    Every write of a page has bytes of its own, unlike in real life, so that a handle that reads
    another write than the one it was opened for is seen. A store may forget pages when more were
    put than fit; before that it must not.

    Thread: one at a time; what threads do to each other is in the suite.
    """

    opened: ClassVar[Bundle[_Opened]] = Bundle("opened")

    #: Whether the handles of one opener are read by the other too. Not where each has a memory of
    #: its own, and the place opens on the memory of the one that was closed last.
    handles_travel: ClassVar[bool] = True

    #: Whether a page may get another place while it is there, as from memory to a file and back. Then
    #: handles of its old place are a miss, and say nothing of damage in the new one.
    pages_move: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._place: StorePlace | None = None
        self._stores: list[PageStore] = []
        #: Which write of each page is the last that the store took.
        self._writes: dict[bytes, int] = {}
        #: Pages that were damaged since that write, with the layer range.
        self._damaged: dict[bytes, int] = {}
        self._turn = 0
        self._flooded = False

    @property
    def place(self) -> StorePlace:
        """The place of this run."""
        assert self._place is not None
        return self._place

    def make_place(self) -> StorePlace:
        """Make an empty place."""
        raise NotImplementedError

    def discard_place(self, place: StorePlace) -> None:
        """Remove a place and what is in it; all its stores are closed."""

    @initialize()
    def make(self) -> None:
        """Two openers of one place, with half of the pages there."""
        self._place = self.make_place()
        self._stores = [self.place.open(SUITE_LAYOUT) for _ in range(2)]
        self.put(0, list(range(0, _NUM_PAGES, 2)), is_read=False)

    @rule(opener=_OPENERS, pages=_PAGES, is_read=st.booleans())
    def put(self, opener: int, pages: list[int], is_read: bool) -> None:  # noqa: FBT001
        """Put pages, and perhaps read them; those that were there keep their bytes."""
        self._turn += 1
        keys = page_keys(pages)
        store = self._stores[opener]
        before = store.contains(keys)
        stored = store.put(keys, self._parts(keys))
        assert before & stored == before
        assert self._flooded or stored.complete
        for page in stored:
            if page not in before:
                self._writes[keys[page]] = self._turn
                self._damaged.pop(keys[page], None)
        if is_read:
            self._read_range(1 - opener, self._open(opener, pages), 0)

    @rule(opener=_OPENERS)
    def flood(self, opener: int) -> None:
        """Put many other pages, so that some are evicted."""
        self._turn += 1
        self._flooded = True
        keys = page_keys(range(_FLOOD), f"flood {self._turn}")
        store = self._stores[opener]
        assert put_pages(store, keys) == store.contains(keys)

    @rule(target=opened, opener=_OPENERS, pages=_PAGES)
    def open(self, opener: int, pages: list[int]) -> _Opened:
        """Open pages for later reads."""
        return self._open(opener, pages)

    @rule(opener=_OPENERS, opened=opened)
    def read(self, opener: int, opened: _Opened) -> None:
        """Read by handles, old ones or new: the bytes of that write, or a miss."""
        for layer_range in range(len(SUITE_LAYOUT.range_bytes)):
            self._read_range(opener, opened, layer_range)

    @precondition(lambda machine: machine.place.gives("corrupt"))
    @rule(opener=_OPENERS, page=_PAGE, layer_range=_RANGES, is_read=st.booleans())
    def damage(self, opener: int, page: int, layer_range: int, is_read: bool) -> None:  # noqa: FBT001
        """Flip a bit of a page that is there, and perhaps read it."""
        key = page_key(page)
        if self._stores[opener].contains(page_keys([page])).complete and key not in self._damaged:
            self.place.corrupt(SUITE_LAYOUT, key, layer_range)
            self._damaged[key] = layer_range
            if is_read:
                self._read_range(opener, self._open(opener, [page]), layer_range)

    @precondition(lambda machine: machine.place.gives("drop"))
    @rule(opener=_OPENERS, page=_PAGE)
    def drop(self, opener: int, page: int) -> None:
        """Remove a page that is there: nobody has it any more, and it may be put again."""
        if self._stores[opener].contains(page_keys([page])).complete:
            self.place.drop(SUITE_LAYOUT, page_key(page))
            del self._writes[page_key(page)]
            self._damaged.pop(page_key(page), None)

    @precondition(lambda machine: machine.place.gives("drop"))
    @rule(opener=_OPENERS, opened=opened)
    def replace(self, opener: int, opened: _Opened) -> None:
        """Remove pages that were opened, put them again, and read by the old handles."""
        for page in set(opened.pages):
            self.drop(opener, page)
        self.put(opener, opened.pages, is_read=False)
        self.read(1 - opener, opened)

    @rule(opener=_OPENERS)
    def open_again(self, opener: int) -> None:
        """Close a store and open it again: the pages stay."""
        self._stores[opener].close()
        self._stores[opener] = self.place.open(SUITE_LAYOUT)

    @invariant()
    def nothing_is_forgotten_for_no_reason(self) -> None:
        """What was put is there, as long as everything fits; what never was is not."""
        written = [page for page, key in enumerate(_ALL) if key in self._writes]
        expected = PageBits.of(written, _NUM_PAGES)
        for store in self._stores:
            there = store.contains(_ALL)
            assert there & expected == there
            assert self._flooded or there == expected

    @override
    def teardown(self) -> None:
        for store in self._stores:
            store.close()
        if self._place is not None:
            self.discard_place(self._place)

    def _open(self, opener: int, pages: list[int]) -> _Opened:
        """Open pages; a store that can touch them says the same of them."""
        keys = page_keys(pages)
        store = self._stores[opener]
        handles = store.open(keys, 0.0)
        assert handles.found == self._stores[1 - opener].contains(keys)
        if hasattr(store, "touch"):
            assert cast("Touchable", store).touch(keys) == handles.found
        writes = [
            self._writes[key] if page in handles.found else 0 for page, key in enumerate(keys)
        ]
        return _Opened(opener=opener, pages=pages, handles=handles, writes=tuple(writes))

    def _read_range(self, opener: int, opened: _Opened, layer_range: int) -> None:
        if not self.handles_travel:
            opener = opened.opener
        handles = opened.handles
        size = SUITE_LAYOUT.range_bytes[layer_range]
        right, rows = read_page_range(self._stores[opener], handles, layer_range)
        assert right & handles.found == right
        for page, key in enumerate(handles.keys):
            current = self._writes.get(key) == opened.writes[page]
            damaged = current and self._damaged.get(key) == layer_range
            if page in right:
                row = rows[page * size : (page + 1) * size]
                assert row == range_bytes(key, layer_range, size, str(opened.writes[page]))
                assert current
                assert not damaged
            elif damaged and page in handles.found:
                # Seen: from now on the page is gone, and may be put again.
                seen = page not in self._stores[opener].contains(handles.keys)
                assert seen or self.pages_move
                if seen:
                    self._forget(key)

    def _parts(self, keys: PageKeys) -> list[bytes]:
        """Pages with the bytes of this turn; a page that comes again has others, which do not count."""
        variants = [
            str(self._turn) if key not in keys.span(0, page) else "again"
            for page, key in enumerate(keys)
        ]
        return [
            b"".join(
                range_bytes(key, layer_range, size, variant)
                for key, variant in zip(keys, variants, strict=True)
            )
            for layer_range, size in enumerate(SUITE_LAYOUT.range_bytes)
        ]

    def _forget(self, key: bytes) -> None:
        del self._writes[key], self._damaged[key]
