from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from radixlink_contracts import RankGroup
from radixlink_contracts.errors import AgreementError
from radixlink_linker import LinkerSettings
from radixlink_linker._frame import Agenda, FrameKind
from radixlink_linker._ranks import FrameExchange
from radixlink_testing.faults import Nameless

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS = LinkerSettings(frame_words=10)
NOTHING = Agenda(operations=(), asking=(), masks=())


class OtherRank(RankGroup):
    """Rank 0 of two; the other one says what the test tells it to."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self.calls: list[str] = []
        #: What this rank gave to be gathered.
        self.said: list[bytes] = []
        #: What the other rank's words differ by, at each place.
        self.differs: dict[int, int] = {}
        self.told = b"another"
        self.late = False

    @property
    @override
    def rank(self) -> int:
        return 0

    @property
    @override
    def size(self) -> int:
        return self._size

    @override
    def all_and(self, words: bytearray, timeout_s: float) -> None:
        self.calls.append("all_and")
        self._meet()
        for place, difference in self.differs.items():
            words[place] &= words[place] ^ difference

    @override
    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        raise NotImplementedError

    @override
    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        self.calls.append("all_gather")
        self.said.append(value)
        self._meet()
        return (value, self.told)

    @override
    def split(self, color: int, timeout_s: float) -> RankGroup:
        raise NotImplementedError

    @override
    def renew(self, timeout_s: float) -> RankGroup:
        self.calls.append("renew")
        self._meet()
        renewed = OtherRank(self._size)
        renewed.calls = self.calls
        return renewed

    @override
    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        raise NotImplementedError

    @override
    def close(self) -> None:
        raise NotImplementedError

    def _meet(self) -> None:
        if self.late:
            raise AgreementError("late", by_rank={0: "here", 1: "no answer"}, rank=0)


def agreed(group: OtherRank) -> FrameExchange:
    """An exchange to which a linker was attached."""
    frames = FrameExchange(group, SETTINGS)
    group.told = b"facts"
    frames.agree_on_settings("facts")
    group.calls.clear()
    return frames


def test_a_call_that_was_left_by_what_has_no_text_is_left_all_the_same() -> None:
    frames = FrameExchange(OtherRank(), SETTINGS)
    frames.leave("step", Nameless())
    with pytest.raises(AgreementError, match="left step by Nameless"):
        frames.check()


@pytest.mark.parametrize(
    ("error", "said"),
    [(Nameless(), b"Nameless"), (OSError("\udcff"), b"OSError('\\udcff')")],
    ids=["no text", "no UTF-8"],
)
def test_a_rank_that_cannot_attach_tells_the_others_whatever_it_is(
    error: Exception, said: bytes
) -> None:
    group = OtherRank()
    FrameExchange(group, SETTINGS).agree_on_attach(error)
    assert group.said == [said]


def test_a_group_of_one_is_left_alone() -> None:
    group = OtherRank(size=1)
    frames = FrameExchange(group, SETTINGS)
    assert frames.alone
    frames.agree_on_settings("facts")
    frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
    assert group.calls == []


def test_a_group_without_a_linker_is_left_alone() -> None:
    group = OtherRank()
    FrameExchange(group, SETTINGS).renew()
    assert group.calls == []


def test_settings_that_differ_are_named_by_rank() -> None:
    group = OtherRank()
    with pytest.raises(AgreementError) as caught:
        FrameExchange(group, SETTINGS).agree_on_settings("mine")
    assert caught.value.by_rank == {0: "mine", 1: "another"}


def test_a_frame_is_one_collective() -> None:
    group = OtherRank()
    frames = agreed(group)
    frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
    frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
    assert group.calls == ["all_and", "all_and"]


@pytest.mark.parametrize("place", [0, 7, 8, 15])
def test_another_digest_fails_this_frame_and_all_later_ones(place: int) -> None:
    group = OtherRank()
    frames = agreed(group)
    frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
    # The other rank's digest differs by some bit: one of it or of its complement is lost.
    group.differs = {place: 0xFF}
    for attempt in range(3):
        with pytest.raises(AgreementError) as caught:
            frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
        assert caught.value.rank == 0
        assert "frame 2 of epoch 0" in str(caught.value)
        assert caught.value.by_rank[1] == "facts"
        assert "frame 2, facts [1]" in caught.value.by_rank[0]
        with pytest.raises(AgreementError):
            frames.check()
        with pytest.raises(AgreementError):
            frames.agree_on_settings("facts")
        assert group.calls == ["all_and", "all_and", "all_gather"], attempt
    frames.renew()
    frames.check()
    frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)


def test_a_rank_that_is_late_fails_this_frame_and_all_later_ones() -> None:
    group = OtherRank()
    frames = agreed(group)
    group.late = True
    for _ in range(2):
        with pytest.raises(AgreementError) as caught:
            frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
        assert caught.value.by_rank == {0: "here", 1: "no answer"}
    assert group.calls == ["all_and"]


def test_a_failure_pins_no_frame() -> None:
    class Marker:
        """Stands in for what the caller's frames refer to."""

    group = OtherRank()
    frames = agreed(group)
    group.late = True

    def step() -> weakref.ref[Marker]:
        marker = Marker()
        try:
            frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
        except AgreementError:
            return weakref.ref(marker)
        pytest.fail("expected an error")

    marker = step()
    gc.collect()
    assert marker() is None
    with pytest.raises(AgreementError):
        frames.check()


def test_ids_are_never_used_twice() -> None:
    frames = agreed(OtherRank())
    first = [frames.mint() for _ in range(3)]
    assert first == sorted(first)
    frames.renew()
    second = [frames.mint() for _ in range(3)]
    assert min(second) > max(first)
    # Shifted for its verdict, an id still fits a word of the digest.
    frames.exchange(FrameKind.STEP, NOTHING, [second[0] << 2], 0.0)


def test_a_renewal_that_fails_changes_nothing() -> None:
    group = OtherRank()
    frames = agreed(group)
    group.late = True
    for _ in range(2):
        with pytest.raises(AgreementError):
            frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
        with pytest.raises(AgreementError):
            frames.renew()
        with pytest.raises(AgreementError):
            frames.check()
    group.late = False
    frames.renew()
    frames.exchange(FrameKind.STEP, NOTHING, [1], 0.0)
