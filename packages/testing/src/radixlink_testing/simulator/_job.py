"""`Job`: one operation on its way through a simulated backend."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from radixlink_contracts import BatchIndex, OperationTicket, PageKeys, PoolName, PoolTransfer
    from radixlink_testing.simulator._faults import Fault
    from radixlink_testing.simulator._operations import Share


class JobKind(enum.Enum):
    """What an operation does."""

    LOAD = "load"
    OFFLOAD = "offload"
    TOUCH = "touch"


@attrs.define(kw_only=True, eq=False)
class Run:
    """The pages of one pool in an operation.

    Attributes:
        transfer: Their keys.
        pages: Where they are on the device; none of a touch.
        keys: The keys, once they are hashed.
        gathered: What an offload has read, by layer.
    """

    transfer: PoolTransfer
    pages: list[int]
    keys: PageKeys | None = None
    gathered: list[list[bytes]] = attrs.field(factory=list)

    @property
    def pool(self) -> PoolName:
        """Which pool."""
        return self.transfer.name


@attrs.define(kw_only=True, eq=False)
class Job:
    """One operation.

    Attributes:
        ticket: As the wrapper handed it over.
        runs: Its pages, by pool.
        share: What is known of it.
        kind: What it does.
        layer_wise: True for a load that a forward waits for.
        batch: The batch that waits for it, once it is started.
        fault: What goes wrong with it.
        opened: Its keys are hashed, and its pages found.
        layer: The layer range that is copied now, or next.
        copying: A copy touches its pages.
        delay: Quanta that the copy still takes.
    """

    ticket: OperationTicket
    runs: list[Run]
    share: Share
    kind: JobKind
    layer_wise: bool
    fault: Fault | None
    batch: BatchIndex | None = None
    opened: bool = False
    layer: int = 0
    copying: bool = False
    delay: int = 0

    @property
    def load(self) -> bool:
        """True for a load."""
        return self.kind is JobKind.LOAD

    @property
    def what(self) -> str:
        """What it is, for a story."""
        return f"{self.kind.value} {self.ticket.op}"
