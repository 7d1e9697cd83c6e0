"""Keys: what a sequence is called in the tree (`RadixKey`) and its pages in a store (`PageKeys`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, Self

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Iterator

PAGE_KEY_BYTES: Final = 32
"""Length of one page key: a SHA-256 digest."""


@attrs.frozen
class Namespace:
    """What keeps sequences of equal tokens apart. None and the empty string differ.

    Attributes:
        extra_key: Set by the engine, for example the adapter (LoRA) in use.
        cache_salt: Set by the client, for example its tenant.
    """

    extra_key: str | None = None
    cache_salt: str | None = None


DEFAULT_NAMESPACE: Final = Namespace()
"""No extra key and no salt."""


@attrs.frozen
class RadixKey:
    """A token sequence with its namespace, as engines hold it.

    Attributes:
        token_ids: The tokens, an `array` of typecode "q". Shape: (num_tokens,). The key keeps a reference, no copy: the
            caller may append to it later but must not change what is there.
        namespace: Sequences of different namespaces share nothing.
    """

    token_ids: array[int]
    namespace: Namespace = DEFAULT_NAMESPACE

    def __attrs_post_init__(self) -> None:
        """Refuse any other element type: comparisons are of bytes."""
        if self.token_ids.typecode != "q":
            msg = f"RadixKey: expected array('q'), got array({self.token_ids.typecode!r})"
            raise ContractError(msg)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


class PageKeySource(Protocol):
    """The keys of a run of pages, perhaps not hashed yet.

    A transfer carries one of these, so that the scheduler thread can build it without hashing: the thread that needs
    the digests calls `resolve`.
    """

    def __len__(self) -> int:
        """Number of pages."""
        ...

    def span(self, start: int, stop: int) -> PageKeySource:
        """The pages [start, stop) of this run, not hashed by asking."""
        ...

    def resolve(self, pause: Callable[[], None] | None = None) -> PageKeys:
        """The digests, computed once and kept.

        Args:
            pause: Called after each few hundred pages that had to be hashed. Hashing keeps Python's lock, so that a
                scheduler thread which let go of it, say in a collective, would wait 5 ms to get it back, each time; a
                short sleep here lets it have it.

        Raises:
            ContractError: A token cannot be hashed (it is negative).

        Thread: any but the scheduler's.
        Cost: one SHA-256 for each page that was not hashed before.
        """
        ...


@attrs.frozen
class PageKeys:
    """The keys of n pages, one 32-byte digest each, in one buffer. Itself a `PageKeySource` that is resolved.

    Attributes:
        data: n * 32 bytes, page 0 first.
    """

    data: bytes = b""

    def __attrs_post_init__(self) -> None:
        """Refuse a torn digest."""
        if len(self.data) % PAGE_KEY_BYTES:
            msg = f"PageKeys: expected a multiple of {PAGE_KEY_BYTES} bytes, got {len(self.data)}"
            raise ContractError(msg)

    @classmethod
    def join(cls, digests: Iterable[bytes]) -> PageKeys:
        """The keys of single digests, in their order."""
        return cls(b"".join(digests))

    @classmethod
    def from_hex(cls, digests: Iterable[str]) -> PageKeys:
        """The keys of hex digests: the form that SGLang's side uses."""
        return cls(b"".join(bytes.fromhex(digest) for digest in digests))

    def hex(self) -> tuple[str, ...]:
        """Each key in lower-case hex."""
        return tuple(digest.hex() for digest in self)

    def span(self, start: int, stop: int) -> PageKeys:
        """The keys of pages [start, stop), as many as there are, as in a slice."""
        return PageKeys(self.data[start * PAGE_KEY_BYTES : stop * PAGE_KEY_BYTES])

    def resolve(self, pause: Callable[[], None] | None = None) -> Self:  # noqa: ARG002 -- nothing to pause
        """Itself: nothing is left to hash."""
        return self

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.data) // PAGE_KEY_BYTES

    def __getitem__(self, page: int) -> bytes:
        """The digest of one page.

        Raises:
            IndexError: There is no such page.
        """
        if not 0 <= page < len(self):
            msg = f"PageKeys: expected a page in 0..{len(self) - 1}, got {page}"
            raise IndexError(msg)
        return self.data[page * PAGE_KEY_BYTES : (page + 1) * PAGE_KEY_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        """Each digest, page 0 first."""
        for start in range(0, len(self.data), PAGE_KEY_BYTES):
            yield self.data[start : start + PAGE_KEY_BYTES]
