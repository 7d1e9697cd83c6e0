"""`FrameExchange`: frames over a rank group, and the bookkeeping of epochs, digests and failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_contracts import OperationId
from radixlink_contracts.errors import AgreementError
from radixlink_contracts.texts import text_of
from radixlink_linker._frame import (
    digests_agree,
    read_frame,
    replicated_digest,
    write_frame,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import RankGroup
    from radixlink_linker._frame import Agenda, AgreedFrame, FrameKind
    from radixlink_linker._settings import LinkerSettings

_OPERATIONS_OF_AN_EPOCH: Final = 1 << 32


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
        #: Operations of this epoch.
        self._minted = 0
        self._digest = 0
        #: True once a linker was attached: before that the group is left alone.
        self._used = False
        #: Set once ranks did not agree, or may not any more: every later exchange fails at once,
        #: until `renew`. Never itself raised, so that it holds no traceback.
        self._failure: AgreementError | None = None

    @property
    def alone(self) -> bool:
        """True in a group of one, where no collective is needed."""
        return self.group.size == 1

    def check(self) -> None:
        """Return while the ranks agree.

        Raises:
            AgreementError: They did not, in this epoch; or a call was left in its middle here.
        """
        if self._failure is not None:
            raise _copy(self._failure)

    def leave(self, call: str, error: BaseException) -> None:
        """A call was left in its middle: what is replicated may differ here, so nothing goes on.

        Args:
            call: Which one.
            error: What left it: a signal's exception, or an engine's out of what it handed in.
        """
        if self._failure is None:
            what = f"left {call} by {text_of(error)}"
            msg = f"{call}: expected to go through with what all ranks do, {what}, until all reset"
            self._failure = AgreementError(
                msg, by_rank={self.group.rank: what}, rank=self.group.rank
            )

    def mint(self) -> OperationId:
        """The next operation's id: the same on all ranks, and never used before in any epoch."""
        self._minted += 1
        return OperationId(self._epoch * _OPERATIONS_OF_AN_EPOCH + self._minted)

    def agree_on_settings(self, facts: str) -> None:
        """Compare what every rank attaches with.

        Raises:
            AgreementError: It differs; names each rank's. Raised on every rank alike.
        """
        self.check()
        if self.alone:
            return
        self._used = True
        told = self.group.all_gather(facts.encode(), self._settings.step_timeout_s)
        if len(set(told)) > 1:
            by_rank = {rank: value.decode() for rank, value in enumerate(told)}
            msg = f"attach: expected the same settings on all ranks, got {by_rank}"
            raise AgreementError(msg, by_rank=by_rank, rank=self.group.rank)

    def agree_on_attach(self, error: Exception | None) -> None:
        """Have all ranks attach or none: each says whether it could.

        Args:
            error: What kept this rank from it; None for nothing. The caller raises that itself, so
                none is raised here beside it.

        Raises:
            AgreementError: Another rank could not, or did not come: names it.
        """
        if self.alone:
            return
        self._used = True
        said = b"" if error is None else text_of(error).encode()
        try:
            told = self.group.all_gather(said, self._settings.step_timeout_s)
        except AgreementError:
            if error is None:
                raise
            return
        by_rank = {rank: other.decode() for rank, other in enumerate(told) if other}
        if by_rank and error is None:
            msg = f"attach: expected all ranks to attach, got {by_rank}"
            raise AgreementError(msg, by_rank=by_rank, rank=self.group.rank)

    def exchange(
        self, kind: FrameKind, agenda: Agenda, facts: Sequence[int], now: float
    ) -> AgreedFrame:
        """One frame.

        Args:
            kind: Which one.
            agenda: What it speaks of.
            facts: Replicated numbers that must be equal on all ranks.
            now: This rank's clock.

        Raises:
            AgreementError: Ranks differ, or one did not come in time. On every rank that came.

        Cost: one collective; none in a group of one.
        """
        self.check()
        self._number += 1
        self._digest = replicated_digest(self._digest, kind, (self._epoch, self._number, *facts))
        frame = write_frame(agenda, self._digest, now, self._settings, rank=self.group.rank)
        if not self.alone:
            try:
                self.group.all_and(frame, self._settings.step_timeout_s)
            except AgreementError as error:
                self._failure = self._told_of(error)
                raise _copy(self._failure) from error
            if not digests_agree(frame):
                self._failure = self._divergence(facts)
                raise _copy(self._failure)
        return read_frame(frame, agenda, self._settings)

    def _told_of(self, error: AgreementError) -> AgreementError:
        """What is raised where a frame failed: before the first one a rank may have failed alone."""
        message = error.message
        if self._number == 1:
            message = (
                f"first frame of epoch {self._epoch}: a rank that does not come may have failed "
                f"alone to attach or to reset; {message}"
            )
        return AgreementError(message, by_rank=error.by_rank, rank=error.rank)

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
        """Begin a new epoch on a new communicator.

        Collective where there is more than one rank and a linker was ever attached.

        Raises:
            AgreementError: Not all ranks came in time.
        """
        if self._used:
            self.group = self.group.renew(self._settings.step_timeout_s)
        self._epoch += 1
        self._number = 0
        self._minted = 0
        self._digest = 0
        self._failure = None


def _copy(error: AgreementError) -> AgreementError:
    """The same error without where it was raised."""
    return AgreementError(error.message, by_rank=error.by_rank, rank=error.rank)
