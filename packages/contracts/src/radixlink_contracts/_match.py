"""Match: what of a sequence is cached, on the device and outside."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from radixlink_contracts._ids import NodeId, OperationId, RequestId
    from radixlink_contracts._keys import RadixKey


class ExternalMatch(enum.Enum):
    """What is agreed about the part of a sequence that the device lacks."""

    #: Nobody asked: there is no linker, no request, or no whole page is missing.
    NOT_ASKED = "not_asked"
    #: The lookup is on its way, or another request's load of the next page is: keep the request waiting.
    UNKNOWN = "unknown"
    #: Nothing can be restored: compute.
    MISS = "miss"
    #: `MatchResult.host_hit_length` tokens can be restored on every rank.
    HIT = "hit"


@attrs.frozen(kw_only=True)
class MatchPrefixParams:
    """What to match.

    Attributes:
        key: The sequence. Only whole pages match.
        request_id: Names the request whose external lookup the answer belongs to; None asks for the device part only.
    """

    key: RadixKey
    request_id: RequestId | None = None


@attrs.frozen(kw_only=True)
class MatchResult:
    """What was found. All lengths are tokens and multiples of the page size.

    Attributes:
        device_prefix_len: How much of the sequence is on the device, with all that its end needs: a live window
            behind it, a state at it.
        last_device_node: The node where that part ends (the root for 0). Its path's indices are read on demand.
        external: What is agreed about the rest.
        host_hit_length: Tokens beyond `device_prefix_len` that can be restored; 0 unless `external` is HIT.
        waiting_on: The operation that already loads the first missing page, where one does.
        full_kv_hit_length: How much of it full attention alone has; at least `device_prefix_len`.
        branching_len: Where a checkpoint would have let this match end and may let the next one that parts here:
            beyond `device_prefix_len`, within `full_kv_hit_length`. 0 for none.
    """

    device_prefix_len: int
    last_device_node: NodeId
    external: ExternalMatch = ExternalMatch.NOT_ASKED
    host_hit_length: int = 0
    waiting_on: OperationId | None = None
    full_kv_hit_length: int = 0
    branching_len: int = 0


@attrs.frozen(kw_only=True)
class PrefixHoldings:
    """What the device holds of a sequence, piece by piece, whether or not a match may end there. Lengths are tokens.

    Attributes:
        full_len: How much of the sequence full attention has.
        last_node: The node where that part ends (the root for 0).
        windows: Where window slots are, as ranges [first, behind the last), ascending and disjoint.
        states: Where states stand, ascending.
    """

    full_len: int
    last_node: NodeId
    windows: tuple[tuple[int, int], ...] = ()
    states: tuple[int, ...] = ()
