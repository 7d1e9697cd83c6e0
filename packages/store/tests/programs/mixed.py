"""Put and read pages of a store far too small for them, and count.

Arguments: location, capacity in bytes, whether checksums are on (0 or 1), reads to do, a seed.
Prints, as JSON, how many reads were right, wrong, and rejected as stale or damaged.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store import FileStoreFactory

NUM_KEYS = 1000
RANGE_BYTES = 8192
BATCH = 16
LAYOUT = PoolLayout(
    identity=CacheIdentity(
        model="tiny", revision="1", dtype="uint8", page_size=1, num_layers=2, layout="bytes"
    ),
    pool=PoolName.KV,
    range_bytes=(RANGE_BYTES, RANGE_BYTES),
)
KEYS = [hashlib.sha256(f"/{number}".encode()).digest() for number in range(NUM_KEYS)]


def content(key: bytes, layer_range: int) -> bytes:
    """What a page has in a layer range: a function of its key."""
    if layer_range:
        key = key[::-1]
    return key * (RANGE_BYTES // len(key))


def main(location: str, capacity_bytes: str, checksums: str, reads: str, seed: str) -> None:
    """Be one of several."""
    config = StoreConfig(location=location, capacity_bytes=int(capacity_bytes))
    store = FileStoreFactory(config, checksums=checksums == "1").open(LAYOUT)
    choose = random.Random(int(seed))
    pages = [[content(key, layer_range) for layer_range in (0, 1)] for key in KEYS]

    def put() -> None:
        numbers = choose.sample(range(NUM_KEYS), BATCH)
        parts = [
            b"".join(pages[number][layer_range] for number in numbers) for layer_range in (0, 1)
        ]
        store.put(PageKeys.join(KEYS[number] for number in numbers), parts)

    right = wrong = 0
    out = bytearray(BATCH * RANGE_BYTES)
    while right + wrong < int(reads):
        numbers = choose.sample(range(NUM_KEYS), BATCH)
        handles = store.open(PageKeys.join(KEYS[number] for number in numbers), 0.0)
        for layer_range in (0, 1):
            # Between the layers, as in a load that takes its time, and by other processes all along.
            put()
            for i in store.read(handles, layer_range, out):
                if out[i * RANGE_BYTES : (i + 1) * RANGE_BYTES] == pages[numbers[i]][layer_range]:
                    right += 1
                else:
                    wrong += 1
    counters = store.counters
    store.close()
    counts = {
        "right": right,
        "wrong": wrong,
        "stale": counters.read_stale,
        "corrupt": counters.read_corrupt,
        "put": counters.put,
        "busy": counters.rejected_busy,
    }
    sys.stdout.write(json.dumps(counts) + "\n")


main(*sys.argv[1:])
