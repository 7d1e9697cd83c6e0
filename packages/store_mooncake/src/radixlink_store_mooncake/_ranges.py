"""`RangeReader`: a layer range of pages that were found, from where `open` put them or from the store.

A row is right when its bytes, where the caller has them, match the tag of the write that the handle
names. What is not right where `open` put it is read in the store, and what is not right there gets
a second look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from radixlink_contracts import PageBits
from radixlink_store_mooncake._codes import Code
from radixlink_store_mooncake._object import TAG_BYTES
from radixlink_store_mooncake.counters import MooncakeCounters
from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from radixlink_contracts import PageHandles
    from radixlink_store_mooncake._client import PageClient
    from radixlink_store_mooncake._loan import Loan
    from radixlink_store_mooncake._object import PageFormat
    from radixlink_store_mooncake._second_look import SecondLook
    from radixlink_store_mooncake._staging import Bytes, Staging
    from radixlink_store_mooncake._tally import Tally


class RangeReader:
    """Reads the layer ranges of one store.

    Thread: any, several at once.
    """

    def __init__(
        self,
        page_format: PageFormat,
        client: PageClient,
        staging: Staging,
        *,
        prefix: str,
        second_look: SecondLook,
        tally: Tally,
    ) -> None:
        """Read the pages of a store.

        Args:
            page_format: What their objects are.
            client: Connected.
            staging: Registered with it; keeps what `open` fetched.
            prefix: Of the objects' names; the key follows, in hexadecimal digits.
            second_look: For what is not right in the store.
            tally: Where rows are counted.
        """
        self._format: Final = page_format
        self._client: Final = client
        self._staging: Final = staging
        self._prefix: Final = prefix
        self._second_look: Final = second_look
        self._tally: Final = tally

    def read(self, handles: PageHandles, layer_range: int, rows: Bytes) -> PageBits:
        """Read a range into rows: which of them are right.

        Args:
            handles: The pages.
            layer_range: Which range of each.
            rows: Where it goes. Shape: (num_pages, bytes of the range).
        """
        return self._completed(
            handles, layer_range, rows, self._from_kept(handles, layer_range, rows)
        )

    def verify(self, handles: PageHandles, layer_range: int, loan: Loan) -> PageBits:
        """Verify a range where it lies in lent frames: in which of them it is right.

        Args:
            handles: The pages, one for each frame.
            layer_range: Which range of each.
            loan: The frames; what is not right there is read into them.
        """
        start = self._format.tag_offsets[layer_range] + TAG_BYTES
        rows = loan.frames[:, start : start + self._format.range_bytes[layer_range]]
        return self._completed(handles, layer_range, rows, self._lent(handles, layer_range, loan))

    def _completed(
        self,
        handles: PageHandles,
        layer_range: int,
        rows: Bytes,
        judged: Iterable[tuple[int, bool]],
    ) -> PageBits:
        """Which rows are right, once those that are not were read in the store.

        Args:
            handles: The pages.
            layer_range: Which range of each.
            rows: Where it goes. Shape: (num_pages, bytes of the range).
            judged: Each page that was found, and whether its row is right already.
        """
        count = len(handles.keys)
        mask = 0
        elsewhere: list[int] = []
        for page, right in judged:
            if right:
                mask |= 1 << page
            else:
                elsewhere.append(page)
        try:
            for page in self._from_store(handles, elsewhere, layer_range, rows):
                mask |= 1 << page
        except UnansweredError:
            self._tally.add(MooncakeCounters(unanswered=1))
        self._tally.add(
            MooncakeCounters(read_ok=mask.bit_count(), read_missing=count - handles.found.total)
        )
        return PageBits(mask, count)

    def _from_kept(
        self, handles: PageHandles, layer_range: int, rows: Bytes
    ) -> Iterator[tuple[int, bool]]:
        """Read what `open` fetched: each page that was found, and whether it was right there."""
        form = self._format
        tag_offset, size = form.tag_offsets[layer_range], form.range_bytes[layer_range]
        pages = list(handles.found)
        ids = [(handles.keys[page], handles.generations[page]) for page in pages]
        places = self._staging.find(ids)
        try:
            for page, (key, generation), place in zip(pages, ids, places, strict=True):
                right = False
                if place is not None:
                    block, start = place
                    tag = start + tag_offset
                    data = tag + TAG_BYTES
                    row = rows[page]
                    np.copyto(row, block.bytes[data : data + size])
                    tagged = block.view[tag:data]
                    right = form.is_right(key, generation, layer_range, tagged, row.data)
                yield page, right
        finally:
            self._staging.release(place[0] for place in places if place is not None)

    def _lent(
        self, handles: PageHandles, layer_range: int, loan: Loan
    ) -> Iterator[tuple[int, bool]]:
        """Each page that was found, and whether the range in its frame is right."""
        form, view = self._format, loan.buffer
        tag_offset, size = form.tag_offsets[layer_range], form.range_bytes[layer_range]
        for page in handles.found:
            tag = page * form.object_bytes + tag_offset
            data = tag + TAG_BYTES
            yield (
                page,
                form.is_right(
                    handles.keys[page],
                    handles.generations[page],
                    layer_range,
                    view[tag:data],
                    view[data : data + size],
                ),
            )

    def _from_store(
        self, handles: PageHandles, pages: Sequence[int], layer_range: int, rows: Bytes
    ) -> Iterator[int]:
        """Read pages in the store by their ranges: those that are right."""
        form = self._format
        size = TAG_BYTES + form.range_bytes[layer_range]
        step = self._staging.block_bytes // size
        for start in range(0, len(pages), step):
            some = pages[start : start + step]
            names = [self._prefix + handles.keys[page].hex() for page in some]
            suspects: list[int] = []
            failed = stale = 0
            with self._staging.take(self._client.timeout_s) as block:
                codes = self._client.get_range(names, block, form.tag_offsets[layer_range], size)
                for place, (page, code) in enumerate(zip(some, codes, strict=True)):
                    if code == Code.OBJECT_NOT_FOUND:
                        stale += 1
                        continue
                    if code < 0 and code != Code.INVALID_PARAMS:
                        failed += 1
                        continue
                    if code != size:
                        suspects.append(page)
                        continue
                    tag = place * size
                    data = tag + TAG_BYTES
                    key, generation, row = handles.keys[page], handles.generations[page], rows[page]
                    np.copyto(row, block.bytes[data : tag + size])
                    tagged = block.view[tag:data]
                    if form.is_right(key, generation, layer_range, tagged, row.data):
                        yield page
                    elif form.is_renewed(key, generation, layer_range, tagged, row.data):
                        stale += 1
                    else:
                        suspects.append(page)
            self._tally.add(MooncakeCounters(read_stale=stale, failed=failed))
            for page in suspects:
                if self._second_look.is_read(handles, page, layer_range, rows[page]):
                    yield page
