"""Ranks of several nodes, made of one machine, that read each other's pages; the cases are the arguments.

Says `ok`, the rank and the case for each rank that saw all that it must. RADIXLINK_MPI_FAKE_NODES says
how many nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest import mock

import attrs
import numpy as np
import pytest
from packages.store_mpi.tests.window_place import WindowPlace

from radixlink_contracts import PageBits, StoreConfig
from radixlink_contracts.errors import BackendUnavailableError, IdentityError, StaleHandleError
from radixlink_store_mpi import MpiStoreFactory, NodeSettings, NodesPageStore
from radixlink_store_mpi._desk import Desk
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, put_pages, read_right
from radixlink_testing._deadlines import run_at_once
from radixlink_testing.pages import page_key, page_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PageKeys, PoolLayout

WORLD: Final = MPI.COMM_WORLD
CONFIG: Final = StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES, timeout_s=20)
#: Far longer than any answer takes on a busy machine.
PATIENT: Final = attrs.evolve(NodeSettings.from_environment(), answer_timeout_s=20)
#: For those that do not get one.
HASTY: Final = attrs.evolve(PATIENT, answer_timeout_s=1)
KEYS: Final = page_keys(range(20))


def open_store(factory: MpiStoreFactory, layout: PoolLayout = SUITE_LAYOUT) -> NodesPageStore:
    store = factory.open(layout)
    assert isinstance(store, NodesPageStore)
    return store


def leaders_of(factory: MpiStoreFactory) -> tuple[int, ...]:
    ranks = factory._ranks
    assert ranks is not None
    return ranks.leaders


def read_at_last(store: NodesPageStore, keys: PageKeys) -> None:
    """Ask until a node answers that did not; the job's deadline is this one's."""
    while not read_right(store, store.open(keys, 0)).complete:
        pass


def page_of_one_node_is_found_by_all_and_then_local() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    leaders = leaders_of(factory)
    assert len(leaders) == PATIENT.fake_nodes
    if WORLD.rank == 0:
        assert put_pages(store, KEYS) == PageBits.all(20)
    WORLD.Barrier()
    assert store.contains(KEYS) == PageBits.all(20)
    WORLD.Barrier()
    if WORLD.rank in leaders[1:]:
        assert read_right(store, store.open(KEYS, 0)) == PageBits.all(20)
        assert store.node_counters.fetched == 20
    WORLD.Barrier()
    # By now every node has them, and nobody is asked any more, by no rank.
    asked = store.node_counters.asked
    assert read_right(store, store.open(KEYS, 0)) == PageBits.all(20)
    assert store.contains(KEYS) == store.touch(KEYS) == put_pages(store, KEYS) == PageBits.all(20)
    assert store.node_counters.asked == asked
    assert (WORLD.rank in leaders) == (store.node_counters.served > 0)
    factory.close()


def every_rank_reads_what_every_rank_put() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    put_pages(store, page_keys(range(10), f"rank {WORLD.rank}"))
    WORLD.Barrier()
    others = [page_keys(range(10), f"rank {rank}") for rank in range(WORLD.size)]

    def read(keys: PageKeys) -> None:
        assert read_right(store, store.open(keys, 0)) == PageBits.all(10)

    def reader(keys: PageKeys) -> Callable[[], None]:
        return lambda: read(keys)

    run_at_once(30, "reading", [reader(keys) for keys in others])
    WORLD.Barrier()
    assert store.counters.read_corrupt == 0
    assert store.node_counters.late == store.node_counters.malformed == 0
    factory.close()


def large_pages_come_in_several_answers() -> None:
    layout = attrs.evolve(SUITE_LAYOUT, range_bytes=(1 << 20, 3 << 18))
    nodes = attrs.evolve(PATIENT, max_answer_bytes=4 * layout.page_bytes)
    factory = MpiStoreFactory(attrs.evolve(CONFIG, capacity_bytes=32 << 20), nodes=nodes)
    store = open_store(factory, layout)
    keys = page_keys(range(10))
    if WORLD.rank == 0:
        assert put_pages(store, keys) == PageBits.all(10)
    WORLD.Barrier()
    if WORLD.rank == WORLD.size - 1:
        assert read_right(store, store.open(keys, 0)) == PageBits.all(10)
        assert store.node_counters.fetched == 10
    factory.close()


def damaged_page_of_another_node_is_a_miss() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    if WORLD.rank == 0:
        put_pages(store, KEYS)
        WindowPlace.segment_of(factory, SUITE_LAYOUT).corrupt(page_key(3), 1)
    WORLD.Barrier()
    if WORLD.rank == WORLD.size - 1:
        handles = store.open(KEYS, 0)
        assert handles.found == PageBits.of(set(range(20)) - {3}, 20)
        assert read_right(store, handles) == handles.found
        # Neither is it left where it was.
        assert store.contains(KEYS) == handles.found
    factory.close()


def stopped_leader_is_a_miss_until_it_goes_on() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=HASTY)
    store = open_store(factory)
    last = leaders_of(factory)[-1]
    pid = WORLD.bcast(os.getpid(), last)
    if WORLD.rank == last:
        put_pages(store, KEYS)
    WORLD.Barrier()
    if WORLD.rank == 0:
        mine = page_keys(range(5), "mine")
        os.kill(pid, signal.SIGSTOP)
        assert store.contains(KEYS) == PageBits.none(20)
        assert store.node_counters.late >= 1
        # The second call does not even ask.
        assert store.open(KEYS, 0).found == PageBits.none(20)
        assert store.node_counters.skipped >= 1
        assert put_pages(store, mine) == PageBits.all(5)
        assert read_right(store, store.open(mine, 0)) == PageBits.all(5)
        os.kill(pid, signal.SIGCONT)
        read_at_last(store, KEYS)
        assert store.node_counters.dropped >= 1
    WORLD.Barrier()
    factory.close()


def slow_leader_is_a_miss_and_its_answer_is_dropped() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=HASTY)
    store = open_store(factory)
    slow = leaders_of(factory)[1]
    if WORLD.rank == slow:
        put_pages(store, KEYS)
    gate = threading.Event()
    answer = Desk.answer

    def late_answer(desk: Desk, message: memoryview, number: int) -> memoryview:
        gate.wait()
        return answer(desk, message, number)

    if WORLD.rank == slow:
        with mock.patch.object(Desk, "answer", late_answer):
            WORLD.Barrier()
            WORLD.Barrier()
            gate.set()
    else:
        WORLD.Barrier()
        if WORLD.rank == 0:
            assert store.open(KEYS, 0).found == PageBits.none(20)
            assert store.node_counters.late >= 1
        WORLD.Barrier()
        if WORLD.rank == 0:
            read_at_last(store, KEYS)
            assert store.node_counters.dropped >= 1
    WORLD.Barrier()
    factory.close()


def answer_that_is_none_is_a_miss() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    if WORLD.rank == leaders_of(factory)[1]:
        put_pages(store, KEYS)

    def garbage(*_: object) -> memoryview:
        return memoryview(np.random.default_rng(1).bytes(1000))

    with mock.patch.object(Desk, "answer", garbage):
        WORLD.Barrier()
        if WORLD.rank == 0:
            assert store.open(KEYS, 0).found == PageBits.none(20)
            nodes = len(leaders_of(factory))
            assert store.node_counters.malformed == nodes - 1
        WORLD.Barrier()
    WORLD.Barrier()
    if WORLD.rank == 0:
        assert read_right(store, store.open(KEYS, 0)) == PageBits.all(20)
    WORLD.Barrier()
    factory.close()


def page_evicted_on_one_node_comes_from_another() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    last = WORLD.size - 1
    if WORLD.rank == 0:
        put_pages(store, KEYS)
    WORLD.Barrier()
    if WORLD.rank == last:
        handles = store.open(KEYS, 0)
        assert read_right(store, handles) == PageBits.all(20)
        put_pages(store, page_keys(range(200), "other"))
        # A handle is of the write that it was opened for; opened again, they come once more.
        assert read_right(store, handles) == PageBits.none(20)
        assert read_right(store, store.open(KEYS, 0)) == PageBits.all(20)
        assert store.node_counters.fetched == 40
    WORLD.Barrier()
    factory.close()


def forked_child_reads_its_node_and_asks_no_other() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    leaders = leaders_of(factory)
    if WORLD.rank == leaders[-1]:
        assert put_pages(store, KEYS) == PageBits.all(20)
    WORLD.Barrier()
    few = page_keys(range(5))
    if WORLD.rank == 0:
        assert read_right(store, store.open(few, 0)).complete
        child = os.fork()
        if child == 0:
            code = 1
            try:
                there = PageBits.of(range(5), 20)
                assert store.contains(KEYS) == store.touch(KEYS) == there
                assert read_right(store, store.open(KEYS, 0)) == there
                with pytest.raises(StaleHandleError):
                    put_pages(store, page_keys([99]))
                factory.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        asked = store.node_counters.asked
        # All is as before.
        assert read_right(store, store.open(KEYS, 0)).complete
        assert store.node_counters.asked > asked
    WORLD.Barrier()
    factory.close()


def closing_leaves_no_thread_and_no_file() -> None:
    threads, files = set(threading.enumerate()), open_files()
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    store = open_store(factory)
    leads = WORLD.rank in leaders_of(factory)
    assert (set(threading.enumerate()) != threads) == leads
    # A store that is closed is served on, until the factory is closed.
    put_pages(store, page_keys(range(5), f"rank {WORLD.rank}"))
    if leads:
        store.close()
    WORLD.Barrier()
    if not leads:
        for rank in range(WORLD.size):
            assert store.contains(page_keys(range(5), f"rank {rank}")) == PageBits.all(5)
    factory.close()
    factory.close()
    assert set(threading.enumerate()) == threads
    assert open_files() == files
    with pytest.raises(StaleHandleError):
        factory.open(SUITE_LAYOUT)


def rank_that_does_not_close_is_not_waited_for_longer_than_agreed() -> None:
    threads = set(threading.enumerate())
    factory = MpiStoreFactory(attrs.evolve(CONFIG, timeout_s=3), nodes=HASTY)
    # That is also how long they wait for each other when they open.
    WORLD.Barrier()
    open_store(factory)
    if WORLD.rank != 1:
        factory.close()
        assert set(threading.enumerate()) == threads
    WORLD.Barrier()
    factory.close()
    assert set(threading.enumerate()) == threads


def leader_that_cannot_start_a_thread_is_refused_on_all_ranks() -> None:
    threads = set(threading.enumerate())
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    half = WORLD.size // 2
    if WORLD.rank >= half:
        # As much as a process can address, and so more than there is beside the rest of it.
        threading.stack_size(1 << 47)
    try:
        with pytest.raises(BackendUnavailableError, match="can't start new thread") as caught:
            factory.open(SUITE_LAYOUT)
    finally:
        threading.stack_size(0)
    # The first of those is a leader.
    assert half in leaders_of(factory)
    assert caught.value.rank == half
    for begun in set(threading.enumerate()) - threads:
        begun.join(CONFIG.timeout_s)
    assert set(threading.enumerate()) == threads
    put_pages(open_store(factory), page_keys(range(5), f"rank {WORLD.rank}"))
    factory.close()


def layouts_that_differ_are_refused_on_all_ranks() -> None:
    factory = MpiStoreFactory(CONFIG, nodes=PATIENT)
    layout = attrs.evolve(SUITE_LAYOUT, range_bytes=(WORLD.rank + 1,))
    with pytest.raises(IdentityError, match="rank 1"):
        factory.open(layout)
    store = open_store(factory)
    put_pages(store, page_keys(range(5), f"rank {WORLD.rank}"))
    WORLD.Barrier()
    for rank in range(WORLD.size):
        assert store.contains(page_keys(range(5), f"rank {rank}")) == PageBits.all(5)
    factory.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


for name in sys.argv[1:]:
    globals()[name]()
    sys.stdout.write(f"ok {WORLD.rank} {name}\n")
    sys.stdout.flush()
    WORLD.Barrier()
