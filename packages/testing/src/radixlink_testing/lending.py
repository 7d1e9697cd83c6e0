"""Stores that lend, for tests of what borrows, and what borrows, for tests of stores that lend.

* `LendingPageStore`: any page store as one that lends. What is given back loses its bytes at once.
* `BorrowingPageStore`: a store that lends as a plain page store, so that the suites reach its loans.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import LendingStore, LentFrames, PageFrames, PageStore
from radixlink_contracts.errors import ContractError, StaleHandleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageBits, PageHandles, PageKeys, PoolLayout

GIVEN_BACK: Final = 0xDD
"""What every byte of a loan is once it was given back."""

_GAP_BYTES: Final = 8


class _Frames(LentFrames):
    """Frames of a `LendingPageStore`."""

    def __init__(self, lender: LendingPageStore, num_pages: int) -> None:
        self._lender: Final = lender
        self.num_pages: Final = num_pages
        self._memory: Final = memoryview(bytearray(num_pages * lender.frames.frame_bytes))
        self.served = False
        self.released = False

    @property
    @override
    def buffer(self) -> memoryview:
        return self._memory

    @override
    def release(self) -> None:
        if not self.released:
            self.released = True
            self._memory[:] = bytes([GIVEN_BACK]) * len(self._memory)
            self._lender.num_lent -= 1

    def row(self, page: int, layer_range: int) -> memoryview:
        """One range of one page."""
        frames = self._lender.frames
        start = page * frames.frame_bytes + frames.range_offsets[layer_range]
        return self._memory[start : start + self._lender.layout.range_bytes[layer_range]]


class LendingPageStore(LendingStore):
    """Another store, which has every call, behind one that lends.

    Thread: as the other store's, but loans are made and given back by one thread at a time.
    """

    def __init__(self, inner: PageStore, *, max_pages: int = 1 << 16, max_loans: int = 2) -> None:
        """Lend memory for the pages of a store, which stays its owner's.

        Args:
            inner: The store.
            max_pages: See `PageFrames`.
            max_loans: Loans at once.
        """
        self.inner: Final = inner
        self._max_loans: Final = max_loans
        offsets, end = [], _GAP_BYTES
        for size in inner.layout.range_bytes:
            offsets.append(end)
            end += size + _GAP_BYTES
        self._frames: Final = PageFrames(
            frame_bytes=end, range_offsets=tuple(offsets), max_pages=max_pages
        )
        #: Loans that were not given back.
        self.num_lent = 0
        #: How many pages each loan so far was for.
        self.loans: Final[list[int]] = []

    @property
    @override
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self.inner.layout

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there."""
        return self.inner.contains(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load."""
        return self.inner.open(keys, ttl_s)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found."""
        return self.inner.read(handles, layer_range, out)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages."""
        return self.inner.put(keys, parts)

    @override
    def close(self) -> None:
        """Close the other store."""
        self.inner.close()

    @property
    @override
    def frames(self) -> PageFrames:
        """The ranges one after the other, with gaps."""
        return self._frames

    @override
    def lend(self, num_pages: int) -> LentFrames | None:
        """Lend fresh memory.

        Raises:
            ContractError: It is for no page, or for too many.
        """
        if not 1 <= num_pages <= self._frames.max_pages:
            msg = f"lend: expected 1..{self._frames.max_pages} pages, got {num_pages}"
            raise ContractError(msg)
        if self.num_lent >= self._max_loans:
            return None
        self.num_lent += 1
        self.loans.append(num_pages)
        return _Frames(self, num_pages)

    @override
    def put_lent(self, keys: PageKeys, lent: LentFrames) -> PageBits:
        """Put pages that lie in frames."""
        frames = self._own(lent, len(keys), serves=True)
        parts = [
            b"".join(frames.row(page, layer_range) for page in range(len(keys)))
            for layer_range in range(len(self.layout.range_bytes))
        ]
        return self.inner.put(keys, parts)

    @override
    def open_lent(self, keys: PageKeys, ttl_s: float, lent: LentFrames) -> PageHandles:
        """Open pages; each range is brought when it is verified."""
        self._own(lent, len(keys), serves=True)
        return self.inner.open(keys, ttl_s)

    @override
    def verify(self, handles: PageHandles, layer_range: int, lent: LentFrames) -> PageBits:
        """Read one layer range into the frames."""
        count = len(handles.keys)
        frames = self._own(lent, count, serves=False)
        sizes = self.layout.range_bytes
        size = sizes[layer_range] if 0 <= layer_range < len(sizes) else 0
        column = bytearray(count * size)
        right = self.inner.read(handles, layer_range, column)
        for page in right:
            frames.row(page, layer_range)[:] = column[page * size : (page + 1) * size]
        return right

    def _own(self, lent: LentFrames, num_pages: int, *, serves: bool) -> _Frames:
        """Frames that were lent here, one for each page, and are not given back.

        Raises:
            ContractError: They were not.
            StaleHandleError: They were given back, or served a call before.
        """
        if not isinstance(lent, _Frames) or lent._lender is not self:  # noqa: SLF001 -- its own class
            msg = f"lent: expected frames lent by this store, got {lent!r}"
            raise ContractError(msg)
        if lent.num_pages != num_pages:
            msg = f"lent: expected a frame for each of {num_pages} pages, got {lent.num_pages}"
            raise ContractError(msg)
        if lent.released or (serves and lent.served):
            msg = "lent: expected frames of a new loan, got some used before"
            raise StaleHandleError(msg)
        lent.served |= serves
        return lent


class BorrowingPageStore(PageStore):
    """A store that lends, used by loans where it gives any, and else as any other.

    A loan for a load is given back when its handles are forgotten.

    Thread: any.
    """

    def __init__(self, lender: LendingStore) -> None:
        """Use a store, which stays its owner's."""
        self.lender: Final = lender
        #: How many loans were got.
        self.borrowed = 0
        self._mutex: Final = threading.Lock()
        #: The loans of handles, by their identity, until the handles go.
        self._loans: Final[dict[int, LentFrames]] = {}

    @property
    @override
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self.lender.layout

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there."""
        return self.lender.contains(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages, in frames if they are lent."""
        lent = self._borrow(len(keys))
        if lent is None:
            return self.lender.open(keys, ttl_s)
        try:
            handles = self.lender.open_lent(keys, ttl_s, lent)
        except BaseException:
            lent.release()
            raise
        with self._mutex:
            self._loans[id(handles)] = lent
        weakref.finalize(handles, self._give_back, id(handles))
        return handles

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Verify one layer range, and copy what is right.

        Raises:
            ContractError: `out` does not fit, or there is no such range.
        """
        lent = self._loans.get(id(handles))
        if lent is None:
            return self.lender.read(handles, layer_range, out)
        with self._mutex:
            right = self.lender.verify(handles, layer_range, lent)
            size = self.layout.range_bytes[layer_range]
            rows = _writable(out, len(handles.keys) * size)
            for page in right:
                rows[page * size : (page + 1) * size] = self._row(lent, page, layer_range)
        return right

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Write pages into frames, if they are lent, and put them.

        Raises:
            ContractError: The parts do not fit keys and layout.
        """
        sizes = self.layout.range_bytes
        views = [memoryview(part) for part in parts]
        fit = [view.nbytes for view in views] == [len(keys) * size for size in sizes]
        lent = self._borrow(len(keys)) if fit else None
        if lent is None:
            return self.lender.put(keys, parts)
        try:
            for layer_range, (view, size) in enumerate(zip(views, sizes, strict=True)):
                column = view.cast("B")
                for page in range(len(keys)):
                    row = self._row(lent, page, layer_range)
                    row[:] = column[page * size : (page + 1) * size]
            return self.lender.put_lent(keys, lent)
        finally:
            lent.release()

    @override
    def close(self) -> None:
        """Close the other store."""
        self.lender.close()

    def _borrow(self, num_pages: int) -> LentFrames | None:
        """Frames for some pages; None where none are lent."""
        if not 1 <= num_pages <= self.lender.frames.max_pages:
            return None
        lent = self.lender.lend(num_pages)
        self.borrowed += lent is not None
        return lent

    def _give_back(self, handles_id: int) -> None:
        """The handles went."""
        self._loans.pop(handles_id).release()

    def _row(self, lent: LentFrames, page: int, layer_range: int) -> memoryview:
        """One range of one page in frames."""
        frames = self.lender.frames
        start = page * frames.frame_bytes + frames.range_offsets[layer_range]
        return lent.buffer[start : start + self.layout.range_bytes[layer_range]]


def _writable(out: Buffer, num_bytes: int) -> memoryview:
    """A buffer as plain bytes.

    Raises:
        ContractError: It is of another length, or cannot be written.
    """
    view = memoryview(out)
    if view.nbytes != num_bytes or view.readonly or not view.c_contiguous:
        msg = f"read: expected {num_bytes} writable bytes, got {view.nbytes}"
        raise ContractError(msg)
    return view.cast("B")
