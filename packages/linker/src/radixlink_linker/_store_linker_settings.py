"""How a `StoreLinker` works on its rank."""

from __future__ import annotations

import attrs

from radixlink_contracts import MAX_TIMEOUT_S
from radixlink_contracts.errors import ContractError


@attrs.frozen(kw_only=True)
class StoreLinkerSettings:
    """How a `StoreLinker` works; local to its rank.

    Attributes:
        staging_bytes: How much one thread moves at a time.
        lease_s: Seconds for which the store is asked to keep the pages of a load.
        copy_timeout_s: Seconds after which an operation whose copy has not ended counts as failed.
        layer_timeout_s: Seconds from the start of a batch of layer-wise loads after which no
            forward waits for its layers.
        hang_s: Seconds after which a call of a store hangs: until it has returned, or another of its
            kind has, nothing else is begun but for a try once in a while.
        max_hanging_calls: With so many calls that are on their way or lost while one hangs, there
            is no such try: each has a thread.
        close_timeout_s: Seconds that `close`, or the end of a process without it, waits for the
            thread, which may be in a call of a store.
        quiesce_timeout_s: Seconds that `reset` waits for the copy that runs; so does `close`, before
            it waits for the thread.
    """

    staging_bytes: int = 16 << 20
    lease_s: float = 10.0
    copy_timeout_s: float = 10.0
    layer_timeout_s: float = 10.0
    hang_s: float = 5.0
    max_hanging_calls: int = 4
    close_timeout_s: float = 5.0
    quiesce_timeout_s: float = 30.0

    def __attrs_post_init__(self) -> None:
        """Refuse what is no size and no time."""
        for name, value in attrs.asdict(self).items():
            # What is no number is above nothing.
            if not value > 0:
                msg = f"StoreLinkerSettings: expected {name} above 0, got {value}"
                raise ContractError(msg)
            if name.endswith("_s") and value > MAX_TIMEOUT_S:
                msg = f"StoreLinkerSettings: expected {name} of at most {MAX_TIMEOUT_S:g} s, got {value}"
                raise ContractError(msg)
