"""What the exchange between nodes counted, as a value."""

from __future__ import annotations

from typing import Final

import attrs

from radixlink_store.segments import ProcessMutex


@attrs.frozen(kw_only=True)
class NodeCounters:
    """What one rank's factory asked of other nodes, and answered them.

    Attributes:
        asked: Requests sent to other nodes.
        answered: Those that were answered in time, rightly.
        late: Those that were not answered in time.
        dropped: Answers that came later and were thrown away.
        skipped: Requests that were not sent since the node still owed an answer.
        lost: Requests that failed since the node's process had ended.
        refused: Answers that say that the node could not serve.
        malformed: Answers that are none.
        corrupt: Answers whose bytes do not match their checksum.
        fetched: Pages of other nodes that became local.
        no_room: Pages of other nodes that found no room here.
        served: Requests that this rank, as the leader of its node, answered.
        sent: Pages in those answers.
    """

    asked: int = 0
    answered: int = 0
    late: int = 0
    dropped: int = 0
    skipped: int = 0
    lost: int = 0
    refused: int = 0
    malformed: int = 0
    corrupt: int = 0
    fetched: int = 0
    no_room: int = 0
    served: int = 0
    sent: int = 0


class NodeTally:
    """The counters in the making.

    Thread: any.
    """

    def __init__(self) -> None:
        self._mutex: Final = ProcessMutex()
        self._counts: Final = dict.fromkeys((f.name for f in attrs.fields(NodeCounters)), 0)

    def add(self, **counts: int) -> None:
        """Add to counters by the names that `NodeCounters` gives them."""
        with self._mutex.lock:
            for name, count in counts.items():
                self._counts[name] += count

    @property
    def counters(self) -> NodeCounters:
        """What was counted."""
        with self._mutex.lock:
            return NodeCounters(**self._counts)
