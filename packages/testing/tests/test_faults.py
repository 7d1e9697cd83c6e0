"""The store with faults, and the suite for those who use one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import pytest
from packages.testing.tests import consumers, suite_runner
from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_contracts.errors import StorageError
from radixlink_testing import SUITE_LAYOUT, InMemoryStoreFactory, put_pages, read_page_range
from radixlink_testing.faults import FAULT_MATRIX, Fault, FaultKind, FaultyStore, StoreCall
from radixlink_testing.pages import page_keys
from radixlink_testing.store_consumers import StoreConsumerTests

if TYPE_CHECKING:
    from radixlink_testing.store_consumers import MakeConsumer, StoreConsumer

KEYS: Final = page_keys(range(4))
THERE: Final = PageBits.of([0, 2], 4)
NOT_THERE: Final = PageBits.of([1, 3], 4)


class TestCarefulConsumer(StoreConsumerTests):
    @pytest.fixture
    @override
    def make_consumer(self) -> MakeConsumer:
        return consumers.Careful


#: The case that names the rule a consumer breaks, then others that need the rule.
CAUGHT: Final[dict[type[StoreConsumer], tuple[str, ...]]] = {
    consumers.TrustsTheLookup: (
        "what_is_promised_under_a_fault_is_true",
        "fault_in_the_middle_of_a_load_gives_no_torn_page",
        "late_read_leaves_memory_alone_that_is_used_again",
        "page_that_is_damaged_is_not_loaded",
    ),
    consumers.TrustsOpen: (
        "page_that_is_damaged_is_not_loaded",
        "fault_in_the_middle_of_a_load_gives_no_torn_page",
    ),
    consumers.RaisesWhatTheStoreRaises: (
        "fault_of_one_operation_leaves_the_others",
        "everything_works_again_after_a_fault",
        "failed_put_is_not_told_as_stored",
        "fault_in_the_middle_of_a_load_gives_no_torn_page",
        "what_is_promised_under_a_fault_is_true",
    ),
    consumers.WaitsForEver: (
        "fault_of_one_operation_leaves_the_others",
        "everything_works_again_after_a_fault",
        "what_is_promised_under_a_fault_is_true",
    ),
    consumers.ReadsIntoItsMemory: ("late_read_leaves_memory_alone_that_is_used_again",),
    consumers.PutsFromItsMemory: ("late_put_stores_what_it_was_given",),
    consumers.CountsTheCallAsStored: (
        "failed_put_is_not_told_as_stored",
        "late_put_stores_what_it_was_given",
        "what_is_promised_under_a_fault_is_true",
    ),
    consumers.GivesUpForGood: ("everything_works_again_after_a_fault",),
}


@pytest.mark.parametrize("kind", CAUGHT, ids=lambda kind: kind.__name__)
def test_careless_consumer_is_caught_by_the_case_that_names_its_rule(
    kind: type[StoreConsumer],
) -> None:
    class Suite(StoreConsumerTests):
        # Each of its hangs costs that.
        case_deadline_s = 0.3 if kind is consumers.WaitsForEver else 30.0

    failures = suite_runner.failures_of(Suite, lambda: {"make_consumer": lambda: kind})
    assert failures.keys() == set(CAUGHT[kind])


# --- the store with faults ------------------------------------------------------------------------


@pytest.fixture
def store() -> FaultyStore:
    """Over a store with pages 0 and 2 of four."""
    store = FaultyStore(InMemoryStoreFactory().open(SUITE_LAYOUT))
    put_pages(store.inner, page_keys([0, 2]))
    return store


def do(store: FaultyStore, call: StoreCall) -> PageBits:
    """One call; which pages it says yes of."""
    match call:
        case StoreCall.CONTAINS:
            return store.contains(KEYS)
        case StoreCall.OPEN:
            return store.open(KEYS, 0.0).found
        case StoreCall.READ:
            return read_page_range(store, store.inner.open(KEYS, 0.0), 0)[0]
        case StoreCall.PUT:
            return put_pages(store, KEYS)


@pytest.mark.parametrize("call", StoreCall)
def test_call_without_a_fault_is_handed_on(store: FaultyStore, call: StoreCall) -> None:
    assert do(store, call) == (PageBits.all(4) if call is StoreCall.PUT else THERE)
    assert store.calls == [call.value]
    assert store.layout == SUITE_LAYOUT


@pytest.mark.parametrize("call", StoreCall)
def test_failing_call_does_nothing(store: FaultyStore, call: StoreCall) -> None:
    store.plan(Fault(call, FaultKind.FAILS))
    with pytest.raises(StorageError) as caught:
        do(store, call)
    assert caught.value.transient
    assert store.inner.contains(KEYS) == THERE


@pytest.mark.parametrize("call", StoreCall)
def test_lying_call_says_the_opposite(store: FaultyStore, call: StoreCall) -> None:
    store.plan(Fault(call, FaultKind.LIES))
    assert do(store, call) == (PageBits.all(4) if call is StoreCall.PUT else NOT_THERE)
    assert store.inner.contains(KEYS) == THERE


@pytest.mark.parametrize("call", StoreCall)
@pytest.mark.parametrize("kind", [FaultKind.HANGS, FaultKind.LATE])
def test_call_that_waits_ends_when_it_is_let_go(
    store: FaultyStore, call: StoreCall, kind: FaultKind
) -> None:
    store.plan(Fault(call, kind))
    answers: list[PageBits | StorageError] = []

    def run() -> None:
        try:
            answers.append(do(store, call))
        except StorageError as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert store.waiting.wait(30)
    assert answers == []
    assert store.inner.contains(KEYS) == THERE
    store.release()
    thread.join(30)
    [answer] = answers
    if kind is FaultKind.HANGS:
        assert isinstance(answer, StorageError)
        assert store.inner.contains(KEYS) == THERE
    else:
        assert answer == (PageBits.all(4) if call is StoreCall.PUT else THERE)


@pytest.mark.parametrize("call", StoreCall)
def test_call_that_comes_twice_reaches_the_store_twice(store: FaultyStore, call: StoreCall) -> None:
    inner = FaultyStore(store.inner)
    twice = FaultyStore(inner, [Fault(call, FaultKind.TWICE)])
    assert do(twice, call) == (PageBits.all(4) if call is StoreCall.PUT else THERE)
    assert inner.calls.count(call.value) == 2
    assert twice.calls == [call.value]


def test_plan_counts_the_calls_of_each_operation(store: FaultyStore) -> None:
    store.plan(
        Fault(StoreCall.CONTAINS, FaultKind.LIES, first=1, count=2),
        Fault(StoreCall.CONTAINS, FaultKind.FAILS, first=2),
    )
    assert do(store, StoreCall.OPEN) == THERE
    said = [do(store, StoreCall.CONTAINS) for _ in range(3)]
    assert said == [THERE, NOT_THERE, NOT_THERE]
    with pytest.raises(StorageError):
        do(store, StoreCall.CONTAINS)
    store.plan()
    assert do(store, StoreCall.CONTAINS) == THERE


def test_matrix_has_every_operation_with_every_fault() -> None:
    pairs = {(fault.call, fault.kind) for fault in FAULT_MATRIX}
    assert pairs == {(call, kind) for call in StoreCall for kind in FaultKind}
