"""What only this store raises, within itself; callers of a store see misses in its place."""

from __future__ import annotations

from radixlink_contracts.errors import BackendUnavailableError


class UnansweredError(BackendUnavailableError):
    """A call of Mooncake did not return before its deadline, or was not made because too many have not."""
