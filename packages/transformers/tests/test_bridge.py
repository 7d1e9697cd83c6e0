from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import PageKeys, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError
from radixlink_transformers import KVGeometry, PagedKVPool, restore_prefix, save_pages
from radixlink_transformers._forward import prefill
from radixlink_transformers._hugging_face import kv_layer, new_cache

if TYPE_CHECKING:
    from radixlink_transformers import CausalModel

PAGE_SIZE = 16
NUM_PAGES = 40


@pytest.fixture
def pool(model: CausalModel) -> PagedKVPool:
    geometry = KVGeometry.of_model(model, page_size=PAGE_SIZE)
    return PagedKVPool(geometry, NUM_PAGES, torch.device("cpu"))


@pytest.fixture
def rows() -> torch.Tensor:
    """Twelve pages in no order."""
    return torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3))[:12]


def _logits(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> torch.Tensor:
    """Behind a prompt whose first pages are in the pool."""
    start = len(rows) * PAGE_SIZE
    kv = new_cache(model.config)
    restore_prefix(kv, pool, rows)
    return prefill(model, kv, prompt[start:], start)


def test_restored_logits_equal_recomputed_ones_at_every_page_boundary(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    whole = new_cache(model.config)
    one_shot = prefill(model, whole, prompt, 0)
    save_pages(whole, pool, rows, 0)
    for pages in range(len(rows)):
        restored = _logits(model, pool, rows[:pages], prompt)
        assert (restored - one_shot).abs().max() < 1e-4
        boundary = pages * PAGE_SIZE
        chunked = new_cache(model.config)
        if boundary:
            prefill(model, chunked, prompt[:boundary], 0)
        assert torch.equal(restored, prefill(model, chunked, prompt[boundary:], boundary))


def test_a_page_that_was_never_written_shows_as_nan(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    prefill(model, kv, prompt, 0)
    save_pages(kv, pool, rows[:5], 0)
    assert not _logits(model, pool, rows[:5], prompt).isnan().any()
    assert _logits(model, pool, rows[:6], prompt).isnan().all()


def test_a_poisoned_page_shows_as_nan(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    prefill(model, kv, prompt, 0)
    save_pages(kv, pool, rows, 0)
    pool.poison(rows[3:4])
    assert not _logits(model, pool, rows[:3], prompt).isnan().any()
    assert _logits(model, pool, rows[:4], prompt).isnan().all()


def test_pages_in_the_middle_of_a_sequence_can_be_saved_alone(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    one_shot = prefill(model, kv, prompt, 0)
    save_pages(kv, pool, rows[:4], 0)
    save_pages(kv, pool, rows[4:8], 4 * PAGE_SIZE)
    assert (_logits(model, pool, rows[:8], prompt) - one_shot).abs().max() < 1e-4


def test_saving_no_page_needs_no_token(model: CausalModel, pool: PagedKVPool) -> None:
    save_pages(new_cache(model.config), pool, torch.empty(0, dtype=torch.int64), 0)


def test_a_cache_that_holds_tokens_is_not_restored_into(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    prefill(model, kv, prompt[:3], 0)
    with pytest.raises(ContractError, match="empty cache"):
        restore_prefix(kv, pool, rows)


def test_more_pages_than_the_cache_holds_are_refused(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    prefill(model, kv, prompt[:40], 0)
    with pytest.raises(ContractError, match=r"expected shape \(1, 2, 48, 16\) .* \(1, 2, 40, 16\)"):
        save_pages(kv, pool, rows[:3], 0)


def test_a_pool_row_is_a_page_of_keys_then_values(
    model: CausalModel, pool: PagedKVPool, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    prefill(model, kv, prompt, 0)
    save_pages(kv, pool, torch.tensor([7, 2]), 0)
    transfer = PoolTransfer(
        name=PoolName.KV,
        keys=PageKeys(bytes(64)),
        device_indices=torch.cat([torch.arange(112, 128), torch.arange(32, 48)]),
    )
    device_pool = pool.device_pool
    region = device_pool.region(1, device_pool.page_rows(transfer))
    assert device_pool.range_bytes == pool.geometry.range_bytes
    assert region.index.tolist() == [7, 2]
    layer = kv_layer(kv, 1)
    expected = torch.cat([layer.keys[0, :, 16:32].flatten(), layer.values[0, :, 16:32].flatten()])
    assert torch.equal(region.rows[2].view(torch.float32), expected)


def test_pages_are_written_beside_a_reader_of_other_pages(
    model: CausalModel, pool: PagedKVPool, rows: torch.Tensor, prompt: tuple[int, ...]
) -> None:
    kv = new_cache(model.config)
    prefill(model, kv, prompt, 0)
    save_pages(kv, pool, rows[:6], 0)
    expected = pool.read(0, rows[:6]).keys
    seen: list[bool] = []
    reader = threading.Thread(
        target=lambda: seen.extend(
            torch.equal(pool.read(0, rows[:6]).keys, expected) for _ in range(50)
        )
    )
    reader.start()
    for _ in range(50):
        save_pages(kv, pool, rows[6:], 6 * PAGE_SIZE)
        pool.poison(rows[6:])
    reader.join()
    assert seen == [True] * 50
