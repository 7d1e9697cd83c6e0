"""Staging buffers: who has them, and what is kept until they are needed."""

from __future__ import annotations

import itertools
import threading

import pytest

from radixlink_store_mooncake._staging import Block, Staging
from radixlink_store_mooncake.errors import UnansweredError

PAGE = (b"page", 1)


def test_blocks_do_not_overlap_and_are_all_within() -> None:
    staging = Staging(5000, 3)
    blocks = [staging.take(0.0) for _ in range(3)]
    starts = sorted(block.address for block in blocks)
    assert starts[0] == staging.address
    assert all(b - a >= 5000 for a, b in itertools.pairwise(starts))
    assert starts[-1] + 5000 <= staging.address + staging.num_bytes
    assert {len(block.view) for block in blocks} == {5000}


def test_no_block_is_lent_twice_until_the_last_holder_lets_go() -> None:
    staging = Staging(4096, 1)
    with staging.take(0.0) as block:
        block.hold()
        with pytest.raises(UnansweredError, match="staging buffers"):
            staging.take(0.0)
    with pytest.raises(UnansweredError):
        staging.take(0.0)
    block.release()
    assert staging.take(0.0) is block


def test_who_waits_gets_the_next_free_block() -> None:
    staging = Staging(4096, 1)
    block = staging.take(0.0)
    taken: list[Block] = []
    waiting = threading.Thread(target=lambda: taken.append(staging.take(30.0)))
    waiting.start()
    block.release()
    waiting.join()
    assert taken == [block]


def test_who_waits_gets_a_block_that_is_kept_while_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staging = Staging(4096, 1)
    waits, wait = threading.Event(), staging._changed.wait

    def tell_and_wait(timeout: float | None = None) -> bool:
        # The condition is held until it waits: nothing becomes of the block before that.
        waits.set()
        return wait(timeout)

    monkeypatch.setattr(staging._changed, "wait", tell_and_wait)
    block = staging.take(0.0)
    taken: list[Block] = []
    waiting = threading.Thread(target=lambda: taken.append(staging.take(1000.0)), daemon=True)
    waiting.start()
    assert waits.wait(30.0)
    staging.keep(block, {PAGE: 0}, uses=9)
    block.release()
    waiting.join(30.0)
    assert taken == [block]
    assert staging.find([PAGE]) == [None]


def test_kept_block_that_is_read_stays_kept_while_another_can_go() -> None:
    staging = Staging(4096, 2)
    pages = [(b"page", number) for number in range(2)]
    kept = []
    for page in pages:
        with staging.take(0.0) as block:
            staging.keep(block, {page: 0}, uses=9)
            kept.append(block)
    assert staging.find(pages[:1]) == [(kept[0], 0)]
    assert staging.take(0.0) is kept[1]
    with pytest.raises(UnansweredError):
        staging.take(0.0)
    assert staging.find(pages) == [(kept[0], 0), None]


def test_kept_block_is_found_until_its_memory_is_needed() -> None:
    staging = Staging(4096, 2)
    with staging.take(0.0) as first:
        staging.keep(first, {PAGE: 16}, uses=9)
    assert staging.find([PAGE, (b"page", 2)]) == [(first, 16), None]
    first.release()
    second = staging.take(0.0)
    assert second is not first
    # Only the kept one is left.
    assert staging.take(0.0) is first
    assert staging.find([PAGE]) == [None]


def test_the_block_kept_longest_goes_first() -> None:
    staging = Staging(4096, 2)
    pages = [(b"page", number) for number in range(2)]
    kept = []
    for page in pages:
        with staging.take(0.0) as block:
            staging.keep(block, {page: 0}, uses=9)
            kept.append(block)
    assert staging.take(0.0) is kept[0]
    assert staging.find(pages) == [None, (kept[1], 0)]


def test_block_that_is_read_is_not_lent() -> None:
    staging = Staging(4096, 1)
    with staging.take(0.0) as block:
        staging.keep(block, {PAGE: 0}, uses=9)
    assert staging.find([PAGE]) == [(block, 0)]
    with pytest.raises(UnansweredError):
        staging.take(0.0)
    block.release()
    assert staging.take(0.0) is block


def test_page_that_was_kept_again_is_found_where_it_was_kept_last() -> None:
    staging = Staging(4096, 2)
    first, last = staging.take(0.0), staging.take(0.0)
    for block, offset in ((first, 0), (last, 32)):
        staging.keep(block, {PAGE: offset}, uses=9)
        block.release()
    assert staging.take(0.0) is first
    assert staging.find([PAGE]) == [(last, 32)]


def test_block_whose_pages_were_all_asked_for_is_free() -> None:
    staging = Staging(4096, 2)
    with staging.take(0.0) as block:
        staging.keep(block, {PAGE: 0, (b"page", 2): 16}, uses=4)
    for pages in ([PAGE], [PAGE, (b"page", 2)], [(b"page", 2)]):
        assert None not in staging.find(pages)
    assert staging.find([PAGE, (b"page", 2)]) == [None, None]
    # Those who found it hold it still.
    assert staging.take(0.0) is not block
    for _ in range(4):
        block.release()
    assert staging.take(0.0) is block


def test_one_block_is_kept_back_from_borrowers() -> None:
    staging = Staging(4096, 3)
    first, second = staging.lend(), staging.lend()
    assert first is not None
    assert second is not None
    assert staging.lend() is None
    with staging.take(0.0) as left:
        assert left not in {first, second}
    first.release()
    assert staging.lend() is first


def test_borrower_waits_for_nothing_but_takes_what_is_kept() -> None:
    staging = Staging(4096, 2)
    with staging.take(0.0) as kept:
        staging.keep(kept, {PAGE: 0}, uses=9)
    block = staging.take(0.0)
    lent = staging.lend()
    assert lent is kept
    assert staging.find([PAGE]) == [None]
    kept.release()
    # All are taken, none is lent.
    last = staging.take(0.0)
    assert {block, last} == {kept, block}
    assert staging.lend() is None


def test_block_that_a_call_holds_is_lent_until_the_call_has_returned() -> None:
    staging = Staging(4096, 3)
    late = staging.lend()
    assert late is not None
    late.hold()
    late.release()
    other = staging.lend()
    assert other is not None
    assert other is not late
    # The third is kept back, for calls.
    assert staging.lend() is None
    third = staging.take(0.0)
    assert third not in {late, other}
    with pytest.raises(UnansweredError):
        staging.take(0.0)
    late.release()
    assert staging.lend() is late
