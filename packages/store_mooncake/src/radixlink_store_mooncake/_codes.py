"""Mooncake's result codes, as far as this package tells them apart, and which of them may pass."""

from __future__ import annotations

import enum
from typing import Final


class Code(enum.IntEnum):
    """What a call says of one object. Calls that move bytes say how many where they succeed."""

    OK = 0
    #: No memory is free: what could be evicted is leased, or eviction has not run yet.
    NO_AVAILABLE_HANDLE = -200
    #: A range outside the object, or an object that is larger than its buffer.
    INVALID_PARAMS = -600
    OBJECT_NOT_FOUND = -704
    #: Somebody reads it.
    OBJECT_HAS_LEASE = -706
    #: The read took longer than the lease, so its bytes may be another object's.
    LEASE_EXPIRED = -707
    #: The owner of the bytes did not take or give them.
    TRANSFER_FAIL = -800
    #: The master is gone.
    RPC_FAIL = -900


GET_TRANSIENT: Final = frozenset({Code.LEASE_EXPIRED, Code.TRANSFER_FAIL})
"""Another try may use another replica, or be faster."""

PUT_TRANSIENT: Final = frozenset({Code.NO_AVAILABLE_HANDLE, Code.TRANSFER_FAIL})
"""Another try may find what was evicted meanwhile, or land on another owner."""

REMOVE_TRANSIENT: Final = frozenset({Code.OBJECT_HAS_LEASE})
"""A forced removal asks no lease, but waits for nothing that copies the object."""
