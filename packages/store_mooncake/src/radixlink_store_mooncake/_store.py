"""`MooncakePageStore`: the `PageStore` contract over Mooncake's batch calls.

Theory of operation. A page is one object, its name the namespace, the layout's fingerprint and the
page's key; `_object.py` has its bytes. All bytes go through registered staging; pages are put and
opened here, and their ranges read in `_ranges.py`::

    put        header, tags and ranges into a buffer -> one batch put
    open       whole pages into a buffer that is kept for reads -> one batch get
               or, where they do not fit or `whole_pages` is off, the headers alone
    read       from the kept buffer; else tag and range of each page -> one ranged get
    lend       a buffer, for which objects are frames
    put_lent   header and tags beside the ranges that lie there -> one batch put
    open_lent  whole pages into it -> one batch get
    verify     the range where it lies; else tag and range, as `read`

Rules of a store:

1. Nothing is told as read before its checksum was verified on the caller's own bytes, lent or not,
   with the generation that the handle names. So whatever moves or goes underneath is a miss.
2. A call that is late or refused, and a code that tries did not change, is a miss for its pages.
   Nothing of Mooncake's raises out of a store.
3. What does not verify is looked at once more, in the store (`_second_look.py`). If it is of the
   same write, or no page at all, it is damaged and removed, so that the page can be stored again. A
   removal by mistake, as when somebody wrote it anew in between, costs that page.
4. Two writers of one page at once: Mooncake tells the second "put" while the first still writes. If
   that one dies, the page is missing although the second was told. Storedness is a hint.
5. Memory that a call was given is nobody else's before that call has returned, however late, and
   whatever its borrower does meanwhile. So a borrower gets a loan for one call.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from radixlink_contracts import LendingStore, PageBits, PageFrames, PageHandles
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_store_mooncake._arguments import (
    check_ttl,
    distinct,
    handles_of,
    new_generations,
    rows_of,
    with_copies,
)
from radixlink_store_mooncake._codes import Code
from radixlink_store_mooncake._loan import Loan
from radixlink_store_mooncake._object import (
    FORMAT_VERSION,
    HEADER_BYTES,
    TAG_BYTES,
    Header,
)
from radixlink_store_mooncake._ranges import RangeReader
from radixlink_store_mooncake._second_look import SecondLook
from radixlink_store_mooncake._tally import Tally
from radixlink_store_mooncake.counters import MooncakeCounters
from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import LentFrames, PageKeys, PoolLayout
    from radixlink_store_mooncake._client import PageClient
    from radixlink_store_mooncake._object import PageFormat
    from radixlink_store_mooncake._staging import Block, Bytes, Staging


class MooncakePageStore(LendingStore):
    """Pages in Mooncake. `contains` raises their recency, as everything does that looks at them.

    Thread: any, several at once, of the process that opened it.
    Errors: `StaleHandleError` after `close`, and in a forked child.
    """

    def __init__(
        self,
        layout: PoolLayout,
        page_format: PageFormat,
        client: PageClient,
        staging: Staging,
        *,
        namespace: str,
        whole_pages: bool,
    ) -> None:
        """Serve the pages of a layout; see `MooncakeStoreFactory.open`.

        Args:
            layout: The pages.
            page_format: How they lie in objects; one fits a block of the staging.
            client: Connected.
            staging: Registered with it.
            namespace: See `MooncakeSettings`.
            whole_pages: See `MooncakeSettings`.
        """
        self._layout: Final = layout
        self._format: Final = page_format
        self._client: Final = client
        self._staging: Final = staging
        self._whole_pages: Final = whole_pages
        self._frames: Final = PageFrames(
            frame_bytes=page_format.object_bytes,
            range_offsets=tuple(offset + TAG_BYTES for offset in page_format.tag_offsets),
            max_pages=staging.block_bytes // page_format.object_bytes,
        )
        prefix = f"{namespace}/{FORMAT_VERSION}/{page_format.fingerprint.hex()}/"
        tally = Tally()
        look = SecondLook(page_format, client, staging, prefix, tally)
        self._prefix: Final = prefix
        self._tally: Final = tally
        self._second_look: Final = look
        self._ranges: Final = RangeReader(
            page_format, client, staging, prefix=prefix, second_look=look, tally=tally
        )
        self._process: Final = os.getpid()
        self._closed = False

    @property
    @override
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._layout

    @property
    def counters(self) -> MooncakeCounters:
        """What this opener did so far; also after `close`."""
        return self._tally.counters

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there; none where no master answers. Leases them, and raises recency.

        Cost: one round trip to the master.
        """
        self._require_open()
        if not keys.data:
            return PageBits.none(0)
        try:
            codes = self._client.exist(self._names(keys))
        except UnansweredError:
            self._tally.add(MooncakeCounters(unanswered=1))
            return PageBits.none(len(keys))
        return PageBits.of((page for page, code in enumerate(codes) if code == 1), len(keys))

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load, and fetch them where they fit a staging buffer.

        Args:
            keys: The pages.
            ttl_s: Only checked: how long a lease is, is a flag of the master.

        Raises:
            ContractError: `ttl_s` is not a number of at least 0.
        """
        self._require_open()
        check_ttl(ttl_s)
        count = len(keys)
        whole = self._whole_pages and (
            count * self._format.object_bytes <= self._staging.block_bytes
        )
        step = self._staging.block_bytes // HEADER_BYTES
        headers: list[tuple[int, Header]] = []
        for start in range(0, count, step):
            try:
                some = self._fetch_headers(keys.span(start, start + step), whole=whole)
            except UnansweredError:
                self._tally.add(MooncakeCounters(unanswered=1))
                break
            headers += [(start + page, header) for page, header in some]
        return handles_of(keys, headers)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found, verified on what was copied.

        Raises:
            ContractError: `out` does not fit, or there is no such range.

        Cost: a copy and a checksum for each page; a ranged get for those that `open` did not fetch.
        """
        self._require_open()
        self._require_range(layer_range)
        size = self._layout.range_bytes[layer_range]
        rows = rows_of(out, len(handles.keys), size, what="out", writable=True)
        return self._ranges.read(handles, layer_range, rows)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages; those that are there stay as they are.

        Raises:
            ContractError: The parts do not fit keys and layout.

        Cost: a copy, a checksum and a transfer for each page that is not there.
        """
        self._require_open()
        sizes = self._layout.range_bytes
        if len(parts) != len(sizes):
            raise ContractError(f"Mooncake store: expected {len(sizes)} parts, got {len(parts)}")
        columns = [
            rows_of(part, len(keys), size, what=f"part {layer_range}", writable=False)
            for layer_range, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ]
        first, pages = distinct(keys)
        stored: set[int] = set()
        step = self._staging.block_bytes // self._format.object_bytes
        for start in range(0, len(pages), step):
            some = pages[start : start + step]
            try:
                stored |= self._put(keys, some, columns)
            except UnansweredError:
                self._tally.add(MooncakeCounters(unanswered=1))
                break
        return with_copies(keys, first, stored)

    # -- in memory that is lent --------------------------------------------------------------------

    @property
    @override
    def frames(self) -> PageFrames:
        """Frames are objects; see `_object.py`."""
        return self._frames

    @override
    def lend(self, num_pages: int) -> Loan | None:
        """Lend a staging buffer; all but one of them at most. None where `whole_pages` is off.

        Raises:
            ContractError: It is for no page, or for more than fit a buffer.
        """
        self._require_open()
        frames = self._frames
        if not 1 <= num_pages <= frames.max_pages:
            raise ContractError(
                f"Mooncake store: expected a loan for 1..{frames.max_pages} pages, got {num_pages}"
            )
        block = self._staging.lend() if self._whole_pages else None
        return None if block is None else Loan(self._staging, block, num_pages, frames.frame_bytes)

    @override
    def put_lent(self, keys: PageKeys, lent: LentFrames) -> PageBits:
        """Store pages that lie in lent frames; see `LendingStore.put_lent`.

        Cost: a checksum and a transfer for each page that is not there.
        """
        self._require_open()
        loan = self._own(lent, len(keys), "put_lent")
        loan.serve("put_lent")
        first, pages = distinct(keys)
        form = self._format
        for page, generation in zip(pages, new_generations(len(pages)), strict=True):
            header = Header(generation, self._process)
            form.seal(keys[page], header, loan.frames[page].data)
        try:
            stored = self._send(
                keys, pages, loan.block, [page * form.object_bytes for page in pages]
            )
        except UnansweredError:
            self._tally.add(MooncakeCounters(unanswered=1))
            stored = set()
        return with_copies(keys, first, stored)

    @override
    def open_lent(self, keys: PageKeys, ttl_s: float, lent: LentFrames) -> PageHandles:
        """Fetch pages into lent frames; see `LendingStore.open_lent`, and `open` for `ttl_s`."""
        self._require_open()
        check_ttl(ttl_s)
        loan = self._own(lent, len(keys), "open_lent")
        loan.serve("open_lent")
        size = self._format.object_bytes
        try:
            codes = self._client.get(self._names(keys), loan.block, size)
            headers, suspects = self._headers_in(keys, codes, loan.block, size)
            headers += self._second_look.headers(keys, suspects)
        except UnansweredError:
            self._tally.add(MooncakeCounters(unanswered=1))
            headers = []
        return handles_of(keys, headers)

    @override
    def verify(self, handles: PageHandles, layer_range: int, lent: LentFrames) -> PageBits:
        """Verify one layer range where it lies; see `LendingStore.verify`.

        Cost: a checksum for each page; a ranged get for those that are not right.
        """
        self._require_open()
        self._require_range(layer_range)
        loan = self._own(lent, len(handles.keys), "verify")
        loan.require_held("verify")
        return self._ranges.verify(handles, layer_range, loan)

    @override
    def close(self) -> None:
        """Refuse further calls; the pages stay. Idempotent; waits for no call in progress."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise StaleHandleError(
                "Mooncake store: expected an open store, got one that was closed"
            )
        if os.getpid() != self._process:
            raise StaleHandleError(
                f"Mooncake store: expected a call of process {self._process} that opened it, got "
                f"one of its forked child {os.getpid()}, where Mooncake does not work"
            )

    def _names(self, keys: PageKeys) -> list[str]:
        """What the objects of pages are called."""
        return [self._prefix + key.hex() for key in keys]

    def _require_range(self, layer_range: int) -> None:
        """There is such a layer range.

        Raises:
            ContractError: There is none.
        """
        sizes = self._layout.range_bytes
        if not 0 <= layer_range < len(sizes):
            raise ContractError(
                f"Mooncake store: expected a layer range in 0..{len(sizes) - 1}, got {layer_range}"
            )

    def _own(self, lent: LentFrames, num_pages: int, what: str) -> Loan:
        """Frames that a caller was lent here, one for each of some pages.

        Raises:
            ContractError: They are not.
        """
        if not isinstance(lent, Loan):
            raise ContractError(f"{what}: expected frames lent by this store, got {lent!r}")
        lent.require(self._staging, num_pages, self._format.object_bytes, what)
        return lent

    def _put(self, keys: PageKeys, pages: Sequence[int], columns: Sequence[Bytes]) -> set[int]:
        """Put some pages that fit a block: those that are stored."""
        form = self._format
        size = form.object_bytes
        with self._staging.take(self._client.timeout_s) as block:
            generations = new_generations(len(pages))
            for place, (page, generation) in enumerate(zip(pages, generations, strict=True)):
                start, key = place * size, keys[page]
                form.write_header(key, Header(generation, self._process), block.view[start:])
                for layer_range, column in enumerate(columns):
                    row = column[page]
                    tag = start + form.tag_offsets[layer_range]
                    data = tag + TAG_BYTES
                    # Summed first, which brings it near: copied first, both take a quarter longer.
                    block.view[tag:data] = form.tag(key, generation, layer_range, row.data)
                    np.copyto(block.bytes[data : data + len(row)], row)
            return self._send(keys, pages, block, range(0, len(pages) * size, size))

    def _send(
        self, keys: PageKeys, pages: Sequence[int], block: Block, offsets: Sequence[int]
    ) -> set[int]:
        """Put objects that lie in a block: the pages that are stored."""
        names = [self._prefix + keys[page].hex() for page in pages]
        codes = self._client.put(names, block, offsets, self._format.object_bytes)
        full = codes.count(Code.NO_AVAILABLE_HANDLE)
        done = codes.count(Code.OK)
        self._tally.add(
            MooncakeCounters(put=done, rejected_full=full, failed=len(codes) - done - full)
        )
        return {page for page, code in zip(pages, codes, strict=True) if code == Code.OK}

    def _fetch_headers(self, keys: PageKeys, *, whole: bool) -> list[tuple[int, Header]]:
        """The headers of those pages that are there and sound.

        Args:
            keys: Pages that fit a block.
            whole: Fetch all of each page, and keep it for `read`.
        """
        form = self._format
        size = form.object_bytes if whole else HEADER_BYTES
        names = self._names(keys)
        with self._staging.take(self._client.timeout_s) as block:
            codes = (
                self._client.get(names, block, size)
                if whole
                else self._client.get_range(names, block, 0, size)
            )
            headers, suspects = self._headers_in(keys, codes, block, size)
            if whole and headers:
                kept = {(keys[page], header.generation): page * size for page, header in headers}
                self._staging.keep(block, kept, uses=len(headers) * len(form.range_bytes))
        return headers + self._second_look.headers(keys, suspects)

    def _headers_in(
        self, keys: PageKeys, codes: Sequence[int], block: Block, size: int
    ) -> tuple[list[tuple[int, Header]], list[int]]:
        """What a get has brought.

        Args:
            keys: The pages.
            codes: What it said of each.
            block: Where they begin, at multiples of `size`.
            size: What was asked of each.

        Returns:
            The headers of those that are sound, and the pages that are there and are not.
        """
        headers: list[tuple[int, Header]] = []
        suspects: list[int] = []
        failed = 0
        for page, code in enumerate(codes):
            if code == Code.OBJECT_NOT_FOUND:
                continue
            if code < 0 and code != Code.INVALID_PARAMS:
                failed += 1
                continue
            header = None
            if code == size:
                start = page * size
                header = self._format.read_header(keys[page], block.view[start : start + size])
            if header is None:
                suspects.append(page)
            else:
                headers.append((page, header))
        if failed:
            self._tally.add(MooncakeCounters(failed=failed))
        return headers, suspects
