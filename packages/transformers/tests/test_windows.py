"""Models with sliding windows beside full attention: which of their pages are kept and needed.

Window of 32 tokens, which looks back 31: two pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import EvictParams, PoolName, RequestId
from radixlink_contracts.errors import CapacityError, ContractError
from radixlink_transformers import (
    KVGeometry,
    ModelKind,
    PagedKVPool,
    generate_without_cache,
    restore_prefix,
    save_pages,
)
from radixlink_transformers._forward import prefill
from radixlink_transformers._hugging_face import new_cache

from .conftest import PAGE_SIZE, at_rest, other_prompt

if TYPE_CHECKING:
    from radixlink_transformers import CausalModel

    from .conftest import EngineMaker, MemoryStores

NUM_NEW = 8
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


# -- what of the store is needed ----------------------------------------------------------------


def test_a_window_page_that_is_not_seen_is_not_needed(
    make: EngineMaker, stores: MemoryStores, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores, of=gemma)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    windows = stores.pool(PoolName.SWA)
    for key in list(windows)[:9]:
        del windows[key]
    generation = make(stores, of=gemma).generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == generate_without_cache(gemma, prompt, NUM_NEW).tokens


def test_a_lost_window_page_ends_the_prefix_before_it(
    make: EngineMaker, stores: MemoryStores, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores, of=gemma)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    windows = stores.pool(PoolName.SWA)
    # Pages 9 and 10 are the window behind 176 tokens, 8 and 9 that behind 160.
    del windows[list(windows)[9]]
    heir = make(stores, of=gemma)
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 144
    assert generation.tokens == generate_without_cache(gemma, prompt, NUM_NEW).tokens
    assert at_rest(heir)


# -- on the device ------------------------------------------------------------------------------


def test_a_window_that_went_comes_back_with_the_next_request(
    make: EngineMaker, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=gemma)
    engine.generate(prompt, R1, NUM_NEW)
    windows = engine._device.windows
    assert windows is not None
    engine._cache.evict(_swa(12 * PAGE_SIZE))
    assert windows.pair.swa.available_size == 64 * PAGE_SIZE
    assert engine.num_tokens_on_device(prompt) == 0
    again = engine.generate(prompt, R2, NUM_NEW)
    assert again.figures.computed_tokens == len(prompt)
    assert engine.num_tokens_on_device(prompt) == 176
    third = engine.generate(prompt, R3, NUM_NEW)
    assert third.figures.device_tokens == 176
    assert third.tokens == generate_without_cache(gemma, prompt, NUM_NEW).tokens
    assert at_rest(engine)


def test_the_store_gives_windows_that_the_device_has_no_more(
    make: EngineMaker, stores: MemoryStores, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(stores, of=gemma)
    engine.generate(prompt, R1, 1)
    assert engine.settle(10)
    engine._cache.evict(_swa(12 * PAGE_SIZE))
    again = engine.generate(prompt, R2, NUM_NEW)
    assert again.figures.restored_tokens == 176
    assert again.tokens == generate_without_cache(gemma, prompt, NUM_NEW).tokens
    assert at_rest(engine)


def test_few_window_pages_keep_the_last_windows_only(
    make: EngineMaker, stores: MemoryStores, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(stores, of=gemma, num_window_pages=4)
    engine.generate(prompt, R1, 1)
    assert engine.num_tokens_on_device(prompt) == 176
    # Pages 8 to 11 have windows, so a match can end behind page 9.
    assert engine.num_tokens_on_device(prompt[:161]) == 160
    assert engine.num_tokens_on_device(prompt[:145]) == 0
    assert at_rest(engine)
    heir = make(stores, of=gemma, num_window_pages=4)
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == generate_without_cache(gemma, prompt, NUM_NEW).tokens
    assert at_rest(heir)


def test_what_does_not_fit_beside_its_own_prefix_is_computed_from_nothing(
    make: EngineMaker, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=gemma, num_window_pages=4)
    # Pages 0 and 1 are one node, and page 2: whoever goes on behind page 2 locks three windows.
    engine.generate(prompt[:33], R1, 1)
    engine.generate(prompt[:49], R2, 1)
    longer = prompt[:80]
    generation = engine.generate(longer, R3, NUM_NEW)
    assert generation.figures.computed_tokens == len(longer)
    assert generation.tokens == generate_without_cache(gemma, longer, NUM_NEW).tokens
    assert at_rest(engine)


def test_a_window_that_does_not_fit_is_refused(make: EngineMaker, gemma: CausalModel) -> None:
    engine = make(of=gemma, num_window_pages=1)
    with pytest.raises(CapacityError, match="one of 16 for windows"):
        engine.generate(other_prompt(1, 64), R1, 1)
    assert at_rest(engine)


# -- the bridge alone ---------------------------------------------------------------------------


def test_windows_go_to_pages_and_back_whatever_the_chunks(
    gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    kind = ModelKind.of_config(gemma.config)
    geometry = KVGeometry.of_model(gemma, page_size=PAGE_SIZE)
    pools = [
        PagedKVPool(geometry, 12, torch.device("cpu")),
        PagedKVPool(geometry.of_windows(kind), 12, torch.device("cpu"), PoolName.SWA),
    ]
    nothing, all_rows = torch.empty(0, dtype=torch.int64), torch.arange(12)
    one_shot = prefill(gemma, new_cache(gemma.config), prompt, 0)
    for chunk_tokens in (None, 16, 40, 100):
        cache = new_cache(gemma.config)
        for pool in pools:
            restore_prefix(cache, pool, nothing)
        assert _distance(prefill(gemma, cache, prompt, 0, chunk_tokens), one_shot) < 1e-4
        for pool in pools:
            save_pages(cache, pool, all_rows, 0)
        for num_pages in (1, 2, 3, 11):
            heir = new_cache(gemma.config)
            for pool in pools:
                seen = min(num_pages, 2) if pool is pools[1] else num_pages
                rows = all_rows[num_pages - seen : num_pages]
                restore_prefix(heir, pool, rows, num_pages * PAGE_SIZE)
            start = num_pages * PAGE_SIZE
            assert _distance(prefill(gemma, heir, prompt[start:], start), one_shot) < 1e-4


def test_what_left_the_window_is_not_saved(gemma: CausalModel, prompt: tuple[int, ...]) -> None:
    kind = ModelKind.of_config(gemma.config)
    geometry = KVGeometry.of_model(gemma, page_size=PAGE_SIZE).of_windows(kind)
    pool = PagedKVPool(geometry, 12, torch.device("cpu"), PoolName.SWA)
    cache = new_cache(gemma.config)
    prefill(gemma, cache, prompt, 0)
    with pytest.raises(ContractError, match="a window that begins at 161"):
        save_pages(cache, pool, torch.arange(2), 160)
    with pytest.raises(ContractError, match="expected 2 pages before token 64 in layer 0, got 4"):
        restore_prefix(new_cache(gemma.config), pool, torch.arange(4), 64)


def _swa(num_tokens: int) -> EvictParams:
    return EvictParams(swa_num_tokens=num_tokens)
