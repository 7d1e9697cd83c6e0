from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import (
    PageBits,
    PageKeys,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    Staging,
)
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    import torch


def slots(count: int) -> torch.Tensor:
    """Something of that length: these tests run without torch, as the contracts do."""
    return cast("torch.Tensor", range(count))


@given(st.integers(0, 5), st.integers(0, 12))
def test_slots_are_dealt_out_evenly_to_the_pages(num_pages: int, num_slots: int) -> None:
    keys = PageKeys(bytes(32 * num_pages))
    if num_pages and num_slots % num_pages == 0:
        transfer = PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots(num_slots))
        assert transfer.keys is keys
    else:
        with pytest.raises(ContractError, match=f"{num_pages} whole pages, got {num_slots}"):
            PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots(num_slots))


def test_a_lookup_has_keys_alone_and_needs_all_of_them() -> None:
    transfer = PoolTransfer(name=PoolName.KV, keys=PageKeys(bytes(64)))
    assert transfer.device_indices is None
    assert transfer.hit_policy is PoolHitPolicy.ALL_PAGES


@given(st.sets(st.integers(1, 40)), st.integers(40, 60))
def test_a_result_is_the_set_of_lengths_that_can_be_restored(
    lengths: set[int], num_pages: int
) -> None:
    bits = PageBits.of((length - 1 for length in lengths), num_pages)
    assert PoolTransferResult(restorable_prefix_pages=bits).longest == max(lengths, default=0)


@st.composite
def found_pages(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    """How many pages a lookup asks about, and which of them each of three pools has."""
    count = draw(st.integers(0, 40))
    pages = st.sets(st.integers(0, count - 1)) if count else st.just(set[int]())
    return count, [draw(pages) for _ in range(3)]


def transfer(name: PoolName, num_keys: int, policy: PoolHitPolicy) -> PoolTransfer:
    return PoolTransfer(name=name, keys=PageKeys(bytes(32 * num_keys)), hit_policy=policy)


@given(found_pages(), st.integers(0, 12))
def test_restorable_is_what_the_policy_says_of_every_length(
    sample: tuple[int, list[set[int]]], window: int
) -> None:
    count, (kv, swa, states) = sample
    num_keys = min(window, count)
    lookup = [
        (transfer(PoolName.KV, count, PoolHitPolicy.ALL_PAGES), kv, count),
        (transfer(PoolName.SWA, num_keys, PoolHitPolicy.TRAILING_PAGES), swa, max(1, num_keys)),
        (transfer(PoolName.MAMBA, min(1, count), PoolHitPolicy.TRAILING_PAGES), states, 1),
    ]
    together = PageBits.all(count)
    for asked, pages, trail in lookup:
        restorable = asked.restorable(PageBits.of(pages, count))
        assert [bit + 1 for bit in restorable] == [
            length
            for length in range(1, count + 1)
            if pages.issuperset(range(max(0, length - trail), length))
        ]
        together &= restorable
    # Field report 13: full attention bounds everything, whatever a deeper state says.
    longest = PoolTransferResult(restorable_prefix_pages=together).longest
    assert longest <= PageBits.of(kv, count).leading


@pytest.mark.parametrize(
    ("windows", "states", "longest"),
    [({3}, {3}, 3), ({3}, {2}, 0), ({1, 3}, {1, 2}, 1)],
)
def test_the_longest_common_length_is_no_minimum_of_maxima(
    windows: set[int], states: set[int], longest: int
) -> None:
    """Field report 9: the lengths at which each pool has what it needs."""
    ends = [PageBits.of((length - 1 for length in lengths), 4) for lengths in (windows, states)]
    one = [
        transfer(name, 1, PoolHitPolicy.TRAILING_PAGES).restorable(bits)
        for name, bits in zip((PoolName.SWA, PoolName.MAMBA), ends, strict=True)
    ]
    kv = transfer(PoolName.KV, 4, PoolHitPolicy.ALL_PAGES).restorable(PageBits.all(4))
    common = kv & one[0] & one[1]
    assert PoolTransferResult(restorable_prefix_pages=common).longest == longest


def test_a_window_that_is_not_there_in_full_is_no_hit() -> None:
    """Field report 10: four pages look back, the store has the first two of six."""
    window = transfer(PoolName.SWA, 4, PoolHitPolicy.TRAILING_PAGES)
    assert list(window.restorable(PageBits.of([0, 1], 6))) == [0, 1]
    assert list(window.restorable(PageBits.of([1, 2, 3], 6))) == []
    assert list(window.restorable(PageBits.of([1, 2, 3, 4], 6))) == [4]


def test_an_empty_result_is_a_miss_of_every_length() -> None:
    result = PoolTransferResult.empty(5)
    assert result.longest == 0
    assert result.restorable_prefix_pages == PageBits.none(5)


class FourBytes:
    """As much of a tensor as staging looks at."""

    def numel(self) -> int:
        return 4


def test_staging_is_one_memory_of_one_size() -> None:
    tensor = cast("torch.Tensor", FourBytes())
    buffer = memoryview(bytearray(4))
    assert Staging(tensor=tensor, buffer=buffer).buffer is buffer
    for size in (3, 5):
        with pytest.raises(ContractError, match=f"expected 4 bytes, got {size}"):
            Staging(tensor=tensor, buffer=memoryview(bytearray(size)))
