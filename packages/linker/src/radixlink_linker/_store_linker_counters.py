"""What a `StoreLinker` moved, in numbers. Local: no decision is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen(kw_only=True)
class StoreLinkerCounters:
    """What a `StoreLinker` moved.

    Attributes:
        pages_loaded: Objects copied to the device by loads that came through here, whatever other
            ranks said; a page that is stored as several objects counts as so many.
        pages_stored: Pages that offloads which landed put, or found there.
        pages_touched: Pages of touches that found all of theirs.
        pages_by_writer: Pages loaded, by the process that had written them (0: unknown).
        last_error: What the last failed transfer said, for people.
    """

    pages_loaded: int = 0
    pages_stored: int = 0
    pages_touched: int = 0
    pages_by_writer: Mapping[int, int] = attrs.field(factory=dict)
    last_error: str = ""
