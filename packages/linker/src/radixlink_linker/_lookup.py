"""`Lookup`: one request's question to the store, answered by every rank and agreed bit by bit.

    asked -> ready (this rank) -> agreed ready (a frame) -> mask exchanged, some words a frame
          -> answered

A rank that fails or is late is ready with an empty mask, so that a slow one keeps no other waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import PageBits, PoolName
from radixlink_contracts.texts import text_of
from radixlink_linker._runtime import give_way
from radixlink_linker._settings import WORD_BITS
from radixlink_linker._transfers import transfer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from radixlink_contracts import (
        MatchResult,
        PageKeySource,
        PoolTransfer,
        PoolTransferResult,
        RadixKey,
        RequestId,
        UnifiedCacheLinker,
    )
    from radixlink_linker._component_transfers import ComponentTransfers


class Lookup:
    """A question about the pages behind a device prefix."""

    def __init__(
        self,
        request_id: RequestId,
        key: RadixKey,
        start: int,
        keys: PageKeySource,
        deadline: float,
        held: Mapping[PoolName, PageBits] | None = None,
    ) -> None:
        """Ask about all whole pages of `key[start:]`.

        Args:
            request_id: Who asks.
            key: The request's sequence.
            start: Token where the device prefix ended.
            keys: The pages' keys.
            deadline: This rank's own moment to give up.
            held: Which of these pages the device holds of each pool: replicated. No store is asked
                for them.
        """
        self.request_id = request_id
        self.key = key
        self.start = start
        self.keys = keys
        self.deadline = deadline
        self.held = held or {}
        #: Pages asked about.
        self.num_pages: Final = len(keys)
        #: Words that the whole mask takes in frames.
        self.num_words: Final = -(-self.num_pages // WORD_BITS)
        #: How many of the first pages the device held of full attention.
        self.num_held: Final = self.held_of(PoolName.KV).leading
        #: What was asked, and which of its pages this rank's store has of each pool, where its
        #: linker tells: for explanations. Written before `answer`.
        self.asked: tuple[PoolTransfer, ...] = ()
        self.found: Mapping[PoolName, PageBits] = {}
        #: What this rank's store said. Written once by an executor's thread, read by the
        #: scheduler's.
        self.answer: PageBits | None = None
        #: Why this rank could not ask, or that its answer was late; written before `answer`.
        self.error: str | None = None
        #: This rank's mask as it goes into frames: fixed at the first frame that says ready.
        self._mask: int | None = None
        #: True once every rank said ready: a replicated fact, like all below.
        self.agreed_ready = False
        self._words_done = 0
        self._agreed_mask = 0

    def held_of(self, pool: PoolName) -> PageBits:
        """Which of the pages the device held of a pool when this was asked; a sidecar goes with KV."""
        held = self.held.get(pool, self.held.get(PoolName.KV))
        return PageBits.none(self.num_pages) if held is None else held

    @property
    def words_left(self) -> int:
        """Words of the mask that no frame has carried."""
        return self.num_words - self._words_done

    def probe(self, linker: UnifiedCacheLinker, components: ComponentTransfers) -> None:
        """Hash the tail and ask this rank's store. Whatever goes wrong is a miss. Thread: any, once."""
        transfers = self.prepare(components)
        if transfers is None:
            return
        try:
            result = linker.lookup(self.request_id, transfers)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's miss
            self.fail(text_of(error))
            return
        self.told(transfers, result)

    def prepare(self, components: ComponentTransfers) -> Sequence[PoolTransfer] | None:
        """Hash the tail, and say what is to be asked; None where that went wrong, which is a miss.

        Thread: any, once.
        """
        try:
            transfers = components.lookup(self.keys)
            if transfers is None:
                self.fail("a component takes no part")
                return None
            self.keys.resolve(give_way)
        except Exception as error:  # noqa: BLE001 -- whatever a component raises is this rank's miss
            self.fail(text_of(error))
            return None
        return [attrs.evolve(one, held=self.held.get(one.name)) for one in transfers]

    def told(self, transfers: Sequence[PoolTransfer], result: PoolTransferResult) -> None:
        """Take in what this rank's linker said of some transfers. Thread: any, once."""
        try:
            answer, found = result.restorable_prefix_pages, result.found
            # Made anew, so that it is found here where some of it is no page bits.
            lengths = {PageBits(bits.mask, bits.count).count for bits in (answer, *found.values())}
        except Exception as error:  # noqa: BLE001 -- a backend that says anything else is a miss too
            got = f"{type(result).__name__}: {text_of(error)}"
            self.fail(f"expected a PoolTransferResult, got a {got}")
            return
        if lengths != {self.num_pages}:
            self.fail(f"expected an answer for {self.num_pages} pages, got {sorted(lengths)}")
            return
        self.asked, self.found = tuple(transfers), found
        self.answer = answer

    def fail(self, error: str) -> None:
        """This rank could not ask: a miss. Thread: any, once."""
        self.error = error
        self.answer = PageBits.none(self.num_pages)

    def restorable_in(self, pool: PoolName) -> PageBits:
        """Which lengths one pool alone would let this rank restore.

        A pool that no transfer names is a sidecar: it needs every page.
        """
        found = self.found[pool]
        transfer = transfer_of(self.asked, pool)
        if transfer is not None:
            return transfer.restorable(found)
        return PageBits((1 << (found | self.held_of(pool)).leading) - 1, found.count)

    def settle(self, now: float) -> bool:
        """Read this rank's own state once, for one frame.

        Returns:
            True when this rank is ready; it stays so, with the mask it has now.
        """
        if self._mask is None:
            answer = self.answer
            if answer is not None:
                self._mask = answer.mask
            elif now >= self.deadline:
                self.error = "no answer in time"
                self._mask = 0
        return self._mask is not None

    def words(self, count: int) -> bytes:
        """The next `count` words of this rank's mask."""
        assert self._mask is not None, "every rank said ready, this one too"
        shifted = self._mask >> (self._words_done * WORD_BITS)
        return (shifted & ((1 << (count * WORD_BITS)) - 1)).to_bytes(count * 8, "little")

    def take(self, words: bytes) -> bool:
        """Take in the agreed form of the next words.

        Returns:
            True when the whole mask is agreed.
        """
        self._agreed_mask |= int.from_bytes(words, "little") << (self._words_done * WORD_BITS)
        self._words_done += len(words) // 8
        return self._words_done == self.num_words

    def longest(self, at_most: int) -> int:
        """The longest agreed length of at most `at_most` pages; 0 for none.

        Cost: O(1) where all that is agreed fits, as in a match.
        """
        longest = self._agreed_mask.bit_length()
        if longest <= at_most:
            return longest
        return (self._agreed_mask & ((1 << max(0, at_most)) - 1)).bit_length()


def is_shorter(device: MatchResult, lookup: Lookup, page_size: int) -> bool:
    """True when the device has less of the prefix, or of full attention, than the lookup went by."""
    start = device.device_prefix_len
    full_len = lookup.start + lookup.num_held * page_size
    return start < lookup.start or max(start, device.full_kv_hit_length) < full_len
