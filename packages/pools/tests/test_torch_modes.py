"""What torch is told about new tensors, a default device or inference mode, reaches no table here."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from radixlink_contracts import ByteRegion, PageKeys, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError
from radixlink_pools import (
    CpuCopier,
    DevicePoolEntry,
    FullSwaAllocator,
    PagedAllocator,
    byte_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from radixlink_contracts import SlotAllocator

Mode = Literal["normal", "inference"]

MODES: tuple[Mode, ...] = ("normal", "inference")


def entered(mode: Mode) -> AbstractContextManager[None]:
    return torch.inference_mode() if mode == "inference" else nullcontext()


def take(allocator: SlotAllocator, num_tokens: int) -> torch.Tensor:
    taken = allocator.alloc(num_tokens)
    assert taken is not None
    return taken


def host(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def states(rows: list[torch.Tensor]) -> DevicePoolEntry:
    return DevicePoolEntry(PoolName.MAMBA, rows, 1)


@pytest.fixture
def _meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_meta_by_default")
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_default_device_moves_no_page_of_a_pool(page_size: int) -> None:
    allocator = PagedAllocator(8, page_size, first_page=1)
    # Its memory is written by address, so a stack elsewhere must not get as far as that.
    assert allocator._stack.device.type == "cpu"
    taken = take(allocator, 3 * page_size)
    assert taken.tolist() == list(range(page_size, 4 * page_size))
    allocator.check_in_use(taken)
    allocator.free(taken[page_size:])
    with pytest.raises(ContractError, match="is free"):
        allocator.free(taken)
    assert allocator.available_size == 7 * page_size
    allocator.clear()
    assert torch.equal(take(allocator, 3 * page_size), taken)


@pytest.mark.usefixtures("_meta_by_default")
def test_a_default_device_moves_no_table_of_pairs() -> None:
    allocator = FullSwaAllocator(8, 8, 2)
    assert allocator.full_to_swa.device.type == "cpu"
    assert allocator._full_of.device.type == "cpu"
    full, alone = take(allocator, 4), take(allocator.full, 4)
    allocator.map_full_to_swa(alone, allocator.swa_indices(full))
    assert allocator.swa_indices(torch.cat([full, alone])).tolist() == [-1] * 4 + [0, 1, 2, 3]
    assert allocator.free_swa(alone[:2]) == 2
    with pytest.raises(ContractError, match="beside which window slot 2 is in use"):
        allocator.full.free(alone)
    allocator.free(alone)
    allocator.full.free(full)
    allocator.clear()
    assert allocator.full_to_swa.tolist() == [-1] * 16


@pytest.mark.usefixtures("_meta_by_default")
def test_a_default_device_moves_neither_rows_nor_staging() -> None:
    tensor = torch.arange(8 * 6, dtype=torch.uint8, device="cpu").view(8, 6)
    pool = DevicePoolEntry(PoolName.KV, [byte_rows(tensor, 4)], 4)
    transfer = PoolTransfer(
        name=PoolName.KV, keys=PageKeys(bytes(32)), device_indices=host(4, 5, 6, 7)
    )
    rows = pool.page_rows(transfer)
    assert rows.tolist() == [1]
    copier = CpuCopier()
    staging = copier.staging(24)
    assert staging.tensor.device.type == "cpu"
    copier.gather(pool.region(0, rows), staging.tensor)
    assert bytes(staging.buffer) == bytes(range(24, 48))
    copier.scatter(pool.region(0, host(0)), staging.tensor)
    pool.copy_pages(host(0), host(1))
    assert tensor.tolist() == [*torch.arange(24, 48, device="cpu").view(4, 6).tolist()] * 2


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("then", MODES)
def test_pages_go_out_and_come_back_in_any_mode(
    made: Mode, first: Mode, then: Mode, page_size: int
) -> None:
    with entered(made):
        allocator = PagedAllocator(8, page_size)
    # Calls of this length are counted with what the first one made.
    with entered(first):
        taken = take(allocator, 2 * page_size)
        allocator.free(taken)
    with entered(then):
        allocator.check_in_use(take(allocator, 2 * page_size))
        allocator.free(taken)
        with pytest.raises(ContractError, match="is free"):
            allocator.free(taken)
        allocator.clear()
    assert allocator.available_size == 8 * page_size


@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("then", MODES)
def test_pairs_are_made_and_parted_in_any_mode(made: Mode, first: Mode, then: Mode) -> None:
    with entered(made):
        allocator = FullSwaAllocator(8, 8, 2)
    with entered(first):
        full, alone = take(allocator, 4), take(allocator.full, 4)
        swa = allocator.swa_indices(full)
    with entered(then):
        allocator.map_full_to_swa(alone, swa)
        assert allocator.free_swa(alone[:2]) == 2
        allocator.swa.free(allocator.swa_indices(alone[2:]))
        allocator.full.free(alone)
        allocator.free(full)
        again = take(allocator, 4)
    allocator.free(again)
    allocator.clear()
    assert allocator.full_to_swa.tolist() == [-1] * 16


@pytest.mark.parametrize("row_bytes", [7, 8])
@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("used", MODES)
def test_rows_and_staging_are_copied_to_in_any_mode(made: Mode, used: Mode, row_bytes: int) -> None:
    """Rows of an odd size are no wider words, so it is the tensor itself that is written."""
    with entered(made):
        rows = torch.arange(4 * row_bytes, dtype=torch.uint8).view(4, row_bytes)
        staging = CpuCopier().staging(row_bytes)
        index, other = torch.tensor([1]), torch.tensor([3])
    with entered(used):
        CpuCopier().gather(ByteRegion(rows=rows, index=index), staging.tensor)
        CpuCopier().scatter(ByteRegion(rows=rows, index=other), staging.tensor)
    assert bytes(staging.buffer) == bytes(rows[1].tolist()) == bytes(rows[3].tolist())


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("entry_made", MODES)
@pytest.mark.parametrize("used", MODES)
def test_pages_are_copied_in_any_mode(
    made: Mode, entry_made: Mode, used: Mode, *, raw: bool
) -> None:
    with entered(made):
        tensor = torch.arange(4 * 7, dtype=torch.uint8).view(4, 7)
        rows = tensor if raw else byte_rows(tensor)
    with entered(entry_made):
        pool = states([rows])
    with entered(used):
        pool.copy_pages(torch.tensor([0]), torch.tensor([3]))
    assert tensor[3].tolist() == list(range(7))
    assert pool.region(0, torch.tensor([0])).rows.data_ptr() == tensor.data_ptr()


def test_an_error_of_torch_itself_is_no_fault_of_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("no memory")

    allocator = PagedAllocator(8, 2)
    taken = take(allocator, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", no_memory)
        patch.setattr(torch.Tensor, "index_select", no_memory)
        for call in (allocator.free, allocator.check_in_use):
            with pytest.raises(RuntimeError, match="no memory"):
                call(taken)
            # Bad pages are said to be, whatever torch says.
            with pytest.raises(ContractError, match="exceeds the pool"):
                call(taken + 100)
    assert allocator.available_size == 12
    allocator.free(taken)
    assert torch.equal(take(allocator, 4), taken)


def test_an_error_of_torch_itself_is_no_fault_of_the_rows() -> None:
    rows = torch.zeros(1, 7, dtype=torch.uint8).expand(4, 7)
    region = ByteRegion(rows=rows, index=torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="single memory location"):
        CpuCopier().scatter(region, torch.zeros(14, dtype=torch.uint8))
    staging = torch.zeros(1, dtype=torch.uint8).expand(14)
    with pytest.raises(RuntimeError, match="single memory location"):
        CpuCopier().gather(region, staging)
