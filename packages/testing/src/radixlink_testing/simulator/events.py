"""What may happen in a history: the events of a plan, the faults, and when backends work."""

from radixlink_testing.simulator._faults import Divergence, Fault
from radixlink_testing.simulator._plan import (
    Abort,
    Arrive,
    Attach,
    Detach,
    Diverge,
    Event,
    Evict,
    Kill,
    Pass,
    Point,
    Poke,
    Recover,
    Reset,
    Strike,
    Work,
)

__all__ = [
    "Abort",
    "Arrive",
    "Attach",
    "Detach",
    "Diverge",
    "Divergence",
    "Event",
    "Evict",
    "Fault",
    "Kill",
    "Pass",
    "Point",
    "Poke",
    "Recover",
    "Reset",
    "Strike",
    "Work",
]
