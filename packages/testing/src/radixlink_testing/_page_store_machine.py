"""A Hypothesis machine that drives a page store against a dict of what was written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_testing._places import SUITE_LAYOUT, read_page_range
from radixlink_testing.pages import page_key, page_keys, page_parts, range_bytes

if TYPE_CHECKING:
    from radixlink_contracts import PageHandles, PageStore
    from radixlink_testing._places import StorePlace

_NUM_PAGES: Final = 40
_ALL: Final = page_keys(range(_NUM_PAGES))
_PAGE: Final = st.integers(0, _NUM_PAGES - 1)
_PAGES: Final = st.lists(_PAGE, min_size=1, max_size=12, unique=True)
_OPENERS: Final = st.integers(0, 1)
_RANGES: Final = st.integers(0, len(SUITE_LAYOUT.range_bytes) - 1)
_FLOOD: Final = 48


@attrs.frozen(kw_only=True, eq=False)
class _Opened:
    """Handles, and which write of each page they must be of.

    Attributes:
        handles: What the store gave.
        writes: The write of each page at that time; 0 for one that was not there.
    """

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

    def make_place(self) -> StorePlace:
        """Make an empty place."""
        raise NotImplementedError

    def discard_place(self, place: StorePlace) -> None:
        """Remove a place and what is in it; all its stores are closed."""

    @initialize()
    def make(self) -> None:
        """Two openers of one place."""
        self._place = self.make_place()
        self._stores = [self._place.open(SUITE_LAYOUT) for _ in range(2)]

    @rule(opener=_OPENERS, pages=_PAGES)
    def put(self, opener: int, pages: list[int]) -> None:
        """Put pages; those that were there keep their bytes."""
        self._turn += 1
        keys = page_keys(pages)
        store = self._stores[opener]
        before = store.contains(keys)
        stored = store.put(keys, page_parts(keys, SUITE_LAYOUT, str(self._turn)))
        assert before & stored == before
        assert self._flooded or stored.complete
        for page in stored:
            if page not in before:
                self._writes[keys[page]] = self._turn
                self._damaged.pop(keys[page], None)

    @rule(opener=_OPENERS)
    def flood(self, opener: int) -> None:
        """Put many other pages, so that some are evicted."""
        self._turn += 1
        self._flooded = True
        keys = page_keys(range(_FLOOD), f"flood {self._turn}")
        self._stores[opener].put(keys, page_parts(keys, SUITE_LAYOUT))

    @rule(target=opened, opener=_OPENERS, pages=_PAGES)
    def open(self, opener: int, pages: list[int]) -> _Opened:
        """Open pages for later reads."""
        keys = page_keys(pages)
        handles = self._stores[opener].open(keys, 0.0)
        assert handles.found == self._stores[1 - opener].contains(keys)
        writes = [
            self._writes[key] if page in handles.found else 0 for page, key in enumerate(keys)
        ]
        return _Opened(handles=handles, writes=tuple(writes))

    @rule(opener=_OPENERS, opened=opened, layer_range=_RANGES)
    def read(self, opener: int, opened: _Opened, layer_range: int) -> None:
        """Read by handles, old ones or new: the bytes of that write, or a miss."""
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
                assert page not in self._stores[opener].contains(handles.keys)
                self._forget(key)

    @rule(opener=_OPENERS, page=_PAGE, layer_range=_RANGES)
    def damage(self, opener: int, page: int, layer_range: int) -> None:
        """Flip a bit of a page that is there."""
        key = page_key(page)
        if self._stores[opener].contains(page_keys([page])).complete and key not in self._damaged:
            assert self._place is not None
            self._place.corrupt(SUITE_LAYOUT, key, layer_range)
            self._damaged[key] = layer_range

    @rule(opener=_OPENERS)
    def open_again(self, opener: int) -> None:
        """Close a store and open it again: the pages stay."""
        assert self._place is not None
        self._stores[opener].close()
        self._stores[opener] = self._place.open(SUITE_LAYOUT)

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

    def _forget(self, key: bytes) -> None:
        del self._writes[key], self._damaged[key]
