"""What actions do, slot by slot, in the model's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)

from .prefix_model import Gone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_contracts.actions import CacheAction

    from .pools import Pools
    from .prefix_model import Event


def events_of(pools: Pools, actions: Iterable[CacheAction]) -> list[Event]:
    """The events of these actions, in their order; an offer to the store is none."""
    events: list[Event] = []
    pages_of = pools.pages_of
    for action in actions:
        match action:
            case FreeDeviceKV():
                events += [(Gone.WHOLE, page, 0) for page in pages_of(action.indices)]
            case FreeDeviceKVFullOnly():
                events += [(Gone.BARE, page, 0) for page in pages_of(action.indices)]
            case FreeSWA():
                events += [(Gone.WINDOW, page, 0) for page in pages_of(action.full_indices)]
            case FreeMambaSlots():
                events += [(Gone.STATE, slot, 0) for slot in action.slots]
            case MoveSWA():
                pairs = zip(pages_of(action.from_full), pages_of(action.to_full), strict=True)
                events += [(Gone.MOVED, old, new) for old, new in pairs]
            case BackupKV():
                pass
            case _:
                assert_never(action)
    return events


def by_kind(events: list[Event]) -> list[Event]:
    """The events of each kind together, in their order."""
    return sorted(events, key=lambda event: event[0])
