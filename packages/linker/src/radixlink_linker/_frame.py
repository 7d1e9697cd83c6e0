"""Frames: what ranks tell each other in one collective, and the check of what it is about.

A frame is a fixed number of 64-bit words, combined by bitwise AND over all ranks::

    word 0              digest of everything replicated
    word 1              its complement
    words 2, 3          verdicts of operations, high and low bit: bit i is operation i of the list
    word 4              quiesced: bit i is operation i
    words 5..           ready: bit i is lookup i of the list
    the rest            masks of lookups that were agreed ready before, word by word

Rules of the file:
1. The lists follow from replicated facts alone, so every rank lays out the same frame.
2. All ranks agree if and only if the ANDed digest and the ANDed complement have no bit in common
   unset: their OR is all ones. Every rank sees the same words, so every rank comes to the same
   verdict about them in the same step.
3. The digest is checked before any other bit is read.
4. Unused bits are ones on every rank, so that they say nothing.
"""

from __future__ import annotations

import enum
from array import array
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_linker._operation import Verdict
from radixlink_linker._settings import WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_linker._lookup import Lookup
    from radixlink_linker._operation import Operation
    from radixlink_linker._settings import LinkerSettings

_ALL_ONES: Final = (1 << WORD_BITS) - 1
_WORD_BYTES: Final = WORD_BITS // 8
#: Words 0 to 4.
_HEAD: Final = Struct("<5Q")
_FIRST_READY_WORD: Final = 5
_VERDICTS: Final = {verdict.value: verdict for verdict in Verdict}


class FrameKind(enum.IntEnum):
    """Which frame it is. All kinds have one size."""

    #: The frame of a scheduler step.
    STEP = 1
    #: The frame after a launch: the layer-wise loads of its batch and nothing else.
    LAUNCH = 2


@attrs.frozen(kw_only=True)
class Agenda:
    """What one frame speaks of: the lists that give each bit its meaning. The same on every rank.

    Attributes:
        operations: Oldest first.
        asking: Lookups that are not agreed ready, oldest first.
        masks: Lookups that are agreed ready, oldest first, with the number of words that this frame
            carries of each.
    """

    operations: Sequence[Operation]
    asking: Sequence[Lookup]
    masks: Sequence[tuple[Lookup, int]]

    @classmethod
    def of(
        cls, operations: Sequence[Operation], lookups: Sequence[Lookup], settings: LinkerSettings
    ) -> Agenda:
        """The oldest of everything that is outstanding, as much as fits."""
        room = settings.frame_words - _mask_start(settings)
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
        return cls(operations=operations[: settings.max_operations], asking=asking, masks=masks)


@attrs.frozen(kw_only=True)
class AgreedFrame:
    """A frame after the collective, its digest checked.

    Attributes:
        verdicts: For each operation of the agenda.
        quiesced: For each operation of the agenda: no rank touches its slots any more.
        ready: For each asking lookup of the agenda: every rank is ready.
        masks: For each mask of the agenda: its words.
    """

    verdicts: tuple[Verdict, ...]
    quiesced: tuple[bool, ...]
    ready: tuple[bool, ...]
    masks: tuple[bytes, ...]


def replicated_digest(previous: int, kind: FrameKind, facts: Sequence[int]) -> int:
    """The digest of one frame, rolled over the one before.

    Args:
        previous: The digest of the last frame of this epoch, 0 before the first.
        kind: Of the frame.
        facts: Replicated numbers, each of 64 bits unsigned.
    """
    packed = array("Q", (previous, kind, *facts)).tobytes()
    return int.from_bytes(blake2b(packed, digest_size=_WORD_BYTES).digest(), "little")


def write_frame(agenda: Agenda, digest: int, now: float, settings: LinkerSettings) -> bytearray:
    """This rank's words.

    Args:
        agenda: What the frame speaks of.
        digest: Of what is replicated.
        now: This rank's clock: read once, for every lookup of the frame.
        settings: The frame's size.
    """
    high = low = quiesced = _ALL_ONES
    for place, operation in enumerate(agenda.operations):
        bit = 1 << place
        verdict = operation.local_verdict.value
        if not verdict & 0b10:
            high ^= bit
        if not verdict & 0b01:
            low ^= bit
        if not operation.local_quiesced:
            quiesced ^= bit
    ready_words = _ready_words(settings)
    ready = (1 << (ready_words * WORD_BITS)) - 1
    for place, lookup in enumerate(agenda.asking):
        if not lookup.settle(now):
            ready ^= 1 << place
    frame = bytearray(_HEAD.pack(digest, digest ^ _ALL_ONES, high, low, quiesced))
    frame += ready.to_bytes(ready_words * _WORD_BYTES, "little")
    for lookup, count in agenda.masks:
        frame += lookup.words(count)
    frame += b"\xff" * (settings.frame_words * _WORD_BYTES - len(frame))
    return frame


def digests_agree(frame: bytearray) -> bool:
    """True when every rank wrote the same digest into the ANDed frame."""
    digest, complement, *_ = _HEAD.unpack_from(frame)
    return bool(digest | complement == _ALL_ONES)


def read_frame(frame: bytearray, agenda: Agenda, settings: LinkerSettings) -> AgreedFrame:
    """What all ranks agreed on. The digests were found to agree before."""
    _, _, high, low, quiesced = _HEAD.unpack_from(frame)
    places = range(len(agenda.operations))
    at = _FIRST_READY_WORD * _WORD_BYTES
    ready_bytes = _ready_words(settings) * _WORD_BYTES
    ready = int.from_bytes(frame[at : at + ready_bytes], "little")
    at += ready_bytes
    masks: list[bytes] = []
    for _, count in agenda.masks:
        masks.append(bytes(frame[at : at + count * _WORD_BYTES]))
        at += count * _WORD_BYTES
    return AgreedFrame(
        verdicts=tuple([_VERDICTS[(high >> i & 1) << 1 | (low >> i & 1)] for i in places]),
        quiesced=tuple([bool(quiesced >> i & 1) for i in places]),
        ready=tuple([bool(ready >> i & 1) for i in range(len(agenda.asking))]),
        masks=tuple(masks),
    )


def _ready_words(settings: LinkerSettings) -> int:
    """Words of ready bits."""
    return -(-settings.max_lookups // WORD_BITS)


def _mask_start(settings: LinkerSettings) -> int:
    """The first word of the masks."""
    return _FIRST_READY_WORD + _ready_words(settings)
