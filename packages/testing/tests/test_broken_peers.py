"""Stores that several peers have open, broken: caught by a case that names the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from packages.testing.tests import broken_stores as broken

from radixlink_contracts import StoreConfig
from radixlink_testing import ProcessOpener
from radixlink_testing.store_peers import CASES, PeerProcesses, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

CAUGHT: Final = {
    "pages_of_one_peer_are_read_by_all": broken.SeesOnlyItsOwnPages,
    "first_writer_wins_among_peers": broken.LastWriterWins,
    "peers_that_write_one_page_never_mix_their_bytes": broken.MixesTwoWriters,
    "page_is_seen_whole_or_not_at_all": broken.PublishesTooEarly,
    "peers_under_pressure_never_mix_bytes": broken.MixesBatchesUp,
    "handle_is_of_one_write_whoever_evicts_its_page": broken.ReadsByKeyAlone,
    "peer_that_closes_does_so_for_itself": broken.ForgetsItsPagesAtClose,
}
DEADLINE_S: Final = 20.0


def opener(name: str) -> ProcessOpener:
    return ProcessOpener(factory=f"{broken.__name__}:{name}", config=StoreConfig())


@pytest.fixture
def processes() -> Iterator[PeerProcesses]:
    processes = PeerProcesses(2, 2.0)
    yield processes
    processes.kill()


@pytest.mark.parametrize("case", CASES)
def test_case_passes_a_store_without_a_fault(case: str) -> None:
    run_in_threads(broken.place_of(broken.Working), 3, CASES[case], DEADLINE_S)


@pytest.mark.parametrize("case", CASES)
def test_broken_store_is_caught_by_the_case_that_names_its_rule(case: str) -> None:
    with pytest.raises(AssertionError):
        run_in_threads(broken.place_of(CAUGHT[case]), 3, CASES[case], DEADLINE_S)


def test_process_that_fails_says_why_and_the_next_case_has_new_ones(
    processes: PeerProcesses,
) -> None:
    # Processes that share nothing.
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match="pages_of_one_peer") as caught:
            processes.run(opener("working_factory"), "pages_of_one_peer_are_read_by_all")
        assert "process 0 of 2" in str(caught.value)
        assert "AssertionError" in str(caught.value)


def test_process_that_dies_is_a_failure(processes: PeerProcesses) -> None:
    with pytest.raises(pytest.fail.Exception, match="process 0 died, exit code 3"):
        processes.run(opener("dying_factory"), "pages_of_one_peer_are_read_by_all")


def test_process_that_hangs_is_a_failure_that_says_where(processes: PeerProcesses) -> None:
    with pytest.raises(pytest.fail.Exception, match="hangs") as caught:
        processes.run(opener("hanging_factory"), "pages_of_one_peer_are_read_by_all")
    assert "in open\n    threading.Event().wait()" in str(caught.value)
