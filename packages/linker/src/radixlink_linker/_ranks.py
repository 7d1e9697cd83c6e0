"""`FrameExchange`: frames over a rank group, with the bookkeeping of epochs, digests and failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts.errors import AgreementError

from radixlink_linker._frame import (
    FrameKind,
    digests_agree,
    read_frame,
    replicated_digest,
    write_frame,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import RankGroup

    from radixlink_linker._frame import Agenda, AgreedFrame
    from radixlink_linker._settings import LinkerSettings


class FrameExchange:
    """Sends and checks the frames of one rank.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's.
    """

    def __init__(self, group: RankGroup, settings: LinkerSettings) -> None:
        """Exchange over this group, from epoch 0 on."""
        self.group = group
        self._settings = settings
        self._epoch = 0
        #: Frames of this epoch.
        self._number = 0
        self._digest = 0
        #: Set once ranks did not agree: every later exchange fails at once, until `renew`.
        self._failure: AgreementError | None = None

    @property
    def alone(self) -> bool:
        """True in a group of one, where no collective is needed."""
        return self.group.size == 1

    def check(self) -> None:
        """Return while the ranks agree.

        Raises:
            AgreementError: They did not, in this epoch.
        """
        if self._failure is not None:
            raise AgreementError(self._failure.message, by_rank=self._failure.by_rank)

    def agree_on_settings(self, facts: str) -> None:
        """Compare what every rank attaches with.

        Raises:
            AgreementError: It differs; names each rank's. Raised on every rank alike.
        """
        if self.alone:
            return
        told = self.group.all_gather(facts.encode(), self._settings.step_timeout_s)
        if len(set(told)) > 1:
            by_rank = {rank: value.decode() for rank, value in enumerate(told)}
            msg = f"attach: expected the same settings on all ranks, got {by_rank}"
            raise AgreementError(msg, by_rank=by_rank, rank=self.group.rank)

    def exchange(self, agenda: Agenda, facts: Sequence[int], now: float) -> AgreedFrame:
        """One frame.

        Args:
            agenda: What it speaks of.
            facts: Replicated numbers that must be equal on all ranks.
            now: This rank's clock.

        Raises:
            AgreementError: Ranks differ, or one did not come in time. On every rank that came.

        Cost: one collective; none in a group of one.
        """
        self.check()
        self._number += 1
        self._digest = replicated_digest(
            self._digest, FrameKind.STEP, (self._epoch, self._number, *facts)
        )
        frame = write_frame(agenda, self._digest, now, self._settings)
        if not self.alone:
            try:
                self.group.all_and(frame, self._settings.step_timeout_s)
            except AgreementError as error:
                self._failure = error
                raise
            if not digests_agree(frame):
                self._failure = self._divergence(facts)
                raise self._failure
        return read_frame(frame, agenda, self._settings)

    def _divergence(self, facts: Sequence[int]) -> AgreementError:
        """The error that every rank raises for the same frame, with what each of them believed."""
        mine = f"epoch {self._epoch}, frame {self._number}, facts {list(facts)}"
        try:
            told = self.group.all_gather(mine.encode(), self._settings.step_timeout_s)
            by_rank = {rank: value.decode() for rank, value in enumerate(told)}
        except AgreementError as error:
            by_rank = {self.group.rank: mine, **error.by_rank}
        msg = (
            f"frame {self._number} of epoch {self._epoch}: expected the same replicated state on "
            f"all ranks, got different digests: {by_rank}"
        )
        return AgreementError(msg, by_rank=by_rank, rank=self.group.rank)

    def renew(self) -> None:
        """Begin a new epoch on a new communicator. Collective; nothing in a group of one.

        Raises:
            AgreementError: Not all ranks came in time.
        """
        if not self.alone:
            self.group = self.group.renew(self._settings.step_timeout_s)
        self._epoch += 1
        self._number = 0
        self._digest = 0
        self._failure = None
