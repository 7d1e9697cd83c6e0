"""`Patience`: a bounded wait, of which all ranks see the same end.

A wait goes on from step to step until a report names the request. How it ends decides what is
computed, so all ranks must end it in the same step:

1. A report, a match and a count are replicated: code may branch on them.
2. A clock is local. With one rank there is nobody to differ from, and the deadline is in seconds.
3. With several, the deadline is a number of steps, as many pauses as fit into the same seconds. It
   is replicated, because every step is collective; it comes no earlier than the seconds do, and the
   deadline of each step itself (the group's, an `AgreementError`) bounds how much later. Where no
   request runs there is such a pause between two steps; where one does, a step takes longer.

So no rank has to raise, and lose its replica, for a slow store: the request is let go on all ranks
in the same step, and computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixlink_contracts import Clock


class Patience:
    """One wait. Made when it begins."""

    def __init__(
        self, *, clock: Clock, timeout_s: float, poll_interval_s: float, num_ranks: int
    ) -> None:
        """Begin to wait.

        Args:
            clock: Local; asked only where there is one rank.
            timeout_s: How long, at least.
            poll_interval_s: The pause between two steps.
            num_ranks: How many ranks wait together.
        """
        self._clock = clock
        self._alone = num_ranks == 1
        self._deadline = clock.now() + timeout_s
        self._steps_left = math.ceil(timeout_s / poll_interval_s)

    def lasts(self) -> bool:
        """Ask for one step more; False when the wait has lasted long enough."""
        if self._alone:
            return self._clock.now() < self._deadline
        if self._steps_left == 0:
            return False
        self._steps_left -= 1
        return True
