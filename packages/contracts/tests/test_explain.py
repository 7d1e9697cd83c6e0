from __future__ import annotations

import attrs
import pytest

from radixlink_contracts import (
    Explanation,
    HeldBack,
    HitCause,
    Holders,
    LoadFailure,
    LockHolder,
    LookupAnswer,
    NodeId,
    OperationId,
    OperationKind,
    OperationStatus,
    Outcome,
    PageBits,
    PoolAnswer,
    PoolName,
    ReceiptId,
    RequestId,
    WrittenOff,
)

LOOKUP = LookupAnswer(start_page=2, num_pages=5, ready=True, agreed=5, local=5)
STATUS = OperationStatus(
    op=OperationId(7),
    kind=OperationKind.STAGED_LOAD,
    request_id=RequestId("a"),
    queued=False,
    verdict=None,
    local=None,
    quiesced=False,
    age=3,
    node_id=NodeId(9),
    slots={PoolName.KV: 8, PoolName.SWA: 4},
)
EXPLANATION = Explanation(
    request_id=RequestId("a"),
    rank=1,
    num_ranks=2,
    cause=HitCause.RESTORABLE,
    device_pages=2,
    hit_pages=5,
    lookup=LOOKUP,
    waits_for=None,
    num_loads=0,
    max_loads=2,
    failures=(),
    load_miss=None,
    published=False,
)


def pool(
    pages: list[int], lengths: list[int], name: PoolName = PoolName.KV, held: tuple[int, ...] = ()
) -> PoolAnswer:
    restorable = PageBits.of([length - 1 for length in lengths], 5)
    return PoolAnswer(
        pool=name,
        found=PageBits.of(pages, 5),
        restorable=restorable,
        held=PageBits.of(held, 5),
    )


def test_a_lookup_that_lacks_nothing_has_two_lines() -> None:
    full = attrs.evolve(LOOKUP, pools=(pool([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),))
    assert full.lines() == ["asked for pages 2-6", "agreed 5 of 5 pages"]


def test_what_a_pool_lacks_is_told_in_runs_from_the_start_of_the_sequence() -> None:
    answer = attrs.evolve(LOOKUP, agreed=1, local=1, pools=(pool([0, 4], [1]),))
    assert answer.lines() == [
        "asked for pages 2-6",
        "pages 3-5: KV missing here, so that it lets 1 pages be restored",
        "agreed 1 of 5 pages",
    ]
    scattered = attrs.evolve(LOOKUP, pools=(pool([1, 3], []),))
    assert "pages 2, 4, 6: KV missing here" in scattered.lines()[1]


def test_what_is_missing_and_not_needed_is_no_reason() -> None:
    window = pool([3, 4], [5], PoolName.SWA)
    assert attrs.evolve(LOOKUP, pools=(window,)).lines()[1] == (
        "pages 2-4: SWA missing here, where it is not needed"
    )


def test_what_the_device_holds_is_told_and_not_missed() -> None:
    kv = pool([], [1, 2, 3, 4, 5], held=(0, 1, 2, 3, 4))
    windows = pool([2], [4], PoolName.SWA, held=(3,))
    assert attrs.evolve(LOOKUP, agreed=4, local=4, pools=(kv, windows)).lines() == [
        "asked for pages 2-6",
        "pages 2-6: KV is on the device",
        "page 5: SWA is on the device",
        "pages 2-3, 6: SWA missing here, so that it lets 4 pages be restored",
        "agreed 4 of 5 pages",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"agreed": None}, "not agreed yet"),
        ({"ready": False, "local": None, "agreed": None}, "this rank has no answer yet"),
        ({"local": None, "error": "no answer in time"}, "this rank could not answer: no answer"),
        (
            {"agreed": 3, "missing_elsewhere": 5},
            "some other rank lacks page 5, or could not answer",
        ),
        ({"agreed": 3}, "this rank can restore 5; some other rank cannot, or could not answer"),
    ],
)
def test_what_is_not_known_is_not_said(changes: dict[str, object], line: str) -> None:
    lines = attrs.evolve(LOOKUP, **changes).lines()  # type: ignore[arg-type]
    assert any(one.startswith(line) for one in lines), lines


def test_an_explanation_is_a_few_lines() -> None:
    assert str(EXPLANATION).splitlines() == [
        "request a on rank 1 of 2: restorable on all ranks; 2 pages on the device, 5 more to be had",
        "  asked for pages 2-6; agreed 5 of 5 pages",
        "  loaded 0 of at most 2 times",
    ]
    failures = (
        LoadFailure(op=OperationId(3), age=9, here=True, why="a page is gone"),
        LoadFailure(op=OperationId(4), age=2, here=False, why=""),
    )
    held = HeldBack(node_id=NodeId(9), num_pages=3, failures=2, uses_left=100)
    full = attrs.evolve(
        EXPLANATION,
        lookup=None,
        waits_for=STATUS,
        failures=failures,
        load_miss="no room",
        published=True,
        held_back=(held,),
    )
    assert str(full).splitlines()[1:] == [
        f"  waits for {STATUS}",
        "  loaded 0 of at most 2 times",
        "  load 3 failed 9 steps ago, here: a page is gone",
        "  load 4 failed 2 steps ago, on some other rank",
        "  was not loaded: no room",
        "  what was restored for it is locked",
        f"  {held}",
    ]


def test_what_is_held_back_is_one_line() -> None:
    held = HeldBack(node_id=NodeId(9), num_pages=3, failures=2, uses_left=100)
    assert str(held) == (
        "node 9 (3 pages) was not stored, 2 failures in a row: "
        "not offered again for 100 uses of the tree"
    )


def test_an_operation_is_one_line() -> None:
    assert str(STATUS) == (
        "staged load 7 for request a: agreed pending, here pending and not quiesced, 3 steps old, "
        "locks node 9, moves 8 kv slots, 4 swa slots"
    )
    offload = attrs.evolve(
        STATUS,
        kind=OperationKind.OFFLOAD,
        request_id=None,
        verdict=Outcome.LANDED,
        local=Outcome.LANDED,
        quiesced=True,
        slots={},
    )
    assert str(offload) == (
        "offload 7: agreed landed, here landed and quiesced, 3 steps old, locks node 9, "
        "moves no slots"
    )
    waited = attrs.evolve(STATUS, queued=True, waiters=(RequestId("b"), RequestId("c")))
    assert "for request a, queued: " in str(waited)
    assert str(waited).endswith(", waited for by b, c")


def test_holders_are_a_line_each() -> None:
    holders = Holders(
        operations=(STATUS,),
        written_off=(WrittenOff(operation=STATUS, ranks=(0, 2)),),
        locks=(
            LockHolder(receipt_id=ReceiptId(1), node_id=NodeId(2), op=OperationId(7)),
            LockHolder(receipt_id=ReceiptId(2), node_id=NodeId(3), request_id=RequestId("b")),
            LockHolder(receipt_id=ReceiptId(3), node_id=NodeId(4)),
        ),
        due_offloads=(NodeId(5),),
        lookups=(RequestId("c"), RequestId("d")),
        staged={PoolName.KV: 8},
        num_retired=6,
    )
    assert str(holders).splitlines() == [
        "staged loads hold 8 kv slots; 6 slots are retired; 1 offloads are due; 2 lookups are open",
        f"  {STATUS}",
        f"  written off, not let go of by ranks [0, 2]: {STATUS}",
        "  lock 1 on node 2: operation 7",
        "  lock 2 on node 3: what was restored for request b",
        "  lock 3 on node 4: the engine",
    ]
    assert str(Holders()).splitlines() == [
        "staged loads hold no slots; 0 slots are retired; 0 offloads are due; 0 lookups are open"
    ]


def test_explanations_are_values() -> None:
    assert hash(STATUS) == hash(attrs.evolve(STATUS))
    assert attrs.evolve(EXPLANATION) == EXPLANATION
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EXPLANATION.rank = 3  # type: ignore[misc]
