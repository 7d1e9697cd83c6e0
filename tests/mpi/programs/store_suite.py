"""The store suites over the ranks of a job. Says `ok` for each rank of a job that passed.

Rank 0 runs the cases, and what it opens is on one rank after the other: a call of its store goes to
that rank, which waits for such calls. So whoever writes a page, reads it, evicts it or closes is
mostly another rank than the last one. Then all ranks run the cases of `store_peers` together.

RADIXLINK_MPI_FAKE_NODES splits the ranks into nodes. What happens behind a store's back then happens
on every node that has the page.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

import attrs
import pytest
from hypothesis import settings
from packages.store_mpi.tests import test_conformance as one_process
from packages.store_mpi.tests.window_place import CONFIG, WindowPlace
from typing_extensions import override

from radixlink_contracts import PageBits, PageHandles, PageKeys
from radixlink_store_mpi import MpiStoreFactory, NodeSettings
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    SUITE_LAYOUT,
    PageStoreMachine,
    StorePlace,
)
from radixlink_testing._deadlines import within
from radixlink_testing.store_peers import (
    CASES,
    Peer,
    handle_is_of_one_write_whoever_evicts_its_page,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageStore, PoolLayout

WORLD: Final = MPI.COMM_WORLD
_REQUEST, _REPLY = 1, 2
_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.0002
NUM_NODES: Final = NodeSettings.from_environment().fake_nodes

_locks: Final = [threading.Lock() for _ in range(WORLD.size)]


# --- what every rank does when it is asked to -----------------------------------------------------


class Here:
    """The factories and stores of this rank, by numbers that rank 0 gives."""

    def __init__(self) -> None:
        self.factories: dict[int, MpiStoreFactory] = {}
        self.stores: dict[int, PageStore] = {}

    def make(self, factory: int, capacity_bytes: int) -> None:
        config = attrs.evolve(CONFIG, capacity_bytes=capacity_bytes)
        self.factories[factory] = MpiStoreFactory(config)

    def open(self, factory: int, store: int, layout: PoolLayout) -> None:
        self.stores[store] = self.factories[factory].open(layout)

    def close(self, factory: int) -> None:
        self.factories[factory].close()

    def reach(self, factory: int, layout: PoolLayout, method: str, *args: object) -> bool:
        """Do something to this node's segment; False where it has no such page."""
        segment = WindowPlace.segment_of(self.factories[factory], layout)
        try:
            getattr(segment, method)(*args)
        except ValueError:
            return False
        return True

    def call(self, store: int, method: str, *args: object) -> object:
        return getattr(self.stores[store], method)(*args)

    def read(
        self, store: int, handles: PageHandles, layer_range: int, num_bytes: int, *, writable: bool
    ) -> tuple[PageBits, bytes]:
        out = bytearray(num_bytes)
        bits = self.stores[store].read(handles, layer_range, out if writable else bytes(out))
        return bits, bytes(out)


HERE: Final = Here()


def serve() -> None:
    """Do what rank 0 asks for, until it asks for nothing."""
    while True:
        while not WORLD.Iprobe(0, _REQUEST):
            # Ranks that wait must leave the cores to those that work.
            time.sleep(_POLL_S)
        request: tuple[str, tuple[Any, ...], dict[str, Any]] | None = WORLD.recv(None, 0, _REQUEST)
        if request is None:
            return
        WORLD.send(_outcome(*request), 0, _REPLY)


def _outcome(
    method: str, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[object, Exception | None]:
    try:
        return getattr(HERE, method)(*args, **options), None
    except Exception as error:  # noqa: BLE001 - raised again on rank 0
        return None, error


# --- rank 0 ---------------------------------------------------------------------------------------


def ask(rank: int, method: str, *args: object, **options: object) -> Any:  # noqa: ANN401 - see Here
    """Have a rank do something, and wait for it."""
    if rank == 0:
        return getattr(HERE, method)(*args, **options)
    with _locks[rank]:
        WORLD.send((method, args, options), rank, _REQUEST)
        while not WORLD.Iprobe(rank, _REPLY):
            time.sleep(_POLL_S)
        result, error = WORLD.recv(None, rank, _REPLY)
    if error is not None:
        raise error
    return result


def ask_all(method: str, *args: object) -> None:
    """Have all ranks do something together; what fails on one fails on all alike."""
    for rank in range(1, WORLD.size):
        WORLD.send((method, args, {}), rank, _REQUEST)
    _, error = _outcome(method, args, {})
    errors = [WORLD.recv(None, rank, _REPLY)[1] for rank in range(1, WORLD.size)]
    assert {type(other) for other in errors} == {type(error)}, f"{error!r}, {errors}"
    if error is not None:
        raise error


class RankStore:
    """A store that is open on some rank."""

    def __init__(self, rank: int, number: int, layout: PoolLayout) -> None:
        self.rank = rank
        self.closed = False
        self._number = number
        self._layout = layout

    @property
    def layout(self) -> PoolLayout:
        return self._layout

    def contains(self, keys: PageKeys) -> PageBits:
        return self._bits("contains", keys)

    def touch(self, keys: PageKeys) -> PageBits:
        return self._bits("touch", keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        handles = ask(self.rank, "call", self._number, "open", keys, ttl_s)
        assert isinstance(handles, PageHandles)
        return handles

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        view = memoryview(out)
        bits, rows = ask(
            self.rank,
            "read",
            self._number,
            handles,
            layer_range,
            view.nbytes,
            writable=not view.readonly,
        )
        if rows:
            view.cast("B")[:] = rows
        assert isinstance(bits, PageBits)
        return bits

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        return self._bits("put", keys, [memoryview(part).tobytes() for part in parts])

    def close(self) -> None:
        self.closed = True
        ask(self.rank, "call", self._number, "close")

    def _bits(self, method: str, *args: object) -> PageBits:
        bits = ask(self.rank, "call", self._number, method, *args)
        assert isinstance(bits, PageBits)
        return bits


class RankFactory:
    """Factories on all ranks; what they open is used on one of them."""

    _numbers = itertools.count()

    def __init__(self, capacity_bytes: int) -> None:
        self.number = next(self._numbers)
        ask_all("make", self.number, capacity_bytes)

    def open(self, layout: PoolLayout, rank: int | None = None) -> RankStore:
        number = next(self._numbers)
        ask_all("open", self.number, number, layout)
        return RankStore(number % WORLD.size if rank is None else rank, number, layout)

    def close(self) -> None:
        ask_all("close", self.number)


@functools.cache
def shared_factory() -> RankFactory:
    """One for all places: to make a window takes far longer than to empty it."""
    return RankFactory(SUITE_CAPACITY_BYTES)


class RankPlace(WindowPlace):
    """The windows of all ranks, empty."""

    def __init__(self) -> None:
        StorePlace.__init__(self)
        self._opened: list[RankStore] = []

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> RankFactory:
        return RankFactory(capacity_bytes)

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        store = shared_factory().open(layout)
        self._opened.append(store)
        return store

    @override
    def close(self) -> None:
        for store in self._opened:
            store.close()
        for layout in {store.layout for store in self._opened}:
            self._reach(layout, "clear")

    @override
    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        assert self._reach(layout, "corrupt", key, layer_range)

    @override
    def drop(self, layout: PoolLayout, key: bytes) -> None:
        assert self._reach(layout, "drop", key)

    @override
    def pass_time(self, seconds: int) -> None:
        self._reach(SUITE_LAYOUT, "pass_time", seconds)

    def _reach(self, layout: PoolLayout, method: str, *args: object) -> bool:
        """Do something to the segments of all nodes; whether any had what it is about."""
        factory = shared_factory().number
        ranks = HERE.factories[factory]._ranks
        assert ranks is not None
        done = [ask(leader, "reach", factory, layout, method, *args) for leader in ranks.leaders]
        return any(done)


class NodesPlace(RankPlace):
    """The same for openers that stay where they are: on the first rank and on the last.

    It damages no page: a page that one node found damaged, another may still have.
    """

    corrupt = StorePlace.corrupt

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        taken = {store.rank for store in self._opened if not store.closed}
        rank = next(rank for rank in (0, WORLD.size - 1) if rank not in taken)
        store = shared_factory().open(layout, rank)
        self._opened.append(store)
        return store


class TestStoreOfRanks(one_process.TestMpiStore):
    @pytest.fixture
    @override
    def place(self) -> Iterator[StorePlace]:
        place = RankPlace()
        yield place
        place.close()


class RanksMachine(PageStoreMachine):
    # The handles of a node mean nothing on another.
    handles_travel = NUM_NODES == 1

    @override
    def make_place(self) -> StorePlace:
        return RankPlace() if NUM_NODES == 1 else NodesPlace()

    @override
    def discard_place(self, place: StorePlace) -> None:
        place.close()


TestRanksMachine = RanksMachine.TestCase
TestRanksMachine.settings = settings(max_examples=10, stateful_step_count=15, derandomize=True)


# --- all ranks together ---------------------------------------------------------------------------


class RankPeer(Peer):
    """A peer that is a rank."""

    def __init__(self) -> None:
        self._factory = MpiStoreFactory(CONFIG)

    @property
    @override
    def index(self) -> int:
        return WORLD.rank

    @property
    @override
    def count(self) -> int:
        return WORLD.size

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        return self._factory.open(layout)

    @override
    def exchange(self, word: str) -> tuple[str, ...]:
        return tuple(WORLD.allgather(word))

    def close(self) -> None:
        self._factory.close()


#: An evicted page is still on other nodes; what becomes of its handle then is in `store_nodes`.
NOT_OF_NODES: Final = {handle_is_of_one_write_whoever_evicts_its_page}


def main() -> None:
    """Be a rank."""
    if WORLD.rank == 0:
        # pytest would rather import its plugins itself.
        imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
        failed = pytest.main([__file__, "-q", "-W", imported, "-p", "no:cacheprovider"])
        if failed:
            WORLD.Abort(int(failed))
        shared_factory().close()
        for rank in range(1, WORLD.size):
            WORLD.send(None, rank, _REQUEST)
    else:
        serve()
    for name, case in CASES.items():
        if NUM_NODES > 1 and case in NOT_OF_NODES:
            continue
        peer = RankPeer()
        try:
            within(_DEADLINE_S, f"{name}, rank {WORLD.rank}", functools.partial(case, peer))
        except BaseException:  # noqa: BLE001 - the others wait for this rank
            traceback.print_exc()
            WORLD.Abort(1)
        peer.close()
    sys.stdout.write(f"ok {WORLD.rank}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
