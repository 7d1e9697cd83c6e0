"""What stores must do that several threads, processes or MPI ranks have open at once.

A case is a function of one peer: every peer runs it, each with stores of its own, and what any of
them raises fails the test. So the same cases serve threads, processes and MPI jobs. Subclass
`StorePeersTests` and give it a `StorePlace`: threads open its stores by `open`, processes by what
`process_opener` says. Where peers are something else, a program of each gets a case by its name
from `CASES` and runs it with a `Peer` of its own.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias

import pytest
from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_testing._deadlines import run_at_once, within
from radixlink_testing._places import (
    SUITE_LAYOUT,
    evict,
    put_pages,
    read_right,
    read_variants,
)
from radixlink_testing._store_suite import StoreSuite
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from radixlink_contracts import PageStore, PoolLayout
    from radixlink_testing._places import ProcessOpener, StorePlace

_TTL_S: Final = 0.0


class Peer(Protocol):
    """One of those who share a place: a thread, a process or a rank."""

    @property
    def index(self) -> int:
        """0..count-1."""
        ...

    @property
    def count(self) -> int:
        """How many there are, at least 2."""
        ...

    def open(self, layout: PoolLayout) -> PageStore:
        """Open another store of the place, as big as a `StorePlace` opens it.

        Ranks: all peers, in the same order: for some stores this is collective.
        """
        ...

    def exchange(self, word: str) -> tuple[str, ...]:
        """Say something, wait for all others, and hear what everybody said, by index."""
        ...


PeerCase: TypeAlias = "Callable[[Peer], None]"


# --- the cases ------------------------------------------------------------------------------------


def pages_of_one_peer_are_read_by_all(peer: Peer) -> None:
    """Whoever wrote a page."""
    store = peer.open(SUITE_LAYOUT)
    mine = page_keys(range(10), f"peer {peer.index}")
    assert put_pages(store, mine) == PageBits.all(10)
    peer.exchange("written")
    for other in range(peer.count):
        keys = page_keys(range(10), f"peer {other}")
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(10)


def first_writer_wins_among_peers(peer: Peer) -> None:
    """The others are told that the page is there, and change nothing."""
    store = peer.open(SUITE_LAYOUT)
    keys = page_keys(range(10))
    if peer.index == 0:
        assert put_pages(store, keys, "first") == PageBits.all(10)
    peer.exchange("written")
    assert put_pages(store, keys, f"peer {peer.index}") == PageBits.all(10)
    peer.exchange("written again")
    assert read_right(store, store.open(keys, _TTL_S), "first") == PageBits.all(10)


def peers_that_write_one_page_never_mix_their_bytes(peer: Peer) -> None:
    """Who is first may be anybody, but all layer ranges are of one writer."""
    store = peer.open(SUITE_LAYOUT)
    variants = [f"peer {index}" for index in range(peer.count)]
    for turn in range(5):
        keys = page_keys(range(turn * 2, turn * 2 + 2))
        peer.exchange("ready")
        assert put_pages(store, keys, variants[peer.index]) == PageBits.all(2)
        assert None not in read_variants(store, store.open(keys, _TTL_S), variants)
    peer.exchange("written")
    assert None not in read_variants(store, store.open(page_keys(range(10)), _TTL_S), variants)


def page_is_seen_whole_or_not_at_all(peer: Peer) -> None:
    """Whatever is found while another writes can be read."""
    store = peer.open(SUITE_LAYOUT)
    keys = page_keys(range(24))
    peer.exchange("ready")
    if peer.index == 0:
        for page in range(24):
            put_pages(store, keys.span(page, page + 1))
    found = PageBits.none(24)
    while not found.complete:
        handles = store.open(keys, _TTL_S)
        found = handles.found
        assert read_right(store, handles) == found


def peers_under_pressure_never_mix_bytes(peer: Peer) -> None:
    """Far more pages than fit, half of them the neighbour's too."""
    store = peer.open(SUITE_LAYOUT)
    peer.exchange("ready")
    hits = 0
    for turn in range(40):
        first = (turn * 24 + peer.index * 12) % 300
        keys = page_keys(range(first, first + 24))
        put_pages(store, keys)
        hits += read_right(store, store.open(keys, _TTL_S)).total
    assert hits > 0


def handle_is_of_one_write_whoever_evicts_its_page(peer: Peer) -> None:
    """A page that others evicted and wrote again is not what was opened."""
    store = peer.open(SUITE_LAYOUT)
    keys = page_keys(range(8))
    if peer.index == 0:
        put_pages(store, keys)
    peer.exchange("written")
    handles = store.open(keys, _TTL_S)
    assert handles.found == PageBits.all(8)
    peer.exchange("opened")
    if peer.index == 1:
        evict(store, keys)
        assert put_pages(store, keys, "later") == PageBits.all(8)
    peer.exchange("written again")
    assert read_right(store, handles) == PageBits.none(8)
    assert read_right(store, store.open(keys, _TTL_S), "later") == PageBits.all(8)


def peer_that_closes_does_so_for_itself(peer: Peer) -> None:
    """The pages stay, for the others and for whoever comes back."""
    store = peer.open(SUITE_LAYOUT)
    keys = page_keys(range(10))
    if peer.index == 0:
        put_pages(store, keys)
        store.close()
    peer.exchange("closed")
    if peer.index != 0:
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(10)
    again = peer.open(SUITE_LAYOUT)
    assert read_right(again, again.open(keys, _TTL_S)) == PageBits.all(10)


CASES: Final[Mapping[str, PeerCase]] = {
    case.__name__: case
    for case in (
        pages_of_one_peer_are_read_by_all,
        first_writer_wins_among_peers,
        peers_that_write_one_page_never_mix_their_bytes,
        page_is_seen_whole_or_not_at_all,
        peers_under_pressure_never_mix_bytes,
        handle_is_of_one_write_whoever_evicts_its_page,
        peer_that_closes_does_so_for_itself,
    )
}


# --- threads --------------------------------------------------------------------------------------


class _ThreadPeer(Peer):
    """A peer that is a thread."""

    def __init__(
        self, place: StorePlace, index: int, words: list[str], meeting: threading.Barrier
    ) -> None:
        self._place: Final = place
        self._index: Final = index
        self._words: Final = words
        self._meeting: Final = meeting

    @property
    @override
    def index(self) -> int:
        """0..count-1."""
        return self._index

    @property
    @override
    def count(self) -> int:
        """How many threads there are."""
        return len(self._words)

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        """Open another store of the place."""
        return self._place.open(layout)

    @override
    def exchange(self, word: str) -> tuple[str, ...]:
        """Say something and hear everybody."""
        self._words[self._index] = word
        self._meeting.wait()
        heard = tuple(self._words)
        self._meeting.wait()
        return heard


def run_in_threads(place: StorePlace, count: int, case: PeerCase, deadline_s: float) -> None:
    """Run a case with so many threads.

    Raises:
        BaseException: What the first of them to fail raised.
    """
    meeting = threading.Barrier(count, timeout=deadline_s)
    words = [""] * count
    causes: list[BaseException] = []

    def be(peer: Peer) -> None:
        try:
            case(peer)
        except threading.BrokenBarrierError:
            raise
        except BaseException as error:
            causes.append(error)
            meeting.abort()
            raise

    peers = [_ThreadPeer(place, index, words, meeting) for index in range(count)]
    try:
        run_at_once(deadline_s, case.__name__, [functools.partial(be, peer) for peer in peers])
    except threading.BrokenBarrierError as waited:
        raise causes[0] if causes else waited from None


# --- processes ------------------------------------------------------------------------------------


class _ProcessPeer(Peer):
    """A peer that is a process. It tells the parent ("word", ...), ("failed", ...) or ("ended", "")."""

    def __init__(
        self, opener: ProcessOpener, index: int, count: int, parent: Connection, deadline_s: float
    ) -> None:
        self._factory: Final = opener.load()
        self._index: Final = index
        self._count: Final = count
        self._parent: Final = parent
        self._deadline_s: Final = deadline_s

    @property
    @override
    def index(self) -> int:
        """0..count-1."""
        return self._index

    @property
    @override
    def count(self) -> int:
        """How many processes there are."""
        return self._count

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        """Open another store of the place."""
        return self._factory.open(layout)

    @override
    def exchange(self, word: str) -> tuple[str, ...]:
        """Say something and hear everybody."""
        self.say(word)
        if not self._parent.poll(self._deadline_s):
            raise TimeoutError(
                f"peer {self._index}: others did not come within {self._deadline_s} s"
            )
        heard: tuple[str, ...] = self._parent.recv()
        return heard

    def say(self, word: str) -> None:
        """Say something and wait for nobody."""
        self._parent.send(("word", word))

    def close(self) -> None:
        """Close every store that was opened."""
        self._factory.close()


def _writes_without_end(peer: Peer) -> None:
    """Put more pages than fit, until killed; a word after each turn."""
    assert isinstance(peer, _ProcessPeer)
    store = peer.open(SUITE_LAYOUT)
    turn = 0
    while True:
        put_pages(store, page_keys(range(turn % 256, turn % 256 + 16)))
        peer.say(f"turn {turn}")
        turn += 1


_PROCESS_CASES: Final[Mapping[str, PeerCase]] = {
    **CASES,
    _writes_without_end.__name__: _writes_without_end,
}


def _be_process(index: int, count: int, parent: Connection, deadline_s: float) -> None:
    """What a process does: run the cases that it is told to, until one fails or the parent is gone."""
    failed = False
    while not failed:
        try:
            opener, case = parent.recv()
        except EOFError:
            break
        try:
            peer = _ProcessPeer(opener, index, count, parent, deadline_s)
            run = functools.partial(_PROCESS_CASES[case], peer)
            within(deadline_s, f"{case}, process {index}", run)
            peer.close()
        except BaseException:  # noqa: BLE001 - told to the parent
            failed = True
            parent.send(("failed", f"process {index} of {count}\n{traceback.format_exc()}"))
        else:
            parent.send(("ended", ""))
    # A thread that hangs, left behind by `within`, must not keep the process.
    parent.close()
    os._exit(0)


class PeerProcesses:
    """Processes that run cases together, one case after the other; started with the first.

    After a failure they are ended, and the next case gets new ones.

    Thread: one.
    """

    def __init__(self, count: int, deadline_s: float) -> None:
        """Start nothing yet.

        Args:
            count: How many.
            deadline_s: Seconds that a case may take.
        """
        self._count: Final = count
        self._deadline_s: Final = deadline_s
        self._peers: list[tuple[BaseProcess, Connection]] = []
        self._case = ""
        self._give_up = 0.0

    def run(self, opener: ProcessOpener, case: str) -> None:
        """Run a case of `CASES` in all of them.

        Raises:
            pytest.fail.Exception: What a process raised, or that one died or hangs.
        """
        try:
            self.start(opener, case)
            self._serve()
        except BaseException:
            self.kill()
            raise

    def start(self, opener: ProcessOpener, case: str) -> None:
        """Let all of them start a case."""
        if not self._peers:
            self._make(opener)
        self._case = case
        self._give_up = time.monotonic() + self._deadline_s
        for _, connection in self._peers:
            connection.send((opener, case))

    def hear(self, index: int) -> str | None:
        """What a process says next; None once it has come to its end.

        Raises:
            pytest.fail.Exception: It failed, died, or says nothing.
        """
        process, connection = self._peers[index]
        # Its own deadline comes first, and tells more.
        if not connection.poll(max(0.0, self._give_up + 1 - time.monotonic())):
            pytest.fail(f"{self._case}: process {index} hangs")
        try:
            kind, said = connection.recv()
        except EOFError:
            process.join()
            pytest.fail(f"{self._case}: process {index} died, exit code {process.exitcode}")
        if kind == "failed":
            pytest.fail(f"{self._case}: {said}", pytrace=False)
        return str(said) if kind == "word" else None

    def kill(self) -> None:
        """Kill all of them, wherever they are, and wait for their end."""
        peers, self._peers = self._peers, []
        for process, _ in peers:
            process.kill()
        for process, connection in peers:
            process.join()
            connection.close()

    def _make(self, opener: ProcessOpener) -> None:
        # No fork of this process: it has threads. The server has imported what they need once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, opener.factory.partition(":")[0]])
        for index in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_be_process,
                args=(index, self._count, theirs, self._deadline_s),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._peers.append((process, ours))

    def _serve(self) -> None:
        """Hand on what they say to each other until all have ended."""
        while True:
            heard = [self.hear(index) for index in range(self._count)]
            words = tuple(word for word in heard if word is not None)
            if not words:
                return
            if len(words) < len(heard):
                pytest.fail(f"{self._case}: some ended while others say {words}")
            for _, connection in self._peers:
                connection.send(words)


# --- the suite ------------------------------------------------------------------------------------


class StorePeersTests(StoreSuite):
    """The cases with threads and with processes. Subclass it and give `place`."""

    #: How many threads or processes.
    num_peers: ClassVar[int] = 3

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[PeerProcesses]:
        """Processes for all cases: starting them takes longer than what they do."""
        processes = PeerProcesses(cls.num_peers, cls.case_deadline_s)
        yield processes
        processes.kill()

    @pytest.mark.parametrize("case", CASES)
    def test_peers_in_threads(self, place: StorePlace, case: str) -> None:
        """Each thread has stores of its own."""
        run_in_threads(place, self.num_peers, CASES[case], self.case_deadline_s)

    @pytest.mark.parametrize("case", CASES)
    def test_peers_in_processes(
        self, place: StorePlace, processes: PeerProcesses, case: str
    ) -> None:
        """Each process has stores of its own."""
        processes.run(place.process_opener(), case)

    def test_killed_writers_leave_no_wrong_page_and_no_lock(
        self, place: StorePlace, processes: PeerProcesses
    ) -> None:
        """Processes that are killed while they write cost the others nothing."""
        opener = place.process_opener()
        store = place.open(SUITE_LAYOUT)
        # Wherever in a write the signal comes.
        for turn in range(5):
            processes.start(opener, _writes_without_end.__name__)
            for _ in range(turn + 1):
                for index in range(self.num_peers):
                    assert processes.hear(index) is not None
            processes.kill()
            keys = page_keys(range(272))
            handles = store.open(keys, _TTL_S)
            assert read_right(store, handles) == handles.found
            again = page_keys(range(16), f"after {turn}")
            assert put_pages(store, again) == PageBits.all(16)
            assert read_right(store, store.open(again, _TTL_S)) == PageBits.all(16)
