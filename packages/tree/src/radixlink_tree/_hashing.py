"""Page hashes: the chain that names a page by everything up to its end.

The rule is SGLang's, so that stores can be shared with it: page k is
``SHA256(digest of page k-1 || each token as uint32 LE)``; a page with a token above 2**32-1 is
``SHA256(prior || 0xFF || each token as uint64 LE)``. The first page of the default namespace has no
prior; that of any other namespace has the namespace's seed.

Source: sglang 0.5.23 page hashes, checked by the vectors in the tests.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from radixlink_contracts import DEFAULT_NAMESPACE, PAGE_KEY_BYTES
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import Namespace

TOKEN_BYTES: Final = 8
"""Tokens are kept as signed 64-bit integers in the machine's order."""

PAGES_BETWEEN_PAUSES: Final = 256
"""So many take some 200 us, for which another thread waits that wants to run Python."""

_NARROW_BYTES: Final = 4
_WIDE_MARK: Final = b"\xff"
_NAMESPACE_DOMAIN: Final = b"sglang-cache-namespace-v1"


def namespace_seed(namespace: Namespace) -> bytes | None:
    """The prior of a namespace's first page; None for the default namespace."""
    if namespace == DEFAULT_NAMESPACE:
        return None
    return sha256(
        _NAMESPACE_DOMAIN + _framed(namespace.extra_key) + _framed(namespace.cache_salt)
    ).digest()


def framed_namespace(namespace: Namespace) -> bytes:
    """Bytes that differ for different namespaces; empty for the default one."""
    # Mostly it is the very same, and to compare attrs costs more than to look.
    if namespace is DEFAULT_NAMESPACE or namespace == DEFAULT_NAMESPACE:
        return b""
    return _framed(namespace.extra_key) + _framed(namespace.cache_salt)


def _framed(text: str | None) -> bytes:
    """An optional text framed by its length, so that neighbours cannot run into each other.

    Clients choose some of these texts, so a lone surrogate, which JSON can spell, is no error.
    """
    if text is None:
        return b"\x00"
    encoded = text.encode("utf-8", "surrogatepass")
    return b"\x01" + len(encoded).to_bytes(8, "little") + encoded


def hash_pages(
    prior: bytes | None,
    tokens: bytes,
    page_size: int,
    pause: Callable[[], None] | None = None,
) -> bytes:
    """The digests of consecutive pages, 32 bytes each.

    Args:
        prior: The digest before the first page, or the namespace's seed, or None.
        tokens: Whole pages of signed 64-bit tokens in the machine's byte order, as an `array("q")`
            has them in memory. The digests are those of SGLang whatever that order is.
        page_size: Tokens.
        pause: Called between blocks of `PAGES_BETWEEN_PAUSES` pages; see `PageKeySource.resolve`.

    Raises:
        ContractError: The bytes are not whole pages, or a token is negative.

    Thread: any; pure.
    Cost: one SHA-256 a page.
    """
    page_bytes = page_size * TOKEN_BYTES
    if page_size < 1 or len(tokens) % page_bytes:
        msg = (
            f"hash_pages: expected whole pages of {page_size} tokens of {TOKEN_BYTES} bytes, "
            f"got {len(tokens)} bytes"
        )
        raise ContractError(msg)
    block_bytes = PAGES_BETWEEN_PAUSES * page_bytes
    blocks: list[bytes] = []
    for start in range(0, len(tokens), block_bytes):
        if start:
            prior = blocks[-1][-PAGE_KEY_BYTES:]
            if pause is not None:
                pause()
        blocks.append(_hash_block(prior, tokens[start : start + block_bytes], page_size))
    return b"".join(blocks)


def _hash_block(prior: bytes | None, tokens: bytes, page_size: int) -> bytes:
    """`hash_pages` of a few."""
    narrow = _narrow(tokens)
    if narrow is None:
        return _hash_wide(prior, tokens, page_size)
    step = page_size * _NARROW_BYTES
    digest = prior or b""
    digests = []
    for start in range(0, len(narrow), step):
        digest = sha256(digest + narrow[start : start + step]).digest()
        digests.append(digest)
    return b"".join(digests)


def _narrow(tokens: bytes) -> bytes | None:
    """Each token as uint32 LE; None where one does not fit or the machine's order is another."""
    if sys.byteorder != "little":
        return None
    halves = memoryview(tokens).cast("I")
    if halves[1::2].tobytes().count(0) != len(tokens) // 2:
        return None
    return halves[::2].tobytes()


def _hash_wide(prior: bytes | None, tokens: bytes, page_size: int) -> bytes:
    """`_hash_block` token by token: for pages with a token that takes more than 32 bits."""
    words = array("q", tokens)
    digest = prior or b""
    digests = []
    for start in range(0, len(words), page_size):
        page = words[start : start + page_size]
        if min(page) < 0:
            msg = f"page hash: expected tokens of 0 or more, got {min(page)}"
            raise ContractError(msg)
        if max(page) < 1 << 32:
            payload = b"".join(token.to_bytes(4, "little") for token in page)
        else:
            payload = _WIDE_MARK + b"".join(token.to_bytes(8, "little") for token in page)
        digest = sha256(digest + payload).digest()
        digests.append(digest)
    return b"".join(digests)
