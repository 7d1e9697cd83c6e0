"""`HomeProcess`: where something with threads works; a forked child has a copy of it, and none of them."""

from __future__ import annotations

import os

from radixlink_contracts.errors import StaleHandleError


class HomeProcess:
    """The process that made something. Thread: any."""

    def __init__(self, what: str) -> None:
        """It is this one.

        Args:
            what: What was made, for people.
        """
        self._what = what
        self._id = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child, where a lock may be held for ever by a thread of the parent."""
        return os.getpid() == self._id

    def check(self) -> None:
        """Return in the process that made it.

        Raises:
            StaleHandleError: This is a forked child of it.
        """
        if not self.is_here:
            msg = (
                f"{self._what}: expected to work in process {self._id} that made it, got its forked "
                f"child {os.getpid()}; make another in the child"
            )
            raise StaleHandleError(msg)
