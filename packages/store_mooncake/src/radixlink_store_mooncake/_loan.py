"""`Loan`: a block of the staging as frames that a borrower fills, or has filled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import LentFrames
from radixlink_contracts.errors import ContractError, StaleHandleError

if TYPE_CHECKING:
    from radixlink_store_mooncake._staging import Block, Bytes, Staging


class Loan(LentFrames):
    """The first frames of a block.

    A call that is late keeps the block, so that it is not free when the borrower gives it back; nor
    does the borrower get it for another call before that.

    Thread: any, one at a time.
    """

    def __init__(self, staging: Staging, block: Block, num_pages: int, frame_bytes: int) -> None:
        """Frames of a block that `Staging.lend` gave."""
        self._staging: Final = staging
        self._buffer: Final = block.view[: num_pages * frame_bytes]
        #: The memory that Mooncake knows.
        self.block: Final = block
        #: All frames. Shape: (num_pages, frame_bytes).
        self.frames: Final[Bytes] = block.bytes[: num_pages * frame_bytes].reshape(
            num_pages, frame_bytes
        )
        self._mutex: Final = threading.Lock()
        self._served = False
        self._released = False

    @property
    @override
    def buffer(self) -> memoryview:
        """All frames. Shape: (num_pages * frame_bytes,) bytes."""
        return self._buffer

    @override
    def release(self) -> None:
        """Give the frames back; see `LentFrames.release`."""
        with self._mutex:
            released, self._released = self._released, True
        if not released:
            self.block.release()

    def serve(self, what: str) -> None:
        """The frames are for this call, and for no other.

        Raises:
            StaleHandleError: They were given back, or are another's.
        """
        with self._mutex:
            served, self._served = self._served, True
        if served:
            raise StaleHandleError(f"{what}: expected frames of a new loan, got some used before")
        self.require_held(what)

    def require_held(self, what: str) -> None:
        """The borrower has them still.

        Raises:
            StaleHandleError: It does not.
        """
        if self._released:
            raise StaleHandleError(f"{what}: expected lent frames, got some given back")

    def require(self, staging: Staging, num_pages: int, frame_bytes: int, what: str) -> None:
        """They are of this staging, one for each of some pages of this size.

        Raises:
            ContractError: They are not.
        """
        if self._staging is not staging or self.frames.shape != (num_pages, frame_bytes):
            raise ContractError(
                f"{what}: expected {num_pages} frames of {frame_bytes} bytes lent by this store, "
                f"got {self.frames.shape} of {'this' if self._staging is staging else 'another'}"
            )
