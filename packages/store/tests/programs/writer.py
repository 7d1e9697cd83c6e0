"""Open a store, say so, and put pages when told; pause at a point of the first write if one is named.

Arguments: location, capacity in bytes, first page, number of pages, and where to pause:

* nowhere;
* claimed: the slot says WRITING, nothing of the page is there;
* copied: payload and header are half there;
* written: all is there, but the slot does not say READY yet.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from typing import NoReturn
from unittest import mock

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store import FileStoreFactory, _segment

LAYOUT = PoolLayout(
    identity=CacheIdentity(
        model="tiny", revision="1", dtype="uint8", page_size=1, num_layers=2, layout="bytes"
    ),
    pool=PoolName.KV,
    range_bytes=(40, 24),
)


#: What the writer comes to when it is at that point of a write.
POINTS = {
    "claimed": (_segment.Segment, "fill"),
    "copied": (_segment, "header_checksum"),
    "written": (_segment, "published"),
}


def numbered_pages(pages: range) -> tuple[PageKeys, list[bytes]]:
    """The pages of `radixlink_testing.pages`, without that package: it takes a second to import."""
    keys = PageKeys.join(hashlib.sha256(f"/{page}".encode()).digest() for page in pages)
    parts = [
        b"".join(hashlib.shake_128(key + number.to_bytes(4, "little")).digest(size) for key in keys)
        for number, size in enumerate(LAYOUT.range_bytes)
    ]
    return keys, parts


def pause(*_: object) -> NoReturn:
    """Say that the point is reached, and stay there."""
    say("paused")
    while True:
        signal.pause()


def say(word: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(location: str, capacity_bytes: str, first: str, count: str, point: str) -> None:
    """Be a writer."""
    config = StoreConfig(location=location, capacity_bytes=int(capacity_bytes))
    say("started")
    sys.stdin.readline()
    store = FileStoreFactory(config).open(LAYOUT)
    if point in POINTS:
        target, name = POINTS[point]
        mock.patch.object(target, name, pause).start()
    stored = store.put(*numbered_pages(range(int(first), int(first) + int(count))))
    say(f"stored {stored.total}")
    store.close()


main(*sys.argv[1:])
