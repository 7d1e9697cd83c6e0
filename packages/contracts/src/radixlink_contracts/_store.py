"""`PageStore`: the narrow waist for backend authors. No torch, no tree, no ranks: pages of bytes under 32-byte keys."""

from __future__ import annotations

import hashlib
import math
from array import array
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts._bits import PageBits
    from radixlink_contracts._keys import PageKeys
    from radixlink_contracts._pools import PoolName


def _digest(fields: Sequence[bytes]) -> bytes:
    """SHA-256 over fields framed by their lengths, so that no two lists of fields collide."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


@attrs.frozen(kw_only=True)
class CacheIdentity:
    """What a page's bytes mean. Two engines share pages if and only if all of this is equal.

    Attributes:
        model: The model's name.
        revision: Which weights: a commit or a digest of them.
        dtype: Element type of the cache, for example "float32".
        page_size: Tokens of a page.
        num_layers: Layers of the model.
        layout: How a page's bytes are laid out within a layer range, geometry included, for example
            "k|v;heads=3;dim=64".
    """

    model: str
    revision: str
    dtype: str
    page_size: int
    num_layers: int
    layout: str

    def __attrs_post_init__(self) -> None:
        """Refuse an identity with a field unknown, or of which no fingerprint can be made."""
        for name in ("model", "revision", "dtype", "layout"):
            text: str = getattr(self, name)
            if not text:
                # Its pages could be taken for another's.
                msg = f"CacheIdentity: expected {name} to be known, got an empty string"
                raise ContractError(msg)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                msg = f"CacheIdentity: expected {name} to have a form in UTF-8, got {text!r}"
                raise ContractError(msg) from error
        if self.page_size < 1 or self.num_layers < 1:
            msg = (
                "CacheIdentity: expected page_size and num_layers of at least 1, "
                f"got {self.page_size} and {self.num_layers}"
            )
            raise ContractError(msg)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ when any field differs."""
        return _digest(
            [
                b"radixlink-identity-v1",
                self.model.encode(),
                self.revision.encode(),
                self.dtype.encode(),
                str(self.page_size).encode(),
                str(self.num_layers).encode(),
                self.layout.encode(),
            ]
        )


@attrs.frozen(kw_only=True)
class Shard:
    """Which part of each page a rank holds, for example its share of the heads.

    Attributes:
        index: 0..count-1.
        count: How many parts there are; 1 where ranks hold replicas.
    """

    index: int = 0
    count: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse a part that does not exist."""
        if not 0 <= self.index < self.count:
            msg = f"Shard: expected an index in 0..{self.count - 1}, got {self.index}"
            raise ContractError(msg)


@attrs.frozen(kw_only=True)
class PoolLayout:
    """The objects of one `PageStore`: one pool, one shard, one size, one identity.

    Attributes:
        identity: What the bytes mean.
        pool: The pool they come from.
        shard: The part of each page.
        range_bytes: Bytes of a page in each layer range, in layer order. Ranges are read one by one.
    """

    identity: CacheIdentity
    pool: PoolName
    shard: Shard = attrs.field(factory=Shard)
    range_bytes: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse an object of no bytes."""
        if not self.range_bytes or min(self.range_bytes) < 1:
            msg = f"PoolLayout: expected layer ranges of at least 1 byte, got {self.range_bytes}"
            raise ContractError(msg)

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page."""
        return sum(self.range_bytes)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ when any field differs."""
        return _digest(
            [
                b"radixlink-layout-v1",
                self.identity.fingerprint,
                self.pool.value.encode(),
                str(self.shard.index).encode(),
                str(self.shard.count).encode(),
                ",".join(map(str, self.range_bytes)).encode(),
            ]
        )


def _zeros(count: int) -> array[int]:
    """`count` unsigned 64-bit zeros."""
    return array("Q", bytes(8 * count))


@attrs.frozen(kw_only=True)
class PageHandles:
    """One generation of each of some pages, as `open` found them: every read of a load is of the same write.

    Attributes:
        keys: The pages.
        found: Which of them there are; the other places of the arrays mean nothing.
        slots: Where each page is, in the store's own terms. Shape: (num_pages,) typecode "Q".
        generations: Which write of that place. Shape: (num_pages,) typecode "Q".
        writers: The process that wrote it, 0 where the store does not know. Shape: (num_pages,) typecode "Q".
    """

    keys: PageKeys
    found: PageBits
    slots: array[int]
    generations: array[int]
    writers: array[int]

    def __attrs_post_init__(self) -> None:
        """Refuse columns of different length."""
        lengths = {self.found.count, len(self.slots), len(self.generations), len(self.writers)}
        if lengths != {len(self.keys)}:
            msg = f"PageHandles: expected {len(self.keys)} rows in each column, got {lengths}"
            raise ContractError(msg)

    @classmethod
    def without_places(cls, keys: PageKeys, found: PageBits) -> PageHandles:
        """Handles of pages that a store finds by their keys alone: all slots and generations are 0.

        Only for a store that never writes a key twice, also not once the page was evicted, dropped or damaged. Any
        other needs generations: a handle would read the later write. A row number that is never used again will do,
        for example that of SQLite's AUTOINCREMENT.
        """
        count = len(keys)
        return cls(
            keys=keys,
            found=found,
            slots=_zeros(count),
            generations=_zeros(count),
            writers=_zeros(count),
        )


class PageStore(Protocol):
    """Pages of bytes under 32-byte keys, shared by whoever opens the same place.

    A page is immutable: its key says what it is, and the first writer wins. A page may vanish at any time; that is a
    miss. What cannot be read whole and right is a miss too, never wrong bytes.

    The rules, in the order in which an author meets them:

    1. Rows and bits follow the keys of the call: row or bit i is of key i. No keys are a call like any other. Equal
       keys in one call are one page, each with its own row and bit; of a `put`, the first one's bytes are it.
    2. `put` copies: when it returns, nothing refers to the parts. A page is there whole or not at all, for all.
    3. A handle is of one write. Once its page was evicted, dropped or found damaged, it is a miss for ever, also where
       the same key was written again: that is what `PageHandles.generations` are for.
    4. Bytes are verified when they are read, for example by a checksum. A page that does not match is a miss from then
       on, and the next `put` of its key stores it anew.
    5. A full store evicts, or leaves pages out and says so; that is no error. `open` and `touch` raise recency.
    6. A call that raises `ContractError`, but for that of 7, changed nothing: no page is there that was not, and
       `out` is as before.
    7. After `close`, of the store or of the factory that opened it, every call raises `StaleHandleError`; so does one
       that `close` comes upon, or it ends as ever. `close` never pulls memory from under a call.

    Thread: several executor threads at once, any method, `close` too.
    Ranks: local.
    Errors: `ContractError`, of which `StaleHandleError` is one, for a caller's mistake; `StorageError` and its children
        for all that goes wrong in the backend. A miss is no error.
    """

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        ...

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there. A hint: only `read` tells whether they are right."""
        ...

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load, raise their recency, and ask that they be kept for `ttl_s` seconds.

        The lease is advice to eviction, not a promise.
        """
        ...

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found.

        Args:
            handles: From `open` of this store.
            layer_range: Index into `layout.range_bytes`.
            out: Any buffer of bytes that is contiguous and can be written. Shape:
                (num_pages, range_bytes[layer_range]) bytes, row i for page i; rows of pages that were not found, or
                not read right, hold anything.

        Returns:
            Which rows hold the right bytes, verified.

        Raises:
            ContractError: `out` is of another size or read-only, or there is no such range (negative ones do not
                count from the end). `out` is as before.
            StaleHandleError: The store is closed.
        """
        ...

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages.

        Args:
            keys: The pages. Of equal ones the first is written, and all of them have its bit.
            parts: One contiguous buffer for each layer range; the caller may change them once `put` has returned.
                Shape of part r: (num_pages, range_bytes[r]) bytes.

        Returns:
            Which of them are there now: those just written and those that were there before. The rest found no room;
            that is no error.

        Raises:
            ContractError: The parts do not fit keys and layout. Nothing is stored then.
            StaleHandleError: The store is closed.
        """
        ...

    def close(self) -> None:
        """Release everything of this process; the pages stay. Idempotent.

        Every later call raises `StaleHandleError`. One that is on its way ends first, or raises it. For a `with` there
        is `contextlib.closing`, so that no backend has to bring one.
        """
        ...


@runtime_checkable
class Touchable(Protocol):
    """A store that can raise the recency of pages without reading them. Without it, `contains` is used."""

    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency; say which pages are there."""
        ...


@attrs.frozen(kw_only=True)
class StoreConfig:
    """How to open a store.

    Attributes:
        location: Where it is, in the backend's own terms: a directory for the file store. Empty for the default.
        capacity_bytes: Room for pages, for each `PoolLayout` that is opened.
        timeout_s: Seconds that opening may wait for others.
        persistent_path: A directory for a tier of files behind the store, which a later job finds again. Empty for
            none. A backend that has no such tier refuses it.
        persistent_bytes: Room in that directory, for all that is stored there together.
    """

    location: str = ""
    capacity_bytes: int = 1 << 30
    timeout_s: float = 30.0
    persistent_path: str = ""
    persistent_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse a time that never ends or is none, less room than none, and places that no system has."""
        for name in ("location", "persistent_path"):
            place: str = getattr(self, name)
            if "\0" in place:
                msg = f"StoreConfig: expected a {name} without a null character, got {place!r}"
                raise ContractError(msg)
        if not 0 <= self.timeout_s < math.inf:
            msg = f"StoreConfig: expected a finite timeout_s of at least 0, got {self.timeout_s}"
            raise ContractError(msg)
        if self.capacity_bytes < 0 or self.persistent_bytes < 0:
            msg = (
                f"StoreConfig: expected sizes of at least 0, got capacity_bytes={self.capacity_bytes} and "
                f"persistent_bytes={self.persistent_bytes}"
            )
            raise ContractError(msg)


class StoreFactory(Protocol):
    """Opens the page stores of one backend.

    Found by the entry point group `radixlink.stores`: a callable that takes a `StoreConfig` and returns one of these.
    """

    def open(self, layout: PoolLayout) -> PageStore:
        """Open the store of one layout, making it where it is not there yet.

        Raises:
            IdentityError: The place holds pages of another model, layout or version. The message names the field of
                `CacheIdentity` that differs, for example "revision", with both values.
            BackendUnavailableError: The place cannot be used; the message says why and what to do.
            CapacityError: There is no room for it, or `capacity_bytes` is less than one page.
            StaleHandleError: The factory is closed.

        Owns: the caller closes it, or the factory's `close` does. Two stores of one layout are independent: one goes
            on when the other is closed.
        """
        ...

    def close(self) -> None:
        """Close every store it opened, and open none any more; both then raise `StaleHandleError`. Idempotent.

        For a `with` there is `contextlib.closing`.
        """
        ...
