"""`Server`: the thread of a node's leader that answers other nodes.

It receives requests and sends answers, any number of each at a time, and waits for none of them: a
node that was stopped while it sends or receives keeps only the buffers of its own messages. While it
is asked it hardly sleeps, and asleep it looks once a millisecond.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING, Final

from radixlink_store_mpi._buffers import Buffers
from radixlink_store_mpi._mpi import MPI
from radixlink_store_mpi._transit import Receiving, Sending, keep, pause

if TYPE_CHECKING:
    from radixlink_store_mpi._desk import Desk

_EXIT_S: Final = 1.0
"""How long the interpreter waits at its end for a server that nobody stopped."""


class Server:
    """Answers requests from a thread of its own, from when it is made until `stop`.

    Thread: `stop` by whoever owns it.
    """

    def __init__(self, requests: MPI.Intracomm, answers: MPI.Intracomm, desk: Desk) -> None:
        """Answer from now on.

        Args:
            requests: Carries requests, and nothing else.
            answers: Carries answers, and nothing else.
            desk: Says what to answer.

        Raises:
            RuntimeError: No thread can be started.
        """
        self._requests: Final = requests
        self._answers: Final = answers
        self._desk: Final = desk
        self._buffers: Final = Buffers()
        #: Whom to listen to: anybody; since a process ended, each rank by itself that has not.
        self._sources = [MPI.ANY_SOURCE]
        self._incoming: list[Receiving] = []
        self._outgoing: list[Sending] = []
        # No `threading.Event`: its lock may be held at a fork, and the child's exit stops this as well.
        self._stopping = False
        self._thread: Final = threading.Thread(
            target=self._run, name="radixlink-mpi-server", daemon=True
        )
        self._thread.start()
        # MPI ends when the interpreter does, and no thread may be in it then.
        atexit.register(self.stop, _EXIT_S)

    def stop(self, timeout_s: float) -> bool:
        """Answer no more. Idempotent.

        Returns:
            Whether the thread ended in time.
        """
        self._stopping = True
        self._thread.join(timeout_s)
        atexit.unregister(self.stop)
        return not self._thread.is_alive()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while not self._stopping:
            happened = self._listen()
            happened |= self._reply()
            happened |= self._send_on()
            now = time.monotonic()
            if happened:
                idle_since = now
            else:
                pause(now - idle_since)
        if self._outgoing or self._incoming:
            keep((self._outgoing, self._incoming))

    def _listen(self) -> bool:
        """Begin to receive a request.

        Returns:
            Whether there was one.
        """
        heard = False
        for source in list(self._sources):
            try:
                receiving = Receiving.begin(self._requests, source, MPI.ANY_TAG, self._buffers)
            except MPI.Exception:
                self._stop_listening_to(source)
                continue
            if receiving is not None:
                self._incoming.append(receiving)
                heard = True
        return heard

    def _reply(self) -> bool:
        """Answer what has arrived.

        Returns:
            Whether anything has.
        """
        waiting = []
        for receiving in self._incoming:
            try:
                arrived = receiving.done()
            except MPI.Exception:
                continue
            if not arrived:
                waiting.append(receiving)
                continue
            answer = self._desk.answer(receiving.message, receiving.tag)
            try:
                sending = Sending(self._answers, answer, receiving.source, receiving.tag)
            except MPI.Exception:
                continue
            self._outgoing.append(sending)
        happened = len(waiting) < len(self._incoming)
        self._incoming = waiting
        return happened

    def _send_on(self) -> bool:
        """Let go of what was sent.

        Returns:
            Whether anything was.
        """
        waiting = []
        for sending in self._outgoing:
            try:
                if not sending.done():
                    waiting.append(sending)
            except MPI.Exception:
                continue
        happened = len(waiting) < len(self._outgoing)
        self._outgoing = waiting
        return happened

    def _stop_listening_to(self, source: int) -> None:
        """Go on without a process that ended."""
        if source == MPI.ANY_SOURCE:
            self._sources = [
                rank for rank in range(self._requests.size) if rank != self._requests.rank
            ]
        else:
            self._sources.remove(source)
