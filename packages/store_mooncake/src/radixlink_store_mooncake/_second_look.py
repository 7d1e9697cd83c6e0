"""`SecondLook`: what did not verify is judged once more, a page at a time, in the store.

A get may meet a page that goes, or is written anew, while it runs. What it brought is then wrong,
but what there is in the store now may be right, or of another write, which is a miss and no damage.
So nothing is removed before its header, and with it its range, was fetched again::

    the object is gone now, or does not come        STALE
    it has another size, or no sound header         DAMAGED, removed
    its header is of another write                  STALE
    the range is right                              RIGHT
    the range is of another write                   STALE: it was written anew between the two
    the range is neither                            DAMAGED, removed

It costs round trips for each page, and comes rarely.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import numpy as np

from radixlink_store_mooncake._object import HEADER_BYTES, TAG_BYTES, Header
from radixlink_store_mooncake.counters import MooncakeCounters
from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import PageHandles, PageKeys
    from radixlink_store_mooncake._client import PageClient
    from radixlink_store_mooncake._object import PageFormat
    from radixlink_store_mooncake._staging import Bytes, Staging
    from radixlink_store_mooncake._tally import Tally


class _Verdict(enum.Enum):
    """What a second look at a page says."""

    RIGHT = enum.auto()
    #: Gone, or of another write.
    STALE = enum.auto()
    #: No page, or not what its header says.
    DAMAGED = enum.auto()


class SecondLook:
    """Judges pages in the store, and removes those that are damaged.

    Thread: any. The caller holds no block of the staging that another may wait for.
    """

    def __init__(
        self,
        page_format: PageFormat,
        client: PageClient,
        staging: Staging,
        prefix: str,
        tally: Tally,
    ) -> None:
        """Judge the pages of a store.

        Args:
            page_format: What their objects are.
            client: Connected.
            staging: Registered with it.
            prefix: Of the objects' names; the key follows, in hexadecimal digits.
            tally: Where what was found is counted.
        """
        self._format: Final = page_format
        self._client: Final = client
        self._staging: Final = staging
        self._prefix: Final = prefix
        self._tally: Final = tally

    def headers(self, keys: PageKeys, suspects: Sequence[int]) -> list[tuple[int, Header]]:
        """The headers of those suspects that are sound now; none of what a call is not answered for.

        Args:
            keys: The pages.
            suspects: Those whose get brought no header.

        Cost: two round trips for each suspect, three for a damaged one.
        """
        headers: list[tuple[int, Header]] = []
        try:
            for page in suspects:
                header = self._header(keys[page])
                if isinstance(header, Header):
                    headers.append((page, header))
                elif header is _Verdict.DAMAGED:
                    self._remove(keys[page])
        except UnansweredError:
            self._tally.add(MooncakeCounters(unanswered=1))
        return headers

    def is_read(self, handles: PageHandles, page: int, layer_range: int, row: Bytes) -> bool:
        """A range that was not right was read again, and is right.

        Args:
            handles: The pages of a load.
            page: Which of them.
            layer_range: Which range of it.
            row: Where the range goes.

        Raises:
            UnansweredError: A call was not answered.

        Cost: three round trips, four for a damaged page.
        """
        verdict = self._judge(handles, page, layer_range, row)
        if verdict is _Verdict.STALE:
            self._tally.add(MooncakeCounters(read_stale=1))
        elif verdict is _Verdict.DAMAGED:
            self._remove(handles.keys[page])
        return verdict is _Verdict.RIGHT

    def _judge(self, handles: PageHandles, page: int, layer_range: int, row: Bytes) -> _Verdict:
        """Is this range right, of another write, or damaged?"""
        form, key, generation = self._format, handles.keys[page], handles.generations[page]
        header = self._header(key)
        if not isinstance(header, Header):
            return header
        if header.generation != generation:
            return _Verdict.STALE
        size = TAG_BYTES + len(row)
        with self._staging.take(self._client.timeout_s) as block:
            name, offset = self._prefix + key.hex(), form.tag_offsets[layer_range]
            (code,) = self._client.get_range([name], block, offset, size)
            if code != size:
                return _Verdict.STALE
            np.copyto(row, block.bytes[TAG_BYTES:size])
            tag = block.view[:TAG_BYTES]
            if form.is_right(key, generation, layer_range, tag, row.data):
                return _Verdict.RIGHT
            # Perhaps it was written anew since its header was read.
            renewed = form.is_renewed(key, generation, layer_range, tag, row.data)
        return _Verdict.STALE if renewed else _Verdict.DAMAGED

    def _header(self, key: bytes) -> Header | _Verdict:
        """The header of a page, if it is sound; else STALE or DAMAGED."""
        name = self._prefix + key.hex()
        size = self._client.size(name)
        if size < 0:
            return _Verdict.STALE
        if size != self._format.object_bytes:
            return _Verdict.DAMAGED
        with self._staging.take(self._client.timeout_s) as block:
            (code,) = self._client.get_range([name], block, 0, HEADER_BYTES)
            if code != HEADER_BYTES:
                return _Verdict.STALE
            header = self._format.read_header(key, block.view[:HEADER_BYTES])
        return _Verdict.DAMAGED if header is None else header

    def _remove(self, key: bytes) -> None:
        """Remove what is no page."""
        self._client.remove(self._prefix + key.hex())
        self._tally.add(MooncakeCounters(corrupt=1))
