"""`LendingStore`: a page store that lends its own memory, so that pages go there and come from there without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from radixlink_contracts._store import PageStore
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from radixlink_contracts._bits import PageBits
    from radixlink_contracts._keys import PageKeys
    from radixlink_contracts._store import PageHandles


@attrs.frozen(kw_only=True)
class PageFrames:
    """How pages lie in lent memory: one frame after the other, a page in each.

    Attributes:
        frame_bytes: From the begin of a frame to that of the next.
        range_offsets: Where in a frame each layer range begins. What no range covers is the store's own.
        max_pages: Frames of the largest loan.
    """

    frame_bytes: int
    range_offsets: tuple[int, ...]
    max_pages: int

    def __attrs_post_init__(self) -> None:
        """Refuse frames that hold no page, and loans of no frame."""
        if not self.range_offsets or not 0 <= max(self.range_offsets) < self.frame_bytes:
            msg = (
                f"PageFrames: expected layer ranges that begin within {self.frame_bytes} bytes, "
                f"got {self.range_offsets}"
            )
            raise ContractError(msg)
        if self.max_pages < 1:
            msg = f"PageFrames: expected loans of at least 1 page, got {self.max_pages}"
            raise ContractError(msg)


class LentFrames(Protocol):
    """Memory of a store that the borrower alone writes and reads, until it gives it back.

    It serves one `put_lent`, or one `open_lent` and what is verified after it: a call that the store gave up on may
    go on in that memory, which therefore is lent to nobody else before that call has ended.

    Thread: any, one at a time.
    """

    @property
    def buffer(self) -> memoryview:
        """Writable. Shape: (num_pages * frame_bytes,) bytes; what is in it is anything."""
        ...

    def release(self) -> None:
        """Give it back: the borrower touches it no more. Idempotent."""
        ...


@runtime_checkable
class LendingStore(PageStore, Protocol):
    """A store for which it is cheapest that pages lie in its own memory. Optional: all it does, `PageStore` can do.

    ::

        put    lend -> write the layer ranges of each page into its frame -> put_lent -> release
        load   lend -> open_lent -> verify a layer range -> use it where it lies -> ... -> release
    """

    @property
    def frames(self) -> PageFrames:
        """How pages lie in what it lends."""
        ...

    def lend(self, num_pages: int) -> LentFrames | None:
        """Lend memory. Does not wait.

        Args:
            num_pages: Of the call that it is for: 1..`frames.max_pages`.

        Returns:
            None where too much is lent, or none is free: then `put`, `open` and `read` are the way.

        Raises:
            ContractError: It is for no page, or for more than one loan can have.

        Owns: the caller releases it, whatever happens.
        """
        ...

    def put_lent(self, keys: PageKeys, lent: LentFrames) -> PageBits:
        """`put` of pages whose layer ranges lie in lent frames, page i in frame i.

        Raises:
            ContractError: The frames are not this store's, or not one for each page.
            StaleHandleError: They were given back, or served a call before.
        """
        ...

    def open_lent(self, keys: PageKeys, ttl_s: float, lent: LentFrames) -> PageHandles:
        """`open`, and fetch page i into frame i.

        Raises:
            ContractError: As for `put_lent`.
            StaleHandleError: As for `put_lent`.
        """
        ...

    def verify(self, handles: PageHandles, layer_range: int, lent: LentFrames) -> PageBits:
        """`read` in place: the layer range lies in the frames, where `range_offsets` says.

        Args:
            handles: From `open_lent` with these frames.
            layer_range: Index into `layout.range_bytes`.
            lent: The frames. Only rows of this range are written, where a page has to be read anew.

        Returns:
            In which frames the right bytes are, verified.

        Raises:
            ContractError: There is no such range, or as for `put_lent`.
            StaleHandleError: The frames were given back.
        """
        ...
