from __future__ import annotations

from array import array
from functools import reduce
from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import (
    IncLockRefResult,
    NodeId,
    OperationId,
    Outcome,
    PageBits,
    PageKeys,
    RadixKey,
    ReceiptId,
    RequestId,
)
from radixlink_linker import LinkerSettings
from radixlink_linker._frame import (
    Agenda,
    FrameKind,
    digests_agree,
    read_frame,
    replicated_digest,
    write_frame,
)
from radixlink_linker._lookup import Lookup
from radixlink_linker._operation import OffloadOperation, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_linker._frame import AgreedFrame

ALL_ONES = (1 << 64) - 1
DIGEST = 0x0123456789ABCDEF


def operation(op: int) -> OffloadOperation:
    receipt = IncLockRefResult(receipt_id=ReceiptId(op), node_id=NodeId(op))
    return OffloadOperation(OperationId(op), receipt, deadline=1e9)


def lookup(name: int, num_pages: int) -> Lookup:
    return Lookup(
        RequestId(str(name)),
        RadixKey(array("q")),
        start=0,
        keys=PageKeys(bytes(32 * num_pages)),
        deadline=1e9,
    )


def anded(frames: Sequence[bytearray]) -> bytearray:
    """What a collective makes of the ranks' frames."""
    assert len({len(frame) for frame in frames}) == 1
    agreed = reduce(int.__and__, (int.from_bytes(frame, "little") for frame in frames))
    return bytearray(agreed.to_bytes(len(frames[0]), "little"))


@attrs.frozen
class LocalOperation:
    """What one rank knows of an operation."""

    verdict: Verdict
    quiesced: bool

    def tell(self, target: OffloadOperation) -> None:
        if self.verdict is not Verdict.PENDING:
            outcome = Outcome.LANDED if self.verdict is Verdict.DONE else Outcome.FAILED
            target.note(outcome, quiesced=self.quiesced)
        elif self.quiesced:
            target.local_quiesced = True


@attrs.frozen
class Case:
    """Ranks with an agenda: what each knows of each operation, and answers to each lookup."""

    settings: LinkerSettings
    operations: tuple[tuple[LocalOperation, ...], ...]
    #: For each lookup: its pages, each rank's mask, and each rank's frame of the answer.
    lookups: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 4))
    # Many lookups and room for them, or few of both.
    crowded = draw(st.booleans())
    max_lookups = draw(st.sampled_from([64, 256] if crowded else [1, 3]))
    settings = LinkerSettings(
        max_operations=draw(st.sampled_from([1, 5, 64])),
        max_lookups=max_lookups,
        frame_words=6
        + -(-max_lookups // 64)
        + draw(st.sampled_from([99, 500] if crowded else [0, 5])),
    )
    num_operations = draw(st.integers(0, 70))
    num_lookups = draw(st.integers(0, 300 if crowded else 6))
    # Of many only the first few are drawn, the rest repeat them.
    known = st.builds(LocalOperation, st.sampled_from(Verdict), st.booleans())
    rows = [tuple(draw(known) for _ in range(num_ranks)) for _ in range(min(num_operations, 7))]
    kinds = []
    for _ in range(min(num_lookups, 5)):
        num_pages = draw(st.integers(1, 400))
        masks = st.integers(0, (1 << num_pages) - 1) | st.just((1 << num_pages) - 1)
        kinds.append(
            (
                num_pages,
                tuple(draw(masks) for _ in range(num_ranks)),
                tuple(draw(st.integers(0, 2)) for _ in range(num_ranks)),
            )
        )
    return Case(
        settings=settings,
        operations=tuple(rows[i % len(rows)] for i in range(num_operations)),
        lookups=tuple(kinds[i % len(kinds)] for i in range(num_lookups)),
    )


class Ranks:
    """The replicated lists of each rank, and the frames that they exchange."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.num_ranks = len(case.lookups[0][1] if case.lookups else (case.operations or [[0]])[0])
        self.operations = [
            [operation(op) for op in range(len(case.operations))] for _ in range(self.num_ranks)
        ]
        self.lookups = [
            [lookup(name, num_pages) for name, (num_pages, _, _) in enumerate(case.lookups)]
            for _ in range(self.num_ranks)
        ]
        for rank, operations in enumerate(self.operations):
            for target, known in zip(operations, case.operations, strict=True):
                known[rank].tell(target)

    def answer(self, frame: int) -> None:
        """What the stores have said by a frame."""
        for rank, lookups in enumerate(self.lookups):
            for asked in lookups:
                num_pages, masks, frames = self.case.lookups[int(asked.request_id)]
                if asked.answer is None and frame >= frames[rank]:
                    asked.answer = PageBits(masks[rank], num_pages)

    def exchange(self) -> tuple[list[Agenda], AgreedFrame]:
        settings = self.case.settings
        agendas = [
            Agenda.of(operations[: settings.max_operations], lookups, settings)
            for operations, lookups in zip(self.operations, self.lookups, strict=True)
        ]
        frames = [write_frame(agenda, DIGEST, 0.0, settings) for agenda in agendas]
        assert {len(frame) for frame in frames} == {settings.frame_words * 8}
        frame = anded(frames)
        assert digests_agree(frame)
        first, *others = [read_frame(frame, agenda, settings) for agenda in agendas]
        assert all(other == first for other in others)
        return agendas, first


@given(cases())
def test_ranks_agree_on_the_least_of_what_each_knows(case: Case) -> None:
    ranks = Ranks(case)
    num_frames = 0
    while ranks.operations[0] or ranks.lookups[0]:
        assert num_frames < 5000
        ranks.answer(num_frames)
        num_frames += 1
        agendas, agreed = ranks.exchange()
        agenda = agendas[0]
        assert len(agreed.verdicts) == len(agenda.operations) <= case.settings.max_operations
        for target, verdict, quiesced in zip(
            agenda.operations, agreed.verdicts, agreed.quiesced, strict=True
        ):
            known = case.operations[target.op]
            assert verdict.value == min(one.verdict.value for one in known)
            assert quiesced == all(one.quiesced for one in known)
        assert len(agreed.ready) == len(agenda.asking) <= case.settings.max_lookups
        for asked, ready in zip(agenda.asking, agreed.ready, strict=True):
            frames = case.lookups[int(asked.request_id)][2]
            assert ready == (num_frames > max(frames))
        for each in agendas:
            for asked, ready in zip(each.asking, agreed.ready, strict=True):
                asked.agreed_ready = ready
            for (asked, _), words in zip(each.masks, agreed.masks, strict=True):
                if asked.take(words):
                    check_answer(asked, case)
        for operations in ranks.operations:
            del operations[: case.settings.max_operations]
        for lookups in ranks.lookups:
            lookups[:] = [one for one in lookups if one.words_left]


def check_answer(asked: Lookup, case: Case) -> None:
    num_pages, masks, _ = case.lookups[int(asked.request_id)]
    common = reduce(int.__and__, masks)
    for at_most in {0, 1, num_pages // 2, num_pages, num_pages + 100}:
        lengths = [n for n in range(1, num_pages + 1) if n <= at_most and common >> (n - 1) & 1]
        assert asked.longest(at_most) == max(lengths, default=0)
    assert asked.longest(-3) == 0


@given(st.lists(st.integers(0, ALL_ONES) | st.sampled_from([0, 1, ALL_ONES]), min_size=1))
def test_every_rank_sees_whether_all_digests_are_equal(digests: list[int]) -> None:
    settings = LinkerSettings()
    agenda = Agenda(operations=(), asking=(), masks=())
    frame = anded([write_frame(agenda, digest, 0.0, settings) for digest in digests])
    assert digests_agree(frame) == (len(set(digests)) == 1)


@pytest.mark.parametrize("odd", range(4))
def test_a_digest_that_differs_on_any_one_rank_is_seen(odd: int) -> None:
    settings = LinkerSettings()
    agenda = Agenda(operations=(), asking=(), masks=())
    for bit in range(64):
        digests = [DIGEST ^ (1 << bit if rank == odd else 0) for rank in range(4)]
        frame = anded([write_frame(agenda, digest, 0.0, settings) for digest in digests])
        assert not digests_agree(frame)


def test_an_empty_agenda_says_nothing() -> None:
    settings = LinkerSettings(frame_words=20)
    frame = write_frame(Agenda(operations=(), asking=(), masks=()), DIGEST, 0.0, settings)
    assert frame[:8] == DIGEST.to_bytes(8, "little")
    assert frame[8:16] == (DIGEST ^ ALL_ONES).to_bytes(8, "little")
    assert frame[16:] == b"\xff" * (20 * 8 - 16)


@given(cases())
def test_bits_that_nobody_uses_are_ones(case: Case) -> None:
    ranks = Ranks(case)
    ranks.answer(2)
    settings = case.settings
    for asked in ranks.lookups[0][::2]:
        asked.settle(0.0)
        asked.agreed_ready = True
    operations = ranks.operations[0][: settings.max_operations]
    agenda = Agenda.of(operations, ranks.lookups[0], settings)
    words = array("Q", bytes(write_frame(agenda, DIGEST, 0.0, settings)))
    beyond = ALL_ONES << len(agenda.operations) & ALL_ONES
    assert all(word & beyond == beyond for word in words[2:5])
    ready_words = -(-settings.max_lookups // 64)
    ready = int.from_bytes(words[5 : 5 + ready_words].tobytes(), "little")
    assert ready >> len(agenda.asking) == (1 << (64 * ready_words - len(agenda.asking))) - 1
    used = 5 + ready_words + sum(count for _, count in agenda.masks)
    assert all(word == ALL_ONES for word in words[used:])


def test_the_oldest_come_first_and_a_long_mask_goes_on_in_the_next_frame() -> None:
    settings = LinkerSettings(frame_words=8, max_lookups=2)
    operations = [operation(1), operation(2)]
    lookups = [lookup(name, num_pages) for name, num_pages in enumerate((200, 10, 20, 30))]
    for asked in lookups:
        asked.answer = PageBits.none(asked.num_pages)
        asked.settle(0.0)
    lookups[0].agreed_ready = True
    agenda = Agenda.of(operations, lookups, settings)
    assert agenda.operations == operations
    assert agenda.asking == lookups[1:3]
    assert agenda.masks == [(lookups[0], 2)]
    lookups[0].take(bytes(16))
    lookups[1].agreed_ready = lookups[2].agreed_ready = True
    agenda = Agenda.of(operations, lookups, settings)
    assert agenda.masks == [(lookups[0], 2)]
    lookups[0].take(bytes(16))
    agenda = Agenda.of(operations, lookups[1:], settings)
    assert agenda.asking == [lookups[3]]
    assert agenda.masks == [(lookups[1], 1), (lookups[2], 1)]


def test_the_digest_rolls_over_everything_before_it() -> None:
    def digest(*frames: tuple[int, ...]) -> int:
        return reduce(lambda last, facts: replicated_digest(last, FrameKind.STEP, facts), frames, 0)

    seen = {
        digest(),
        digest(()),
        digest((), ()),
        digest((0,)),
        digest((1,)),
        digest((1, 2)),
        digest((1,), (2,)),
        digest((2,), (1,)),
        digest((2, 1)),
        digest((ALL_ONES,)),
    }
    assert len(seen) == 10
    assert all(0 <= value <= ALL_ONES for value in seen)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=140))
def test_overdue_operations_name_the_ranks_that_have_not_let_go(quiesced: list[list[bool]]) -> None:
    """By rank and operation."""
    asked, answered = lookup(1, 3), lookup(2, 70)
    frames = []
    agenda = Agenda(operations=(), asking=(), masks=())
    for rank, of_rank in enumerate(quiesced):
        operations = [operation(op) for op in range(1, 5)]
        for one, done in zip(operations, (*of_rank, True), strict=True):
            one.note(Outcome.FAILED, quiesced=done)
        for one in operations[:3]:
            one.decide(Verdict.FAILED, step=7)
        answered.answer = PageBits.all(70)
        answered.settle(0.0)
        answered.agreed_ready = True
        agenda = Agenda.of(
            operations,
            [asked, answered],
            LinkerSettings(write_off_steps=5),
            step=12,
            num_ranks=len(quiesced),
        )
        frames.append(write_frame(agenda, DIGEST, 0.0, LinkerSettings(), rank=rank))
    agreed = read_frame(anded(frames), agenda, LinkerSettings())
    assert agreed.busy == tuple(
        tuple(rank for rank, of_rank in enumerate(quiesced) if not of_rank[place])
        for place in range(3)
    )
    # It moves what follows, and nothing else.
    assert agreed.quiesced == (
        *[all(of_rank[place] for of_rank in quiesced) for place in range(3)],
        True,
    )
    (words,) = agreed.masks
    assert int.from_bytes(words, "little") & ((1 << 70) - 1) == (1 << 70) - 1
