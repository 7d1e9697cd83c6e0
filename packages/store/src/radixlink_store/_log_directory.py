"""`LogDirectory`: where the files of a log are, also after somebody removed it and made it anew.

Everybody uses one descriptor, whose number stays. Where the path leads to another directory, the
number is made to mean that one in one step (`dup2`), so that no call ever meets a number that is
closed or somebody else's; closing waits for no call, and the last one that uses it closes it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import StorageError
from radixlink_store._directory import let_go, open_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from radixlink_store._tier_tally import TierTally


class LogDirectory:
    """A directory of our own, found by its path.

    Attributes:
        path: Where it is.
        turn: How often there was another one in its place.

    Thread: any.
    """

    def __init__(self, path: Path, tally: TierTally, report: Callable[[str], None]) -> None:
        """Open it, made if it is not there; its parent must be.

        Args:
            path: Where it is.
            tally: Counts how often the path led to another one.
            report: Takes what people should know: that it did.

        Raises:
            BackendUnavailableError: It cannot be made or opened, or is not ours alone.
        """
        self.path: Final = path
        self._tally: Final = tally
        self._report: Final = report
        self._descriptor: Final = open_directory(path)
        self._mutex: Final = threading.Lock()
        self._users = 0
        self._closed = False
        self.turn = 0

    @property
    def descriptor(self) -> int:
        """The descriptor, for whoever knows that it is not closed meanwhile."""
        return self._descriptor

    @contextlib.contextmanager
    def use(self) -> Iterator[int | None]:
        """A descriptor of it, which stays open meanwhile; None once it was closed."""
        with self._mutex:
            lent = not self._closed
            self._users += lent
        if not lent:
            yield None
            return
        try:
            yield self._descriptor
        finally:
            with self._mutex:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                let_go(self._descriptor)

    def close(self) -> None:
        """Lend it no more. It is closed when nobody uses it. Idempotent; waits for no call."""
        with self._mutex:
            last = not self._closed and not self._users
            self._closed = True
        if last:
            let_go(self._descriptor)

    def follow(self) -> None:
        """Go where the path leads, if there is another directory now; one in use only."""
        try:
            there = self.path.lstat()
        except OSError:
            return
        if not os.path.samestat(there, os.fstat(self._descriptor)):
            self.renew()

    def renew(self) -> bool:
        """Go where the path leads, to a directory that is made if none is there; one in use only.

        Returns:
            Whether there is one of our own.
        """
        try:
            descriptor = open_directory(self.path)
        except StorageError:
            return False
        try:
            with self._mutex:
                is_new = not os.path.sameopenfile(descriptor, self._descriptor)
                if is_new:
                    os.dup2(descriptor, self._descriptor, inheritable=False)
                    self.turn += 1
        finally:
            let_go(descriptor)
        if is_new:
            self._tell()
        return True

    def _tell(self) -> None:
        self._tally.add(reopened=1)
        self._report(
            f"{self.path}: the directory was removed or replaced while it was in use; the pages in "
            f"it are given up, others are written to the one that is there now"
        )
