"""`PageChain`: the keys of a run of pages, hashed once, by whoever asks first, on whatever thread.

A chain knows its tokens and the chain before it, both of which never change, so that any thread may
resolve it while the tree goes on. Two threads that resolve one chain at once compute the same
digests; the second result replaces the first by an equal one. A chain that is split before it is
resolved stays whole for those who have it, and its halves are hashed on their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from radixlink_contracts import PAGE_KEY_BYTES, PageKeys
from radixlink_tree._hashing import PAGES_BETWEEN_PAUSES, TOKEN_BYTES, hash_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PageKeySource


class PageChain:
    """The keys of consecutive pages behind another chain. A `PageKeySource`."""

    __slots__ = ("before", "digests", "page_size", "seed", "tokens")

    def __init__(
        self, tokens: bytes, page_size: int, *, before: PageChain | None, seed: bytes | None = None
    ) -> None:
        """Describe the run; nothing is hashed.

        Args:
            tokens: Whole pages of signed 64-bit tokens.
            page_size: Tokens.
            before: The chain that this one continues; None at the start of a sequence.
            seed: The namespace's seed, at the start of a sequence.
        """
        self.tokens = tokens
        self.page_size = page_size
        #: Dropped once the digests are known, so that no chain keeps those before it alive.
        self.before = before
        self.seed = seed
        #: The digests once they are known.
        self.digests: bytes | None = None

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.tokens) // (self.page_size * TOKEN_BYTES)

    def span(self, start: int, stop: int) -> PageKeySource:
        """The pages [start, stop) of this run."""
        return ChainSpan(chain=self, start=start, stop=min(stop, len(self)))

    def resolve(self, pause: Callable[[], None] | None = None) -> PageKeys:
        """The digests; see `PageKeySource.resolve`."""
        return PageKeys(self._resolve(pause))

    def _resolve(self, pause: Callable[[], None] | None) -> bytes:
        """Hash what is not hashed of this chain and those before it, first things first."""
        todo: list[tuple[PageChain, PageChain | None]] = []
        chain: PageChain | None = self
        while chain is not None:
            # The link is read before the digests: whoever hashes a chain sets its digests before
            # it drops its link.
            before = chain.before
            if chain.digests is not None:
                break
            todo.append((chain, before))
            chain = before
        hashed = 0
        for unhashed, before in reversed(todo):
            if unhashed.digests is None:
                if pause is not None and hashed + len(unhashed) > PAGES_BETWEEN_PAUSES:
                    pause()
                    hashed = 0
                prior = unhashed.seed if before is None else before.last_digest()
                unhashed.digests = hash_pages(prior, unhashed.tokens, unhashed.page_size, pause)
                unhashed.before = None
                hashed += len(unhashed)
        resolved = self.digests
        assert resolved is not None
        return resolved

    def last_digest(self) -> bytes:
        """The digest that the next chain continues."""
        digests = self.digests
        assert digests is not None
        return digests[-PAGE_KEY_BYTES:]

    def split(self, num_pages: int) -> tuple[PageChain, PageChain]:
        """This run as two: the first `num_pages` pages and the rest. What is hashed stays hashed.

        Thread: the scheduler's. Whoever resolves this chain meanwhile is not disturbed.
        """
        cut = num_pages * self.page_size * TOKEN_BYTES
        before = self.before
        head = PageChain(self.tokens[:cut], self.page_size, before=before, seed=self.seed)
        tail = PageChain(self.tokens[cut:], self.page_size, before=head)
        digests = self.digests
        if digests is not None:
            head.digests = digests[: num_pages * PAGE_KEY_BYTES]
            tail.digests = digests[num_pages * PAGE_KEY_BYTES :]
            head.before = tail.before = None
        return head, tail


@attrs.frozen(kw_only=True)
class ChainSpan:
    """Some pages of a chain. A `PageKeySource`.

    Attributes:
        chain: The whole run.
        start: First page.
        stop: Page after the last.
    """

    chain: PageChain
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of pages."""
        return max(0, self.stop - self.start)

    def span(self, start: int, stop: int) -> PageKeySource:
        """The pages [start, stop) of this span."""
        return ChainSpan(
            chain=self.chain,
            start=self.start + start,
            stop=min(self.start + stop, self.stop),
        )

    def resolve(self, pause: Callable[[], None] | None = None) -> PageKeys:
        """The digests; see `PageKeySource.resolve`."""
        return self.chain.resolve(pause).span(self.start, self.stop)
