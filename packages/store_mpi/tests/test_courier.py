"""What becomes of answers that come too late, and of a fork. The node that is asked is this process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from radixlink_store_mpi import _courier
from radixlink_store_mpi._courier import Courier
from radixlink_store_mpi._mpi import MPI
from radixlink_store_mpi._transit import Sending
from radixlink_store_mpi.counters import NodeCounters, NodeTally
from radixlink_testing.forks import in_a_child_while_held

if TYPE_CHECKING:
    from typing_extensions import Buffer

THREADS = 2
TIMEOUT_S = 30.0


class TogetherCourier(Courier):
    """All threads have seen that nobody owes anything before the first of them asks."""

    together = threading.Barrier(THREADS)

    @override
    def _owing(self) -> set[int]:
        owing = super()._owing()
        self.together.wait(TIMEOUT_S)
        return owing


def check_owed(
    courier: Courier, tally: NodeTally, requests: MPI.Intracomm, answers: MPI.Intracomm
) -> None:
    """Node 0 is asked nothing more until its late answer has come, which is dropped. Frees both."""
    assert courier.ask({0: (courier.number(), b"who?")}) == {}
    assert tally.counters == NodeCounters(asked=1, late=1, skipped=1)
    status = MPI.Status()
    requests.Recv(bytearray(4), MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    answers.Isend(b"late", 0, status.Get_tag()).Free()
    courier.settle(TIMEOUT_S)
    assert tally.counters.dropped == 1
    requests.Free()
    answers.Free()


def test_late_answers_of_one_node_to_several_threads_are_each_dropped_and_counted() -> None:
    requests, answers = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    tally = NodeTally()
    courier = TogetherCourier(requests, answers, (0,), timeout_s=0.05, tally=tally)
    got: list[dict[int, memoryview]] = []
    threads = [
        threading.Thread(target=lambda: got.append(courier.ask({0: (courier.number(), b"who?")})))
        for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [{}] * THREADS
    assert tally.counters == NodeCounters(asked=THREADS, late=THREADS)
    status = MPI.Status()
    for _ in range(THREADS):
        requests.Recv(bytearray(4), MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        answers.Isend(b"late", 0, status.Get_tag()).Free()
    courier.settle(TIMEOUT_S)
    assert tally.counters == NodeCounters(asked=THREADS, late=THREADS, dropped=THREADS)
    requests.Free()
    answers.Free()


def test_child_asks_nobody_whatever_another_thread_held() -> None:
    requests, answers = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    tally = NodeTally()
    courier = Courier(requests, answers, (0,), timeout_s=TIMEOUT_S, tally=tally)
    tally.add(asked=3)

    def ask() -> int:
        assert courier.ask({0: (courier.number(), b"who?")}) == {}
        tally.add(answered=1)
        assert tally.counters == NodeCounters(asked=3, answered=1)
        return 0

    assert in_a_child_while_held(courier._mutex, ask) == 0
    assert in_a_child_while_held(tally._mutex.lock, ask) == 0
    assert tally.counters == NodeCounters(asked=3)
    assert not requests.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    requests.Free()
    answers.Free()


def test_node_that_was_asked_before_an_exception_owes_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(Sending):
        def __init__(self, comm: MPI.Intracomm, message: Buffer, to: int, tag: int) -> None:
            if to:
                raise KeyboardInterrupt
            super().__init__(comm, message, to, tag)

    requests, answers = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    tally = NodeTally()
    courier = Courier(requests, answers, (0, 1), timeout_s=TIMEOUT_S, tally=tally)
    with monkeypatch.context() as patch:
        patch.setattr(_courier, "Sending", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            courier.ask({node: (courier.number(), b"who?") for node in courier.nodes})
    assert tally.counters == NodeCounters(asked=1, late=1)
    check_owed(courier, tally, requests, answers)


def test_answer_that_an_exception_keeps_from_being_waited_for_is_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    requests, answers = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    tally = NodeTally()
    courier = Courier(requests, answers, (0,), timeout_s=TIMEOUT_S, tally=tally)
    with monkeypatch.context() as patch:
        patch.setattr(_courier, "pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            courier.ask({0: (courier.number(), b"who?")})
    check_owed(courier, tally, requests, answers)
