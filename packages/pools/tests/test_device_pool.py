from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PageKeys, PoolName, PoolTransfer, Shard
from radixlink_contracts.errors import ContractError
from radixlink_pools import DevicePoolEntry, LayerBuffers

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


def unpacked_entry() -> DevicePoolEntry:
    """Case F1: K widths 3 and 5, V 7 and 11, 8 rows of a token, layers 0 and 2."""
    widths = ((3, 5), (7, 11))
    groups = [[torch.zeros(8, width, dtype=torch.uint8) for width in group] for group in widths]
    buffers = LayerBuffers(groups=groups, layers=(0, 2))
    return DevicePoolEntry.of_buffers(PoolName.KV, buffers, PAGE_SIZE, packed=False)


def test_an_unpacked_entry_has_an_object_for_each_group() -> None:
    pool = unpacked_entry()
    assert pool.range_bytes == (6, 10, 14, 22)
    assert pool.page_rows(transfer(0, 1, 4, 5)).tolist() == [0, 2]
    assert [stored.range_bytes for stored in pool.objects] == [(6, 10), (14, 22)]
    pieces = pool.pieces_of(2)
    assert [(piece.num_bytes, piece.offset) for piece in pieces] == [(10, 6), (22, 14)]
    assert pool.pieces_of(1) == ()
    for stored, piece in zip(pool.objects, pieces, strict=True):
        assert stored.pieces_of(2)[0].offset == piece.offset
        assert stored.page_rows(transfer(0, 1, 4, 5)).tolist() == [0, 2]


def test_an_object_of_an_unpacked_page_is_the_same_memory() -> None:
    pool, index = unpacked_entry(), torch.tensor([1])
    for layer_range, (place, piece) in enumerate(
        (piece.stored_object, piece.layer_range) for piece in pool.layout.pieces
    ):
        whole = pool.region(layer_range, index).rows
        part = pool.objects[place].region(piece, index).rows
        assert (whole.data_ptr(), whole.shape) == (part.data_ptr(), part.shape)


def test_a_packed_entry_is_its_own_object() -> None:
    pool = entry(3, 5)
    assert pool.objects == (pool,)
    assert [piece.offset for piece in pool.layout.pieces] == [0, 3]
    assert pool.pieces_of(1)[0].layer_range == 1


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0,), "multiple of page_size"),
        ((1, 2), "aligned contiguous"),
        ((0, 2), "aligned contiguous"),
        ((8, 9), "exceeds"),
    ],
)
def test_slots_that_are_no_pages_are_refused_by_every_object(
    slots: tuple[int, ...], message: str
) -> None:
    """Case F2."""
    pool = unpacked_entry()
    for stored in (pool, *pool.objects):
        with pytest.raises(ContractError, match=message):
            stored.page_rows(transfer(*slots, num_keys=1))


@pytest.mark.parametrize(
    ("layers", "object_sizes", "message"),
    [
        ([0], None, "a layer for each of 2"),
        ([0, -1], None, "a layer for each of 2"),
        (None, [1], "share out 2 ranges"),
        (None, [1, 2], "share out 2 ranges"),
    ],
)
def test_an_entry_refuses_layers_and_objects_that_do_not_fit(
    layers: list[int] | None, object_sizes: list[int] | None, message: str
) -> None:
    rows = [torch.zeros(NUM_PAGES, 3, dtype=torch.uint8)] * 2
    with pytest.raises(ContractError, match=message):
        DevicePoolEntry(PoolName.KV, rows, PAGE_SIZE, layers=layers, object_sizes=object_sizes)


def test_tokens_of_another_number_of_pages_are_refused() -> None:
    groups = [[torch.zeros(8, 3)], [torch.zeros(6, 3)]]
    with pytest.raises(ContractError, match="expected 4 pages on cpu in range 1, got 3"):
        DevicePoolEntry.of_buffers(PoolName.KV, LayerBuffers(groups=groups), PAGE_SIZE)


def test_a_replicated_entry_is_one_shard() -> None:
    rows = [torch.zeros(NUM_PAGES, 3, dtype=torch.uint8)]
    assert DevicePoolEntry(PoolName.KV, rows, 2).shard(1, 2) == Shard(index=1, count=2)
    replicated = DevicePoolEntry(PoolName.KV, rows, 2, replicated=True)
    assert replicated.shard(1, 2) == Shard()
    with pytest.raises(ContractError, match=r"an index in 0\.\.1"):
        replicated.shard(2, 2)


def states() -> tuple[DevicePoolEntry, list[torch.Tensor]]:
    """Four state slots of two layers: a convolution's and a recurrence's."""
    generator = torch.Generator().manual_seed(3)
    conv = [torch.randn(4, 3, 4, generator=generator).bfloat16() for _ in range(2)]
    recurrent = [torch.randn(4, 2, 5, generator=generator) for _ in range(2)]
    buffers = LayerBuffers(groups=(conv, recurrent), rows_are_pages=True)
    return DevicePoolEntry.of_buffers(PoolName.MAMBA, buffers, 1), [*conv, *recurrent]


def test_a_request_gets_its_own_copy_of_a_state() -> None:
    """Case J4: equal content in its own slot, and the tree's slot unchanged."""
    pool, tensors = states()
    before = [tensor.clone() for tensor in tensors]
    pool.copy_pages(torch.tensor([2, 2]), torch.tensor([0, 3]))
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor, was[[2, 1, 2, 2]])


@pytest.mark.parametrize(
    ("source", "target"),
    [([0], [1, 2]), ([0, 1], [2]), ([0, 1], [2, 2]), ([0], [0]), ([0], [4]), ([-1], [0])],
)
def test_a_copy_that_is_none_is_refused_and_changes_nothing(
    source: list[int], target: list[int]
) -> None:
    pool, tensors = states()
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ContractError, match=r"copy pages in 0\.\.3 to as many others"):
        pool.copy_pages(torch.tensor(source), torch.tensor(target))
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_a_state_is_one_key_and_one_slot() -> None:
    """Case J10."""
    pool, _ = states()
    one = transfer(3, num_keys=1, name=PoolName.MAMBA)
    assert pool.page_rows(one).tolist() == [3]
    # Conv states first, then recurrent ones: a layer needs one of each.
    assert [piece.num_bytes for piece in pool.pieces_of(1)] == [24, 40]
