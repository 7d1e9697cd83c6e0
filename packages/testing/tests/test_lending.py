"""The stores about lending against the suite, through each other, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packages.testing.tests.test_conformance import MemoryPlace
from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_testing import (
    SUITE_LAYOUT,
    InMemoryStoreFactory,
    PageStoreTests,
    StorePlace,
    put_pages,
    read_right,
)
from radixlink_testing.lending import GIVEN_BACK, BorrowingPageStore, LendingPageStore
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from radixlink_contracts import PageStore, PoolLayout


class LendingPlace(MemoryPlace):
    """A dict, each opener of which borrows."""

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        return BorrowingPageStore(LendingPageStore(super().open(layout)))


class TestBorrowedPageStore(PageStoreTests):
    @pytest.fixture
    @override
    def place(self) -> StorePlace:
        return LendingPlace()


@pytest.fixture
def lender() -> LendingPageStore:
    return LendingPageStore(InMemoryStoreFactory().open(SUITE_LAYOUT), max_pages=4)


def test_loans_are_counted_and_given_back(lender: LendingPageStore) -> None:
    keys = page_keys(range(4))
    store = BorrowingPageStore(lender)
    assert put_pages(store, keys).complete
    assert lender.num_lent == 0
    handles = store.open(keys, 0.0)
    assert lender.num_lent == 1
    assert read_right(store, handles) == PageBits.all(4)
    del handles
    assert lender.num_lent == 0
    assert store.borrowed == len(lender.loans) == 2


def test_what_was_given_back_is_gone_and_refused(lender: LendingPageStore) -> None:
    keys = page_keys(range(2))
    lent = lender.lend(2)
    assert lent is not None
    handles = lender.open_lent(keys, 0.0, lent)
    with pytest.raises(StaleHandleError):
        lender.put_lent(keys, lent)
    lent.release()
    lent.release()
    assert lender.num_lent == 0
    assert set(lent.buffer) == {GIVEN_BACK}
    with pytest.raises(StaleHandleError):
        lender.verify(handles, 0, lent)


def test_loans_that_cannot_be_are_refused(lender: LendingPageStore) -> None:
    for num_pages in (0, 5):
        with pytest.raises(ContractError):
            lender.lend(num_pages)
    lent = lender.lend(2)
    assert lent is not None
    with pytest.raises(ContractError):
        lender.put_lent(page_keys(range(3)), lent)
    other = LendingPageStore(InMemoryStoreFactory().open(SUITE_LAYOUT))
    with pytest.raises(ContractError):
        other.put_lent(page_keys(range(2)), lent)
    assert lender.lend(1) is not None
    assert lender.lend(1) is None
