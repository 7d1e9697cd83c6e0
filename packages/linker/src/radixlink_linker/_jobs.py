"""`Job`: one operation, as the transfer thread of a `StoreLinker` gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from radixlink_contracts.errors import TransferError

if TYPE_CHECKING:
    from radixlink_contracts import BatchIndex, OperationTicket, PoolTransfer


class GivenUpError(TransferError):
    """Nobody wants the operation any more. It says nothing of a store, nor of a copier."""


@attrs.define(kw_only=True, eq=False)
class Job:
    """One operation. The last two fields are guarded by the board's lock.

    Attributes:
        ticket: The operation.
        transfers: What to move.
        direction: "load", "offload" or "touch"; a touch has no slots.
        layer_wise: A load that goes layer by layer, together with others.
        copying: A copy touches its slots.
        over: It touches no slot any more, and nothing more is told of it.
    """

    ticket: OperationTicket
    transfers: tuple[PoolTransfer, ...]
    direction: Literal["load", "offload", "touch"]
    layer_wise: bool = False
    copying: bool = False
    over: bool = False

    @property
    def num_pages(self) -> int:
        """Pages of all pools."""
        return sum(len(transfer.keys) for transfer in self.transfers)

    def ask(self) -> None:
        """Return while its slots may be touched.

        Raises:
            GivenUpError: The ranks decided the operation, or the linker was reset.
        """
        if self.ticket.decided or self.over:
            raise self._error(GivenUpError, "it was given up")

    def failed(self, why: str) -> TransferError:
        """The error of a job that did not come through."""
        return self._error(TransferError, why)

    def _error(self, kind: type[TransferError], why: str) -> TransferError:
        return kind(
            f"{self.direction} of operation {self.ticket.op}: {why}",
            direction=self.direction,
            pages=self.num_pages,
            operation=self.ticket.op,
        )


@attrs.frozen(kw_only=True, eq=False)
class LayerWiseBatch:
    """Loads that go layer by layer together: a forward waits for a layer of all of them at once.

    Attributes:
        index: What the forward waits on.
        jobs: The loads, oldest first.
    """

    index: BatchIndex
    jobs: tuple[Job, ...]


@attrs.frozen(kw_only=True, eq=False)
class TouchBatch:
    """Touches that waited for the thread together: the stores are asked once for all of them.

    Attributes:
        jobs: The touches, oldest first.
    """

    jobs: tuple[Job, ...]
