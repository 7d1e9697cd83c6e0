"""What the ranks of a group agree on when a linker is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import MAX_TIMEOUT_S, POOL_OF, PoolName
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable

WORD_BITS: Final = 64
"""Bits of a frame's word."""

HANGING_LOOKUPS: Final = 4
"""How many lookups may hang: for each that does, and for the try behind it, a thread is needed."""


def _in_one_order(pools: Iterable[PoolName]) -> tuple[PoolName, ...]:
    return tuple(sorted(set(pools)))


@attrs.frozen(kw_only=True)
class LinkerSettings:
    """The numbers that every rank of a group must have alike; attaching compares them.

    Attributes:
        frame_words: 64-bit words of a frame. All frames of a group have this size. The default is
            just below what MPI libraries send at once (4 KiB with a header of theirs): a frame of
            512 words took twice as long.
        max_operations: Operations that one frame speaks of, and offloads that may be on the way at
            once. Where there are more they take turns, those first that were longest without.
        max_lookups: Lookups that one frame asks about.
        staged_percent: How much of each pool staged loads may hold at once. A window or a state is
            needed whole, so that one load alone may hold more of theirs.
        max_loads: How many loads of either mode one request may have before it computes.
        publish_lock_steps: Steps for which a restored path stays locked for its request.
        miss_steps: Steps for which the pages of a failed load count as missing, and for which a
            request waits for the room of a load that is decided and not let go of.
        heartbeat_steps: Every so many steps an idle group exchanges a frame all the same.
        write_off_steps: Steps after a verdict at which slots that are still not quiesced are given
            up until `reset`.
        written_off_percent: How much of a pool may be given up so before the linker is.
        backup_threshold: Uses of a node before it is offered to the store.
        retry_after_uses: Uses of the tree (matches and inserts, those of loads too) for which a node
            whose offload failed is not offered again; twice as many after each further failure in a
            row, up to 64 times as many. At least 1.
        touch_after_uses: Uses of the tree, likewise, after which a stored node that is used again is
            touched in the store.
        max_touches: Touches that may be on the way at once.
        storing_ranks: For each rank the one that stores for it: itself, or one that holds the same
            bytes and lends its shard of the store to all that do. Empty: each stores its own.
        shared_pools: The pools of which that is so: where states are alike and heads are spread,
            MAMBA alone. What is stored beside a pool goes with it. Kept in one order, each once.
        step_timeout_s: Seconds in which every rank must have entered a frame: an engine's watchdog.
        lookup_timeout_s: Seconds after which a lookup counts as a miss.
        max_hanging_lookups: With so many tasks of the executor that are on their way while one
            hangs, none is added to find out whether the store is back. The executor needs as many
            threads: a try that waits behind what hangs finds nothing out.
        transfer_timeout_s: Seconds after which a load or an offload counts as failed.
    """

    frame_words: int = 480
    max_operations: int = 64
    max_lookups: int = 256
    staged_percent: int = 25
    max_loads: int = 2
    publish_lock_steps: int = 256
    miss_steps: int = 64
    heartbeat_steps: int = 64
    write_off_steps: int = 1024
    written_off_percent: int = 5
    backup_threshold: int = 1
    retry_after_uses: int = 64
    touch_after_uses: int = 1024
    max_touches: int = 8
    storing_ranks: tuple[int, ...] = ()
    shared_pools: tuple[PoolName, ...] = attrs.field(
        default=tuple(POOL_OF.values()), converter=_in_one_order
    )
    step_timeout_s: float = 300.0
    lookup_timeout_s: float = 5.0
    max_hanging_lookups: int = HANGING_LOOKUPS
    transfer_timeout_s: float = 30.0

    def __attrs_post_init__(self) -> None:
        """Refuse numbers out of range: what no frame can be made of, what is no time."""
        for name, least, most in (
            ("max_operations", 1, WORD_BITS),
            ("max_lookups", 1, 64 * WORD_BITS),
            ("staged_percent", 1, 100),
            ("max_loads", 1, 1 << 30),
            ("publish_lock_steps", 0, 1 << 30),
            ("miss_steps", 0, 1 << 30),
            ("heartbeat_steps", 1, 1 << 30),
            ("write_off_steps", 1, 1 << 30),
            ("written_off_percent", 0, 100),
            ("backup_threshold", 1, 1 << 30),
            ("retry_after_uses", 1, 1 << 30),
            ("touch_after_uses", 1, 1 << 30),
            ("max_touches", 0, WORD_BITS),
            ("max_hanging_lookups", 1, 1 << 30),
            ("step_timeout_s", 1e-3, MAX_TIMEOUT_S),
            ("lookup_timeout_s", 0.0, MAX_TIMEOUT_S),
            ("transfer_timeout_s", 0.0, MAX_TIMEOUT_S),
        ):
            value: float = getattr(self, name)
            if not least <= value <= most:
                msg = f"LinkerSettings: expected {name} in {least}..{most}, got {value}"
                raise ContractError(msg)
        if not set(self.shared_pools) <= set(POOL_OF.values()):
            msg = (
                "LinkerSettings: expected shared_pools among those of components, "
                f"{[pool.value for pool in POOL_OF.values()]}, got {self.shared_pools}"
            )
            raise ContractError(msg)
        least = self.least_frame_words(self.max_lookups)
        if self.frame_words < least:
            msg = (
                f"LinkerSettings: expected frame_words of at least {least} "
                f"for {self.max_lookups} lookups, got {self.frame_words}"
            )
            raise ContractError(msg)

    @staticmethod
    def least_frame_words(max_lookups: int) -> int:
        """The words of the smallest frame that asks about so many lookups."""
        return 6 + -(-max_lookups // WORD_BITS)

    def stored_elsewhere(self, rank: int, num_ranks: int) -> frozenset[PoolName]:
        """The pools that another rank stores for this one, which holds the same bytes.

        Raises:
            ContractError: The storing ranks are not of so many ranks, or one does not store itself.
        """
        by = self.storing_ranks
        if not by:
            return frozenset()
        if len(by) != num_ranks or any(one not in range(num_ranks) or by[one] != one for one in by):
            msg = (
                f"LinkerSettings: expected storing_ranks to name, for each of {num_ranks} ranks, "
                f"one that stores for itself, got {by}"
            )
            raise ContractError(msg)
        return frozenset() if by[rank] == rank else frozenset(self.shared_pools)

    @property
    def fingerprint(self) -> str:
        """All fields, in one line that ranks compare."""
        return repr(self)
