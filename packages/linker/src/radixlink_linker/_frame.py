"""Frames: what ranks tell each other in one collective, and the check of what it is about.

A frame is a fixed number of 64-bit words, combined by bitwise AND over all ranks::

    word 0              digest of everything replicated
    word 1              its complement
    words 2, 3          verdicts of operations, high and low bit: bit i is operation i of the list
    word 4              quiesced: bit i is operation i
    words 5..           ready: bit i is lookup i of the list
    then                for each overdue operation a bit for each rank: unset where that rank
                        has not let go of it
    the rest            masks of lookups that were agreed ready before, word by word

Rules of the file:
1. The lists follow from replicated facts alone, so every rank lays out the same frame.
2. All ranks agree if and only if the ANDed digest and the ANDed complement have no bit in common
   unset: their OR is all ones. Every rank sees the same words, so every rank comes to the same
   verdict about them in the same step.
3. The digest is checked before any other bit is read.
4. Unused bits are ones on every rank, so that they say nothing.
5. What each step makes anew is a NamedTuple: a frozen class of attrs takes three times as long to make.
"""

from __future__ import annotations

import enum
from array import array
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from radixlink_contracts.errors import ContractError
from radixlink_linker._operation import Verdict
from radixlink_linker._settings import WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_linker._lookup import Lookup
    from radixlink_linker._operation import AnyOperation
    from radixlink_linker._settings import LinkerSettings

_ALL_ONES: Final = (1 << WORD_BITS) - 1
_WORD_BYTES: Final = WORD_BITS // 8
#: Words 0 to 4.
_HEAD: Final = Struct("<5Q")
_FIRST_READY_WORD: Final = 5
#: The two words that tell whether all others may be read.
_DIGESTS: Final = Struct("<2Q")
_VERDICTS: Final = {verdict.value: verdict for verdict in Verdict}
# A member of an enum takes longer to look up than to compare.
_DONE: Final = Verdict.DONE
_FAILED: Final = Verdict.FAILED
_PENDING: Final = Verdict.PENDING


class FrameKind(enum.IntEnum):
    """Which frame it is. All kinds have one size."""

    #: The frame of a scheduler step.
    STEP = 1
    #: The frame after a launch: the layer-wise loads of its batch and nothing else.
    LAUNCH = 2


class Agenda(NamedTuple):
    """What one frame speaks of: the lists that give each bit its meaning. The same on every rank.

    Attributes:
        operations: Oldest first.
        asking: Lookups that are not agreed ready, oldest first.
        masks: Lookups that are agreed ready, oldest first, with the number of words that this frame
            carries of each.
        overdue: Those of the operations that are written off unless every rank lets go of them by
            now, oldest first. Which ranks do not is told by a bit of each: the AND of all frames
            names them, and costs no collective.
        rank_words: Words that hold a bit for each rank.
    """

    operations: Sequence[AnyOperation]
    asking: Sequence[Lookup] = ()
    masks: Sequence[tuple[Lookup, int]] = ()
    overdue: Sequence[AnyOperation] = ()
    rank_words: int = 1

    @classmethod
    def of(
        cls,
        operations: Sequence[AnyOperation],
        lookups: Sequence[Lookup],
        settings: LinkerSettings,
        *,
        step: int = 0,
        num_ranks: int = 1,
    ) -> Agenda:
        """These operations, and the oldest lookups, as much as fits.

        Args:
            operations: `OperationTable.of_next_frame`.
            lookups: All that are not answered.
            settings: The frame's size.
            step: This one: what was decided too long before it is overdue.
            num_ranks: How many ranks there are.
        """
        rank_words = _words_of_ranks(num_ranks)
        decided_by = step - settings.write_off_steps
        overdue = [
            operation
            for operation in operations
            if operation.verdict is not _PENDING and operation.decided_step <= decided_by
        ]
        if not (overdue or lookups):
            return cls(operations, rank_words=rank_words)
        room = _words_left(settings)
        del overdue[room // rank_words :]
        room -= len(overdue) * rank_words
        masks: list[tuple[Lookup, int]] = []
        asking: list[Lookup] = []
        for lookup in lookups:
            if not lookup.agreed_ready:
                if len(asking) < settings.max_lookups:
                    asking.append(lookup)
            elif room:
                words = min(room, lookup.words_left)
                masks.append((lookup, words))
                room -= words
        return cls(
            operations=operations,
            asking=asking,
            masks=masks,
            overdue=overdue,
            rank_words=rank_words,
        )


class AgreedFrame(NamedTuple):
    """A frame after the collective, its digest checked.

    Attributes:
        verdicts: For each operation of the agenda.
        quiesced: For each operation of the agenda: no rank touches its slots any more.
        ready: For each asking lookup of the agenda: every rank is ready.
        masks: For each mask of the agenda: its words.
        busy: For each overdue operation of the agenda: the ranks that have not let go, ascending.
    """

    verdicts: tuple[Verdict, ...]
    quiesced: tuple[bool, ...]
    ready: tuple[bool, ...] = ()
    masks: tuple[bytes, ...] = ()
    busy: tuple[tuple[int, ...], ...] = ()


def check_room(settings: LinkerSettings, num_ranks: int) -> None:
    """Return when a frame has room for a bit of each rank, beside what every frame has.

    Raises:
        ContractError: It has not.
    """
    needed, left = _words_of_ranks(num_ranks), _words_left(settings)
    if left < needed:
        msg = (
            f"attach: expected frame_words of at least {settings.frame_words + needed - left} "
            f"for {num_ranks} ranks, got {settings.frame_words}"
        )
        raise ContractError(msg)


def replicated_digest(previous: int, kind: FrameKind, facts: Sequence[int]) -> int:
    """The digest of one frame, rolled over the one before.

    Args:
        previous: The digest of the last frame of this epoch, 0 before the first.
        kind: Of the frame.
        facts: Replicated numbers, each of 64 bits unsigned.
    """
    packed = array("Q", (previous, kind, *facts)).tobytes()
    return int.from_bytes(blake2b(packed, digest_size=_WORD_BYTES).digest(), "little")


def write_frame(
    agenda: Agenda, digest: int, now: float, settings: LinkerSettings, *, rank: int = 0
) -> bytearray:
    """This rank's words.

    Args:
        agenda: What the frame speaks of.
        digest: Of what is replicated.
        now: This rank's clock: read once, for every lookup of the frame.
        settings: The frame's size.
        rank: This rank.
    """
    high = low = quiesced = _ALL_ONES
    bit = 1
    for operation in agenda.operations:
        verdict = operation.local_verdict
        if verdict is not _DONE:
            high ^= bit
            if verdict is _FAILED:
                low ^= bit
        if not operation.local_quiesced:
            quiesced ^= bit
        bit <<= 1
    frame = bytearray(b"\xff") * (settings.frame_words * _WORD_BYTES)
    _HEAD.pack_into(frame, 0, digest, digest ^ _ALL_ONES, high, low, quiesced)
    at = _FIRST_READY_WORD * _WORD_BYTES
    ready_bytes = _ready_words(settings) * _WORD_BYTES
    if agenda.asking:
        ready = (1 << (ready_bytes * 8)) - 1
        for place, lookup in enumerate(agenda.asking):
            if not lookup.settle(now):
                ready ^= 1 << place
        frame[at : at + ready_bytes] = ready.to_bytes(ready_bytes, "little")
    at += ready_bytes
    for operation in agenda.overdue:
        if not operation.local_quiesced:
            frame[at + rank // 8] ^= 1 << rank % 8
        at += agenda.rank_words * _WORD_BYTES
    for lookup, count in agenda.masks:
        frame[at : at + count * _WORD_BYTES] = lookup.words(count)
        at += count * _WORD_BYTES
    return frame


def digests_agree(frame: bytearray) -> bool:
    """True when every rank wrote the same digest into the ANDed frame."""
    digest, complement = _DIGESTS.unpack_from(frame)
    return bool(digest | complement == _ALL_ONES)


def read_frame(frame: bytearray, agenda: Agenda, settings: LinkerSettings) -> AgreedFrame:
    """What all ranks agreed on. The digests were found to agree before."""
    _, _, high, low, quiesced = _HEAD.unpack_from(frame)
    places = range(len(agenda.operations))
    verdicts = tuple([_VERDICTS[(high >> i & 1) << 1 | (low >> i & 1)] for i in places])
    let_go = tuple([quiesced >> i & 1 == 1 for i in places])
    if not (agenda.asking or agenda.overdue or agenda.masks):
        return AgreedFrame(verdicts, let_go)
    at = _FIRST_READY_WORD * _WORD_BYTES
    ready_bytes = _ready_words(settings) * _WORD_BYTES
    ready = int.from_bytes(frame[at : at + ready_bytes], "little")
    at += ready_bytes
    busy: list[tuple[int, ...]] = []
    for _ in agenda.overdue:
        gone = int.from_bytes(frame[at : at + agenda.rank_words * _WORD_BYTES], "little")
        ranks = range(agenda.rank_words * WORD_BITS)
        busy.append(tuple([rank for rank in ranks if not gone >> rank & 1]))
        at += agenda.rank_words * _WORD_BYTES
    masks: list[bytes] = []
    for _, count in agenda.masks:
        masks.append(bytes(frame[at : at + count * _WORD_BYTES]))
        at += count * _WORD_BYTES
    return AgreedFrame(
        verdicts=verdicts,
        quiesced=let_go,
        ready=tuple([ready >> i & 1 == 1 for i in range(len(agenda.asking))]),
        masks=tuple(masks),
        busy=tuple(busy),
    )


def _ready_words(settings: LinkerSettings) -> int:
    """Words of ready bits."""
    return -(-settings.max_lookups // WORD_BITS)


def _words_of_ranks(num_ranks: int) -> int:
    """Words that hold a bit for each rank."""
    return -(-num_ranks // WORD_BITS)


def _words_left(settings: LinkerSettings) -> int:
    """Words of a frame for overdue operations and masks."""
    return settings.frame_words - _FIRST_READY_WORD - _ready_words(settings)
