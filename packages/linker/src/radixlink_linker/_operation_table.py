"""`OperationTable`: the operations that are not over, oldest first; what frames speak of."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from radixlink_contracts import LoadMode
from radixlink_linker._operation import LoadOperation, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import Clock, Completion, OperationId, RadixKey
    from radixlink_linker._operation import AnyOperation
    from radixlink_linker._ranks import FrameExchange
    from radixlink_linker._settings import LinkerSettings


class OperationTable:
    """The operations of one replica.

    Ranks: all, the same calls in the same order, but for what completions and clocks say.
    Thread: the scheduler's.
    """

    def __init__(
        self, frames: FrameExchange, clock: Clock, settings: LinkerSettings, page_size: int
    ) -> None:
        """Start with none.

        Args:
            frames: Mints ids.
            clock: For this rank's deadlines.
            settings: How many there may be, and how long this rank waits.
            page_size: Tokens.
        """
        self._frames = frames
        self._clock = clock
        self._settings = settings
        self._page_size = page_size
        #: By id, oldest first. Written only here.
        self.live: dict[OperationId, AnyOperation] = {}
        #: Steps since attach or reset.
        self.step = 0

    def __len__(self) -> int:
        """How many."""
        return len(self.live)

    def __iter__(self) -> Iterator[AnyOperation]:
        """All, oldest first."""
        return iter(self.live.values())

    def get(self, op: OperationId) -> AnyOperation | None:
        """The operation of an id; None for one that is over."""
        return self.live.get(op)

    def has_room(self) -> bool:
        """True while a frame has bits for one more."""
        return len(self.live) < self._settings.max_operations

    def of_next_frame(self) -> list[AnyOperation]:
        """What the frame of this step speaks of, oldest first.

        Where more are live than it has bits for, they take turns, those first of which the last
        frame was longest ago: operations that are decided and whose ranks do not let go, as with a
        store that hangs, keep no other from its verdict.
        """
        operations = list(self.live.values())
        most = self._settings.max_operations
        if len(operations) <= most:
            return operations
        chosen = sorted(operations, key=attrgetter("turn_step"))[:most]
        for operation in chosen:
            operation.turn_step = self.step
        return sorted(chosen, key=attrgetter("op"))

    # -- the beginning and the end -----------------------------------------------------------------

    def mint(self) -> tuple[OperationId, float]:
        """The id of the next operation, and this rank's own moment to give it up."""
        return self._frames.mint(), self._clock.now() + self._settings.transfer_timeout_s

    def add(self, operation: AnyOperation) -> None:
        """An operation that was just minted begins."""
        operation.minted_step = operation.turn_step = self.step
        self.live[operation.op] = operation

    def remove(self, operation: AnyOperation) -> None:
        """It is over."""
        del self.live[operation.op]

    def newest(self) -> AnyOperation | None:
        """The last that was added of those that are not over; None where there is none."""
        return next(reversed(self.live.values()), None)

    # -- loads -------------------------------------------------------------------------------------

    def loads(self) -> list[LoadOperation]:
        """All loads, oldest first. Cost: O(operations)."""
        return [one for one in self.live.values() if isinstance(one, LoadOperation)]

    def running_loads(self) -> list[LoadOperation]:
        """The layer-wise loads that some batch waits for or will, oldest first.

        Cost: O(operations).
        """
        return [
            load
            for load in self.loads()
            if load.mode is LoadMode.LAYER_WISE
            and load.verdict is Verdict.PENDING
            and not load.cancelled
        ]

    def load_of(self, key: RadixKey, start: int) -> LoadOperation | None:
        """The load that brings the page at a token of a key, if there is one.

        Cost: O(operations).
        """
        for load in self.live.values():
            if (
                isinstance(load, LoadOperation)
                and load.verdict is Verdict.PENDING
                and not load.cancelled
                and load.covers(key, start, self._page_size)
            ):
                return load
        return None

    # -- what this rank knows of them --------------------------------------------------------------

    def note(self, completion: Completion) -> bool:
        """Take in one completion.

        Returns:
            False where it says nothing new: its operation is over, or this rank had its verdict.
        """
        operation = self.live.get(completion.op)
        return operation is not None and operation.note(
            completion.outcome, quiesced=completion.quiesced, why=completion.why
        )

    def expire(self, now: float) -> None:
        """What is late on this rank has failed here. Cost: O(operations)."""
        for operation in self.live.values():
            if now >= operation.deadline:
                operation.give_up("its deadline passed")
