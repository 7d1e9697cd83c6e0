"""What happened on this rank, in numbers. Local: no decision is made of them."""

from __future__ import annotations

import attrs


@attrs.define(kw_only=True)
class LinkerCounters:
    """Counts since the linker was attached.

    Attributes:
        frames: Frames exchanged: one collective each where there is more than one rank.
        lookups: Lookups submitted.
        lookup_errors: Lookups that this rank could not answer, by an exception, a component that
            takes no part, or a store that was late; each counts as a miss.
        lookups_refused: Lookups that were a miss here at once, because earlier ones hang; they are
            among the errors too.
        loads_landed: Loads that were committed.
        loads_failed: Loads that were given up.
        offloads_stored: Offloads that every rank confirmed.
        offloads_failed: Offloads that were given up.
        touches_landed: Touches that found all pages of a node on every rank.
        touches_failed: Touches that did not, so that the node is offered again.
        backend_errors: Exceptions out of the linker's calls here; each is the operation's failure.
        late_completions: Completions that came after this rank had already given its verdict.
        slots_written_off: Slots that are not handed out before `reset`, because a rank never let go
            of them.
        last_error: What the last of the two kinds of errors said, for people.
    """

    frames: int = 0
    lookups: int = 0
    lookup_errors: int = 0
    lookups_refused: int = 0
    loads_landed: int = 0
    loads_failed: int = 0
    offloads_stored: int = 0
    offloads_failed: int = 0
    touches_landed: int = 0
    touches_failed: int = 0
    backend_errors: int = 0
    late_completions: int = 0
    slots_written_off: int = 0
    last_error: str = ""
