from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import radixlink_pools
from radixlink_contracts import ByteRegion, PageKeys, PoolName, PoolTransfer, Staging
from radixlink_contracts.errors import BackendUnavailableError, ContractError
from radixlink_pools import CpuCopier, CudaCopier, DevicePoolEntry, byte_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, NaN patterns included: what comes back is compared as bytes."""
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_a_typed_pool_come_back_where_they_belong(dtype: torch.dtype) -> None:
    # Two layer ranges of different geometry: (pages, k and v, tokens, heads, dim).
    layers = [random_pool((6, 2, 2, 3, 4), dtype), random_pool((6, 2, 2, 1, 5), dtype)]
    pool = DevicePoolEntry(PoolName.KV, [byte_rows(layer) for layer in layers], page_size=2)
    before = [byte_rows(layer).clone() for layer in layers]
    copier = CpuCopier()
    transfer = PoolTransfer(
        name=PoolName.KV,
        keys=PageKeys(bytes(96)),
        device_indices=torch.tensor([8, 9, 0, 1, 4, 5]),
    )
    index = pool.page_rows(transfer)
    kept: list[Staging] = []
    for layer_range, row_bytes in enumerate(pool.range_bytes):
        staging = copier.staging(3 * row_bytes)
        assert copier.gather(pool.region(layer_range, index), staging.tensor).done()
        expected = b"".join(bytes(before[layer_range][page].tolist()) for page in (4, 0, 2))
        assert bytes(staging.buffer) == expected
        kept.append(staging)
    other = torch.tensor([1, 3, 5])
    for layer_range, staging in enumerate(kept):
        fence = copier.scatter(pool.region(layer_range, other), staging.tensor)
        assert fence.wait(0.0)
        now = byte_rows(layers[layer_range])
        assert torch.equal(now[[1, 3, 5]], before[layer_range][[4, 0, 2]])
        assert torch.equal(now[[0, 2, 4]], before[layer_range][[0, 2, 4]])


@given(
    num_rows=st.integers(1, 6),
    row_bytes=st.integers(1, 24),
    # Rows as a part of wider ones, so that strides and offsets forbid some word sizes.
    left=st.integers(0, 9),
    right=st.integers(0, 9),
    shift=st.integers(0, 9),
    data=st.data(),
)
def test_any_alignment_of_rows_and_staging_copies_the_same_bytes(
    num_rows: int, row_bytes: int, left: int, right: int, shift: int, data: st.DataObject
) -> None:
    whole = torch.arange(num_rows * (left + row_bytes + right)).view(num_rows, -1)
    whole = (whole % 251).to(torch.uint8)
    rows = whole[:, left : left + row_bytes]
    index = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True)))
    region = ByteRegion(rows=rows, index=index)
    staged = torch.zeros(shift + len(index) * row_bytes, dtype=torch.uint8)[shift:]
    CpuCopier().gather(region, staged)
    assert torch.equal(staged.view(-1, row_bytes), rows[index])
    expected = whole.clone()
    expected[index, left : left + row_bytes] = 255 - rows[index]
    CpuCopier().scatter(region, 255 - staged)
    assert torch.equal(whole, expected)


def test_rows_with_gaps_between_their_bytes_are_copied_too() -> None:
    whole = torch.arange(32, dtype=torch.uint8).view(2, 16)
    region = ByteRegion(rows=whole[:, ::2], index=torch.tensor([1]))
    staged = torch.zeros(8, dtype=torch.uint8)
    CpuCopier().gather(region, staged)
    assert staged.tolist() == list(range(16, 32, 2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(7, dtype=torch.uint8),
        torch.zeros(9, dtype=torch.uint8),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(2, dtype=torch.int32),
    ],
)
def test_staging_of_another_size_or_dtype_is_refused(tensor: torch.Tensor) -> None:
    region = ByteRegion(rows=torch.zeros(4, 4, dtype=torch.uint8), index=torch.tensor([0, 1]))
    for call in (CpuCopier().gather, CpuCopier().scatter):
        with pytest.raises(ContractError, match="staging of 2 x 4 bytes"):
            call(region, tensor)


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_outside_the_pool_is_refused(row: int) -> None:
    region = ByteRegion(rows=torch.zeros(4, 4, dtype=torch.uint8), index=torch.tensor([row]))
    for call in (CpuCopier().gather, CpuCopier().scatter):
        with pytest.raises(ContractError, match=r"rows in 0\.\.3"):
            call(region, torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("index", "got"),
    [
        (torch.zeros(0), r"\(0,\) torch.float32 of none"),
        (torch.zeros(1), r"\(1,\) torch.float32 from 0.0 to 0.0"),
        (torch.zeros(1, 1, dtype=torch.int64), r"\(1, 1\) torch.int64 from 0 to 0"),
        (torch.tensor(0), r"\(\) torch.int64 from 0 to 0"),
    ],
)
def test_an_index_that_is_no_list_of_rows_is_refused(index: torch.Tensor, got: str) -> None:
    pool = torch.zeros(4, 4, dtype=torch.uint8)
    staging = torch.ones(4 * index.numel(), dtype=torch.uint8)
    for call in (CpuCopier().gather, CpuCopier().scatter):
        with pytest.raises(ContractError, match=f"got {got}"):
            call(ByteRegion(rows=pool, index=index), staging)
    assert not pool.any()


def test_staging_is_one_memory_seen_twice() -> None:
    staging = CpuCopier().staging(8)
    staging.buffer[:] = bytes(range(8))
    assert staging.tensor.tolist() == list(range(8))
    staging.tensor[3] = 99
    assert staging.buffer[3] == 99
    assert (staging.buffer.format, staging.buffer.readonly) == ("B", False)


@pytest.mark.parametrize("view", ["tensor", "buffer"])
def test_each_view_of_staging_keeps_the_memory_alive(view: str) -> None:
    def filled(fill: int) -> torch.Tensor | memoryview:
        staging = CpuCopier().staging(1 << 16)
        staging.tensor.fill_(fill)
        return staging.tensor if view == "tensor" else staging.buffer

    kept = [filled(fill) for fill in range(20)]
    gc.collect()
    # Whatever was given up would be taken, and written, by these.
    _others = [torch.full((1 << 16,), 255, dtype=torch.uint8) for _ in range(40)]
    for fill, memory in enumerate(kept):
        assert bytes(memory[:: 1 << 12].tolist()) == bytes([fill]) * 16


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_staging_of_nothing_is_refused(num_bytes: int) -> None:
    with pytest.raises(ContractError, match="at least 1 byte"):
        CpuCopier().staging(num_bytes)


def test_a_cuda_copier_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="use CpuCopier"):
        CudaCopier()


def test_nothing_here_goes_through_numpy() -> None:
    """Torch without numpy must do: the package does not declare it."""
    for path in Path(radixlink_pools.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    assert all(alias.name.split(".")[0] != "numpy" for alias in names), path
                case ast.ImportFrom(module=str(module)):
                    assert module.split(".")[0] != "numpy", path
                case ast.Attribute(attr=attr):
                    assert attr not in {"numpy", "from_numpy"}, path
                case _:
                    pass
