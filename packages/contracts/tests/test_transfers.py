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
