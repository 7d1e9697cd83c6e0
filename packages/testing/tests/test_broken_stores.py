"""Every broken store is caught by the case that names the rule it breaks, and by few others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import attrs
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from packages.testing.tests import broken_stores as broken
from packages.testing.tests import suite_runner
from typing_extensions import override

from radixlink_testing import SUITE_LAYOUT, PageStoreMachine, PageStoreTests, StorePlace

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet


@attrs.frozen
class Caught:
    """What the suite says of a broken store.

    Attributes:
        by: The case that names the rule.
        also: Other cases that must fail too, since they need the rule.
        perhaps: Other cases that may fail, by how threads happen to run.
    """

    by: str
    also: AbstractSet[str] = frozenset()
    perhaps: AbstractSet[str] = frozenset()


CAUGHT: Final[dict[type, Caught]] = {
    # Lookups.
    broken.NamesAnotherLayout: Caught("layout_is_what_was_opened"),
    broken.RaisesOnMiss: Caught(
        "miss_is_a_value",
        also={"pressure_evicts_and_never_mixes_bytes"},
        perhaps={"threads_only_ever_read_right_bytes"},
    ),
    broken.PacksItsAnswers: Caught(
        "partial_hits_keep_their_places",
        also={
            "damaged_page_can_be_stored_again",
            "more_pages_than_fit_are_no_error_and_told",
            "page_that_vanished_is_a_miss_and_can_be_stored_again",
            "thousands_of_keys_in_one_call_are_all_looked_for",
        },
    ),
    broken.LooksAtHalfTheKey: Caught("keys_that_differ_in_one_bit_are_different_pages"),
    broken.LooksForSomeKeys: Caught("thousands_of_keys_in_one_call_are_all_looked_for"),
    broken.NeedsAPage: Caught("no_pages_are_a_call_like_any_other"),
    # Reading.
    broken.ReadsOnce: Caught("layer_ranges_are_read_in_any_order_and_again"),
    broken.MixesBatchesUp: Caught(
        "pages_come_back_in_every_layer_range",
        also={
            "lease_is_advice_and_never_an_error",
            "more_pages_than_fit_are_no_error_and_told",
            "pressure_evicts_and_never_mixes_bytes",
            "thousands_of_keys_in_one_call_are_all_looked_for",
        },
        perhaps={"threads_only_ever_read_right_bytes"},
    ),
    broken.ReadsByKeyAlone: Caught(
        "handle_never_reads_a_later_write_of_its_page",
        also={
            "damaged_page_can_be_stored_again",
            "page_that_vanished_is_a_miss_and_can_be_stored_again",
        },
    ),
    broken.ReadsWhatWasNotFound: Caught("page_stored_after_open_is_not_read_by_its_handle"),
    broken.ReadsInOneThread: Caught("handles_are_read_by_any_thread"),
    broken.NeedsFlatBuffers: Caught("out_may_be_any_writable_buffer"),
    broken.WritesBesideOut: Caught("nothing_beside_out_is_written"),
    # Writing.
    broken.LastWriterWins: Caught(
        "first_writer_wins",
        also={
            "first_writer_wins_whoever_opened_the_store",
            "page_stored_after_open_is_not_read_by_its_handle",
        },
        perhaps={
            "close_in_the_middle_of_calls_is_safe",
            "threads_only_ever_read_right_bytes",
            "threads_that_write_one_page_never_mix_their_bytes",
        },
    ),
    broken.CountsOnlyNewPages: Caught(
        "put_counts_pages_that_were_there",
        also={
            "damaged_page_can_be_stored_again",
            "first_writer_wins_whoever_opened_the_store",
            "keys_that_differ_in_one_bit_are_different_pages",
            "page_that_vanished_is_a_miss_and_can_be_stored_again",
            "threads_that_write_one_page_never_mix_their_bytes",
        },
    ),
    broken.LastDuplicateWins: Caught("duplicates_in_one_put_are_one_page"),
    broken.KeepsReferences: Caught("put_keeps_no_reference_to_what_it_was_given"),
    broken.NeedsBytes: Caught("parts_may_be_any_buffer"),
    broken.ClaimsToHaveRoom: Caught("more_pages_than_fit_are_no_error_and_told"),
    broken.CutsParts: Caught(
        "parts_of_another_size_are_refused", also={"refused_put_stores_nothing"}
    ),
    broken.IgnoresMoreParts: Caught("another_number_of_parts_is_refused"),
    broken.StoresBeforeItLooks: Caught("refused_put_stores_nothing"),
    broken.FillsWhatFits: Caught("out_of_another_size_is_refused"),
    broken.NeverLooksAtOut: Caught("out_that_cannot_be_written_is_refused"),
    broken.CountsRangesFromTheEnd: Caught("layer_range_that_does_not_exist_is_refused"),
    # How long a page stays.
    broken.ReadsTheSlot: Caught(
        "handle_of_an_evicted_page_is_a_miss",
        also={
            "damaged_page_can_be_stored_again",
            "damaged_page_is_a_miss",
            "handle_never_reads_a_later_write_of_its_page",
            "page_that_vanished_is_a_miss_and_can_be_stored_again",
        },
        perhaps={"threads_only_ever_read_right_bytes"},
    ),
    broken.RaisesWhenFull: Caught("more_pages_than_fit_are_no_error_and_told"),
    broken.PromisesLeases: Caught("lease_is_advice_and_never_an_error"),
    broken.ForgetsUse: Caught("open_raises_recency"),
    broken.TouchesNothing: Caught("touch_raises_recency"),
    broken.KeepsNoChecksums: Caught(
        "damaged_page_is_a_miss", also={"damaged_page_can_be_stored_again"}
    ),
    broken.KeepsDamagedPages: Caught("damaged_page_can_be_stored_again"),
    broken.TrustsItsOwnList: Caught("page_that_vanished_is_a_miss_and_can_be_stored_again"),
    # Who else is there.
    broken.ReadsWhenClosed: Caught("closed_store_refuses_every_call"),
    broken.ClosesOnce: Caught(
        "close_is_idempotent",
        also={"closing_a_factory_is_idempotent", "factory_opens_a_layout_again"},
    ),
    broken.ForgetsItsPagesAtClose: Caught(
        "pages_outlive_the_opener_that_wrote_them",
        also={
            "factory_opens_a_layout_again",
            "pages_outlive_their_factory",
            "pages_stay_when_all_have_closed",
        },
    ),
    broken.SeesOnlyItsOwnPages: Caught(
        "second_opener_sees_the_pages_of_the_first",
        also={
            "factory_opens_a_layout_again",
            "pages_outlive_the_opener_that_wrote_them",
            "pages_outlive_their_factory",
            "pages_stay_when_all_have_closed",
        },
    ),
    broken.OnePoolPlace: Caught("equal_keys_of_another_layout_are_other_pages"),
    broken.NoShardPlace: Caught("equal_keys_of_another_layout_are_other_pages"),
    broken.AnyIdentityPlace: Caught("place_of_another_identity_is_refused"),
    broken.NoRoomPlace: Caught("factory_without_room_for_one_page_is_refused"),
    broken.LeavesOpen: Caught("closing_a_factory_closes_its_stores"),
    broken.OpensForEver: Caught("closed_factory_opens_nothing"),
    broken.OpensOnce: Caught("factory_opens_a_layout_again"),
    broken.FactoryClosesOnce: Caught("closing_a_factory_is_idempotent"),
    broken.PublishesTooEarly: Caught(
        "threads_only_ever_read_right_bytes",
        perhaps={
            "close_in_the_middle_of_calls_is_safe",
            "threads_that_write_one_page_never_mix_their_bytes",
        },
    ),
    broken.MixesTwoWriters: Caught(
        "threads_that_write_one_page_never_mix_their_bytes",
        perhaps={"threads_only_ever_read_right_bytes"},
    ),
    broken.HangsWhenTwoPutAtOnce: Caught(
        "threads_only_ever_read_right_bytes",
        perhaps={
            "close_in_the_middle_of_calls_is_safe",
            "threads_that_write_one_page_never_mix_their_bytes",
        },
    ),
    broken.HangsAtNoPages: Caught("no_pages_are_a_call_like_any_other"),
}


@functools.cache
def failures_of(kind: type) -> dict[str, list[BaseException]]:
    """The cases that fail for a place with that fault, and why."""

    class Suite(PageStoreTests):
        case_deadline_s = getattr(kind, "deadline_s", PageStoreTests.case_deadline_s)

    def make() -> dict[str, Callable[[], object]]:
        place = broken.place_of(kind)
        return {"place": lambda: place, "store": lambda: place.open(SUITE_LAYOUT)}

    return suite_runner.failures_of(Suite, make)


def test_store_without_a_fault_passes_every_case() -> None:
    assert failures_of(broken.Working) == {}


@pytest.mark.parametrize("kind", CAUGHT, ids=lambda kind: kind.__name__)
def test_broken_store_is_caught_by_the_case_that_names_its_rule(kind: type) -> None:
    expected = CAUGHT[kind]
    failed = failures_of(kind).keys() - expected.perhaps
    assert failed == {expected.by, *expected.also}


def test_every_case_of_the_suite_catches_a_broken_store() -> None:
    caught = {caught.by for caught in CAUGHT.values()}
    assert set(suite_runner.cases_of(PageStoreTests)) - caught == {
        # Tested by itself, in test_memory_store.py.
        "no_case_is_overridden",
        # Rules that another case names first, met here from another side.
        "close_in_the_middle_of_calls_is_safe",
        "contains_says_what_put_said",
        "first_writer_wins_whoever_opened_the_store",
        "pages_outlive_their_factory",
        "pages_stay_when_all_have_closed",
        "pressure_evicts_and_never_mixes_bytes",
        # A dict is never unusable.
        "place_that_cannot_be_used_is_told",
    }


def test_hang_is_a_failure_that_names_its_case_and_its_place() -> None:
    [hang] = failures_of(broken.HangsAtNoPages)["no_pages_are_a_call_like_any_other"]
    assert "test_no_pages_are_a_call_like_any_other: hangs" in str(hang)
    assert "in open\n    threading.Event().wait()" in str(hang)


@pytest.mark.parametrize(
    "kind",
    [
        broken.ClaimsToHaveRoom,
        broken.CountsOnlyNewPages,
        broken.ForgetsItsPagesAtClose,
        broken.KeepsDamagedPages,
        broken.KeepsNoChecksums,
        broken.LastDuplicateWins,
        broken.LastWriterWins,
        broken.PacksItsAnswers,
        broken.ReadsByKeyAlone,
        broken.ReadsTheSlot,
        broken.ReadsWhatWasNotFound,
        broken.SeesOnlyItsOwnPages,
        broken.TrustsItsOwnList,
    ],
    ids=lambda kind: kind.__name__,
)
def test_broken_store_is_caught_by_the_machine(kind: type) -> None:
    class Machine(PageStoreMachine):
        @override
        def make_place(self) -> StorePlace:
            return broken.place_of(kind)

    found = settings(
        max_examples=300,
        stateful_step_count=25,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=found)
