from __future__ import annotations

import pytest
import torch

from radixlink_contracts.errors import ContractError
from radixlink_pools import LayerBuffers, byte_rows


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


@pytest.mark.parametrize("rows_per_page", [1, 2, 4])
def test_rows_of_tokens_make_pages(rows_per_page: int) -> None:
    pool = torch.arange(8 * 3, dtype=torch.int16).view(8, 3)
    rows = byte_rows(pool, rows_per_page)
    assert rows.shape == (8 // rows_per_page, rows_per_page * 6)
    assert rows.data_ptr() == pool.data_ptr()
    assert bytes(rows.flatten().tolist()) == bytes(pool.view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("shape", [(5, 3, 2, 4), (5, 3), (1, 3, 2), (5, 3, 1, 1)])
def test_one_layer_of_pages_that_hold_all_layers_has_rows_with_gaps(shape: tuple[int, ...]) -> None:
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer = pool[:, 1]
    rows = byte_rows(layer)
    assert rows.data_ptr() == layer.data_ptr()
    assert torch.equal(rows, layer.reshape(len(layer), -1).contiguous().view(torch.uint8))


@pytest.mark.parametrize("rows_per_page", [3, 0, -1])
def test_rows_that_are_no_whole_pages_are_refused(rows_per_page: int) -> None:
    with pytest.raises(ContractError, match="whole pages"):
        byte_rows(torch.zeros(4, 2), rows_per_page)


def test_a_page_of_rows_with_gaps_is_refused() -> None:
    with pytest.raises(ContractError, match="contiguous tensor"):
        byte_rows(torch.zeros(4, 2, 3)[:, 1], 2)


def test_pages_that_share_memory_are_refused() -> None:
    with pytest.raises(ContractError, match="contiguous tensor"):
        byte_rows(torch.zeros(1, 3).expand(4, 3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 2, device="meta"),
        torch.zeros(4, 2).to_sparse(),
        torch.zeros(4, 2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(4, 2)),
    ],
    ids=["meta", "sparse", "conjugate", "negative"],
)
def test_a_tensor_that_hides_its_memory_is_refused(tensor: torch.Tensor) -> None:
    """Case F8: a pool whose storage is hidden, or whose values are other than what is stored."""
    with pytest.raises(ContractError, match="shows its memory, got a hidden one"):
        byte_rows(tensor)


ONE = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("groups", "layers", "message"),
    [
        ([], None, "no storage buffers"),
        ([[]], None, "no storage buffers"),
        ([[ONE], []], None, "no storage buffers"),
        ([[ONE, ONE], [ONE]], None, r"2 tensors in each group, got \[2, 1\]"),
        ([[ONE, ONE]], (0,), r"1 tensors in each group, got \[2\]"),
        ([[ONE]], (), r"0 tensors in each group"),
    ],
)
def test_buffers_say_which_layer_each_is_of(
    groups: list[list[torch.Tensor]], layers: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        LayerBuffers(groups=groups, layers=layers)
