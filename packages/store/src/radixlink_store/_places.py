"""Where a page may be, and by what it is known there: all of it follows from its key.

A key is a digest, so its bits are as good as random. Of its four words the first two choose the
buckets, the third has the fingerprint (bits 63..48) and the tag (bits 47..40); the seed of the
checksums is made of all four. Nothing of the shard is in it: in tables of equal geometry the shards
of a page are in equal buckets.

Each rule is here twice, for one key and for many: numpy takes tens of microseconds where one key
comes alone, and Python as long where hundreds come.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from radixlink_store._layout import KEY_WORDS
from radixlink_store._state import FINGERPRINT_SHIFT, match_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from radixlink_contracts import PageKeys

    Words: TypeAlias = npt.NDArray[np.uint64]
    Tags: TypeAlias = npt.NDArray[np.uint8]
    Slots: TypeAlias = npt.NDArray[np.intp]
    #: The tags of each candidate bucket of a page.
    Lines: TypeAlias = tuple[bytes, ...]

_KEY: Final = struct.Struct("=4Q")
_TAG_SHIFT: Final = 40
_TAG_MASK: Final = 0xFF
_FINGERPRINT_MASK: Final = -1 << FINGERPRINT_SHIFT
#: The match of fingerprint 0.
_MATCH: Final = match_of(0)

NO_TAG: Final = 0
"""The tag of a slot in which no page can be found; no page has it."""


class Place(NamedTuple):
    """Where one page may be.

    Attributes:
        key: Its key.
        tag: Its tag, 1..255.
        match: What a state word's `MATCH_MASK` bits are where it is published.
        seed: What its checksums start from.
        buckets: Its candidate buckets, best first: two different ones, or one of a table of one.
    """

    key: bytes
    tag: int
    match: int
    seed: int
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, key: bytes, num_buckets: int) -> Place:
        """The place of a page in a table of so many buckets."""
        first, second, third, fourth = _KEY.unpack(key)
        bucket = first % num_buckets
        buckets: tuple[int, ...] = (bucket,)
        if num_buckets > 1:
            buckets = bucket, (bucket + second % (num_buckets - 1) + 1) % num_buckets
        tag = third >> _TAG_SHIFT & _TAG_MASK or 1
        match = third & _FINGERPRINT_MASK | _MATCH
        seed = first ^ second ^ third ^ fourth
        # What the generated constructor does, in half its time.
        return tuple.__new__(cls, (key, tag, match, seed, buckets))


def seed_and_match(key: bytes) -> tuple[int, int]:
    """A page's seed, and what its state word's `MATCH_MASK` bits are where it is published."""
    first, second, third, fourth = _KEY.unpack(key)
    return first ^ second ^ third ^ fourth, third & _FINGERPRINT_MASK | _MATCH


def key_words(keys: PageKeys) -> Words:
    """Keys as words. Shape: (num_pages, 4)."""
    return np.frombuffer(keys.data, np.uint64).reshape(-1, KEY_WORDS)


def tags_of(words: Words) -> Tags:
    """The tag of each key. Shape: words (num_pages, 4); the result (num_pages,)."""
    return np.maximum((words[:, 2] >> np.uint64(_TAG_SHIFT)).astype(np.uint8), np.uint8(1))


def matches_of(words: Words) -> Words:
    """What the state word's `MATCH_MASK` bits are where each page is published.

    Shape: words (num_pages, 4); the result (num_pages,).
    """
    shift = np.uint64(FINGERPRINT_SHIFT)
    matches: Words = words[:, 2] >> shift << shift | np.uint64(_MATCH)
    return matches


def candidate_buckets(words: Words, num_buckets: int) -> Slots:
    """The buckets in which each page may be, best first; the second is another one than the first.

    Shape: words (num_pages, 4); the result (num_pages, 2), or (num_pages, 1) for a table of one
    bucket.
    """
    first = words[:, 0] % np.uint64(num_buckets)
    if num_buckets == 1:
        return first.astype(np.intp)[:, np.newaxis]
    step = words[:, 1] % np.uint64(num_buckets - 1) + np.uint64(1)
    second = (first + step) % np.uint64(num_buckets)
    return np.stack([first, second], axis=1).astype(np.intp)
