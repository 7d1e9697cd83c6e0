"""The store of one node among others, with real segments and messages, without MPI between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from packages.store.tests.raw_segment import RawSegment
from packages.store_mpi.tests.loopback import MAX_ANSWER_BYTES, make_nodes

from radixlink_contracts import PageBits
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_store_mpi.counters import NodeCounters
from radixlink_testing import SUITE_LAYOUT, put_pages, read_right
from radixlink_testing.pages import page_key, page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from packages.store_mpi.tests.loopback import Node

KEYS = page_keys(range(6))
ROWS_OF_AN_ANSWER = MAX_ANSWER_BYTES // SUITE_LAYOUT.page_bytes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes."""
    nodes = make_nodes(tmp_path, 2)
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture
def many(tmp_path: Path) -> Iterator[list[Node]]:
    """Four nodes."""
    nodes = make_nodes(tmp_path, 4)
    yield nodes
    for node in nodes:
        node.close()


def segment_of(node: Node) -> RawSegment:
    """The segment of a node, as bytes."""
    segment = node.local._opened()
    return RawSegment(np.frombuffer(segment.memory, np.uint8), segment.geometry)


def count(node: Node, **changes: int) -> None:
    """Check what a node counted."""
    assert node.tally.counters == NodeCounters(**changes)


def test_page_of_another_node_is_found_read_and_then_local(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(there.local, KEYS)
    assert here.local.contains(KEYS) == PageBits.none(6)
    assert store.contains(KEYS) == PageBits.all(6)
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.all(6)
    assert here.local.contains(KEYS) == PageBits.all(6)
    # One question, and as many answers as the pages need.
    assert ROWS_OF_AN_ANSWER < 6
    count(here, answered=3, fetched=6)
    count(there, served=3, sent=6)
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.all(6)
    assert store.contains(KEYS) == PageBits.all(6)
    count(here, answered=3, fetched=6)


def test_only_what_misses_here_is_asked_for(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(here.local, page_keys([0, 2, 4]))
    put_pages(there.local, page_keys([1, 2]))
    assert store.contains(KEYS) == PageBits.of([0, 1, 2, 4], 6)
    handles = store.open(KEYS, 0.0)
    assert handles.found == PageBits.of([0, 1, 2, 4], 6)
    assert read_right(store, handles) == handles.found
    count(there, served=2, sent=1)


def test_each_page_is_fetched_once_whoever_has_it(many: list[Node]) -> None:
    store = many[1].store(many)
    put_pages(many[0].local, page_keys([0, 1, 2]))
    put_pages(many[2].local, page_keys([2, 3]))
    put_pages(many[3].local, page_keys([0, 1, 2, 3, 4]))
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.of(range(5), 6)
    assert many[1].tally.counters.fetched == 5
    # The next in the ring is asked for what it has, the one after it for the rest.
    assert [node.tally.counters.sent for node in many] == [0, 0, 2, 3]


def test_pages_come_in_answers_of_a_bounded_size(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    keys = page_keys(range(3 * ROWS_OF_AN_ANSWER + 1))
    put_pages(there.local, keys)
    sizes: list[int] = []

    def measure(answer: memoryview) -> memoryview:
        sizes.append(len(answer))
        return answer

    there.disturb = measure
    assert read_right(store, store.open(keys, 0.0)).complete
    assert len(sizes) == 4
    assert max(sizes) < MAX_ANSWER_BYTES + 256


def test_damaged_page_is_a_miss_and_the_rest_comes(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(there.local, KEYS)
    segment_of(there).corrupt(page_key(1), 2)
    handles = store.open(KEYS, 0.0)
    assert handles.found == PageBits.of([0, 2, 3, 4, 5], 6)
    assert read_right(store, handles) == handles.found
    # Where it was, it is gone.
    assert there.local.contains(KEYS) == handles.found


def test_damaged_page_comes_from_another_node(many: list[Node]) -> None:
    store = many[0].store(many)
    for node in (many[1], many[2]):
        put_pages(node.local, KEYS)
    segment_of(many[1]).corrupt(page_key(1), 0)
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.all(6)
    assert many[2].tally.counters.sent == 1


def test_answer_damaged_on_its_way_is_a_miss(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(there.local, KEYS)

    def flip(answer: memoryview) -> memoryview:
        answer[-1] ^= 1
        return answer

    there.disturb = flip
    assert store.open(KEYS, 0.0).found == PageBits.none(6)
    count(here, corrupt=1)
    there.disturb = lambda answer: answer
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.all(6)


def test_answer_that_is_none_is_a_miss(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(there.local, KEYS)
    there.disturb = lambda answer: answer[: len(answer) // 2]
    assert store.contains(KEYS) == PageBits.none(6)
    assert store.open(KEYS, 0.0).found == PageBits.none(6)
    count(here, malformed=2)


def test_node_that_says_nothing_is_a_miss_and_the_others_are_heard(many: list[Node]) -> None:
    store = many[0].store(many)
    for node in (many[1], many[2]):
        put_pages(node.local, KEYS)
    many[1].disturb = lambda _: None
    assert store.contains(KEYS) == PageBits.all(6)
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.all(6)


def test_node_that_goes_silent_between_two_questions_is_replaced(many: list[Node]) -> None:
    store = many[0].store(many)
    put_pages(many[1].local, KEYS)
    put_pages(many[2].local, page_keys([0, 1, 2, 3, 4, 7]))
    answers = iter([True, False])

    def once(answer: memoryview) -> memoryview | None:
        return answer if next(answers) else None

    many[1].disturb = once
    handles = store.open(page_keys([*range(6), 7]), 0.0)
    # Page 5 went with it; 7 was asked of the other in the same round, the rest in the next ones.
    assert handles.found == PageBits.of([0, 1, 2, 3, 4, 6], 7)
    assert read_right(store, handles) == handles.found
    assert many[0].tally.counters.fetched == 6


def test_node_without_the_layout_is_a_miss(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path / "a", 1) + make_nodes(
        tmp_path / "b", 2, attrs.evolve(SUITE_LAYOUT, range_bytes=(96, 33, 161))
    )
    here, _, there = nodes
    store = here.store([here, there])
    assert store.contains(KEYS) == PageBits.none(6)
    count(here, refused=1)
    for node in nodes:
        node.close()


def test_node_whose_store_fails_is_a_miss(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(there.local, KEYS)
    there.desk.close()
    assert store.open(KEYS, 0.0).found == PageBits.none(6)
    count(here, refused=1)


def test_page_that_finds_no_room_here_is_a_miss(tmp_path: Path) -> None:
    (there,) = make_nodes(tmp_path / "there", 1)
    (here,) = make_nodes(tmp_path / "here", 1, capacity_bytes=2 * 320)
    here.rank = 1
    nodes = [there, here]
    store = here.store(nodes)
    put_pages(there.local, KEYS)
    kept = page_keys(range(2), "kept")
    put_pages(store, kept)
    store.open(kept, 3600.0)
    assert store.open(KEYS, 0.0).found == PageBits.none(6)
    assert here.tally.counters.no_room == 6
    assert read_right(store, store.open(kept, 0.0)) == PageBits.all(2)
    for node in nodes:
        node.close()


def test_page_that_another_node_has_is_not_stored_twice(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(here.local, page_keys([0]))
    put_pages(there.local, page_keys([2, 4]))
    assert put_pages(store, KEYS, "second") == PageBits.all(6)
    assert here.local.contains(KEYS) == PageBits.of([0, 1, 3, 5], 6)
    assert read_right(here.local, here.local.open(page_keys([1, 3, 5]), 0.0), "second").complete
    # The first writers won.
    assert read_right(store, store.open(page_keys([0, 2, 4]), 0.0)) == PageBits.all(3)


def test_page_is_stored_here_where_no_other_node_answers(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    put_pages(there.local, KEYS)
    there.disturb = lambda _: None
    assert put_pages(store, KEYS) == PageBits.all(6)
    assert here.local.contains(KEYS) == PageBits.all(6)


def test_touch_reaches_pages_of_other_nodes(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    old, new = page_keys(range(40), "old"), page_keys(range(20), "new")
    put_pages(there.local, old)
    put_pages(there.local, new)
    segment_of(there).pass_time(2)
    assert store.touch(old) == PageBits.all(40)
    assert here.local.contains(old) == PageBits.none(40)
    put_pages(there.local, page_keys(range(20), "newest"))
    assert there.local.contains(old) == PageBits.all(40)


def test_refused_put_asks_nobody_and_stores_nothing(nodes: list[Node]) -> None:
    here, there = nodes
    store = here.store(nodes)
    parts = page_parts(KEYS, SUITE_LAYOUT)
    for wrong in ([*parts[:-1], parts[-1] + b"x"], parts[:-1]):
        with pytest.raises(ContractError):
            store.put(KEYS, wrong)
    assert store.contains(KEYS) == PageBits.none(6)
    count(there, served=1)


def test_closed_store_asks_nobody_and_its_node_goes_on_answering(nodes: list[Node]) -> None:
    here, there = nodes
    stores = [node.store(nodes) for node in nodes]
    put_pages(stores[1], KEYS)
    stores[1].close()
    stores[1].close()
    with pytest.raises(StaleHandleError):
        stores[1].contains(KEYS)
    assert read_right(stores[0], stores[0].open(KEYS, 0.0)) == PageBits.all(6)
    assert here.tally.counters.fetched == 6
    assert there.tally.counters.answered == 1
