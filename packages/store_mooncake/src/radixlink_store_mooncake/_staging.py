"""Memory that Mooncake reads from and writes to: registered once, lent block by block.

A block belongs to whoever holds it; the last to release it makes it free. A call that is late holds
its block until it returns. Blocks whose pages a load may still ask for are kept after that, until
all of them were asked for as often as was said, or somebody needs a block: the one kept longest of
those that nobody reads goes first. The block that became free last is lent next, for it is the
warmest.

Of the store's borrowers, who hold a block for as long as they like, one block is always kept back:
whoever waits for a block holds none that another waits for. A block counts as lent until it is free,
for the borrower may give it back while a call that is late holds it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import numpy as np

from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]
    PageId: TypeAlias = tuple[bytes, int]


class Block:
    """One block. A context manager: leaving it releases it."""

    def __init__(self, staging: Staging, data: Bytes) -> None:
        self._staging: Final = staging
        #: Its bytes. Shape: (block_bytes,).
        self.bytes: Final = data
        #: The same, for slicing small parts.
        self.view: Final = data.data
        #: Where it begins, for Mooncake.
        self.address: Final = data.ctypes.data
        #: How many hold it; guarded by the staging's condition.
        self.holders = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self) -> None:
        """One more holds it."""
        self._staging.hold([self])

    def release(self) -> None:
        """One fewer holds it; the last makes it free."""
        self._staging.release([self])


class Staging:
    """All blocks.

    Thread: any.
    """

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        """Memory that costs nothing until it is used."""
        self.block_bytes: Final = block_bytes
        # Blocks start at pages of memory, as registration may want.
        stride = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, stride * num_blocks, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages: what moves all of it misses the TLB less. Refused, it works as well.
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._memory: Final = np.frombuffer(mapped, np.uint8)
        # `with` enters a lock in C, a condition in Python, where a signal's exception would keep it.
        self._lock: Final = threading.RLock()
        self._changed: Final = threading.Condition(self._lock)
        self._free: Final = [
            Block(self, self._memory[start : start + block_bytes])
            for start in range(0, stride * num_blocks, stride)
        ]
        #: Where the pages of kept blocks are; a block that is kept has a holder for that.
        self._pages: Final[dict[PageId, tuple[Block, int]]] = {}
        self._kept: Final[dict[Block, tuple[PageId, ...]]] = {}
        #: How often the pages of each kept block will still be asked for.
        self._uses: Final[dict[Block, int]] = {}
        #: How many blocks may be lent at once, and those that are.
        self._max_lent: Final = num_blocks - 1
        self._lent: Final[set[Block]] = set()

    @property
    def address(self) -> int:
        """Where all of it begins."""
        return self._memory.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return self._memory.nbytes

    def take(self, timeout_s: float) -> Block:
        """A block, held once.

        Raises:
            UnansweredError: None became free in time.
        """
        with self._lock:
            if not self._changed.wait_for(self._make_room, timeout_s):
                raise UnansweredError(
                    f"Mooncake: expected one of the staging buffers within {timeout_s:.3g} s, but "
                    f"calls hold them all",
                    transient=True,
                )
            return self._taken()

    def lend(self) -> Block | None:
        """A block, held once, for a borrower, who releases it; None if there is none now."""
        with self._lock:
            if len(self._lent) >= self._max_lent or not self._make_room():
                return None
            block = self._taken()
            self._lent.add(block)
            return block

    def keep(self, block: Block, pages: Mapping[PageId, int], uses: int) -> None:
        """Keep a block for later reads of its pages, until they are done or its memory is needed.

        Args:
            block: Held by the caller, who still has to release it.
            pages: Where each page begins in it.
            uses: How often one of its pages will be asked for, in all.
        """
        with self._lock:
            block.holders += 1
            self._kept[block] = tuple(pages)
            self._uses[block] = uses
            self._pages.update({page: (block, offset) for page, offset in pages.items()})

    def find(self, pages: Sequence[PageId]) -> list[tuple[Block, int] | None]:
        """Where kept pages are. The caller holds each block as often as it is named, and releases it."""
        with self._lock:
            found = [self._pages.get(page) for page in pages]
            for place in found:
                if place is not None:
                    block = place[0]
                    block.holders += 1
                    self._count_use(block)
        return found

    def hold(self, blocks: Iterable[Block]) -> None:
        """One more holds each."""
        with self._lock:
            for block in blocks:
                block.holders += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """One fewer holds each, as often as it is named."""
        with self._lock:
            for block in blocks:
                self._let_go(block)

    def _taken(self) -> Block:
        """One that is free, held once. The condition is held."""
        block = self._free.pop()
        block.holders = 1
        return block

    def _make_room(self) -> bool:
        """A block is free, if need be because one that was only kept is forgotten. The condition is held."""
        if not self._free:
            unread = next((block for block in self._kept if block.holders == 1), None)
            if unread is not None:
                self._forget(unread)
        return bool(self._free)

    def _count_use(self, block: Block) -> None:
        """One of its pages was asked for. The condition is held."""
        if block in self._uses:
            self._uses[block] -= 1
            if self._uses[block] <= 0:
                self._forget(block)

    def _forget(self, block: Block) -> None:
        """Keep a block no longer."""
        for page in self._kept.pop(block):
            if self._pages.get(page, (None, 0))[0] is block:
                del self._pages[page]
        del self._uses[block]
        self._let_go(block)

    def _let_go(self, block: Block) -> None:
        """One fewer holds a block; whoever waits may have it if that was the last. The condition is held."""
        block.holders -= 1
        if block.holders > 1:
            return
        if not block.holders:
            self._lent.discard(block)
            self._free.append(block)
        elif block not in self._kept:
            return
        self._changed.notify()
