"""`RankGroup`: the ranks that must agree, over whatever they communicate by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class RankGroup(Protocol):
    """A fixed set of ranks on a communicator of its own.

    A collective that times out has perhaps completed on another rank, so it is fatal: the group is unusable then and
    every later call raises at once, until all ranks `renew` it.

    Ranks: every method but the properties and `roll_call` is collective: all ranks, the same order.
    Thread: the scheduler's.
    """

    @property
    def rank(self) -> int:
        """This rank, 0..size-1."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_and(self, words: bytearray, timeout_s: float) -> None:
        """Replace `words` by the bitwise AND of all ranks' words.

        Args:
            words: Whole 64-bit words; as many on every rank.
            timeout_s: Seconds.

        Raises:
            AgreementError: Not all ranks took part in time.

        Cost: one collective; none for a group of one.
        """
        ...

    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        """The value of `root`, on every rank. For attach and error paths: not for every step.

        Raises:
            AgreementError: Not all ranks took part in time.
        """
        ...

    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Every rank's value, by rank. For attach and error paths: not for every step.

        Raises:
            AgreementError: Not all ranks took part in time.
        """
        ...

    def split(self, color: int, timeout_s: float) -> RankGroup:
        """The group of those that gave the same color, in the order of their ranks.

        Raises:
            AgreementError: Not all ranks took part in time.
        """
        ...

    def renew(self, timeout_s: float) -> RankGroup:
        """A new group of the same ranks on a new communicator. The old one is never used again.

        Raises:
            AgreementError: Not all ranks took part in time.
        """
        ...

    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        """After a time-out: leave a mark and read those of the others, outside any collective.

        Args:
            mark: Where this rank stands, for example "epoch 0, frame 17".
            timeout_s: How long to wait for marks.

        Returns:
            The marks that were there in time, by rank, this rank's own included; who is missing left none.
        """
        ...

    def close(self) -> None:
        """Release the communicator. Idempotent."""
        ...
