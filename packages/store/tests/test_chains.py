"""What of a full store can be used: the part of each chain before its first hole."""

from __future__ import annotations

import hashlib
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageKeys
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


@pytest.mark.parametrize("capacities", [1, 2, 3])
def test_nine_tenths_of_the_newest_pages_come_before_the_first_hole_of_their_chain(
    make_store: MakeStore, clock: StillClock, capacities: int
) -> None:
    store, _ = make_store(num_buckets=NUM_BUCKETS, ways=WAYS)
    num_chains = capacities * CHAINS_OF_A_STORE
    for number in range(num_chains):
        clock.now += 1e-5
        put_pages(store, chain(number))
    usable = 0
    for number in range(num_chains - CHAINS_OF_A_STORE, num_chains):
        there = store.contains(chain(number))
        usable += sum(1 for _ in takewhile(there.__contains__, range(CHAIN)))
    assert usable >= 0.9 * NUM_SLOTS
