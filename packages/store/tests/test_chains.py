"""What of a full store can be used: the part of each chain before its first hole."""

from __future__ import annotations

import hashlib
import random
import sys
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageBits, PageKeys
from radixlink_testing import put_pages

if TYPE_CHECKING:
    from packages.store.tests.conftest import MakeStore, StillClock

CHAIN = 128
NUM_BUCKETS, WAYS = 128, 32
NUM_SLOTS = NUM_BUCKETS * WAYS
CHAINS_OF_A_STORE = NUM_SLOTS // CHAIN


def chain(number: int) -> PageKeys:
    """The pages of a chain, which fall into buckets as hashes do."""
    names = (f"chain {number}, page {page}".encode() for page in range(CHAIN))
    return PageKeys.join([hashlib.sha256(name).digest() for name in names])


@pytest.mark.parametrize("num_shards", [1, 8])
@pytest.mark.parametrize("capacities", [1, 2, 3])
def test_nine_tenths_of_the_newest_pages_come_before_the_first_hole_of_their_chain(
    make_store: MakeStore, clock: StillClock, capacities: int, num_shards: int
) -> None:
    """On every shard: each is a store of its own, whose process comes to a chain in its own time."""
    stores = [make_store(num_buckets=NUM_BUCKETS, ways=WAYS)[0] for _ in range(num_shards)]
    num_chains = capacities * CHAINS_OF_A_STORE
    chains = [chain(number) for number in range(num_chains)]
    delays = random.Random(capacities)
    for store in stores:
        started = clock.now
        for number, keys in enumerate(chains):
            # Of chains that come one behind the other, a shard may be late by up to two.
            clock.now = started + 1e-5 * (number + delays.uniform(0, 2))
            put_pages(store, keys)
        clock.now = started
    usable = 0
    for keys in chains[-CHAINS_OF_A_STORE:]:
        there = PageBits.all(CHAIN)
        for store in stores:
            there &= store.contains(keys)
        usable += sum(1 for _ in takewhile(there.__contains__, range(CHAIN)))
    sys.stdout.write(
        f"{num_shards} shards, {capacities} capacities put: {usable / NUM_SLOTS:.1%} usable\n"
    )
    assert usable >= 0.9 * NUM_SLOTS
