from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import (
    IncLockRefResult,
    LoadMode,
    Namespace,
    NodeId,
    OperationId,
    Outcome,
    PageBits,
    PageKeys,
    RadixKey,
    ReceiptId,
    RequestId,
)
from radixlink_linker._load_plan import LoadPlan
from radixlink_linker._lookup import Lookup
from radixlink_linker._operation import LoadOperation, OffloadOperation, Verdict

if TYPE_CHECKING:
    import torch

RECEIPT = IncLockRefResult(receipt_id=ReceiptId(1), node_id=NodeId(0))


class Request:
    """Who a load is for. A `RequestKV`."""

    request_id = RequestId("a")
    key = RadixKey(array("q"))

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        raise AssertionError


def load(
    tokens: list[int], start: int, end: int, namespace: Namespace | None = None
) -> LoadOperation:
    return LoadOperation(
        OperationId(1),
        RECEIPT,
        1.0,
        request=Request(),
        mode=LoadMode.STAGED,
        key=key(tokens, namespace),
        plan=LoadPlan(start=start, full_start=start, end=end, node_id=NodeId(0), missing={}),
        transfers=(),
    )


def key(tokens: list[int], namespace: Namespace | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), namespace or Namespace())


@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(Outcome), st.booleans()))))
def test_a_rank_changes_each_of_its_facts_at_most_once(
    events: list[tuple[Outcome, bool] | None],
) -> None:
    operation = OffloadOperation(OperationId(1), RECEIPT, deadline=1.0)
    verdicts, quiesced = [operation.local_verdict], [operation.local_quiesced]
    for event in events:
        if event is None:
            operation.give_up()
        else:
            outcome, quiet = event
            first = operation.note(outcome, quiesced=quiet)
            assert first == (verdicts[-1] is Verdict.PENDING)
        verdicts.append(operation.local_verdict)
        quiesced.append(operation.local_quiesced)
    changes = [
        one for one, before in zip(verdicts[1:], verdicts, strict=False) if one is not before
    ]
    assert changes in ([], [Verdict.DONE], [Verdict.FAILED])
    assert quiesced == sorted(quiesced)


def test_giving_up_says_nothing_about_the_slots() -> None:
    operation = OffloadOperation(OperationId(1), RECEIPT, deadline=1.0)
    operation.give_up()
    assert (operation.local_verdict, operation.local_quiesced) == (Verdict.FAILED, False)
    assert not operation.note(Outcome.LANDED, quiesced=True)
    assert (operation.local_verdict, operation.local_quiesced) == (Verdict.FAILED, True)


def test_an_agreed_verdict_stops_the_backend() -> None:
    operation = OffloadOperation(OperationId(7), RECEIPT, deadline=1.0)
    assert (operation.ticket.op, operation.ticket.decided) == (7, False)
    operation.decide(Verdict.FAILED, step=5)
    assert operation.ticket.decided
    assert (operation.verdict, operation.decided_step) == (Verdict.FAILED, 5)
    # What this rank knows is another column.
    assert operation.local_verdict is Verdict.PENDING


def test_a_load_covers_the_pages_that_it_brings() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    operation = load(tokens, start=2, end=6)
    assert [operation.covers(key(tokens), start, 2) for start in (0, 2, 4, 6)] == [
        # The prefix became shorter since.
        True,
        True,
        True,
        False,
    ]
    assert not operation.covers(key([1, 2, 9, 4, 5, 6]), 0, 2)
    # A page is named by all before it, too.
    assert operation.covers(key([1, 2, 3, 4, 9, 9]), 2, 2)
    assert not operation.covers(key([9, 2, 3, 4, 5, 6]), 2, 2)
    assert not operation.covers(key([1, 2, 3, 4, 5, 9]), 4, 2)
    assert not operation.covers(key(tokens, Namespace(cache_salt="b")), 2, 2)
    assert load(tokens, 2, 6, Namespace(cache_salt="b")).covers(
        key(tokens, Namespace(cache_salt="b")), 2, 2
    )


def lookup(num_pages: int = 70) -> Lookup:
    return Lookup(
        RequestId("a"), key([]), start=0, keys=PageKeys(bytes(32 * num_pages)), deadline=5.0
    )


def test_a_lookup_keeps_the_answer_of_its_first_ready_frame() -> None:
    asked = lookup()
    assert not asked.settle(1.0)
    asked.answer = PageBits.of([0, 69], 70)
    assert asked.settle(2.0)
    asked.answer = PageBits.all(70)
    assert asked.settle(9.0)
    assert asked.words(2) == PageBits.of([0, 69], 70).mask.to_bytes(16, "little")
    assert asked.error is None


def test_a_late_lookup_is_an_empty_one_whatever_comes_after() -> None:
    asked = lookup()
    assert asked.settle(5.0)
    asked.answer = PageBits.all(70)
    assert asked.settle(6.0)
    assert asked.words(2) == bytes(16)
    assert asked.error is not None


def test_a_lookup_that_failed_is_ready_and_empty() -> None:
    asked = lookup()
    asked.fail("why")
    assert asked.settle(0.0)
    assert (asked.words(2), asked.error) == (bytes(16), "why")
