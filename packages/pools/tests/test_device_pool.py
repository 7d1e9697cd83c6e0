from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PageKeys, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError
from radixlink_pools import DevicePoolEntry, DevicePoolGroup, byte_rows

NUM_PAGES, PAGE_SIZE = 4, 2


def keys(count: int) -> PageKeys:
    return PageKeys.join(bytes([page]) * 32 for page in range(count))


def transfer(
    *slots: int, num_keys: int | None = None, name: PoolName = PoolName.KV
) -> PoolTransfer:
    return PoolTransfer(
        name=name,
        keys=keys(len(slots) // PAGE_SIZE if num_keys is None else num_keys),
        device_indices=torch.tensor(slots, dtype=torch.int64),
    )


def entry(*range_bytes: int, name: PoolName = PoolName.KV) -> DevicePoolEntry:
    rows = [torch.zeros(NUM_PAGES, width, dtype=torch.uint8) for width in range_bytes or (3, 5)]
    return DevicePoolEntry(name, rows, PAGE_SIZE)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_byte_rows_are_the_same_memory(dtype: torch.dtype) -> None:
    # Axes: page, keys or values, token, head, element.
    pool = torch.arange(3 * 2 * 2 * 2 * 4).view(3, 2, 2, 2, 4).to(dtype)
    rows = byte_rows(pool)
    assert rows.shape == (3, 32 * pool.element_size())
    assert rows.data_ptr() == pool.data_ptr()
    rows[1].zero_()
    assert not pool[1].any()
    assert pool[2].all()


def test_byte_rows_of_one_element_a_page() -> None:
    assert byte_rows(torch.zeros(3, dtype=torch.int32)).shape == (3, 4)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(4, 6).t(), torch.zeros(0, 4), torch.tensor(1.0)],
)
def test_byte_rows_refuses_what_it_would_have_to_copy(tensor: torch.Tensor) -> None:
    with pytest.raises(ContractError, match="contiguous tensor of at least one page"):
        byte_rows(tensor)


def test_an_entry_tells_its_ranges() -> None:
    pool = entry(3, 5, 8)
    assert pool.range_bytes == (3, 5, 8)
    assert (pool.name, pool.page_size, pool.num_pages) == (PoolName.KV, PAGE_SIZE, NUM_PAGES)


def test_page_rows_are_page_numbers() -> None:
    rows = entry().page_rows(transfer(6, 7, 0, 1))
    assert rows.tolist() == [3, 0]
    assert rows.dtype is torch.int64


def test_page_rows_of_a_token_pool_are_the_slots() -> None:
    pool = DevicePoolEntry(PoolName.KV, [torch.zeros(8, 4, dtype=torch.uint8)], 1)
    assert pool.page_rows(transfer(7, 0, 3, num_keys=3)).tolist() == [7, 0, 3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (transfer(0, num_keys=1), "multiple of page_size 2"),
        (transfer(0, 1, num_keys=2), "multiple of page_size 2"),
        (transfer(0, 1, 2, 3, num_keys=1), "multiple of page_size 2"),
        (transfer(1, 2), "aligned contiguous pages"),
        (transfer(0, 2), "aligned contiguous pages"),
        (transfer(0, 1, 3, 2), "aligned contiguous pages of 2 slots, got slot 3 at place 2"),
        (transfer(8, 9), "got 4, which exceeds"),
        (transfer(0, 1, -2, -1), "got -1, which exceeds"),
        (transfer(0, 1, name=PoolName.SWA), "transfer of its own slots, got a transfer of swa"),
        (PoolTransfer(name=PoolName.KV, keys=keys(1)), "its own slots, got no slots"),
        (
            PoolTransfer(name=PoolName.KV, keys=keys(1), device_indices=torch.tensor([0.0, 1.0])),
            "int64",
        ),
    ],
)
def test_page_rows_refuses_slots_that_are_no_pages_of_the_pool(
    bad: PoolTransfer, message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        entry().page_rows(bad)


@given(st.lists(st.integers(-2, 9), min_size=2, max_size=6).filter(lambda s: len(s) % 2 == 0))
def test_page_rows_accepts_just_aligned_pages_inside(slots: list[int]) -> None:
    pages = [slot // PAGE_SIZE for slot in slots[::PAGE_SIZE]]
    whole = [slot for page in pages for slot in (2 * page, 2 * page + 1)]
    if whole == slots and all(0 <= page < NUM_PAGES for page in pages):
        assert entry().page_rows(transfer(*slots)).tolist() == pages
    else:
        with pytest.raises(ContractError):
            entry().page_rows(transfer(*slots))


def test_a_region_names_rows_of_its_range_without_a_copy() -> None:
    pool = entry(3, 5)
    index = torch.tensor([2, 0])
    region = pool.region(1, index)
    assert region.index is index
    assert region.rows.shape == (NUM_PAGES, 5)
    assert region.rows.data_ptr() == pool.region(1, index).rows.data_ptr()


@pytest.mark.parametrize("layer_range", [-1, 2])
def test_a_region_of_no_range_is_refused(layer_range: int) -> None:
    with pytest.raises(ContractError, match=r"layer range in 0\.\.1"):
        entry(3, 5).region(layer_range, torch.tensor([0]))


def test_an_entry_needs_storage() -> None:
    with pytest.raises(ContractError, match="no storage buffers"):
        DevicePoolEntry(PoolName.KV, [], PAGE_SIZE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.zeros(4, 2)], "uint8 in range 0"),
        ([torch.zeros(4, dtype=torch.uint8)], "uint8 in range 0"),
        ([torch.zeros(4, 0, dtype=torch.uint8)], "uint8 in range 0"),
        (
            [torch.zeros(4, 2, dtype=torch.uint8), torch.zeros(5, 2, dtype=torch.uint8)],
            "expected 4 pages on cpu in range 1, got 5",
        ),
    ],
)
def test_an_entry_refuses_rows_that_are_none(rows: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        DevicePoolEntry(PoolName.KV, rows, PAGE_SIZE)


def test_an_entry_refuses_pages_of_no_slots() -> None:
    with pytest.raises(ContractError, match="page_size of at least 1"):
        DevicePoolEntry(PoolName.KV, [torch.zeros(4, 2, dtype=torch.uint8)], 0)


def test_a_group_resolves_each_transfer_to_its_pool_in_order() -> None:
    kv, swa = entry(), entry(name=PoolName.SWA)
    group = DevicePoolGroup([kv, swa])
    assert group.pools == {PoolName.KV, PoolName.SWA}
    window, full = transfer(0, 1, name=PoolName.SWA), transfer(2, 3)
    assert group.resolve([window, full]) == ((swa, window), (kv, full))


def test_a_group_leaves_out_what_has_no_keys() -> None:
    group = DevicePoolGroup([entry()])
    assert group.resolve([PoolTransfer(name=PoolName.KV, keys=keys(0))]) == ()
    assert group.resolve([]) == ()


def test_a_group_refuses_two_pools_of_one_name() -> None:
    with pytest.raises(ContractError, match="two of kv"):
        DevicePoolGroup([entry(), entry()])


def test_a_group_of_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="at least one pool"):
        DevicePoolGroup([])


def test_a_group_refuses_transfers_it_cannot_tell_apart_or_place() -> None:
    group = DevicePoolGroup([entry()])
    with pytest.raises(ContractError, match="one transfer for each pool"):
        group.resolve([transfer(0, 1), transfer(2, 3)])
    with pytest.raises(ContractError, match="got mamba"):
        group.resolve([transfer(0, 1, name=PoolName.MAMBA)])
