"""Memory that the store lends: what lies there, how much there is, and who has it when a call is late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np
import pytest
from packages.store_mooncake.tests.conftest import stopped
from packages.store_mooncake.tests.test_failures import soon

from radixlink_contracts import LendingStore, PageBits
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_testing import SUITE_LAYOUT, put_pages, read_right
from radixlink_testing.lending import BorrowingPageStore, LendingPageStore
from radixlink_testing.pages import page_column, page_keys

if TYPE_CHECKING:
    from packages.store_mooncake.tests.conftest import Connect, Namespace, StartMooncake

    from radixlink_contracts import LentFrames, PageKeys
    from radixlink_store_mooncake import MooncakePageStore

_KEYS: Final = page_keys(range(8))
_RANGES: Final = range(len(SUITE_LAYOUT.range_bytes))
_MANY: Final = 20


def lend(store: MooncakePageStore, num_pages: int = len(_KEYS)) -> LentFrames:
    lent = store.lend(num_pages)
    assert lent is not None
    return lent


def address_of(lent: LentFrames) -> int:
    address: int = np.frombuffer(lent.buffer, np.uint8).ctypes.data
    return address


def column(store: MooncakePageStore, lent: LentFrames, layer_range: int) -> bytes:
    """One range of all frames."""
    start, size = store.frames.range_offsets[layer_range], store.layout.range_bytes[layer_range]
    frames = np.frombuffer(lent.buffer, np.uint8).reshape(-1, store.frames.frame_bytes)
    return frames[:, start : start + size].tobytes()


def fill(store: MooncakePageStore, lent: LentFrames, keys: PageKeys) -> None:
    """Have the pages in the frames."""
    frames = np.frombuffer(lent.buffer, np.uint8).reshape(-1, store.frames.frame_bytes)
    for layer_range, size in enumerate(store.layout.range_bytes):
        start = store.frames.range_offsets[layer_range]
        data = np.frombuffer(page_column(keys, store.layout, layer_range), np.uint8)
        frames[:, start : start + size] = data.reshape(-1, size)


def test_pages_that_were_put_from_lent_memory_are_fetched_into_it(whole: Namespace) -> None:
    store = whole.factory.open(SUITE_LAYOUT)
    assert isinstance(store, LendingStore)
    lent = lend(store)
    fill(store, lent, _KEYS)
    assert store.put_lent(_KEYS, lent) == PageBits.all(8)
    lent.release()
    lent = lend(store)
    lent.buffer[:] = bytes(len(lent.buffer))
    handles = store.open_lent(_KEYS, 0.0, lent)
    for layer_range in _RANGES:
        assert store.verify(handles, layer_range, lent) == PageBits.all(8)
        assert column(store, lent, layer_range) == page_column(_KEYS, SUITE_LAYOUT, layer_range)
    lent.release()
    # The other way reads what was put from there too.
    assert read_right(store, store.open(_KEYS, 0.0)) == PageBits.all(8)


def test_bytes_that_changed_in_lent_memory_are_read_anew(whole: Namespace) -> None:
    store = whole.factory.open(SUITE_LAYOUT)
    put_pages(store, _KEYS)
    lent = lend(store)
    handles = store.open_lent(_KEYS, 0.0, lent)
    at = 3 * store.frames.frame_bytes + store.frames.range_offsets[1]
    lent.buffer[at] ^= 1
    assert store.verify(handles, 1, lent) == PageBits.all(8)
    assert column(store, lent, 1) == page_column(_KEYS, SUITE_LAYOUT, 1)
    # So is what was fetched for nobody: the same page of a later write is none of this load's.
    lent.buffer[at] ^= 1
    whole.vandal.remove(whole.name_of(SUITE_LAYOUT, _KEYS[3]))
    put_pages(store, _KEYS.span(3, 4), "later")
    assert store.verify(handles, 1, lent) == PageBits.of(set(range(8)) - {3}, 8)
    assert store.counters.read_stale == 1
    lent.release()


def test_all_buffers_but_one_are_lent_and_the_others_go_on(whole: Namespace) -> None:
    store = whole.factory.open(SUITE_LAYOUT)
    put_pages(store, _KEYS)
    loans = [lend(store) for _ in range(whole.settings.num_buffers - 1)]
    assert len({address_of(lent) for lent in loans}) == len(loans)
    assert store.lend(1) is None
    for _ in range(_MANY):
        assert read_right(store, store.open(_KEYS, 0.0)) == PageBits.all(8)
    for lent in loans:
        lent.release()
        lent.release()
    # Given back twice, each was counted once.
    again = [lend(store) for _ in loans]
    assert store.lend(1) is None
    for lent in again:
        lent.release()


def test_what_is_no_fitting_loan_is_refused(whole: Namespace, ranges: Namespace) -> None:
    store = whole.factory.open(SUITE_LAYOUT)
    put_pages(store, _KEYS)
    for num_pages in (0, store.frames.max_pages + 1):
        with pytest.raises(ContractError, match="loan"):
            store.lend(num_pages)
    lent = lend(store)
    with pytest.raises(ContractError, match="7 frames"):
        store.put_lent(_KEYS.span(0, 7), lent)
    # A frame is as large as a page of its layout.
    wider = whole.factory.open(attrs.evolve(SUITE_LAYOUT, range_bytes=(4096,)))
    with pytest.raises(ContractError, match="frames"):
        wider.open_lent(_KEYS, 0.0, lent)
    foreign = LendingPageStore(store).lend(8)
    assert foreign is not None
    with pytest.raises(ContractError, match="lent by this store"):
        store.open_lent(_KEYS, 0.0, foreign)
    # Refused before it served, it serves still, and once.
    handles = store.open_lent(_KEYS, 0.0, lent)
    with pytest.raises(StaleHandleError):
        store.put_lent(_KEYS, lent)
    with pytest.raises(ContractError, match="layer range"):
        store.verify(handles, len(_RANGES), lent)
    lent.release()
    with pytest.raises(StaleHandleError):
        store.verify(handles, 0, lent)
    # Where pages are to be read range by range, there is nothing to fetch them into.
    assert ranges.factory.open(SUITE_LAYOUT).lend(1) is None


def test_memory_of_a_call_that_is_late_is_lent_to_nobody_before_it_returns(
    start_mooncake: StartMooncake, connect_to: Connect
) -> None:
    mooncake = start_mooncake("--client_ttl=60")
    owner = mooncake.start_owner()
    store = connect_to(mooncake, call_timeout_s=1.0, num_buffers=4).open(SUITE_LAYOUT)
    put_pages(store, _KEYS)
    others = page_keys(range(8), "others")
    loading, storing = lend(store), lend(store)
    fill(store, storing, others)
    late = {address_of(loading), address_of(storing)}
    with stopped(owner), ThreadPoolExecutor() as threads:
        opened = threads.submit(store.open_lent, _KEYS, 0.0, loading)
        put = threads.submit(store.put_lent, others, storing)
        assert opened.result().found == PageBits.none(8)
        assert put.result() == PageBits.none(8)
        assert store.counters.unanswered == 2
        loading.release()
        storing.release()
        # Two of four are left, one of which may be lent while calls may need the other.
        for _ in range(_MANY):
            lent = lend(store)
            assert address_of(lent) not in late
            lent.release()

    def are_back() -> bool:
        loans = [lent for lent in (store.lend(1) for _ in range(3)) if lent is not None]
        # The buffer that became free last is lent next: so both are among the next three.
        for lent in reversed(loans):
            lent.release()
        return late <= {address_of(lent) for lent in loans}

    assert soon(are_back)
    borrower = BorrowingPageStore(store)
    assert soon(lambda: read_right(borrower, borrower.open(_KEYS, 0.0)).complete)
