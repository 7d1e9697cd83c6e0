"""A rank group that counts what is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import RankGroup

if TYPE_CHECKING:
    from collections.abc import Mapping


class CountingGroup(RankGroup):
    """Another rank group, with a count of what is called."""

    def __init__(self, inner: RankGroup, calls: list[str]) -> None:
        self.inner = inner
        self.calls = calls

    @property
    @override
    def rank(self) -> int:
        return self.inner.rank

    @property
    @override
    def size(self) -> int:
        return self.inner.size

    @override
    def all_and(self, words: bytearray, timeout_s: float) -> None:
        self.calls.append("all_and")
        self.inner.all_and(words, timeout_s)

    @override
    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        self.calls.append("broadcast")
        return self.inner.broadcast(value, root, timeout_s)

    @override
    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        self.calls.append("all_gather")
        return self.inner.all_gather(value, timeout_s)

    @override
    def split(self, color: int, timeout_s: float) -> RankGroup:
        self.calls.append("split")
        return self.inner.split(color, timeout_s)

    @override
    def renew(self, timeout_s: float) -> RankGroup:
        self.calls.append("renew")
        return CountingGroup(self.inner.renew(timeout_s), self.calls)

    @override
    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        return self.inner.roll_call(mark, timeout_s)

    @override
    def close(self) -> None:
        self.inner.close()
