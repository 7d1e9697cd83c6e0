"""`Courier`: takes requests to the leaders of other nodes, and brings what they answered in time.

Theory of operation. A request goes to each node's leader under a number of its own, which is the tag
of both messages. What was not answered by the deadline is a *debt*: the message, the receive and
their buffers stay, and the node is not asked again before it has paid. So a node that is stopped or
gone costs one deadline and no more; one that was slow is asked again as soon as its late answer has
come and was dropped; and no memory is given up that MPI may still write to. What a thread waits for
belongs to it alone: threads share nothing but the debts. A forked child asks nobody.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Final

from radixlink_store_mpi._buffers import Buffers
from radixlink_store_mpi._mpi import MPI, is_in_child
from radixlink_store_mpi._transit import Receiving, Sending, keep, pause

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from radixlink_store_mpi.counters import NodeTally


class _Errand:
    """One request, until it is answered."""

    def __init__(
        self,
        requests: MPI.Intracomm,
        answers: MPI.Intracomm,
        message: Buffer,
        node: int,
        number: int,
        buffers: Buffers,
    ) -> None:
        """Send it.

        Raises:
            MPI.Exception: The node's leader has ended.
        """
        self.node: Final = node
        self._number: Final = number
        self._answers: Final = answers
        self._buffers: Final = buffers
        self._sending: Final = Sending(requests, message, node, number)
        self._receiving: Receiving | None = None

    def answer(self) -> memoryview | None:
        """What was answered; None if it is not there yet.

        Raises:
            MPI.Exception: The node's leader has ended.
        """
        if self._receiving is None:
            self._receiving = Receiving.begin(self._answers, self.node, self._number, self._buffers)
            if self._receiving is None:
                return None
        if self._receiving.done() and self._sending.done():
            return self._receiving.message
        return None


class Courier:
    """Brings requests to the leaders of other nodes.

    Thread: any, several at once.
    """

    def __init__(
        self,
        requests: MPI.Intracomm,
        answers: MPI.Intracomm,
        nodes: tuple[int, ...],
        timeout_s: float,
        tally: NodeTally,
    ) -> None:
        """Send nothing yet.

        Args:
            requests: Carries requests, and nothing else.
            answers: Carries answers, and nothing else.
            nodes: The ranks of the other nodes' leaders.
            timeout_s: How long an answer may take.
            tally: Takes what became of requests.
        """
        self.rank: Final = requests.rank
        self.nodes: Final = nodes
        self._requests: Final = requests
        self._answers: Final = answers
        self._timeout_s: Final = timeout_s
        self._tally: Final = tally
        self._buffers: Final = Buffers()
        self._mutex: Final = threading.RLock()
        self._debts: list[_Errand] = []
        self._lost: set[int] = set()
        last = requests.Get_attr(MPI.TAG_UB)
        assert isinstance(last, int), last
        #: Tags end somewhere; a number that comes again is then millions of requests old.
        self._last_number: Final = last
        self._counter: Final = itertools.count()

    def number(self) -> int:
        """A number for the next request: 1 .. the last tag there is."""
        return 1 + next(self._counter) % self._last_number

    def ask(self, messages: Mapping[int, tuple[int, Buffer]]) -> dict[int, memoryview]:
        """Ask some nodes, each by one message, and wait for all of them together.

        Args:
            messages: The number and bytes of the request for each node.

        Returns:
            What was answered in time; nothing in a forked child.

        Cost: one round trip of the slowest node, the deadline at most.
        """
        if is_in_child():
            return {}
        self._collect()
        owing = self._owing()
        errands: list[_Errand] = []
        try:
            for node, (number, message) in messages.items():
                if node in owing:
                    self._tally.add(skipped=1)
                    continue
                try:
                    errand = _Errand(
                        self._requests, self._answers, message, node, number, self._buffers
                    )
                except MPI.Exception:
                    self._lose(node)
                else:
                    errands.append(errand)
                    self._tally.add(asked=1)
            return self._wait(errands)
        finally:
            # Those that are late, or that an exception left, be it before all were sent.
            if errands:
                with self._mutex:
                    self._debts += errands
                self._tally.add(late=len(errands))

    def settle(self, timeout_s: float) -> None:
        """Wait until no node owes an answer, but no longer than that."""
        started = time.monotonic()
        while self._collect() and (waited_s := time.monotonic() - started) < timeout_s:
            pause(waited_s)

    def end(self) -> None:
        """Ask no more. What is still owed, MPI may write until its own end."""
        self._collect()
        with self._mutex:
            if self._debts:
                keep(self._debts)

    def _wait(self, errands: list[_Errand]) -> dict[int, memoryview]:
        """The answers of some errands; takes those out of the list of which nothing more is to come."""
        answers: dict[int, memoryview] = {}
        started = time.monotonic()
        while True:
            errands[:] = [errand for errand in errands if not self._ends(errand, answers)]
            waited_s = time.monotonic() - started
            if not errands or waited_s >= self._timeout_s:
                return answers
            pause(waited_s)

    def _ends(self, errand: _Errand, answers: dict[int, memoryview]) -> bool:
        """Whether nothing more is to come of an errand; takes its answer."""
        try:
            answer = errand.answer()
        except MPI.Exception:
            self._lose(errand.node)
            # Its buffers are MPI's as long as there is any doubt.
            keep(errand)
            return True
        if answer is None:
            return False
        answers[errand.node] = answer
        return True

    def _collect(self) -> bool:
        """Drop the answers that came late.

        Returns:
            Whether some are still owed.
        """
        debts, dropped = [], 0
        with self._mutex:
            for errand in self._debts:
                # One at a time: a node may owe answers to several threads.
                late: dict[int, memoryview] = {}
                if not self._ends(errand, late):
                    debts.append(errand)
                dropped += len(late)
            self._debts = debts
        self._tally.add(dropped=dropped)
        return bool(debts)

    def _owing(self) -> set[int]:
        """The nodes that are not asked."""
        with self._mutex:
            return {errand.node for errand in self._debts} | self._lost

    def _lose(self, node: int) -> None:
        """Remember that a node's leader has ended."""
        with self._mutex:
            self._lost.add(node)
        self._tally.add(lost=1)
