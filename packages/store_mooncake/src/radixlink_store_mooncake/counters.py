"""What a store counted, as a value."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class MooncakeCounters:
    """What one opened store did since it was opened. Other openers count for themselves.

    Attributes:
        put: Pages that Mooncake took, or had before: it does not say which.
        rejected_full: Pages that found no room, after some tries.
        read_ok: Layer ranges of pages read right.
        read_missing: Layer ranges asked for of pages that `open` had not found.
        read_stale: Layer ranges of pages that went, or were written again, since `open`.
        corrupt: Objects that were not what their key says, in bytes or in size. They were removed.
        failed: Pages that an owner did not take or give, after some tries: mostly a dead one.
        unanswered: Calls that did not return before their deadline, were not made because others
            had not, or found no master.
    """

    put: int = 0
    rejected_full: int = 0
    read_ok: int = 0
    read_missing: int = 0
    read_stale: int = 0
    corrupt: int = 0
    failed: int = 0
    unanswered: int = 0

    def __add__(self, other: MooncakeCounters) -> MooncakeCounters:
        """Each counter's sum."""
        return MooncakeCounters(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in attrs.fields(MooncakeCounters)
            }
        )
