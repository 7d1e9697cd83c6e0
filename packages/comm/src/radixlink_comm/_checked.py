"""`CheckedGroup`: what all groups check, count and say the same way. A child only moves bytes."""

from __future__ import annotations

import abc
import enum
import itertools
import reprlib
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeVar

from typing_extensions import override

from radixlink_comm._health import (
    MIXED,
    NO_ANSWER,
    ROLL_CALL_S,
    CollectiveError,
    Health,
    State,
    wording,
)
from radixlink_contracts import MAX_TIMEOUT_S, RankGroup
from radixlink_contracts.errors import AgreementError, ContractError
from radixlink_contracts.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Result = TypeVar("_Result")

WORD_BYTES: Final = 8

#: A value is small: attach and error paths exchange kilobytes.
MAX_VALUE_BYTES: Final = 1 << 30


class MarkKind(enum.IntEnum):
    """Why a mark was left: marks of one kind answer each other.

    The values are part of the protocol between ranks.
    """

    #: A collective failed on this rank.
    FAILED = 0
    #: The caller asked for a roll call.
    CALLED = 1
    #: This rank is in `renew`.
    RENEWING = 2


class CheckedGroup(RankGroup, abc.ABC):
    """A rank group over a transport that a child supplies in five methods.

    The child's methods take a deadline in the seconds of `time.monotonic` and say what went wrong
    by `CollectiveError`; checks, states, marks and messages are here. All that is not for the step
    path is made of `all_and`: a gather is an AND in which each rank leaves the others' places all
    ones, and broadcast and split are gathers. So every rank knows that all took part, the root of a
    broadcast too.

    Ranks: as in `RankGroup`. A failed collective is seen by the ranks that wait in it, and by a
    late one when it comes.
    Thread: one at a time.
    """

    def __init__(self, rank: int, size: int, epoch: int = 0) -> None:
        self._rank = rank
        self._size = size
        self._health = Health(rank)
        #: How often the ranks renewed the group.
        self._epoch = epoch
        #: How many collectives were entered, and the name of the last.
        self._entered = 0
        self._call = "create"
        #: What the ranks renewed this group to, until it is handed out.
        self._successor: Self | None = None

    @property
    @override
    def rank(self) -> int:
        """This rank, 0..size-1."""
        return self._rank

    @property
    @override
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @override
    def all_and(self, words: bytearray, timeout_s: float) -> None:
        """Replace `words` by the bitwise AND of all ranks' words; they are as before if it fails.

        Raises:
            AgreementError: Not all ranks took part in time, or an earlier collective failed.
            ContractError: `words` are no whole 64-bit words, or `timeout_s` is no time.
        """
        # Not by `_check_type`, here and of a timeout: this is the step path, and a call more.
        if not isinstance(words, bytearray):
            raise _wrong_type("all_and", "words as a bytearray", words)
        if len(words) % WORD_BYTES:
            raise ContractError(
                f"all_and: expected whole words of {WORD_BYTES} bytes, got {len(words)} bytes"
            )
        deadline = self._enter("all_and", timeout_s)
        # No words are still a meeting of all ranks, which a transport makes of at least one.
        meeting = words or bytearray(WORD_BYTES)
        self._go_through(partial(self._and, meeting, deadline), timeout_s)

    @override
    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        """The value of `root`, on every rank.

        Raises:
            AgreementError: Not all ranks took part in time, or an earlier collective failed.
            ContractError: There is no rank `root`, `value` is no bytes, or `timeout_s` is no time.
        """
        _check_type("broadcast", "a value of bytes", value, bytes)
        _check_type("broadcast", "a root of int", root, int)
        if not 0 <= root < self._size:
            raise ContractError(f"broadcast: expected a root in 0..{self._size - 1}, got {root}")
        offered = value if root == self._rank else b""
        return self._exchange(f"broadcast from {root}", offered, timeout_s)[root]

    @override
    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Every rank's value, by rank.

        Raises:
            AgreementError: Not all ranks took part in time, or an earlier collective failed.
            ContractError: `value` is no bytes, or `timeout_s` is no time.
        """
        _check_type("all_gather", "a value of bytes", value, bytes)
        return self._exchange("all_gather", value, timeout_s)

    @override
    def split(self, color: int, timeout_s: float) -> Self:
        """The group of those that gave the same color, in the order of their ranks.

        Raises:
            AgreementError: Not all ranks took part in time, or an earlier collective failed.
            ContractError: `color` is no int, or `timeout_s` is no time.
        """
        _check_type("split", "a color of int", color, int)
        deadline = deadline_after("split", timeout_s)
        # Digits also of a bool.
        colors = self._exchange("split", f"{color:d}".encode(), timeout_s)
        members = tuple(rank for rank, other in enumerate(colors) if int(other) == color)
        return self._go_through(lambda: self._subgroup(members, deadline), timeout_s)

    @override
    def renew(self, timeout_s: float) -> Self:
        """A new group of the same ranks on a new communicator; the old one is closed.

        If it fails for want of a rank, it may be tried again: a rank that is late meets what the
        others began. Where it is left behind that (by a signal's exception, as this one is released),
        the others have the new group: called again, it returns it, and meets nobody.

        Raises:
            AgreementError: Not all ranks took part in time.
            ContractError: `timeout_s` is no time.
            InvalidTransitionError: The group was closed or renewed.
        """
        self._health.admit_recovery("renew")
        deadline = self._count("renew", timeout_s)
        if self._successor is None:
            self._successor = self._go_through(
                lambda: self._renewed(deadline), timeout_s, MarkKind.RENEWING
            )
        renewed = self._successor
        why = f"it was renewed, epoch {self._epoch + 1} follows"
        self._go_through(lambda: self._end(why), timeout_s)
        self._successor = None
        return renewed

    @override
    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        """Leave a mark and return those that the others left in time.

        Raises:
            ContractError: `mark` is no str, or `timeout_s` is no time.
            InvalidTransitionError: The group was closed or renewed.
        """
        _check_type("roll_call", "a mark of str", mark, str)
        self._health.admit_recovery("roll_call")
        if self._successor is not None:
            # The others are there by now.
            return self._successor.roll_call(mark, timeout_s)
        return self._marks(MarkKind.CALLED, mark, deadline_after("roll_call", timeout_s))

    @override
    def close(self) -> None:
        """Release the communicator. Idempotent.

        Owns: what a failed collective may still use stays allocated.
        """
        if self._health.state is not State.CLOSED:
            self._end("close was called")
        if self._successor is not None:
            # Nobody else has it.
            self._successor.close()
            self._successor = None

    @abc.abstractmethod
    def _and(self, words: bytearray, deadline: float) -> None:
        """Replace at least one word by the AND of all ranks', or leave all alone and raise."""

    @abc.abstractmethod
    def _subgroup(self, members: tuple[int, ...], deadline: float) -> Self:
        """The group of `members`, in this order. All ranks just met, so all are here."""

    @abc.abstractmethod
    def _renewed(self, deadline: float) -> Self:
        """A group of the same ranks, one epoch later.

        Called again after it raised, it goes on where it was.
        """

    @abc.abstractmethod
    def _marks(self, kind: MarkKind, mark: str, deadline: float) -> dict[int, str]:
        """Leave a mark and return what is known of the ranks; never raises.

        It returns as soon as something is known of each, at the latest at the deadline.
        """

    @abc.abstractmethod
    def _release(self) -> None:
        """Give back what nobody uses any more.

        `_health` still says whether a collective was abandoned.
        """

    def _mark(self) -> str:
        """Where this rank stands."""
        return f"in {self._call}, collective {self._entered} of epoch {self._epoch}"

    def _enter(self, call: str, timeout_s: float) -> float:
        """Count a collective that may be entered, and return its deadline."""
        self._health.admit(call)
        return self._count(call, timeout_s)

    def _count(self, call: str, timeout_s: float) -> float:
        deadline = deadline_after(call, timeout_s)
        self._call = call
        self._entered += 1
        return deadline

    def _go_through(
        self,
        collective: Callable[[], _Result],
        timeout_s: float,
        kind: MarkKind = MarkKind.FAILED,
    ) -> _Result:
        """What a collective brings, which this rank goes through with, or never goes on after.

        What leaves it in its middle (a signal's exception) leaves the transport to write later on,
        and others to have completed it; so does what leaves the roll call behind one that failed.

        Raises:
            AgreementError: It failed.
            ContractError: It was refused before anything was begun; the group is as before.
        """
        try:
            try:
                return collective()
            except CollectiveError as error:
                raise self._broke(timeout_s, error, kind) from error
        except (AgreementError, ContractError):
            raise
        except BaseException as error:
            self._health.broke(f"{self._call}: left by {text_of(error)}", {})
            raise

    def _exchange(self, call: str, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Gather values under the name of the call: ranks that call different things all see it."""
        if len(value) > MAX_VALUE_BYTES // 2:
            raise ContractError(f"{call}: expected a small value, got {len(value)} bytes")
        deadline = self._enter(call, timeout_s)

        def collective() -> tuple[bytes, ...]:
            gathered = self._gather(call.encode() + b"\0" + value, deadline)
            parts = [other.partition(b"\0") for other in gathered]
            agree_on_call([name.decode(errors="replace") for name, _, _ in parts])
            return tuple(other for _, _, other in parts)

        return self._go_through(collective, timeout_s)

    def _gather(self, value: bytes, deadline: float) -> tuple[bytes, ...]:
        """Every rank's value, by rank: an AND of their lengths, then one of the values."""
        lengths = [WORD_BYTES] * self._size
        encoded = self._and_places(len(value).to_bytes(WORD_BYTES, "little"), lengths, deadline)
        lengths = [int.from_bytes(length, "little") for length in encoded]
        if max(lengths) > MAX_VALUE_BYTES:
            # Words of something else: no rank offers so much.
            raise CollectiveError(MIXED)
        return self._and_places(value, lengths, deadline)

    def _and_places(self, value: bytes, lengths: list[int], deadline: float) -> tuple[bytes, ...]:
        """Every rank's value, where all know the lengths."""
        ends = list(itertools.accumulate(lengths))
        num_words = -(-ends[-1] // WORD_BYTES)
        words = bytearray(b"\xff" * WORD_BYTES * max(num_words, 1))
        places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        words[places[self._rank]] = value
        self._and(words, deadline)
        return tuple(bytes(words[place]) for place in places)

    def _broke(self, timeout_s: float, error: CollectiveError, kind: MarkKind) -> AgreementError:
        """Break the group, ask for ranks that nothing is known of, and return what to raise."""
        by_rank = {self._rank: self._mark()} | error.known
        if len(by_rank) < self._size:
            by_rank = self._marks(kind, self._mark(), time.monotonic() + ROLL_CALL_S) | by_rank
        by_rank = {rank: by_rank.get(rank, NO_ANSWER) for rank in range(self._size)}
        where = f"{self._call} (collective {self._entered} of epoch {self._epoch})"
        return self._health.broke(wording(where, timeout_s, error.reason, by_rank), by_rank)

    def _end(self, why: str) -> None:
        self._release()
        self._health.close(why)


def deadline_after(call: str, timeout_s: float) -> float:
    """The moment, in seconds of `time.monotonic`, until which `call` may wait.

    Raises:
        ContractError: The timeout is negative, too long or no number.
    """
    if not isinstance(timeout_s, (int, float)):
        raise _wrong_type(call, "a timeout in seconds", timeout_s)
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise ContractError(
            f"{call}: expected a timeout of 0..{MAX_TIMEOUT_S:g} s, got {timeout_s}"
        )
    return time.monotonic() + timeout_s


def _check_type(call: str, expected: str, given: object, kinds: type | tuple[type, ...]) -> None:
    """Return if an argument is of its type: what is found out in a collective breaks the group.

    Raises:
        ContractError: It is of another one.
    """
    if not isinstance(given, kinds):
        raise _wrong_type(call, expected, given)


def _wrong_type(call: str, expected: str, given: object) -> ContractError:
    return ContractError(
        f"{call}: expected {expected}, got {type(given).__name__} {reprlib.repr(given)}"
    )


def agree_on_call(calls: Sequence[str]) -> None:
    """Return if all ranks made the same call.

    Raises:
        CollectiveError: They did not; on every rank alike, as all see the same calls.
    """
    if len(set(calls)) > 1:
        known = {rank: f"in {call}" for rank, call in enumerate(calls)}
        raise CollectiveError(MIXED, known)


def time_left(deadline: float) -> float:
    """Seconds until a deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())
