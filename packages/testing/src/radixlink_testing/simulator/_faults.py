"""What may go wrong on one rank."""

from __future__ import annotations

import enum


class Fault(enum.Enum):
    """A fault at one seam. Those of a call or of an operation strike the next one."""

    # -- lookups
    LOOKUP_RAISES = "the next lookup raises"
    LOOKUP_HANGS = "the next lookup never comes back"
    LOOKUP_LATE = "the next lookup takes long"
    LOOKUP_TORN = "the next lookup answers for too few pages"
    LOOKUP_LIES = "the next lookup finds pages that are not there"
    EXECUTOR_REFUSES = "the executor takes no task"
    # -- calls
    LOAD_REFUSED = "the next load is refused"
    LOAD_RAISES = "the next load raises"
    START_RAISES = "the next start raises"
    FINISH_RAISES = "the next wait for the layers of a batch raises"
    CANCEL_RAISES = "the next cancel raises"
    OFFLOAD_REFUSED = "the next offload is refused"
    OFFLOAD_RAISES = "the next offload raises"
    POP_RAISES = "the next completion raises"
    TOUCH_REFUSED = "the next touch is refused"
    TOUCH_RAISES = "the next touch raises"
    RESET_RAISES = "the next reset cannot end its copy"
    # -- transfers
    LOAD_FAILS = "the next load fails in a layer"
    LOAD_HANGS = "the next load hangs in a copy"
    LOAD_SLOW = "the next load is slower than a batch waits"
    LATE_WRITER = "the next load fails, and writes on"
    LOAD_DOUBLED = "the next load completes twice"
    LOAD_CONTRADICTS = "the next load says failed, then landed"
    LOAD_LOST = "the next load never completes"
    OFFLOAD_FAILS = "the next offload fails"
    OFFLOAD_HANGS = "the next offload hangs in a copy"
    OFFLOAD_CONTRADICTS = "the next offload says failed, then landed"
    OFFLOAD_LOST = "the next offload never completes"
    TOUCH_FAILS = "the next touch fails"
    TOUCH_LOST = "the next touch never completes"
    OLD_COMPLETION = "an operation that is over completes again"
    # -- the store and the loader's thread
    NO_ROOM = "the store finds no room for some pages"
    PAGE_LOST = "a page is gone"
    PAGES_LOST = "many pages are gone"
    PAGE_FLIPPED = "a bit of a page has changed"
    LOADER_DEAD = "nothing moves for some time"


#: After these a backend may never let go, so that slots are written off.
NEVER_LETS_GO = frozenset(
    {
        Fault.LOAD_LOST,
        Fault.OFFLOAD_LOST,
        Fault.LOAD_HANGS,
        Fault.OFFLOAD_HANGS,
        Fault.LATE_WRITER,
        Fault.CANCEL_RAISES,
        Fault.START_RAISES,
        Fault.FINISH_RAISES,
        Fault.LOAD_SLOW,
        Fault.POP_RAISES,
        Fault.LOADER_DEAD,
    }
)


#: What may go wrong with a touch alone.
OF_TOUCHES = (Fault.TOUCH_REFUSED, Fault.TOUCH_RAISES, Fault.TOUCH_FAILS, Fault.TOUCH_LOST)


class Divergence(enum.Enum):
    """What one rank alone may do: ranks that do not make the same calls."""

    INSERT = "computes and inserts another sequence"
    EVICT = "evicts"
    MATCH = "asks for a request that the others do not know"
    ABORT = "forgets a request whose lookup is open"
    EXTRA_STEP = "steps once more"
    NO_STEP = "does not step"
    SETTINGS = "attaches with other settings"
